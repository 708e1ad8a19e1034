"""Works a device hard for a while and checks every result: matrix products, device copies, a pattern kept in memory.

Runs alone in the interpreter under test: standard library and torch only, Python 3.8 syntax.
argv: results file, JSON object with device, duration_s, dtype (or null), flip_a_bit, telemetry (a command or null).
Lines: {"begin": step}, {"step": step, …}, {"batch": n, …} about five times a second; telemetry.py adds its own.
"""

import faulthandler
import json
import os
import subprocess
import sys
import time

RESULTS, SPEC = sys.argv[1], json.loads(sys.argv[2])
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != HERE]


def write(line):
    # one write call to a file opened for appending, so that lines of two processes do not mix
    with open(RESULTS, "ab", buffering=0) as stream:
        stream.write((json.dumps(line) + "\n").encode())


class Clock:
    """Times work on the device: CUDA events where there are any, else the wall clock around a synchronise."""

    def __init__(self, torch, device):
        self.torch, self.device = torch, device
        self.cuda = device.startswith("cuda")

    def synchronize(self):
        if self.cuda:
            self.torch.cuda.synchronize(self.device)
        elif self.device.startswith("xpu"):
            self.torch.xpu.synchronize()
        elif self.device.startswith("mps"):
            self.torch.mps.synchronize()
        elif self.device.startswith("npu"):
            self.torch.npu.synchronize()

    def each(self, works):
        """Seconds of each piece of work, run one after the other."""
        if self.cuda:
            marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
            marks[0].record()
            for work, mark in zip(works, marks[1:]):
                work()
                mark.record()
            self.synchronize()
            return [marks[i].elapsed_time(marks[i + 1]) / 1000.0 for i in range(len(works))]
        seconds = []
        for work in works:
            began = time.perf_counter()
            work()
            self.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds


def card_id(torch, device):
    """The card's UUID as NVML writes it: CUDA may number cards in another order than NVML does."""
    if not device.startswith("cuda") or torch.version.hip:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "GPU-%s" % uuid if uuid is not None else None


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def free_bytes(torch, device):
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30


def pick_dtype(torch, device):
    wanted = SPEC.get("dtype")
    if wanted:
        return wanted
    if device.startswith("cuda"):
        major = torch.cuda.get_device_capability(device)[0]
        return "bfloat16" if major >= 8 or torch.version.hip else "float16"
    return "float32" if device.startswith(("cpu", "mps")) else "bfloat16"


def pick_size(clock, torch, device, dtype, room):
    """The largest square whose product stays under 30 ms and whose three matrices fit into an eighth of the memory."""
    size, best = 512, None
    width = torch.tensor([], dtype=dtype).element_size()
    while size <= 16384 and 4 * size * size * width < room // 8:
        seconds = time_product(torch, clock, torch.ones(size, size, dtype=dtype, device=device))
        best = (size, seconds)
        if seconds > 0.03:
            break
        size *= 2
    return best


def time_product(torch, clock, a):
    clock.each([lambda: torch.mm(a, a)])
    return min(clock.each([lambda: torch.mm(a, a)] * 2))


def matrices(torch, size, dtype, device, seed):
    """Entries of -1, 0 and 1: their products' sums are small whole numbers, exact in every format, in any order."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-1, 2, (2, size, size), generator=generator, dtype=torch.int8)
    return made[0].to(device=device, dtype=dtype), made[1].to(device=device, dtype=dtype), made


def copy_test(torch, clock, device, room):
    """Device-to-device copies of 1 GiB (less where it does not fit), timed one by one."""
    # On a CPU 1 GiB takes seconds: a short test takes a quarter of it.
    size = 1 << 30 if not device.startswith("cpu") or float(SPEC["duration_s"]) >= 30 else 1 << 28
    while size > 1 << 20 and 2 * size > room * 0.6:
        size //= 2
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    clock.each([lambda: target.copy_(source)])
    seconds = clock.each([lambda: target.copy_(source)] * (9 if device.startswith("cuda") else 5))
    right = bool((target[:: max(1, size // 4 // 4096)] == 1).all().item())
    # each byte is read and written once
    return {"bytes": size, "repeats": len(seconds), "gb_per_s": 2 * size / median(seconds) / 1e9, "right": right}


def facts_of(torch, device):
    found = {"torch": str(torch.__version__), "device": device, "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        p = torch.cuda.get_device_properties(device)
        found["name"] = p.name
        found["capability"] = "%d.%d" % (p.major, p.minor)
        for key in ("multi_processor_count", "total_memory", "memory_clock_rate", "clock_rate", "memory_bus_width"):
            value = getattr(p, key, None)
            if isinstance(value, int):
                found[key] = value
    return found


def main():
    faulthandler.enable()
    began = time.monotonic()
    write({"begin": "import torch"})
    import torch

    device, duration = SPEC["device"], float(SPEC["duration_s"])
    write({"step": "import torch", "seconds": round(time.monotonic() - began, 3)})
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32"):
        if hasattr(torch.backends.cuda.matmul, name):
            setattr(torch.backends.cuda.matmul, name, False)
    write({"begin": "prepare"})
    clock = Clock(torch, device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dtype = getattr(torch, pick_dtype(torch, device))
    telemetry = None
    if SPEC.get("telemetry"):
        try:
            command = list(SPEC["telemetry"])
            command[3] = card_id(torch, device) or command[3]
            telemetry = subprocess.Popen(
                [*command, RESULTS, str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            write({"telemetry_error": str(error)})
    room = free_bytes(torch, device)
    write({"step": "prepare", "free_bytes": room, "dtype": str(dtype).replace("torch.", ""), **facts_of(torch, device)})
    write({"begin": "copy"})
    write({"step": "copy", **copy_test(torch, clock, device, room)})
    write({"begin": "warm-up"})
    size, seconds = pick_size(clock, torch, device, dtype, room)
    a, b, whole = matrices(torch, size, dtype, device, 20261130)
    first = torch.mm(a, b)
    clock.synchronize()
    # The reference: some rows worked out on the CPU in whole numbers.
    rows = [0, 1, size // 3, size // 2, size - 2, size - 1]
    # Sums stay under 2^24 and are exact in float32; the device rounds them once, to the format that is tested.
    exact = (whole[0][rows].float() @ whole[1].float()).to(dtype)
    wrong_at_start = int((first[rows].to("cpu") != exact).sum().item())
    held = torch.arange(
        min(1 << 28 if device.startswith("cpu") else 1 << 30, room // 16) // 4, dtype=torch.int32, device=device
    )
    write(
        {
            "step": "warm-up",
            "size": size,
            "matmul_s": seconds,
            "flop": 2 * size**3,
            "wrong": wrong_at_start,
            "held_bytes": held.numel() * 4,
        }
    )
    write({"begin": "sustain"})
    sustain(torch, clock, a, b, first, seconds, duration)
    write({"begin": "memory"})
    expected = torch.arange(held.numel(), dtype=torch.int32, device=device)
    write({"step": "memory", "wrong": int((held != expected).sum().item()), "bytes": held.numel() * 4})
    write({"step": "end", "seconds": round(time.monotonic() - began, 3)})
    if telemetry is not None:
        telemetry.terminate()


def sustain(torch, clock, a, b, first, matmul_s, duration_s):
    """Products in batches of about 0.2 s until the time is over; every product is compared with the first one."""
    per_batch = max(1, min(200, int(0.2 / max(matmul_s, 1e-6))))
    out = torch.empty_like(first)
    flip = SPEC.get("flip_a_bit")
    began = last = time.monotonic()
    number = 0
    write({"clock_s": began})  # where the telemetry's own time stands against at_s
    while time.monotonic() - began < duration_s:
        wrong = torch.zeros((), dtype=torch.int64, device=first.device)

        def work():
            torch.mm(a, b, out=out)

        seconds = clock.each([work] * per_batch)
        if flip is not None and number == int(flip):
            bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32)
            bits[7, 11] ^= 1 << 9
        wrong += (out != first).sum()
        now = time.monotonic()
        write(
            {
                "batch": number,
                "at_s": round(now - began, 3),
                "work_s": sum(seconds),
                "count": per_batch,
                "longest_s": max(seconds),
                "gap_s": round(now - last, 3),
                "wrong": int(wrong.item()),
            }
        )
        last = now
        number += 1
    write({"step": "sustain", "batches": number})


main()
