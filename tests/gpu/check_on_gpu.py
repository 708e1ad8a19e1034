"""One run on a real GPU: the probe, the torch child and the stress test against nvidia-smi and torch themselves.

    python tests/gpu/check_on_gpu.py [--duration 30] [--out FOLDER]

Needs an NVIDIA driver and a CUDA build of torch in the interpreter that runs it; changes nothing on the machine. Prints
one line per comparison and ends with 1 when one fails. --out keeps the section, the report and a recording of the
machine, which can become a test. Takes about the duration plus two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
failures: list[str] = []


def check(name: str, good: bool, told: object = "") -> None:
    """Print one comparison and remember it when it fails."""
    print(f"{'ok  ' if good else 'FAIL'} {name}: {told}", flush=True)
    if not good:
        failures.append(name)


def smi(*fields: str) -> list[list[str]]:
    """nvidia-smi's own answer, one list a card."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def probe(*arguments: str, expect: tuple[int, ...] = (0,)) -> dict:
    """gpu_probe.py's section, and how long it took."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, str(ROOT / "gpu_probe.py"), "--json", "--python", sys.executable, *arguments],
        capture_output=True, text=True, timeout=900, check=False, cwd=ROOT,
    )  # fmt: skip
    seconds = time.monotonic() - began
    check(f"exit code of gpu_probe.py {' '.join(arguments[:2])}", ended.returncode in expect, ended.returncode)
    try:
        section = json.loads(ended.stdout)
    except ValueError:
        print(ended.stdout[-2000:], ended.stderr[-2000:])
        raise SystemExit(1) from None
    section["took_s"] = seconds
    return section


def codes(section: dict) -> dict[str, str]:
    """Finding codes and their levels."""
    return {one["code"]: one["level"] for one in section["findings"]}


def same_as_nvidia_smi(section: dict) -> None:
    """Names, sizes, driver and capability as nvidia-smi gives them."""
    rows = smi("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap", "pci.bus_id")
    gpus = section["observed"]["gpus"]
    check("number of cards", len(gpus) == len(rows), f"{len(gpus)} and {len(rows)}")
    for gpu, (index, name, total, used, driver, capability, bus) in zip(gpus, rows, strict=False):
        check(f"card {index} name", gpu["name"] == name, f"{gpu['name']} and {name}")
        check(f"card {index} total memory", gpu["memory_total_bytes"] == int(total) * MIB, f"{total} MiB")
        near = abs((gpu["memory_used_bytes"] or 0) - int(used) * MIB) < 1024 * MIB
        check(f"card {index} used memory within 1 GiB", near, f"{gpu['memory_used_bytes']} and {used} MiB")
        check(f"card {index} compute capability", gpu["compute_capability"] == capability, capability)
        check(f"card {index} bus id", gpu["pci_bus_id"].lower() == bus.lower(), bus)
        check("driver version", section["observed"]["driver"] == driver, driver)


def same_as_torch(section: dict) -> None:
    """What the child says of torch, against torch itself."""
    import torch

    seen = section["observed"]["torch"]
    check("torch version", seen["version"] == torch.__version__, torch.__version__)
    check("torch sees CUDA", seen["cuda_available"] is torch.cuda.is_available(), torch.cuda.is_available())
    check("number of devices", seen["device_count"] == torch.cuda.device_count(), torch.cuda.device_count())
    for index, device in enumerate(seen["devices"]):
        properties = torch.cuda.get_device_properties(index)
        check(f"torch device {index} name", device["name"] == properties.name, properties.name)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        check(f"torch device {index} native bf16", device["bf16_native"] == native, native)
    for name, kernel in seen["kernels"].items():
        check(f"kernel on {name}", kernel["right"] is True, kernel["formats"])
    check("finding torch-works", codes(section).get("torch-works") == "ok", codes(section))


def stress(section: dict, duration: float) -> None:
    """The stress test's figures are those of a GPU, its telemetry saw the load, nothing was wrong."""
    run = section["observed"].get("stress")
    check("stress test ran", run is not None, codes(section))
    if run is None:
        return
    check("stress test complete", run["ended"] == "complete", run["ended"])
    check("no wrong result", run["wrong_results"] == 0, run["wrong_where"])
    check("load lasted", run["seconds"] >= 0.9 * duration, run["seconds"])
    check(
        "TFLOP/s under 1.1 of the card's own",
        _under(run["tflops"], run["tflops_theoretical"]),
        (run["tflops"], run["tflops_theoretical"]),
    )
    check("TFLOP/s over a tenth of the card's own", _over(run["tflops"], run["tflops_theoretical"], 0.1), run["tflops"])
    check(
        "copy under 1.05 of the card's own",
        _under(run["copy_gb_per_s"], run["copy_gb_per_s_theoretical"], 1.05),
        (run["copy_gb_per_s"], run["copy_gb_per_s_theoretical"]),
    )
    check("copy of at least 1 GiB", (run["copy_bytes"] or 0) >= 1 << 30, run["copy_bytes"])
    telemetry = run["telemetry"]
    check("telemetry at 5 Hz or more", (telemetry.get("hertz") or 0) >= 5, telemetry.get("hertz"))
    check(
        "telemetry saw the load",
        telemetry.get("utilization_pct", {}).get("max", 0) >= 80,
        telemetry.get("utilization_pct"),
    )
    check(
        "telemetry has temperature and power",
        "temperature_c" in telemetry and "power_w" in telemetry,
        sorted(telemetry),
    )
    check("a kernel is milliseconds", 0 < (run["longest_kernel_s"] or 0) < 1, run["longest_kernel_s"])
    forward = section["observed"]["minimal_forward"]
    check("minimal forward ran", bool(forward["median_s"]) and forward["finite"] is True, forward["median_s"])
    check(
        "minimal forward peak over its weights",
        (forward["peak_bytes"] or 0) >= (forward["weight_bytes"] or 0),
        forward["peak_bytes"],
    )
    print(json.dumps(run, indent=1))


def _under(value: float | None, limit: float | None, factor: float = 1.1) -> bool:
    return limit is None or (value is not None and value <= factor * limit)


def _over(value: float | None, limit: float | None, factor: float) -> bool:
    return value is not None and (limit is None or value >= factor * limit)


def main() -> int:
    """Run every comparison."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--duration", type=float, default=30.0, help="seconds of load")
    made.add_argument("--out", default=os.environ.get("OUT"), help="folder for section, report and recording")
    args = made.parse_args()
    out = Path(args.out or tempfile.mkdtemp(prefix="preflight-gpu-"))
    out.mkdir(parents=True, exist_ok=True)

    plain = probe("--no-torch", expect=(0, 1, 3))
    check("without torch under 3 s", plain["took_s"] < 3, round(plain["took_s"], 2))
    same_as_nvidia_smi(plain)

    recorded = probe("--record", str(out / "machine"), "--report", str(out / "report.md"), expect=(0, 1, 3))
    same_as_torch(recorded)
    (out / "section.json").write_text(json.dumps(recorded, indent=1), encoding="utf-8")
    replayed = probe("--replay", str(out / "machine"), expect=(0, 1, 3))
    check("the recording answers alike", codes(replayed) == codes(recorded), codes(replayed))
    text = "".join(
        path.read_text(encoding="utf-8", errors="replace") for path in (out / "machine").iterdir() if path.is_file()
    )
    check("the recording holds no UUID", not re.search(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}", text), "redacted")

    full = probe("--full", "--stress-test", "--duration", str(args.duration), expect=(0, 1, 3))
    (out / "stress.json").write_text(json.dumps(full, indent=1), encoding="utf-8")
    check("video engines told", "video-engines" in codes(full), full["observed"].get("video"))
    stress(full, args.duration)

    spoiled = probe("--stress-test", "--duration", "3", "--flip-a-bit", "1", expect=(1,))
    check("a flipped bit is found", codes(spoiled).get("stress-wrong-result") == "fail", codes(spoiled))

    print(f"\n{len(failures)} failed: {', '.join(failures) or 'none'}; kept in {out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
