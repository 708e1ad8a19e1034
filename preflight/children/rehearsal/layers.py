"""The lists of layers of a model: which are alike, which run and stand for the others, and whose tensor is whose."""

MIN_LAYERS = 4


def stacks_of(torch, model):
    """The outermost lists of layers: [(path, ModuleList)], those of at least two layers that hold parameters."""
    found = []

    def walk(module, path):
        for name, child in module.named_children():
            here = path + "." + name if path else name
            if (
                isinstance(child, torch.nn.ModuleList)
                and len(child) > 1
                and all(any(True for _ in item.parameters()) for item in child)
            ):
                found.append((here, child))
            else:
                walk(child, here)

    walk(model, "")
    return found


def layer_signature(layer):
    parts = [type(layer).__name__]
    for name in ("layer_type", "attention_type", "is_sliding", "layer_block_type", "block_type"):
        if isinstance(getattr(layer, name, None), (str, bool, int)):
            parts.append((name, getattr(layer, name)))
    for name, child in layer.named_children():
        parts.append((name, type(child).__name__))
        for key in ("is_sliding", "sliding_window", "layer_type", "is_local"):
            value = getattr(child, key, None)
            if isinstance(value, (str, bool, int)):
                parts.append((name, key, value))
    parts.extend((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return tuple(parts)


def choose_layers(kinds, limit=None):
    """Which layers run: the first few, until each kind stood between two others, and the last."""
    total = len(kinds)
    if total <= MIN_LAYERS + 2 or (limit is not None and limit >= total):
        return list(range(total))
    wanted = set(kinds[1:-1])
    end = MIN_LAYERS - 1
    while end < total - 1 and set(kinds[1 : end - 1]) < wanted:
        end += 1
    if limit is not None:
        end = max(end, limit - 1)
    return list(range(total)) if end >= total - 2 else [*range(end), total - 1]


def some_layers(torch, model, limit=None):
    """Leave in the model only the layers that run. ([{path, kinds, run}], [(path, ModuleList)])."""
    chosen = []
    for path, layers in stacks_of(torch, model):
        signatures = [layer_signature(layer) for layer in layers]
        distinct = {signature: index for index, signature in reversed(list(enumerate(signatures)))}
        kinds = [distinct[signature] for signature in signatures]
        run = choose_layers(kinds, limit)
        chosen.append({"path": path, "kinds": kinds, "run": run})
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, torch.nn.ModuleList([layers[i] for i in run]))
    return chosen, [(item["path"], model.get_submodule(item["path"])) for item in chosen]


def owners_of(stacks):
    """Which running layer a module belongs to: {id(module): number}."""
    owners = {}
    number = 0
    for _, layers in stacks:
        for layer in layers:
            for module in layer.modules():
                owners[id(module)] = number
            number += 1
    return owners


def count_trainable(model, owners):
    """Trained elements: {owner: count}, -1 outside the layers."""
    counts, seen = {}, set()
    for module in model.modules():
        owner = owners.get(id(module), -1)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                counts[owner] = counts.get(owner, 0) + parameter.numel()
    return counts


def hooks(torch, stacks, recorder, clock):
    """Marks in the trace where a layer's forward (also its recomputation) and backward begin."""

    def before(number):
        def hook(module, args):
            if clock["phase"] == "fwd":
                recorder.mark("fwd", clock["step"], number)
            elif recorder.place[2] != number or recorder.place[0] != "bwd":
                recorder.mark("bwd", clock["step"], number)

        return hook

    def after(number, last):
        def hook(module, args, output):
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:

                def arrived(grad):
                    if recorder.place[2] != number or recorder.place[0] != "bwd":
                        recorder.mark("bwd", clock["step"], number)

                tensor.register_hook(arrived)
            if last and clock["phase"] == "fwd":
                recorder.mark("fwd", clock["step"], -1)

        return hook

    number = 0
    for _, layers in stacks:
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(before(number))
            layer.register_forward_hook(after(number, index == len(layers) - 1))
            number += 1
