"""Examples in the prompt, the cheap alternative to training: which samples are shown, and what is asked then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from preflight.task.samples import Sample, answer_to_show


def split_shots(samples: Sequence[Sample], shots: int) -> tuple[dict[str, list[Sample]], list[Sample]]:
    """(the examples to show by task, the samples that are left to ask).

    The first `shots` samples of a task whose right answer is known as text are shown; they are asked in neither arm,
    because a model that was shown the answer has not been examined.
    """
    shown: dict[str, list[Sample]] = {}
    left = []
    for sample in samples:
        examples = shown.setdefault(sample.task, [])
        if len(examples) < shots and answer_to_show(sample) is not None:
            examples.append(sample)
        else:
            left.append(sample)
    return shown, left


def with_examples(sample: Sample, examples: Sequence[Sample]) -> list[Mapping[str, Any]]:
    """The turns of the sample with the examples before its own question, behind its system turn."""
    turns = list(sample.messages)
    systems = [turn for turn in turns if turn["role"] in ("system", "developer")]
    rest = [turn for turn in turns if turn["role"] not in ("system", "developer")]
    shown: list[Mapping[str, Any]] = []
    for example in examples:
        shown.extend(turn for turn in example.messages if turn["role"] not in ("system", "developer"))
        shown.append({"role": "assistant", "content": answer_to_show(example) or ""})
    return [*systems, *shown, *rest]
