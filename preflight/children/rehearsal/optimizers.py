"""The optimizer of the plan: torch's own, or one whose kernels work in place so that only its states count."""

import contextlib


def make_optimizer(torch, plan, recorder, parameters):
    """(optimizer, its name): the one that the plan names, else the Trainer's default for this torch."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    name = plan["optimizer"]
    if name is None:
        name = "adamw_torch_fused" if version >= (2, 8) else "adamw_torch"
    if name in ("adamw_torch", "adamw_torch_fused"):
        fused = name.endswith("fused")
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=not fused, fused=fused), name
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, foreach=True), name
    if name == "adafactor" and hasattr(torch.optim, "Adafactor"):
        with contextlib.suppress(Exception):
            from transformers.optimization import Adafactor

            return Adafactor(parameters, lr=1e-4, relative_step=False, scale_parameter=False), name
    return StateOnly(torch, name, parameters, recorder), name


class StateOnly:
    """An optimizer whose kernels work in place: only the states that it keeps are allocated.

    bitsandbytes 8-bit: tensors of 4096 elements or more keep one byte per element and state plus float32 scales per
    block of 256; paged: states of 1e5 elements or more live in unified memory, outside torch's figures.
    Source: bitsandbytes optim/optimizer.py, get_state_buffer and init_state.
    """

    def __init__(self, torch, name, parameters, recorder):
        self.torch, self.name, self.parameters, self.recorder = torch, name, parameters, recorder
        self.states = {}

    def step(self):
        for parameter in self.parameters:
            if parameter.grad is None or id(parameter) in self.states:
                continue
            ident = self.recorder.id_of(parameter)
            owner = self.recorder.owner_of.get(ident, -1)
            kept = []
            self.recorder.owner = owner
            for _ in range(1 if "lion" in self.name or self.name in ("muon",) else 2):
                for size, dtype in self.state(parameter):
                    tensor = self.torch.empty((size,), dtype=dtype)
                    label = self.recorder.what("optimizer", self.name + " state", [size], str(dtype)[6:])
                    kept.append(tensor)
                    self.recorder.watch(tensor, label, owner)
            self.states[id(parameter)] = kept
        self.recorder.owner = -1

    def state(self, parameter):
        torch, count = self.torch, parameter.numel()
        if "paged" in self.name and count >= 100000:
            return []
        if "8bit" in self.name and count >= 4096:
            return [(count, torch.uint8), (-(-count // 256), torch.float32)]
        return [(count, torch.float32)]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None
