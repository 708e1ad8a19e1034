"""Asks torch, step by step, what it is and whether it computes right on each device.

Runs alone in the interpreter under test: standard library and torch only, Python 3.8 syntax.
argv: results file, then optionally the number of CPU threads. One JSON line when a step begins, one when it ends, so
that what was finished before a crash or a hang is known, and which step it happened in.
"""

import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import time
import warnings

RESULTS = sys.argv[1]
# Our own folder comes first on sys.path when a script is run; nothing in it may be imported by accident.
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]


def write(line):
    with open(RESULTS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
        stream.flush()


class Step:
    """One step: what it put into `found` is written when it ends, with its seconds, warnings and error."""

    def __init__(self, name):
        self.name, self.found = name, {}

    def __enter__(self):
        write({"begin": self.name})
        self.caught = warnings.catch_warnings(record=True)
        self.said = self.caught.__enter__()
        warnings.simplefilter("always")
        self.began = time.perf_counter()
        return self.found

    def __exit__(self, kind, error, trace):
        seconds = time.perf_counter() - self.began
        self.caught.__exit__(None, None, None)
        line = {"step": self.name, "ok": error is None, "seconds": round(seconds, 3)}
        line.update(self.found)
        said = [
            str(one.message) for one in self.said if "torch" in str(one.filename) or "cuda" in str(one.message).lower()
        ]
        if said:
            line["warnings"] = said[:5]
        if error is not None:
            line["error"] = {"type": kind.__name__, "message": str(error)[:2000]}
        write(line)
        return isinstance(error, Exception)


def numbers_of(count):
    """Small whole numbers whose products and sums are exact in every format that is tried."""
    return [(i * 7 + 3) % 5 - 2 for i in range(count)]


def check_kernel(torch, device, found):
    """A matrix product on the device in each number format, compared with the exact one worked out in Python."""
    side = 64
    left, right = numbers_of(side * side), numbers_of(side * side + 1)[1:]
    exact = [
        [sum(left[row * side + k] * right[k * side + column] for k in range(side)) for column in range(side)]
        for row in range(side)
    ]
    found["formats"] = {}
    for name in ("float32", "float16", "bfloat16"):
        kind = getattr(torch, name)
        try:
            a = torch.tensor(left, dtype=torch.float32).reshape(side, side).to(device=device, dtype=kind)
            b = torch.tensor(right, dtype=torch.float32).reshape(side, side).to(device=device, dtype=kind)
            product = (a @ b).to("cpu", torch.float32).tolist()
        except Exception as error:
            found["formats"][name] = "%s: %s" % (type(error).__name__, str(error)[:500])
            if name == "float32":
                raise
            continue
        # bfloat16 keeps 8 significant bits: sums up to 256 are exact, larger ones within one part in 256
        slack = 0.0 if name != "bfloat16" else 1.0
        wrong = sum(abs(product[r][c] - exact[r][c]) > slack for r in range(side) for c in range(side))
        found["formats"][name] = "right" if wrong == 0 else "%d of %d values wrong" % (wrong, side * side)
    found["right"] = found["formats"]["float32"] == "right"


def device_facts(torch, index, found):
    properties = torch.cuda.get_device_properties(index)
    found["device"] = index
    for key in (
        "name",
        "total_memory",
        "multi_processor_count",
        "is_integrated",
        "L2_cache_size",
        "memory_clock_rate",
        "clock_rate",
        "memory_bus_width",
        "gcnArchName",
        "warp_size",
    ):
        value = getattr(properties, key, None)
        if value is not None:
            found[key] = value if isinstance(value, (int, bool)) else str(value)
    found["capability"] = "%d.%d" % (properties.major, properties.minor)
    try:
        with torch.cuda.device(index):
            found["free_bytes"], found["total_bytes"] = torch.cuda.mem_get_info()
    except Exception as error:
        found["memory_error"] = str(error)[:300]
    try:
        found["bf16_native"] = bool(torch.cuda.is_bf16_supported(including_emulation=False))
    except TypeError:  # torch before 2.4 has no such argument
        found["bf16_native"] = properties.major >= 8 or bool(getattr(torch.version, "hip", None))


def main():
    faulthandler.enable()
    write(
        {
            "step": "start",
            "ok": True,
            "python": "%d.%d.%d" % sys.version_info[:3],
            "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "bits": 64 if sys.maxsize > 2**32 else 32,
        }
    )
    with Step("find torch") as found:
        spec = importlib.util.find_spec("torch")
        found["found"] = spec is not None
        found["origin"] = getattr(spec, "origin", None)
        found["distributions"] = distributions()
    if spec is None:
        return
    torch = None
    with Step("import torch"):
        import torch
    if torch is None:
        return
    with Step("version") as found:
        found["version"] = str(torch.__version__)
        found["cuda"] = getattr(torch.version, "cuda", None)
        found["hip"] = getattr(torch.version, "hip", None)
        found["xpu"] = getattr(torch.version, "xpu", None)
    with Step("numpy") as found:
        array = torch.zeros(2).numpy()
        found["numpy"] = type(array).__module__
    with Step("compiled architectures") as found:
        flags = getattr(torch._C, "_cuda_getArchFlags", None)
        found["architectures"] = (flags() or "").split() if flags is not None else torch.cuda.get_arch_list()
    available = {}
    with Step("is_available") as found:
        available["cuda"] = bool(torch.cuda.is_available())
        found["available"] = available["cuda"]
        found["device_count"] = int(torch.cuda.device_count()) if available["cuda"] else 0
    if torch.version.cuda and not available.get("cuda"):
        # is_available() swallows the reason; initialising says it
        with Step("initialise CUDA"):
            torch.cuda.init()
    devices = []
    if available.get("cuda"):
        for index in range(min(torch.cuda.device_count(), 16)):
            with Step("device %d properties" % index) as found:
                device_facts(torch, index, found)
            devices.append("cuda:%d" % index)
    if importlib.util.find_spec("torch_npu") is not None:
        with Step("import torch_npu") as found:
            module = importlib.import_module("torch_npu")
            found["version"] = str(getattr(module, "__version__", ""))
            found["available"] = bool(torch.npu.is_available())
            found["device_count"] = int(torch.npu.device_count()) if found["available"] else 0
            if found["available"]:
                devices.append("npu:0")
    with Step("other devices") as found:
        mps = getattr(torch.backends, "mps", None)
        found["mps_built"] = bool(mps and mps.is_built())
        found["mps"] = bool(mps and mps.is_available())
        if found["mps"]:
            devices.append("mps")
            found["mps_recommended_bytes"] = getattr(torch.mps, "recommended_max_memory", lambda: None)()
        xpu = getattr(torch, "xpu", None)
        found["xpu"] = bool(xpu is not None and xpu.is_available())
        if found["xpu"]:
            devices.append("xpu:0")
            found["xpu_devices"] = [
                {"name": xpu.get_device_name(i), "total_bytes": xpu.get_device_properties(i).total_memory}
                for i in range(xpu.device_count())
            ]
    if not any(device.startswith("cuda") for device in devices):
        devices.append("cpu")
    for device in devices:
        with Step("kernel on %s" % device) as found:
            found["device_name"] = device
            check_kernel(torch, device, found)
    write({"step": "end", "ok": True})


def distributions():
    """Versions of what decides how torch behaves, read from their metadata and not imported."""
    try:
        import importlib.metadata as metadata
    except ImportError:  # Python 3.7
        return {}
    names = ("torch", "numpy", "triton", "torch_npu", "nvidia-ml-py", "pynvml", "bitsandbytes", "flash-attn")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except Exception:
            continue
    return found


main()
