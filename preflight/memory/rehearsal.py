"""The user's own stack runs the step on fake tensors in a child; its trace gives the peak that CUDA would see."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preflight.findings import quote
from preflight.machine import Answer, Machine
from preflight.memory import errors, trace
from preflight.memory.closed_form import MemoryEstimate, components_of, context_bytes, static_bytes
from preflight.memory.tape import Held
from preflight.plan import Plan

TIMEOUT_S = 300.0
_NOT_ALIKE = "the layers that ran do not stand for the others"


@dataclass(frozen=True)
class Job:
    """One rehearsal. `config` is config.json; `model_dir` only matters for remote code, which must be trusted.

    `on_cpu`: as the CPU runs it, without what CUDA does otherwise (to compare with a measurement on the CPU).
    `real`: with real tensors.
    `measured_turn` and `empty_before`: the loop resets torch's peaks before that micro step (and empties the cache).
    """

    config: Mapping[str, Any]
    plan: Plan
    model_dir: str | None = None
    trust_remote_code: bool = False
    measured_turn: int | None = None
    empty_before: bool = False
    layers: int | None = None
    on_cpu: bool = False
    real: bool = False

    def as_json(self) -> dict[str, Any]:
        """What the child reads."""
        return {
            "config": dict(self.config),
            "plan": self.plan.as_json(),
            "model_dir": self.model_dir,
            "trust_remote_code": self.trust_remote_code,
            "layers": self.layers,
            "cpu": self.on_cpu,
            "real": self.real,
        }


@dataclass(frozen=True)
class Rehearsal:
    """The result of a job: an estimate, or the reason why there is none (`trouble`, and the step it ended in).

    `lost`: the child ended, or was ended, before it could say anything of this job's outcome.
    """

    estimate: MemoryEstimate | None
    trouble: str = ""
    step: str = ""
    replay: trace.Replay | None = None
    seconds: float | None = None
    lost: bool = False


def rehearse(machine: Machine, python: str, jobs: Sequence[Job], timeout_s: float = TIMEOUT_S) -> list[Rehearsal]:
    """A rehearsal for each job, in one child. Never raises for what goes wrong there: that is the job's `trouble`.

    Where few layers do not stand for the others, all of them run in a second child.
    """
    made = _rehearse(machine, python, jobs, timeout_s)
    lost = [number for number, one in enumerate(made) if one.lost]
    started = made[0].step != "starting"  # the packages could be imported
    if len(lost) > 1 and started:  # one job took the child with it: the others again
        rest = rehearse(machine, python, [jobs[number] for number in lost[1:]], timeout_s)
        for number, one in zip(lost[1:], rest, strict=True):
            made[number] = one
    again = [number for number, one in enumerate(made) if one.trouble.startswith(_NOT_ALIKE)]
    if again:
        whole = [replace(jobs[number], layers=10**6) for number in again]
        for number, one in zip(again, _rehearse(machine, python, whole, timeout_s), strict=True):
            made[number] = one
    return made


def _rehearse(machine: Machine, python: str, jobs: Sequence[Job], timeout_s: float) -> list[Rehearsal]:
    with tempfile.TemporaryDirectory(prefix="preflight-rehearse-") as folder:
        path = Path(folder, "job.json")
        several = len(jobs) > 1
        content = {"jobs": [job.as_json() for job in jobs]} if several else jobs[0].as_json()
        path.write_text(json.dumps(content), encoding="utf-8")
        answer = machine.ask("rehearse", python, [str(path)], timeout_s, env={"OMP_NUM_THREADS": "1"})
    lines = answer.lines_of_json()
    imported = next((line for line in lines if line.get("step") == "imported"), None)
    return [
        _result(job, [line for line in lines if line.get("job", 0) == number], answer, imported)
        for number, job in enumerate(jobs)
    ]


def measure_on_cpu(machine: Machine, python: str, jobs: Sequence[Job], timeout_s: float = TIMEOUT_S) -> list[Rehearsal]:
    """The same steps with real tensors on the CPU, every storage recorded: for small models."""
    real = [replace(job, on_cpu=True, real=True, layers=10**6) for job in jobs]
    return [
        made
        if made.estimate is None
        else replace(made, estimate=replace(made.estimate, evidence="measured on the CPU"))
        for made in rehearse(machine, python, real, timeout_s)
    ]


def measure_on_gpu(machine: Machine, python: str, job: Job, timeout_s: float = TIMEOUT_S) -> Rehearsal:
    """The step for real on the first CUDA device: torch's own peaks. `step` is "no gpu" where there is none.

    Running out of memory is a result: an estimate with the stage it happened after in its notes.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-measure-") as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps({**job.as_json(), "device": "cuda"}), encoding="utf-8")
        answer = machine.ask("measure", python, [str(path)], timeout_s)
    lines = answer.lines_of_json()
    last = next((line for line in lines if line.get("step") == "measured"), None)
    if last is None:
        failed = next((line for line in lines if line.get("step") == "failed"), {})
        reason = quote(failed.get("reason") or answer.trouble or f"exit code {answer.exit_code}")
        return Rehearsal(None, reason, str(failed.get("where", "starting")))
    stages = {str(line["stage"]): int(line["peak_allocated_bytes"]) for line in lines if line.get("step") == "stage"}
    reserved = max((int(line["peak_reserved_bytes"]) for line in lines if line.get("step") == "stage"), default=0)
    allocated = int(last.get("allocated_bytes") or max(stages.values(), default=0))
    reserved = int(last.get("reserved_bytes") or reserved)
    out = bool(last.get("out_of_memory"))
    first = next((line for line in lines if line.get("step") == "imported"), {})
    return Rehearsal(
        MemoryEstimate(
            evidence="measured on the GPU",
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            low_bytes=allocated,
            high_bytes=reserved,
            context_bytes=int(first.get("context_bytes", 0)),
            moment=max(stages, key=lambda name: stages[name]) if stages else "loading",
            moments=stages,
            components=(),
            trainable_parameters=0,
            notes=(f"out of memory after {last.get('after')}: {quote(last.get('message', ''))}",) if out else (),
            detail={"versions": first.get("versions", {}), "out_of_memory": out},
        )
    )


def _result(job: Job, lines: list[dict[str, Any]], answer: Answer, imported: dict[str, Any] | None) -> Rehearsal:
    steps = {str(line.get("step")): line for line in lines}
    done = [name for name in ("imported", "built", "prepared", "rehearsed") if name in steps]
    step = done[-1] if done else "starting"
    if "rehearsed" not in steps:
        if "failed" in steps:
            return Rehearsal(None, quote(steps["failed"].get("reason", "")), step)
        if answer.trouble == "timeout":
            return Rehearsal(None, f"it took longer than its limit after the step: {step}", step, lost=True)
        last = answer.errors.strip().splitlines()[-1:] or [f"exit code {answer.exit_code}"]
        return Rehearsal(None, quote(last[0]), step, lost=True)
    done_line, built, prepared = steps["rehearsed"], steps["built"], steps["prepared"]
    try:
        stacks = trace.stacks_of(built["layers"])
        events = trace.complete(done_line["events"], stacks)
    except trace.CannotComplete as trouble:
        return Rehearsal(None, f"{_NOT_ALIKE}: {trouble}", step)
    grads = done_line["grads"]
    replayed = trace.replay(
        events,
        done_line["table"],
        gradients=frozenset(grads),
        measured_turn=job.measured_turn,
        empty_before=job.empty_before,
    )
    versions = (steps.get("imported") or imported or {}).get("versions", {})
    trained = trained_parameters(prepared["trainable"], stacks)
    estimate = _estimate(job.plan, replayed, built, done_line, versions, trained)
    return Rehearsal(estimate, "", step, replayed, done_line.get("seconds"))


def trained_parameters(by_owner: Mapping[str, int], stacks: Sequence[trace.Stack]) -> int:
    """Trained elements of the whole model, from those of the layers that ran."""
    total = by_owner.get("-1", 0)
    for stack in stacks:
        for index in range(len(stack.kinds)):
            total += by_owner.get(str(stack.template(index)), 0)
    return total


def _estimate(
    plan: Plan,
    replayed: trace.Replay,
    built: dict[str, Any],
    done: dict[str, Any],
    versions: dict[str, str],
    trained: int,
) -> MemoryEstimate:
    rows = list(replayed.at_peak)
    slack = replayed.allocated_bytes - replayed.tensors_bytes
    if slack > 0:
        rows.append(Held("reused blocks handed out whole", slack, "less than 1 MiB each", "cuda"))
    rows.append(Held("allocator cache and rounding", replayed.reserved_bytes - replayed.allocated_bytes, "", "safety"))
    static = static_bytes(rows)
    low, high, reserved = errors.interval("rehearsed", plan, replayed.allocated_bytes, static, replayed.reserved_bytes)
    return MemoryEstimate(
        evidence="rehearsed",
        allocated_bytes=replayed.allocated_bytes,
        reserved_bytes=reserved,
        low_bytes=low,
        high_bytes=high,
        context_bytes=context_bytes(plan),
        moment=replayed.moment,
        moments=replayed.phases,
        components=components_of(rows),
        trainable_parameters=trained,
        static_bytes=static,
        detail={
            "versions": versions,
            "attention": built.get("attention"),
            "attention_backends": done.get("backends"),
            "optimizer": done.get("optimizer"),
            "model_class": built.get("class"),
            "timeline": [list(point) for point in replayed.timeline],
        },
    )
