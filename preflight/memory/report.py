"""The memory part of the model stage: what a plan takes, whether it fits, and what would. Data and findings only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from preflight.findings import Finding, Level, say
from preflight.machine import Machine
from preflight.memory.budget import Budget, judge, verdict
from preflight.memory.closed_form import MemoryEstimate, NoEstimate, estimate
from preflight.memory.would_fit import fixes, would_fit
from preflight.model_shape import ModelShape
from preflight.plan import Plan

if TYPE_CHECKING:
    from preflight.memory.rehearsal import Job

_STRONGEST_FIRST = ("full", "lora", "qlora")


def memory(
    shape: ModelShape, plan: Plan, budget: Budget, choose_method: bool = False, recommend: bool = False
) -> tuple[dict[str, Any], list[Finding]]:
    """(observed, findings) of the memory question, from formulas alone: no torch, well under 0.2 s.

    observed: `plan`, `estimate` (components, interval, moments; see MemoryEstimate.as_json), `budget`, `verdict`
    ("yes", "marginal", "no" or None), `by_method` (full, lora, qlora: bytes and verdict each).
    `would_fit` (see would_fit.py) is there when the verdict is marginal or no, or with `recommend`.
    With `choose_method` the strongest method that fits is taken; when none does, QLoRA is judged.
    """
    try:
        by_method = {name: _with_method(shape, plan, name) for name in _STRONGEST_FIRST}
        if choose_method:
            plan = _choose(by_method, budget)
        made = estimate(shape, plan)
    except NoEstimate as trouble:
        return {"plan": plan.as_json(), "estimate": None, "budget": budget.as_json(), "verdict": None}, [
            Finding(
                "memory-not-estimated",
                Level.UNKNOWN,
                f"Could not tell how much memory training takes: {trouble}.",
                why="The closed form counts every matrix of the model; it needs to know which there are.",
                fix=("run again with `--rehearse` in an environment that has torch, transformers and peft",),
                source="preflight/memory/closed_form.py",
            )
        ]
    observed = {
        "plan": plan.as_json(),
        "estimate": made.as_json(),
        "budget": budget.as_json(),
        "verdict": verdict(made, budget),
        "by_method": {
            name: {
                "allocated_bytes": item.allocated_bytes,
                "reserved_bytes": item.reserved_bytes,
                "verdict": verdict(item, budget),
            }
            for name, (_, item) in by_method.items()
        },
    }
    answer = observed["verdict"]
    remedies: tuple[str, ...] = ()
    if budget.free_bytes is not None and (recommend or answer in ("marginal", "no")):
        found = would_fit(shape, plan, budget)
        observed["would_fit"] = found
        remedies = fixes(found, made.high_bytes + made.context_bytes)
    return observed, [judge(made, budget, describe(plan), remedies)]


def describe(plan: Plan) -> str:
    """The plan in a few words."""
    method = {"full": "Full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}.get(plan.method, plan.method)
    rank = f" r={plan.lora_rank}" if plan.method in ("lora", "qlora") else ""
    return f"{method}{rank}, {plan.micro_batch} x {plan.sequence_tokens} tokens"


def _with_method(shape: ModelShape, plan: Plan, method: str) -> tuple[Plan, MemoryEstimate]:
    changed = plan if plan.method == method else replace(plan, method=method)
    return changed, estimate(shape, changed)


def _choose(by_method: dict[str, tuple[Plan, MemoryEstimate]], budget: Budget) -> Plan:
    for wanted in ("yes", "marginal"):
        for name in _STRONGEST_FIRST:
            plan, made = by_method[name]
            if verdict(made, budget) == wanted:
                return plan
    return by_method["qlora"][0]


def measured(machine: Machine, python: str, job: Job, observed: Mapping[str, Any]) -> tuple[dict[str, Any], Finding]:
    """The step for real: on the first CUDA device, else with real tensors on the CPU (for small models).

    Returns what was measured, beside the other kinds of evidence in bytes (`compared`), and a finding.
    """
    from preflight.memory.rehearsal import measure_on_cpu, measure_on_gpu

    say("measuring the training step with random weights (up to 300 s)")
    made = measure_on_gpu(machine, python, job)
    if made.estimate is None and made.step == "no gpu":
        made = measure_on_cpu(machine, python, [job])[0]
    if made.estimate is None:
        return {"trouble": made.trouble, "estimate": None}, Finding(
            "memory-not-measured",
            Level.UNKNOWN,
            f"The training step could not be measured: {made.trouble}",
            why=f"It ended after the step `{made.step or 'start'}`; formulas and rehearsal are what is left.",
            fix=("name an interpreter with torch, transformers and peft: `--python PATH`",),
            source="preflight/children/measure.py",
        )
    compared = {made.estimate.evidence: made.estimate.allocated_bytes}
    for name, place in (("closed form", observed), ("rehearsed", observed.get("rehearsal") or {})):
        if place.get("estimate"):
            compared[name] = place["estimate"]["allocated_bytes"]
    figures = ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in compared.items())
    if made.estimate.notes:
        return {"trouble": None, "estimate": made.estimate.as_json(), "compared": compared}, Finding(
            "memory-ran-out",
            Level.FAIL,
            f"{describe(job.plan)}: {made.estimate.notes[0]}",
            why=f"Peaks of tensors up to there: {figures}.",
            fix=("run again with `--recommend` for what would fit",),
            source="preflight/children/measure.py",
        )
    return {"trouble": None, "estimate": made.estimate.as_json(), "compared": compared}, Finding(
        "memory-measured",
        Level.OK,
        f"{describe(job.plan)}: peak of tensors {figures}.",
        source="preflight/children/measure.py",
    )
