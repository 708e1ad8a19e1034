# /// script
# requires-python = ">=3.10"
# dependencies = ["filelock>=3.12", "jinja2>=3.1", "nvidia-ml-py>=12.535", "psutil>=5.9", "tqdm>=4.65"]
# ///
"""Which accelerator is here, does its driver answer, which torch builds can use it, and how much of it is free?

Looks with the vendor's own tools (nvidia-smi, amd-smi, rocm-smi, npu-smi, xpu-smi, sysctl), the kernel log and the PCI
bus, and asks torch in a child of the interpreter under test. Nothing on the system is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from preflight import gpu_checks, gpu_health
from preflight.console import parser, run_main, run_stage
from preflight.findings import Finding, Section, run_checks, say

if TYPE_CHECKING:
    import argparse

    from preflight.gpu_checks import Seen
    from preflight.machine import Interpreter, Machine

STAGE = "gpu_probe"
TORCH_LIMIT_S = 60.0


def check_torch(seen: Seen) -> list[Finding]:
    """Whether torch imports, reaches the card and computes right on it."""
    from preflight import torch_state

    state = seen.torch
    if not state.asked:
        return []
    here = [gpu for gpu in seen.usable if gpu.vendor in ("nvidia", "amd")]
    seen_by_tools = bool(here) if (here or not seen.replayed) else None
    install = seen.choice.command() if seen.choice else None
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
    gpu_checks.check_driver_answers,
    gpu_checks.check_other_vendors_answer,
    gpu_health.check_kernel_log,
    check_torch,
    gpu_checks.check_driver_version,
    gpu_checks.check_number_formats,
    gpu_checks.check_amd,
    gpu_checks.check_ascend,
    gpu_checks.check_intel_and_apple,
    gpu_checks.check_jetson,
    gpu_checks.check_unified_memory,
    gpu_checks.check_mig,
    gpu_checks.check_vgpu,
    gpu_checks.check_wsl,
    gpu_checks.check_driver_model,
    gpu_checks.check_mixed_cards,
    gpu_health.check_memory_in_use,
    gpu_health.check_memory_errors,
    gpu_health.check_sensors,
    gpu_health.check_throttling,
    gpu_health.check_pcie,
    gpu_health.check_host,
    gpu_health.check_place,
)


def look(
    machine: Machine, python: str | None = None, ask_torch: bool = True, torch_limit_s: float = TORCH_LIMIT_S
) -> tuple[Seen, Interpreter | None]:
    """Everything that the checks judge, and the interpreter that was asked for torch."""
    from preflight import kernel_log, looking, torch_state
    from preflight.gpus import read_accelerators
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
        "torch_build": gpu_checks.choice_json(seen),
        "interpreter": {"path": interpreter.path, "why": interpreter.why} if interpreter else None,
    }
    observed["gpu_usable"] = gpu_checks.is_usable(seen, findings)
    return Section(STAGE, observed, tuple(findings))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage and return its exit code."""
    made = parser(__doc__, "python gpu_probe.py --json")
    made.add_argument("--python", metavar="PATH", help="the interpreter whose torch is asked (default: the active one)")
    made.add_argument("--no-torch", action="store_true", help="do not ask torch")
    made.add_argument(
        "--torch-timeout",
        type=float,
        default=TORCH_LIMIT_S,
        metavar="SECONDS",
        help="give torch up after this (default: 60)",
    )
    return run_stage(STAGE, made.parse_args(argv), look_and_judge)


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
