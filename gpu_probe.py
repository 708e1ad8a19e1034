# /// script
# requires-python = ">=3.10"
# dependencies = ["filelock>=3.12", "jinja2>=3.1", "nvidia-ml-py>=12.535", "psutil>=5.9", "tqdm>=4.65"]
# ///
"""Which accelerator is here, does its driver answer, which torch builds can use it, and how much of it is free?

Looks with the vendor's own tools (nvidia-smi, amd-smi, rocm-smi, npu-smi, xpu-smi, sysctl), the kernel log and the PCI
bus, and asks torch in a child of the interpreter under test. Nothing on the system is changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from preflight.console import UsageError, parser, run_main, run_stage
from preflight.findings import Finding, Section, run_checks, say
from preflight.hardware import gpu_builds, gpu_checks, gpu_drivers, gpu_health

if TYPE_CHECKING:
    import argparse

    from preflight.hardware.gpu_checks import Seen
    from preflight.machine import Interpreter, Machine

STAGE = "gpu_probe"
TORCH_LIMIT_S = 60.0
# How recordings name what Windows says: its registry and its event log.
WINDOWS_KINDS = r"(?i)^reg\b|registry|wevtutil|WinEvent|event ?(?:log|viewer)|reliability"


def check_torch(seen: Seen) -> list[Finding]:
    """Whether torch imports, reaches the card and computes right on it."""
    from preflight.hardware import torch_state

    state = seen.torch
    if not state.asked:
        return []
    here = [gpu for gpu in seen.usable if gpu.vendor in ("nvidia", "amd")]
    seen_by_tools = bool(here) if (here or not seen.replayed) else None
    there = state.distributions.get("torch", state.version)
    install = seen.choice.command(installed=there) if seen.choice else None
    broken = torch_state.import_finding(state, install)
    if broken is not None:
        return [broken]
    found = [
        torch_state.cuda_finding(state, seen_by_tools, seen.visible_devices, install),
        torch_state.numpy_finding(state),
    ]
    return [finding for finding in found if finding is not None]


CHECKS = (
    gpu_checks.check_devices,
    gpu_drivers.check_driver_answers,
    gpu_drivers.check_other_vendors_answer,
    gpu_health.check_kernel_log,
    check_torch,
    gpu_builds.check_driver_version,
    gpu_builds.check_number_formats,
    gpu_builds.check_amd,
    gpu_builds.check_ascend,
    gpu_builds.check_intel_and_apple,
    gpu_builds.check_jetson,
    gpu_checks.check_unified_memory,
    gpu_checks.check_missing_cards,
    gpu_checks.check_visible_devices,
    gpu_checks.check_mig,
    gpu_checks.check_vgpu,
    gpu_checks.check_wsl,
    gpu_checks.check_libraries,
    gpu_checks.check_compute_mode,
    gpu_checks.check_driver_model,
    gpu_checks.check_mixed_cards,
    gpu_health.check_memory_in_use,
    gpu_health.check_memory_errors,
    gpu_health.check_sensors,
    gpu_health.check_throttling,
    gpu_health.check_persistence,
    gpu_health.check_pcie,
    gpu_health.check_host,
    gpu_health.check_place,
)


def look(
    machine: Machine, python: str | None = None, ask_torch: bool = True, torch_limit_s: float = TORCH_LIMIT_S
) -> tuple[Seen, Interpreter | None]:
    """Everything that the checks judge, and the interpreter that was asked for torch."""
    from preflight.gpus import read_accelerators
    from preflight.hardware import kernel_log, looking, torch_state
    from preflight.host import read_host
    from preflight.machine import choose_python

    accelerators = read_accelerators(machine)
    host = read_host(machine, disks=True)
    log = kernel_log.read_kernel_log(machine)
    interpreter, state = None, torch_state.TorchState()
    if ask_torch:
        interpreter = choose_python(machine, python, needs=("torch",))
        if not machine.replayed:
            say(f"asking torch in {interpreter.path} (up to {torch_limit_s:.0f} s)")
        state = torch_state.ask(machine, interpreter, torch_limit_s)
    return looking.together(machine, accelerators, host, log, state), interpreter


def look_and_judge(machine: Machine, args: argparse.Namespace) -> Section:
    """The hardware section of the report."""
    seen, interpreter = look(machine, args.python, not args.no_torch, args.torch_timeout)
    findings = list(run_checks(CHECKS, seen))
    observed: dict[str, Any] = {
        **gpu_checks.as_json(seen),
        "host": gpu_health.host_json(seen.host),
        "kernel_log": gpu_health.kernel_log_json(seen.log),
        "torch": seen.torch.as_json() if seen.torch.asked else None,
        "torch_build": gpu_builds.choice_json(seen),
        "interpreter": {"path": interpreter.path, "why": interpreter.why} if interpreter else None,
    }
    observed["gpu_usable"] = gpu_checks.is_usable(seen, findings)
    for part in (windows_part, full_part, memory_part, stress_part):
        more, facts = part(machine, args, seen, interpreter)
        findings += more
        observed.update(facts)
    return Section(STAGE, observed, tuple(findings))


# The parts that are looked at only when asked for: findings and facts of each.
Part = tuple[list[Finding], dict[str, Any]]


def windows_part(machine: Machine, args: argparse.Namespace, seen: Seen, python: Interpreter | None) -> Part:
    """Windows: TDR values and the event log."""
    from preflight.hardware import windows_gpu

    recorded = machine.recorded(WINDOWS_KINDS)
    if not recorded and (machine.replayed or seen.system != "Windows"):
        return [], {}
    found = windows_gpu.read_windows_graphics(machine)
    facts = {"tdr": found.tdr, "tdr_delay_s": found.tdr_delay_s, "events": [list(event) for event in found.events]}
    return list(run_checks((windows_gpu.check_windows,), found)), facts


def full_part(machine: Machine, args: argparse.Namespace, seen: Seen, python: Interpreter | None) -> Part:
    """--full: the video engines and, where torch works, a minimal forward."""
    if not args.full:
        return [], {}
    from preflight.hardware import video

    engines = video.read_video(machine, seen.usable)
    findings = list(run_checks((video.check_video,), engines))
    return findings, {"video": video.as_json(engines)}


def memory_part(machine: Machine, args: argparse.Namespace, seen: Seen, python: Interpreter | None) -> Part:
    """--baseline and --compare: free memory and holders, before and after."""
    from preflight.hardware import memory_baseline

    now = memory_baseline.snapshot(seen)
    if args.compare:
        found = memory_baseline.difference(memory_baseline.load(args.compare), now)
        return memory_baseline.check_difference(found), {"memory_difference": found}
    if args.baseline:
        memory_baseline.save(args.baseline, now)
        say(
            f"baseline written: {args.baseline}; close programs, then run `python gpu_probe.py --compare "
            f"{args.baseline}`"
        )
    return [], {}


def stress_part(machine: Machine, args: argparse.Namespace, seen: Seen, python: Interpreter | None) -> Part:
    """--stress-test, and the minimal forward of --stress-test and --full."""
    if not (args.stress_test or args.full or args.model) or python is None:
        return [], {}
    from preflight.hardware import kernel_log, stress_test

    device = args.device or default_device(seen)
    works = seen.torch.kernels or (machine.replayed and seen.torch.asked)
    if device is None or not works:
        if not args.stress_test:
            return [], {}
        return [stress_test.not_run(device, bool(works))], {}
    findings: list[Finding] = []
    facts: dict[str, Any] = {}
    if args.stress_test:
        before = {(xid.bus_id, xid.code, xid.count) for xid in seen.log.xids}
        gpu = next((g for g in seen.usable if device == f"cuda:{g.index}"), None)
        result = stress_test.run(
            machine, python, device, args.duration, gpu=gpu, dtype=args.dtype, flip_a_bit=args.flip_a_bit
        )
        after = kernel_log.read_kernel_log(machine) if seen.log.readable else seen.log
        new = tuple(sorted({x.code for x in after.xids if (x.bus_id, x.code, x.count) not in before}))
        limit = windows_tdr_delay(machine, seen)
        findings += run_checks((stress_test.check_stress,), result, limit, new)
        facts["stress"] = result.as_json()
        if result.ended != "complete":  # what could not bear the load is not asked again
            return findings, facts
    ran = stress_test.minimal_forward(machine, python, device, args.model)
    findings += run_checks((stress_test.check_forward,), ran)
    facts["minimal_forward"] = ran
    return findings, facts


def windows_tdr_delay(machine: Machine, seen: Seen) -> float | None:
    """Seconds that one kernel may take, on Windows with a display driver model; None where no such limit holds."""
    if seen.system != "Windows" or not any(gpu.driver_model == "WDDM" for gpu in seen.usable):
        return None
    from preflight.hardware.windows_gpu import read_windows_graphics

    return float(read_windows_graphics(machine).tdr_delay_s)


def default_device(seen: Seen) -> str | None:
    """The device to test when none is named: the first accelerator that torch reaches; never the CPU unasked."""
    return next((name for name in seen.torch.kernels if name != "cpu"), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage and return its exit code."""
    made = parser(__doc__, "python gpu_probe.py --stress-test --duration 60")
    made.add_argument("--python", metavar="PATH", help="the interpreter whose torch is asked (default: the active one)")
    made.add_argument("--no-torch", action="store_true", help="do not ask torch")
    made.add_argument(
        "--torch-timeout", type=seconds, default=TORCH_LIMIT_S, metavar="SECONDS", help="give torch up after this (60)"
    )
    made.add_argument("--full", action="store_true", help="also the video engines and a minimal forward")
    made.add_argument("--stress-test", action="store_true", help="load the device, check every result, read telemetry")
    made.add_argument("--duration", type=seconds, default=60.0, metavar="SECONDS", help="of the stress test (60)")
    made.add_argument("--device", metavar="NAME", help="device to test: cuda:0, cpu, mps, xpu:0, npu:0")
    made.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="format of the stress test")
    made.add_argument(
        "--flip-a-bit",
        type=int,
        metavar="BATCH",
        help="spoil one result of that batch: shows that wrong answers are found",
    )
    made.add_argument("--model", metavar="DIR", help="shape of the minimal forward: a folder with a config.json")
    made.add_argument("--baseline", metavar="FILE", help="write free memory and its holders to a file")
    made.add_argument("--compare", metavar="FILE", help="compare with such a file: what closing programs gained")
    args = made.parse_args(argv)
    if args.no_torch and args.stress_test:
        raise UsageError("--stress-test computes with torch; it cannot be used together with --no-torch")
    if args.device and not re.fullmatch(r"cpu|mps|(?:cuda|xpu|npu)(?::\d+)?", args.device):
        raise UsageError(f"--device {args.device}: allowed are cpu, mps, cuda:N, xpu:N, npu:N")
    if args.device in ("cuda", "xpu", "npu"):
        args.device += ":0"
    if args.model:
        from preflight.hardware.stress_test import shape_of

        shape_of(args.model)  # a bad model is refused before anything runs
    seen: list[Section] = []

    def judged(machine: Machine, options: argparse.Namespace) -> Section:
        seen.append(look_and_judge(machine, options))
        return seen[0]

    code = run_stage(STAGE, args, judged)
    stress = seen[0].observed.get("stress") or {}
    return {"interrupted": 130, "terminated": 143}.get(stress.get("ended"), code)


def seconds(text: str) -> float:
    """A positive number of seconds, for argparse."""
    value = float(text)
    if not 0 < value < 7 * 86400:
        raise ValueError(text)
    return value


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
