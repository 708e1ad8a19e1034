# ruff: noqa: E731
"""A driver library with one RTX 4090 and one lost card, as pynvml shows them."""

import time
from collections import namedtuple

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
NVML_ENCODER_QUERY_H264, NVML_ENCODER_QUERY_HEVC, NVML_ENCODER_QUERY_AV1 = 0, 1, 2
Use = namedtuple("Use", "gpu memory")
Memory = namedtuple("Memory", "total free used")
Pci = namedtuple("Pci", "busId")


class NVMLError(Exception):
    pass


def refuse(*_):
    raise NVMLError("Not Supported")


nvmlInit = lambda: None
nvmlSystemGetDriverVersion = lambda: "580.95.05"
nvmlSystemGetCudaDriverVersion_v2 = lambda: 13000
nvmlDeviceGetCount = lambda: 2


def nvmlDeviceGetHandleByIndex(index):
    if index != 0:
        raise NVMLError("GPU is lost")
    return "card"


nvmlDeviceGetHandleByPciBusId = lambda bus: "card"
nvmlDeviceGetHandleByUUID = lambda uuid: "card"
nvmlDeviceGetName = lambda handle: "NVIDIA GeForce RTX 4090"
nvmlDeviceGetCudaComputeCapability = lambda handle: (8, 9)
nvmlDeviceGetMemoryInfo = lambda handle: Memory(24 << 30, 20 << 30, 4 << 30)
nvmlDeviceGetPciInfo = lambda handle: Pci("00000000:01:00.0")
nvmlDeviceGetDriverModel = refuse
nvmlDeviceGetMigMode = refuse
nvmlDeviceGetEncoderCapacity = lambda handle, codec: 100
nvmlDeviceGetEncoderStats = lambda handle: [0, 0, 0]
nvmlDeviceGetEncoderUtilization = lambda handle: [0, 167000]
nvmlDeviceGetDecoderUtilization = lambda handle: [3, 167000]
nvmlDeviceGetUtilizationRates = lambda handle: Use(97, 40)
nvmlDeviceGetPowerUsage = lambda handle: 301500
nvmlDeviceGetClockInfo = lambda handle, kind: {1: 2520, 2: 10501}[kind]
nvmlDeviceGetTemperature = lambda handle, kind: 60 + int(time.time()) % 3
nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x4
nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x4 | 0x40
