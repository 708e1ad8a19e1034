"""Fake (or real, random) tensors in place of those of the meta device, with what loading allocates on the way."""

from rehearsal.quantised import fake_4bit


def new_tensor(torch, recorder, shape, dtype):
    """A tensor of this shape: empty when only its size matters, small random numbers when it is used in earnest."""
    if recorder.real and dtype.is_floating_point and len(shape):
        return torch.randn(shape, dtype=torch.float32, device=recorder.device).mul_(0.02).to(dtype)
    return torch.zeros(shape, dtype=dtype, device=recorder.device)


def put_fakes(torch, model, recorder, plan, owners, was_half):
    """A fake (or real, random) tensor in place of every parameter and buffer, in loading order; tied ones stay tied.

    The trace gets what loading allocates: 16-bit weights that are quantised one after the other, float32 copies.
    """
    seen = {}
    nested = bool(plan["double_quant"])
    upcasts = []
    later = []
    for path, module in model.named_modules():
        owner = owners.get(id(module), -1)
        bnb4 = (
            type(module).__name__ == "Linear4bit" and hasattr(module, "compute_dtype") and not hasattr(module, "lora_A")
        )
        bnb8 = type(module).__name__ == "Linear8bitLt" and not hasattr(module, "lora_A")
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in seen:
                module._parameters[name] = seen[id(parameter)]
                continue
            trained = parameter.requires_grad
            if bnb4 and name == "weight":
                fake = fake_4bit(torch, module, recorder, nested, owner)
            elif bnb8 and name == "weight":
                temporary = recorder.add(
                    parameter.numel() * 2, recorder.what("static", "loading", list(parameter.shape), "half"), owner
                )
                fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.int8), requires_grad=False)
                recorder.watch(fake, recorder.what("static", path + ".weight", list(parameter.shape), "int8"), owner)
                scale = torch.empty((parameter.shape[0],), dtype=torch.float32)
                recorder.watch(scale, recorder.what("quantisation", "row scales", list(scale.shape), "float32"), owner)
                module.row_scales = scale
                fake.CB, fake.SCB = fake, scale
                recorder.drop(temporary)
            else:
                value = new_tensor(torch, recorder, parameter.shape, parameter.dtype)
                fake = torch.nn.Parameter(value, requires_grad=trained)
                del value
                kind = "adapter" if trained and plan["method"] != "full" else "static"
                label = recorder.what(
                    kind, name if owner >= 0 else path + "." + name, list(parameter.shape), str(parameter.dtype)[6:]
                )
                if trained and plan["method"] != "full":
                    later.append((fake, label, owner))
                elif path + "." + name in was_half:
                    half = recorder.add(
                        parameter.numel() * 2, recorder.what("static", "loading", list(parameter.shape), "half"), owner
                    )
                    upcasts.append((fake, label, owner, half))
                else:
                    recorder.watch(fake, label, owner)
            seen[id(parameter)] = fake
            module._parameters[name] = fake
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                fake = new_tensor(torch, recorder, buffer.shape, buffer.dtype)
                module._buffers[name] = fake
                recorder.watch(
                    fake,
                    recorder.what(
                        "quantisation" if name in ("scales", "qzeros", "g_idx", "absmax") else "static",
                        name,
                        list(buffer.shape),
                        str(buffer.dtype)[6:],
                    ),
                    owner,
                )
    for fake, label, owner, half in upcasts:
        recorder.watch(fake, label, owner)
        recorder.drop(half)
    for fake, label, owner in later:
        recorder.watch(fake, label, owner)
