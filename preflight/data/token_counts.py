"""How long are prepared records in real tokens, which are trained on, and what does that mean for a length limit?"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.data.packing import packing, percentile
from preflight.data.spool import Piece
from preflight.machine import Machine, choose_python

TURN_SAMPLE = 2000  # records whose single turns are counted


@dataclass
class TokenCounts:
    """One entry a record: `tokens` (0: left out, -1: could not be rendered), `trained` (-1: could not tell), `first`
    (the first message that is kept; -1: too long whatever is left out). `trouble` "" when it was counted."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    trained: array[int] = field(default_factory=lambda: array("i"))
    first: array[int] = field(default_factory=lambda: array("i"))
    facts: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""


def count_tokens(
    machine: Machine,
    pieces: list[Piece],
    state: bytearray,
    folder: Path,
    model: str,
    python: str | None,
    max_tokens: int | None,
    timeout_s: float,
    progress: Callable[[int], None],
) -> TokenCounts:
    """Count with the model's own tokenizer and chat template, in a child."""
    chosen = choose_python(machine, python, needs=("transformers",))
    skip, out, job = folder / "skip", folder / "counts", folder / "job.json"
    skip.write_bytes(bytes(state))
    lines = [str(piece.path("lines")) for piece in pieces]
    job.write_text(
        json.dumps(
            {
                "model": model,
                "pieces": lines,
                "skip": str(skip),
                "out": str(out),
                "max_tokens": max_tokens,
                "turn_sample": TURN_SAMPLE,
            }
        ),
        encoding="utf-8",
    )
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "TRANSFORMERS_VERBOSITY": "error"}
    answer = machine.ask(
        "count_tokens",
        chosen.path,
        [str(job)],
        timeout_s,
        env=env,
        on_line=lambda line: progress(line["records"]) if line.get("step") == "progress" else None,
    )
    steps = {line["step"]: line for line in answer.lines_of_json()}
    counts = TokenCounts(facts={"python": chosen.why})
    counts.facts["transformers"] = steps.get("transformers", {}).get("version")
    counts.facts["tokenizer"] = {
        key: value for key, value in steps.get("tokenizer", {}).items() if key != "step"
    } or None
    if "counted" not in steps:
        error = steps.get("failed", {}).get("error")
        last = next(reversed(steps), "starting Python")
        if answer.trouble == "timeout":
            counts.trouble = f"counting took longer than {timeout_s:g} s (last step: {last})"
        else:
            counts.trouble = error or f"the child ended with exit code {answer.exit_code} (last step: {last})"
        return counts
    counts.facts |= {key: value for key, value in steps["counted"].items() if key != "step"}
    numbers = array("i")
    with open(out, "rb") as stream:
        numbers.frombytes(stream.read())
    counts.tokens, counts.trained, counts.first = numbers[0::3], numbers[1::3], numbers[2::3]
    return counts


def token_statistics(counts: TokenCounts, state: bytearray, max_tokens: int | None) -> dict[str, Any]:
    """Percentiles of the records that are kept, the share of trained tokens, and the packing gain."""
    lengths: Counter[int] = Counter()
    total = trained = 0
    known = True
    for index, tokens in enumerate(counts.tokens):
        if state[index] or tokens <= 0:
            continue
        lengths[tokens] += 1
        total += tokens
        known = known and counts.trained[index] >= 0
        trained += max(0, counts.trained[index])
    limit = max_tokens or (max(lengths) if lengths else None)
    turns = {
        role: {"p50": percentile(sizes, 0.5), "p95": percentile(sizes, 0.95), "max": max(sizes)}
        for role, values in (counts.facts.get("turn_tokens") or {}).items()
        if (sizes := Counter(values))
    }
    return {
        "samples": sum(lengths.values()),
        "tokens": total,
        "p50": percentile(lengths, 0.5),
        "p95": percentile(lengths, 0.95),
        "max": max(lengths, default=None),
        "trained_tokens": trained if known else None,
        "trained_share": round(trained / total, 4) if total and known else None,
        "per_turn": turns,
        "per_turn_records": min(TURN_SAMPLE, sum(lengths.values())),
        "packing": packing(lengths, limit).as_json() if limit else None,
    }
