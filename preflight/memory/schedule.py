"""How many updates, tokens and hours is a training run on these data? From real token lengths where they can be had."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import Finding, Level, quote, say
from preflight.machine import Machine
from preflight.memory.speed import Card, seconds, work
from preflight.model_shape import ModelShape
from preflight.plan import Plan

MOST = 20000  # records that are counted one by one; the rest is taken to be like them
BYTES_PER_TOKEN = 4  # English text and code: 3.5 to 4.5 with the tokenizers of current models
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Lengths:
    """Token lengths of the conversations: length -> how often. `counted_by`: tokenizer, or bytes (about 4 a token).

    `share`: how much of the file these conversations are. `trouble`: why the tokenizer did not count.
    """

    lengths: Counter[int]
    counted_by: str
    share: float = 1.0
    trouble: str = ""

    @property
    def samples(self) -> int:
        """Conversations of the whole file."""
        return round(sum(self.lengths.values()) / self.share)

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that was counted."""
        return max(self.lengths, default=0)

    def tokens(self, limit: int) -> int:
        """Tokens of one pass over the whole file, each conversation cut at `limit`."""
        return round(sum(min(size, limit) * count for size, count in self.lengths.items()) / self.share)

    def cut(self, limit: int) -> int:
        """Conversations that are longer than `limit`."""
        return round(sum(count for size, count in self.lengths.items() if size > limit) / self.share)


def read_lengths(machine: Machine, python: str | None, model: str, data: str) -> Lengths:
    """Token lengths of the conversations in a data file, by the model's own tokenizer and chat template where it is.

    `python` None: nothing is started, and about four bytes are taken for a token.

    `samples` is 0 when the file holds no conversation. Raises UsageError for a file that cannot be read.
    """
    from preflight.data.records import BadRecord, Unreadable, read_records
    from preflight.training_data import conversation_of

    sizes: list[int] = []
    more = 0
    with tempfile.TemporaryDirectory(prefix="preflight-lengths-") as folder:
        lines = Path(folder, "lines")
        try:
            with lines.open("w", encoding="utf-8", newline="\n") as out:
                for record in read_records(Path(data)):
                    if isinstance(record, BadRecord):
                        continue
                    if len(sizes) >= MOST:
                        more += 1
                        continue
                    found = conversation_of(record.value)
                    if isinstance(found, str):
                        continue
                    messages, tools = found
                    line = json.dumps({"messages": messages, **({"tools": tools} if tools else {})})
                    out.write(line + "\n")
                    sizes.append(sum(len(str(m.get("content") or "").encode("utf-8")) + 16 for m in messages))
        except Unreadable as trouble:
            raise UsageError(f"--data {data}: {trouble.what}; {'; '.join(trouble.fix)}") from trouble
        except OSError as error:
            raise UsageError(f"--data {data}: cannot be read ({error.strerror})") from error
        if not sizes:
            return Lengths(Counter(), "nothing", 1.0, "no conversation with an answer to train on")
        share = len(sizes) / (len(sizes) + more)
        tokens, trouble_text = None, ""
        if python is not None:
            tokens, trouble_text = _by_tokenizer(machine, python, model, Path(folder), len(sizes))
    if tokens is None:
        rough = Counter(max(1, size // BYTES_PER_TOKEN) for size in sizes)
        return Lengths(rough, "bytes", share, trouble_text)
    return Lengths(Counter(size for size in tokens if size > 0), "tokenizer", share)


def _by_tokenizer(machine: Machine, python: str, model: str, folder: Path, count: int) -> tuple[array[int] | None, str]:
    say(f"counting the tokens of {count:,} conversations (up to {TIMEOUT_S:.0f} s)")
    (folder / "skip").write_bytes(bytes(count))
    job = {
        "model": model, "pieces": [str(folder / "lines")], "skip": str(folder / "skip"), "out": str(folder / "counts"),
        "max_tokens": None, "turn_sample": 0,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}
    answer = machine.ask("count_tokens", python, [str(folder / "job.json")], TIMEOUT_S, env=env)
    steps = {line.get("step"): line for line in answer.lines_of_json()}
    if "counted" not in steps or not (folder / "counts").is_file():
        return None, quote(steps.get("failed", {}).get("error") or answer.trouble or "the tokenizer did not load", 160)
    numbers = array("i")
    numbers.frombytes((folder / "counts").read_bytes())
    if not any(size > 0 for size in numbers[0::3]):
        return None, "the tokenizer's chat template could render none of them"
    return numbers[0::3], ""


def schedule(shape: ModelShape, plan: Plan, found: Lengths, epochs: float | None, card: Card | None) -> dict[str, Any]:
    """Updates, tokens and hours of the run, as plain JSON data; `hours` is [low, high], None: could not tell.

    `epochs` None: three for fewer than 5,000 conversations, else one, as the recipe has it.

    Without packing a step is padded to its longest conversation; hours count the tokens of the conversations, so many
    samples of very different length in one micro batch take longer.
    """
    if epochs is None:
        epochs = 3.0 if found.samples < 5000 else 1.0
    limit = plan.sequence_tokens
    tokens = found.tokens(limit)
    if plan.packing:
        sequences = max(1, -(-tokens // limit))
        average = float(limit)
    else:
        sequences = found.samples
        average = tokens / max(1, sequences)
    batch = plan.micro_batch * plan.gradient_accumulation * plan.gpus
    updates = max(1, round(-(-sequences // batch) * epochs))
    full = seconds(work(shape, plan), plan, card)
    hours = None
    if full is not None:
        hours = [round(each * updates * average / limit / 3600.0, 3) for each in full]
    return {
        "samples": found.samples,
        "tokens_per_epoch": tokens,
        "longest_tokens": found.longest,
        "cut_samples": found.cut(limit),
        "counted_by": found.counted_by,
        "counting_trouble": found.trouble,
        "epochs": epochs,
        "global_batch": batch,
        "updates": updates,
        "seconds_per_update": None if full is None else [round(each * average / limit, 3) for each in full],
        "hours": hours,
        "card": card.name if card else None,
    }


def _duration(hours: float) -> str:
    if hours < 1 / 60:
        return f"{max(1, round(hours * 3600))} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def check_schedule(made: dict[str, Any] | None, trouble: str = "") -> Finding:
    """The finding about the run on these data."""
    source = "preflight/memory/schedule.py; facts/cards.json"
    if made is None:
        return Finding(
            "training-time-unknown",
            Level.WARN,
            f"Could not tell how long training takes: the data file has {trouble}.",
            "Updates and hours are counted from conversations.",
            ("look at it with `python data_preprocessor.py`",),
            source,
        )
    how = "counted by the tokenizer" if made["counted_by"] == "tokenizer" else "at about four bytes a token"
    what = (
        f"On these data: {made['samples']:,} conversations, {made['tokens_per_epoch']:,} tokens an epoch ({how}), "
        f"{made['updates']:,} updates in {made['epochs']:g} epochs (global batch: {made['global_batch']})."
    )
    if made["cut_samples"]:
        what += f" {made['cut_samples']:,} conversations are longer than a sequence and would be cut."
    if made["hours"] is None:
        why = "How many hours that is could not be told: it needs the published figures of the card (`--gpu NAME`)."
    else:
        low, high = made["hours"]
        why = (
            f"About {_duration(low)} to {_duration(high)} on a {made['card']}: an estimate from the arithmetic and "
            "the traffic of a step at 20 to 60 % of the card's published speed."
        )
    return Finding("training-time", Level.OK, what, why, source=source)
