"""The memory part of the model stage: what a plan takes, whether it fits, and what would. Data and findings only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from preflight.findings import Finding, Level
from preflight.memory.budget import Budget, judge, verdict
from preflight.memory.closed_form import MemoryEstimate, NoEstimate, estimate
from preflight.memory.speed import Card
from preflight.memory.would_fit import fixes, would_fit
from preflight.model_shape import ModelShape
from preflight.plan import Plan

STRONGEST_FIRST = ("full", "lora", "qlora")


def memory(
    shape: ModelShape,
    plan: Plan,
    budget: Budget,
    choose_method: bool = False,
    recommend: bool = False,
    card: Card | None = None,
    longest: int | None = None,
) -> tuple[dict[str, Any], list[Finding]]:
    """(observed, findings) of the memory question, from formulas alone: no torch, well under 0.2 s.

    observed: `plan`, `estimate` (components, interval, moments; see MemoryEstimate.as_json), `budget`, `verdict`
    ("yes", "marginal", "no" or None), `by_method` (full, lora, qlora: bytes and verdict each).
    `would_fit` (see would_fit.py) is there when the verdict is marginal or no, or with `recommend`; `card` (published
    figures) and `longest` (tokens of the longest conversation) make it say more.
    With `choose_method` the strongest method that fits is taken; when none does, QLoRA is judged.
    """
    try:
        by_method = {name: _with_method(shape, plan, name) for name in STRONGEST_FIRST}
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
    told: tuple[str, ...] = ()
    if budget.free_bytes is not None and (recommend or observed["verdict"] in ("marginal", "no")):
        told = remedies(shape, plan, budget, observed, card, longest)
    return observed, [judge(made, budget, describe(plan), told)]


def remedies(
    shape: ModelShape,
    plan: Plan,
    budget: Budget,
    observed: dict[str, Any],
    card: Card | None = None,
    longest: int | None = None,
) -> tuple[str, ...]:
    """What would fit, best first, as remedies; the whole search is put into `observed`. Raises NoEstimate."""
    found = would_fit(shape, plan, budget, card, longest)
    observed["would_fit"] = found
    made = estimate(shape, plan)
    return fixes(found, made.high_bytes + made.context_bytes)


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
        for name in STRONGEST_FIRST:
            plan, made = by_method[name]
            if verdict(made, budget) == wanted:
                return plan
    return by_method["qlora"][0]
