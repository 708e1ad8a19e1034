"""Samples a device at least five times a second while another process works on it.

Runs beside stress.py, in our interpreter (where pynvml may be) or any other; standard library and pynvml only.
argv: device ("cuda:0", "cpu"), its UUID or PCI bus id or "", hertz, results file, the process to watch and end with.
Lines: {"telemetry": {"at_s", "utilization_pct", "memory_used_bytes", "sm_clock_mhz", "memory_clock_mhz",
"temperature_c", "power_w", "throttle"}}; `clock_s` is the monotonic clock, the same in all processes, at at_s 0.
"""

import json
import os
import re
import subprocess
import sys
import time

DEVICE, BUS_ID, HERTZ, RESULTS, WATCHED = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], int(sys.argv[5])

THROTTLES = (
    (0x2, "applications clocks setting"),
    (0x4, "sw power cap"),
    (0x8, "hw slowdown"),
    (0x10, "sync boost"),
    (0x20, "sw thermal slowdown"),
    (0x40, "hw thermal slowdown"),
    (0x80, "hw power brake slowdown"),
)


def write(line):
    with open(RESULTS, "ab", buffering=0) as stream:
        stream.write((json.dumps(line) + "\n").encode())


def alive():
    if os.name == "posix":  # on Windows os.kill would end the process that it asks about
        if os.getppid() == 1:
            return False
        try:
            os.kill(WATCHED, 0)
        except OSError:
            return False
    return os.path.exists(RESULTS)


def loop(sample, began):
    while alive():
        found = {key: value for key, value in sample().items() if value is not None}
        found["at_s"] = round(time.monotonic() - began, 3)
        write({"telemetry": found})
        time.sleep(1.0 / HERTZ)


def nvml_sampler():
    """A function that reads the card through NVML; raises where there is no pynvml or no such card."""
    import pynvml

    pynvml.nvmlInit()
    handle = None
    if BUS_ID.startswith("GPU-"):
        handle = pynvml.nvmlDeviceGetHandleByUUID(BUS_ID.encode())
    elif BUS_ID:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(BUS_ID.encode())
    if handle is None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(DEVICE.partition(":")[2] or 0))

    def ask(function, *arguments):
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:
            return None

    def sample():
        use = ask(pynvml.nvmlDeviceGetUtilizationRates)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        power = ask(pynvml.nvmlDeviceGetPowerUsage)
        reasons = ask(
            getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        )
        return {
            "utilization_pct": use.gpu if use else None,
            "memory_used_bytes": memory.used if memory else None,
            "sm_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            "temperature_c": ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            "power_w": power / 1000.0 if power is not None else None,
            "throttle": [name for bit, name in THROTTLES if reasons & bit] if reasons is not None else None,
        }

    sample()
    return sample


QUERY = "utilization.gpu,memory.used,clocks.sm,clocks.mem,temperature.gpu,power.draw"


def smi_loop(began):
    """Where there is no pynvml: nvidia-smi's own loop, every 200 ms."""
    command = ["nvidia-smi", "--query-gpu=" + QUERY, "--format=csv,noheader,nounits", "-lms", str(int(1000 / HERTZ))]
    command += ["-i", BUS_ID or DEVICE.partition(":")[2] or "0"]
    names = ("utilization_pct", "memory_used_bytes", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in running.stdout:
            if not alive():
                break
            values = [re.fullmatch(r"\s*([\d.]+)\s*", cell) for cell in line.split(",")]
            found = {name: float(value.group(1)) for name, value in zip(names, values) if value}
            if "memory_used_bytes" in found:
                found["memory_used_bytes"] = int(found["memory_used_bytes"]) << 20
            found["at_s"] = round(time.monotonic() - began, 3)
            write({"telemetry": found})
    finally:
        running.kill()


def cpu_sampler():
    """The processor: use out of /proc/stat, memory, clock and temperature where the system shows them."""
    state = {"busy": 0, "total": 0}

    def first_line(path):
        try:
            with open(path) as stream:
                return stream.readline()
        except OSError:
            return ""

    def sample():
        times = [int(word) for word in first_line("/proc/stat").split()[1:9]]
        found = {}
        if times:
            total, idle = sum(times), times[3] + times[4]
            if state["total"] and total > state["total"]:
                found["utilization_pct"] = round(100.0 * (total - idle - state["busy"]) / (total - state["total"]), 1)
            state["busy"], state["total"] = total - idle, total
        clock = first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").strip()
        heat = first_line("/sys/class/thermal/thermal_zone0/temp").strip()
        found["sm_clock_mhz"] = int(clock) // 1000 if clock.isdigit() else None
        found["temperature_c"] = int(heat) / 1000.0 if heat.isdigit() else None
        return found

    return sample


def main():
    began = time.monotonic()
    if not DEVICE.startswith("cuda"):
        write({"telemetry_source": "operating system", "clock_s": began})
        loop(cpu_sampler(), began)
        return
    try:
        sample = nvml_sampler()
    except Exception as error:  # no pynvml, no NVML, no such card: each is a reason to ask nvidia-smi instead
        write(
            {
                "telemetry_source": "nvidia-smi",
                "clock_s": began,
                "because": "%s: %s" % (type(error).__name__, str(error)[:200]),
            }
        )
        smi_loop(began)
        return
    write({"telemetry_source": "NVML", "clock_s": began})
    loop(sample, began)


main()
