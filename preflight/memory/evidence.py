"""Better evidence than formulas: the plan rehearsed with the user's packages, measured for real, and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import Finding, Level, quote, say
from preflight.machine import Machine
from preflight.memory.budget import Budget, judge, verdict
from preflight.memory.rehearsal import TIMEOUT_S, Job, measure_on_cpu, measure_on_gpu, rehearse
from preflight.memory.report import STRONGEST_FIRST, describe, remedies
from preflight.model_shape import ModelShape
from preflight.plan import Plan

KINDS = ("closed", "auto", "rehearsed")
NEEDS = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Question:
    """What is asked about one model. `choose`: the method was left to the program, so a weaker one may take its place.

    `remote_code`: the model's directory, when its own code may run.
    """

    python: str
    name: str
    config: Mapping[str, Any]
    shape: ModelShape
    plan: Plan
    budget: Budget | None
    choose: bool = False
    remote_code: str | None = None

    def job(self, plan: Plan) -> Job:
        """The rehearsal of a plan for this machine: as the CPU runs it when training would run there."""
        on_cpu = self.budget is not None and self.budget.cpu
        return Job(self.config, plan, self.remote_code, self.remote_code is not None, on_cpu=on_cpu)


def wanted(kind: str, packages: Mapping[str, str] | None, planned: tuple[str, ...], needs_code: bool) -> bool:
    """Whether to rehearse: always when asked; under `auto` when the packages are there and are those that are judged.

    `planned`: packages that are judged in another version than the installed one. `needs_code`: the model cannot be
    built without its own code, which may not run.
    """
    if kind != "auto":
        return kind == "rehearsed"
    return all((packages or {}).get(name) for name in NEEDS) and not planned and not needs_code


def _only_counted(plan: Plan) -> str:
    """Why this plan has a closed form and no rehearsal; "" when it can be rehearsed."""
    if plan.offload:
        return "it is offloaded to the host"
    if plan.gpus == 1 or plan.parallel == "ddp":
        return ""
    if plan.parallel != "fsdp_full":
        return "this way of dividing it over several GPUs has a closed form only"
    return "4-bit weights divided by FSDP have a closed form only" if plan.quantised else ""


def rehearsed(
    machine: Machine, asked: Question, observed: dict[str, Any], findings: list[Finding], must: bool
) -> list[Finding]:
    """Rehearses the plan and puts the result into `observed` (rehearsal, verdict, plan); returns the findings.

    The rehearsal's verdict takes the place of the closed form's. When the method was left open and the rehearsal does
    not confirm that it fits, the next weaker one is rehearsed. `must`: the rehearsal was asked for, so its failure is
    an unknown; else it is a warning and the closed form stands.
    """
    plan = asked.plan
    why_not = _only_counted(plan)
    if why_not:
        if not must:
            return findings
        observed["rehearsal"] = {"trouble": why_not, "estimate": None}
        return [*findings, _not_rehearsed(why_not, "planning", must)]
    while True:
        say(f"rehearsing the training step of {describe(plan)} (up to {TIMEOUT_S:.0f} s)")
        made = rehearse(machine, asked.python, [asked.job(plan)])[0]
        if made.estimate is None:
            break
        answer = verdict(made.estimate, asked.budget) if asked.budget else None
        weaker = _weaker(plan) if asked.choose and answer in ("marginal", "no") else None
        if weaker is None:
            break
        plan = weaker
    if made.estimate is None:
        observed["rehearsal"] = {"trouble": quote(made.trouble), "estimate": None}
        if not must and made.trouble == "exit code None":  # a recorded machine that was never asked this
            return findings
        return [*findings, _not_rehearsed(made.trouble, made.step, must)]
    observed["rehearsal"] = {"trouble": None, "estimate": made.estimate.as_json(), "seconds": made.seconds}
    if plan != asked.plan:
        observed["plan"] = plan.as_json()
    if asked.budget is None:
        peak = made.estimate.allocated_bytes / 2**30
        told = Finding(
            "memory-rehearsed",
            Level.OK,
            f"{describe(plan)}: the rehearsed step peaks at {peak:.2f} GiB of tensors (at: {made.estimate.moment}).",
            source="preflight/memory/rehearsal.py",
        )
        return [*findings, told]
    answer = verdict(made.estimate, asked.budget)
    observed["verdict"] = answer
    fixes: tuple[str, ...] = ()
    if answer in ("marginal", "no") and asked.budget.free_bytes is not None:
        fixes = remedies(asked.shape, plan, asked.budget, observed)
    judged = judge(made.estimate, asked.budget, f"{describe(plan)}, rehearsed with the packages under test,", fixes)
    return [judged, *(finding for finding in findings if not finding.code.startswith("memory-fit-"))]


def _weaker(plan: Plan) -> Plan | None:
    """The plan with the next method that takes less memory; None after the last."""
    place = STRONGEST_FIRST.index(plan.method) if plan.method in STRONGEST_FIRST else len(STRONGEST_FIRST)
    return replace(plan, method=STRONGEST_FIRST[place + 1]) if place + 1 < len(STRONGEST_FIRST) else None


def _not_rehearsed(trouble: str, step: str, must: bool) -> Finding:
    return Finding(
        "rehearsal-failed",
        Level.UNKNOWN if must else Level.WARN,
        f"The training step could not be rehearsed: {quote(trouble)}",
        f"It ended in the step {quote(step or 'start', 60)}; the closed form above is what is left.",
        ("name an interpreter with torch, transformers and peft: `--python PATH`",),
        "preflight/memory/rehearsal.py",
    )


def measured(machine: Machine, asked: Question, observed: dict[str, Any]) -> Finding:
    """Runs the step for real: on the first CUDA device, else with real tensors on the CPU (for small models).

    Puts the result into `observed` (measured) and returns the finding.
    """
    say("measuring the training step with random weights (up to 300 s)")
    job = asked.job(asked.plan)
    made = measure_on_gpu(machine, asked.python, job)
    if made.estimate is None and made.step == "no gpu":
        needs, free = (observed.get("estimate") or {}).get("allocated_bytes"), _free_ram(machine)
        if needs is not None and free is not None and needs * 2 > free:
            observed["measured"] = {"trouble": "too large for the RAM here", "estimate": None}
            return _not_measured(
                f"no GPU was found, and in this machine's RAM ({free / 2**30:.1f} GiB free) "
                f"a step of about {needs / 2**30:.1f} GiB is not tried",
                "before it began",
            )
        made = measure_on_cpu(machine, asked.python, [job])[0]
    if made.estimate is None:
        observed["measured"] = {"trouble": made.trouble, "estimate": None}
        return _not_measured(quote(made.trouble), made.step or "start")
    compared = {made.estimate.evidence: made.estimate.allocated_bytes}
    for name, place in (("closed form", observed), ("rehearsed", observed.get("rehearsal") or {})):
        if place.get("estimate"):
            compared[name] = place["estimate"]["allocated_bytes"]
    figures = ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in compared.items())
    observed["measured"] = {"trouble": None, "estimate": made.estimate.as_json(), "compared": compared}
    if made.estimate.notes:
        return Finding(
            "memory-ran-out",
            Level.FAIL,
            f"{describe(asked.plan)}: {made.estimate.notes[0]}",
            why=f"Peaks of tensors up to there: {figures}.",
            fix=("run again with `--recommend` for what would fit",),
            source="preflight/children/measure.py",
        )
    return Finding(
        "memory-measured",
        Level.OK,
        f"{describe(asked.plan)}: peak of tensors {figures}.",
        source="preflight/children/measure.py",
    )


def _not_measured(reason: str, step: str) -> Finding:
    return Finding(
        "memory-not-measured",
        Level.UNKNOWN,
        f"The training step could not be measured: {reason}",
        why=f"It ended after the step `{quote(step, 60)}`; formulas and rehearsal are what is left.",
        fix=("name an interpreter with torch, transformers and peft: `--python PATH`",),
        source="preflight/children/measure.py",
    )


def _free_ram(machine: Machine) -> int | None:
    from preflight.host import read_host

    return read_host(machine).ram_available_bytes


# --- side by side --------------------------------------------------------------------------------------------------


def comparison(observed: Mapping[str, Any]) -> dict[str, Any]:
    """Closed form, rehearsed and measured side by side: peaks, components, and how far each is from the best kind.

    `kinds` lists those that gave a result, the weakest first; `components` holds bytes by component and kind (a
    measurement on a GPU has none); `off_pct` the signed difference of each kind's peaks from the last one's.
    """
    places = (observed, observed.get("rehearsal") or {}, observed.get("measured") or {})
    made = [place["estimate"] for place in places if place.get("estimate")]
    kinds = [estimate["evidence"] for estimate in made]
    parts = {
        name: {
            estimate["evidence"]: estimate["components"][name]["bytes"] if estimate.get("components") else None
            for estimate in made
        }
        for name in (made[0]["components"] if made else {})
    }
    best = made[-1] if made else {}
    peaks = ("allocated_bytes", "reserved_bytes")
    return {
        "kinds": kinds,
        "peaks": {estimate["evidence"]: {key: estimate[key] for key in peaks} for estimate in made},
        "components": parts,
        "off_pct": {
            estimate["evidence"]: {
                key: round(100.0 * (estimate[key] - best[key]) / best[key], 3) if best[key] else None for key in peaks
            }
            for estimate in made[:-1]
        },
    }


def compared(observed: Mapping[str, Any]) -> Finding:
    """The finding that goes with a comparison."""
    found = observed["comparison"]
    told = [
        f"{kind} {peak['allocated_bytes'] / 2**30:.3f} GiB ({peak['reserved_bytes'] / 2**30:.3f} with cache)"
        for kind, peak in found["peaks"].items()
    ]
    listed = ", ".join(told)
    missing = 3 - len(told)
    return Finding(
        "memory-compared",
        Level.OK if not missing else Level.UNKNOWN,
        f"Peak of tensors side by side: {listed}.",
        why=""
        if not missing
        else f"{missing} of the three kinds of evidence gave no result; its own finding says why.",
        fix=() if not missing else ("name an interpreter with torch, transformers and peft: `--python PATH`",),
        source="preflight/memory/evidence.py",
    )


def row(name: str, observed: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """The comparison as one row of a file of own measurements, in the columns of `benchmarks/measured_own.jsonl`."""
    place = observed.get("measured") or {}
    real: Mapping[str, Any] = place.get("estimate") or {}
    told: Mapping[str, Any] = (observed.get("rehearsal") or {}).get("estimate") or {}
    formulas: Mapping[str, Any] = observed.get("estimate") or {}
    return {
        "config": name,
        "device": device if real.get("evidence") == "measured on the GPU" else "CPU" if real else None,
        "plan": observed["plan"],
        "out_of_memory": real.get("out_of_memory", False) if real else None,
        "allocated_bytes": real.get("allocated_bytes"),
        "reserved_bytes": real.get("reserved_bytes"),
        "context_bytes": real.get("context_bytes"),
        "stages_bytes": real.get("moments_bytes"),
        "versions": real.get("versions") or told.get("versions"),
        "closed_form_bytes": formulas.get("allocated_bytes"),
        "rehearsed_bytes": told.get("allocated_bytes"),
        "rehearsed_reserved_bytes": told.get("reserved_bytes"),
    }


def check_file(path: str) -> None:
    """Whether rows can be appended to this file. Raises UsageError before minutes are spent on what it would hold."""
    target = Path(path)
    try:
        with target.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--compare-to {path}: cannot be written ({error.strerror})") from error


def append(path: str, content: Mapping[str, Any]) -> None:
    """Adds one row to a file of JSON Lines, in one write. Raises UsageError when that fails."""
    line = (json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        raise UsageError(f"--compare-to {path}: cannot be written ({error.strerror})") from error
