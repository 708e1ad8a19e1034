"""From the answers to the result: k of n with its interval, the tier, wrong forms apart from wrong answers, latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflight.findings import quote
from preflight.task import statistics
from preflight.task.backends import Reply
from preflight.task.samples import Sample
from preflight.task.scoring import BadScorer, Scored, score

# Heuristics, not laws: below the first, the base lacks the knowledge or the skill more than the form; above the second,
# wording the request better is cheaper than training. `--tiers` changes them.
TIER_EDGES = (0.2, 0.5)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Judged:
    """One sample with its answer and the judgement; `scored` is None when there was no answer to judge."""

    sample: Sample
    reply: Reply
    scored: Scored | None

    @property
    def passed(self) -> bool:
        return self.scored is not None and self.scored.passed

    def as_json(self, shown: int = 300) -> dict[str, Any]:
        """One row of the per-sample table."""
        row: dict[str, Any] = {
            "id": self.sample.id,
            "task": self.sample.task,
            "place": self.sample.place,
            "scorer": self.sample.scorer.name,
            "fingerprint": self.sample.fingerprint,
            "passed": self.scored.passed if self.scored else None,
            "wrong_form": self.scored.wrong_form if self.scored else None,
            "value": round(self.scored.value, 4) if self.scored else None,
            "reason": self.scored.reason if self.scored else quote(self.reply.error, 200),
            "output": quote(self.reply.output, shown),
            "finish": self.reply.finish,
            "seconds": self.reply.seconds,
            "first_token_s": self.reply.first_token_s,
            "per_token_s": self.reply.per_token_s,
            "prompt_tokens": self.reply.prompt_tokens,
            "new_tokens": self.reply.new_tokens,
        }
        if self.scored and self.scored.recovered:
            row["recovered"] = list(self.scored.recovered)
        return row


def judge(sample: Sample, reply: Reply) -> Judged:
    """Score one answer. An answer that hit the time limit counts as it stands; an error leaves nothing to judge."""
    if reply.finish == "error":
        return Judged(sample, reply, None)
    if reply.finish == "time-out" and not reply.output:
        return Judged(sample, reply, Scored(False, quote(reply.error or "no answer within the time limit"), True))
    if sample.scorer.kind == "function":  # judged later, all together, in a child
        return Judged(sample, reply, None)
    try:
        scored = score(sample.scorer, reply.output)
    except BadScorer as error:
        return Judged(sample, Reply(reply.key, reply.output, "error", str(error)), None)
    if not scored.passed and reply.finish == "length" and scored.wrong_form:
        scored = Scored(
            False,
            f"{scored.reason}; cut at {reply.new_tokens} new tokens",
            True,
            scored.value,
            scored.extracted,
            scored.recovered,
        )
    return Judged(sample, reply, scored)


def scored_by_function(line: Mapping[str, Any]) -> Scored | None:
    """The judgement in one line of the child `score_with`; None when the user's function failed on that sample."""
    if line.get("error"):
        return None
    value = float(line.get("value") or 0.0)
    return Scored(bool(line.get("passed")), quote(line.get("reason") or f"value {value:g}", 200), False, value)


@dataclass(frozen=True)
class TaskResult:
    """The result of one task (one data file, or the records that name the same task).

    `n` counts the judged samples, `k` the right ones; `low` and `high` bound the share (Wilson). `tier` is None when
    the interval crosses an edge; then `samples_needed` says about how many would settle it (None: no number would).
    """

    task: str
    scorer: str
    n: int
    k: int
    low: float
    high: float
    tier: str | None
    samples_needed: int | None
    wrong_answers: int
    wrong_form: int
    cut: int
    recovered: int
    errors: int
    not_run: int
    mean_value: float | None

    @property
    def share(self) -> float | None:
        """k/n; None when nothing was judged."""
        return self.k / self.n if self.n else None

    def as_json(self) -> dict[str, Any]:
        """The result as plain JSON data."""
        made = {name: getattr(self, name) for name in self.__dataclass_fields__}
        made.update(share=_rounded(self.share), low=round(self.low, 4), high=round(self.high, 4))
        made.update(mean_value=_rounded(self.mean_value), interval=f"Wilson {CONFIDENCE:.0%}")
        return made


def task_results(
    judged: Sequence[Judged], not_run: Mapping[str, int], edges: Sequence[float] = TIER_EDGES
) -> list[TaskResult]:
    """One result per task, in the order of first appearance. `not_run` counts the samples without any answer."""
    made = []
    for task in dict.fromkeys([*(item.sample.task for item in judged), *not_run]):
        group = [item for item in judged if item.sample.task == task]
        scored = [item for item in group if item.scored is not None]
        k, n = sum(item.passed for item in scored), len(scored)
        low, high = statistics.wilson(k, n, CONFIDENCE)
        tier = statistics.tier_of(k, n, edges, CONFIDENCE) if n else None
        needed = None if tier or not n else statistics.samples_for_tier(k, n, edges, CONFIDENCE)
        wrong_form = sum(1 for item in scored if item.scored and item.scored.wrong_form and not item.passed)
        names = dict.fromkeys(item.sample.scorer.name for item in group)
        values = [item.scored.value for item in scored if item.scored]
        made.append(
            TaskResult(
                task=task,
                scorer=", ".join(names),
                n=n,
                k=k,
                low=low,
                high=high,
                tier=tier.name if tier else None,
                samples_needed=needed,
                wrong_answers=n - k - wrong_form,
                wrong_form=wrong_form,
                cut=sum(1 for item in scored if item.reply.finish == "length" and not item.passed),
                recovered=sum(1 for item in scored if item.scored and item.scored.recovered),
                errors=len(group) - n,
                not_run=not_run.get(task, 0),
                mean_value=sum(values) / n if n else None,
            )
        )
    return made


def latency(replies: Sequence[Reply]) -> dict[str, Any]:
    """Latency of whole answers, of the first token and per token, in seconds, without the warm-up request.

    P50 and P95 by nearest rank; `p95_upper_s` and `p95_lower_s` bound the true P95, each with 95 % confidence, and are
    None where there are too few answers for a bound (an upper one needs 59).
    """
    answered = [reply for reply in replies if reply.seconds is not None]
    seconds = [reply.seconds for reply in answered if reply.seconds is not None]
    first = [reply.first_token_s for reply in answered if reply.first_token_s is not None]
    per_token = [reply.per_token_s for reply in answered if reply.per_token_s is not None]
    lower, upper = statistics.quantile_bounds(seconds, 0.95)
    tokens = [reply.new_tokens for reply in answered if reply.new_tokens is not None]
    n = len(seconds)
    return {
        "n": n,
        "p50_s": _rounded(statistics.quantile(seconds, 0.5)),
        "p95_s": _rounded(statistics.quantile(seconds, 0.95)),
        "p95_is_the_maximum": bool(n) and n < 20,
        "p95_lower_s": _rounded(lower),
        "p95_upper_s": _rounded(upper),
        "maximum_s": _rounded(max(seconds, default=None)),
        "chance_that_maximum_reaches_p95": _rounded(statistics.chance_that_maximum_covers(n)) if n else None,
        "answers_for_a_p95_bound": statistics.samples_to_cover(0.95, 0.95),
        "first_token_p50_s": _rounded(statistics.quantile(first, 0.5)),
        "first_token_p95_s": _rounded(statistics.quantile(first, 0.95)),
        "per_token_p50_s": _rounded(statistics.quantile(per_token, 0.5), 5),
        "per_token_p95_s": _rounded(statistics.quantile(per_token, 0.95), 5),
        "new_tokens_p50": statistics.quantile(tokens, 0.5),
        "new_tokens_maximum": max(tokens, default=None),
        "batch_size": 1,
    }


def target(replies: Sequence[Reply], target_s: float, weights_bytes: int | None = None) -> dict[str, Any]:
    """Is 95 % of the answers faster than `target_s`?  And what would make it so, computed from the measured times.

    `verdict`: met when the exact one-sided bound (95 %) of the share of slower answers is at most 5 %, "not met" when
    its lower bound is above 5 %, else "cannot tell". An answer that hit the time limit counts as slower.
    """
    timed = [reply for reply in replies if reply.seconds is not None or reply.finish == "time-out"]
    n = len(timed)
    late = sum(1 for reply in timed if reply.seconds is None or reply.seconds > target_s or reply.finish == "time-out")
    if n and statistics.upper_bound(late, n) <= 0.05 + 1e-12:
        verdict = "met"
    elif n and statistics.lower_bound(late, n) > 0.05:
        verdict = "not met"
    else:
        verdict = "cannot tell"
    seconds = [reply.seconds for reply in timed if reply.seconds is not None]
    p95 = statistics.quantile(seconds, 0.95)
    first = statistics.quantile([r.first_token_s for r in timed if r.first_token_s is not None], 0.95)
    per_token = statistics.quantile([r.per_token_s for r in timed if r.per_token_s is not None], 0.95)
    tokens = None
    if first is not None and per_token:
        tokens = int((target_s - first) / per_token) + 1 if target_s >= first else 0
    return {
        "target_s": target_s,
        "verdict": verdict,
        "slower": late,
        "n": n,
        "answers_needed_if_none_is_slower": statistics.samples_to_cover(0.95, 0.95),
        "p95_s": _rounded(p95),
        "new_tokens_that_fit": tokens,
        "speed_up_needed": round(p95 / target_s, 2) if p95 and p95 > target_s else None,
        "weights_bytes": weights_bytes,
    }


def compare(first: Mapping[str, bool], second: Mapping[str, bool]) -> dict[str, Any]:
    """Two runs over the same samples, paired: McNemar's exact test. Keys that only one run has are left out.

    `difference` is the change of the share from the first to the second.
    """
    both = [key for key in first if key in second]
    only_first = sum(1 for key in both if first[key] and not second[key])
    only_second = sum(1 for key in both if second[key] and not first[key])
    n = len(both)
    p_value = statistics.mcnemar(only_first, only_second)
    return {
        "n": n,
        "first_right": sum(first[key] for key in both),
        "second_right": sum(second[key] for key in both),
        "only_first_right": only_first,
        "only_second_right": only_second,
        "difference": _rounded((only_second - only_first) / n) if n else None,
        "p_value": round(p_value, 6),
        "significant": p_value <= 0.05,
        "unpaired": len(first) + len(second) - 2 * n,
        "fewest_differing_samples": statistics.fewest_discordant(),
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
