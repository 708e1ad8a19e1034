"""Asks NVML, through pynvml, what nvidia-smi does not print: encoder capacity, compute capability, driver model.

Runs alone: standard library and pynvml (the nvidia-ml-py distribution) only. argv: results file.
One JSON line for the driver, then one for each device; a value that NVML refuses is null.
"""

import json
import sys

RESULTS = sys.argv[1]


def write(line):
    with open(RESULTS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def text(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def main():
    try:
        import pynvml
    except ImportError as error:
        write({"error": "ImportError: %s" % error})
        return
    try:
        pynvml.nvmlInit()
    except Exception as error:
        write({"error": "%s: %s" % (type(error).__name__, error)})
        return

    def ask(name, *arguments):
        function = getattr(pynvml, name, None)
        try:
            return None if function is None else function(*arguments)
        except pynvml.NVMLError:
            return None

    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    write(
        {
            "driver": text(ask("nvmlSystemGetDriverVersion")),
            "cuda": "%d.%d" % (cuda // 1000, cuda % 1000 // 10) if cuda else None,
            "count": ask("nvmlDeviceGetCount"),
        }
    )
    for index in range(ask("nvmlDeviceGetCount") or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            write({"device": index, "error": "no handle: the card is lost or not permitted"})
            continue
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        pci = ask("nvmlDeviceGetPciInfo", handle)
        model = ask("nvmlDeviceGetDriverModel", handle)
        codecs = (
            ("H.264", "NVML_ENCODER_QUERY_H264"),
            ("HEVC", "NVML_ENCODER_QUERY_HEVC"),
            ("AV1", "NVML_ENCODER_QUERY_AV1"),
        )
        capacity = {}
        for name, constant in codecs:
            number = getattr(pynvml, constant, {"H.264": 0, "HEVC": 1, "AV1": 2}[name])
            capacity[name] = ask("nvmlDeviceGetEncoderCapacity", handle, number)
        write(
            {
                "device": index,
                "name": text(ask("nvmlDeviceGetName", handle)),
                "compute_capability": "%d.%d" % tuple(capability) if capability else None,
                "total_bytes": memory.total if memory else None,
                "used_bytes": memory.used if memory else None,
                "free_bytes": memory.free if memory else None,
                "pci_bus_id": text(pci.busId) if pci else None,
                "driver_model": {0: "WDDM", 1: "TCC", 2: "MCDM"}.get(
                    model[0] if isinstance(model, (list, tuple)) else model
                ),
                "mig_mode": {0: "disabled", 1: "enabled"}.get((ask("nvmlDeviceGetMigMode", handle) or [None])[0]),
                "encoder_capacity": capacity,
                "encoder_sessions": (ask("nvmlDeviceGetEncoderStats", handle) or [None])[0],
                "encoder_pct": (ask("nvmlDeviceGetEncoderUtilization", handle) or [None])[0],
                "decoder_pct": (ask("nvmlDeviceGetDecoderUtilization", handle) or [None])[0],
            }
        )


main()
