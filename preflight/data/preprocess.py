"""The preprocessor's work on one file: prepare, compare, count, split, write; what was seen, as plain data."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from preflight.data import duplicates as repeats
from preflight.data.prepare import Recipe
from preflight.data.publish import workshop
from preflight.data.records import Records
from preflight.data.split import test_side
from preflight.data.spool import FAMILIES, Piece, Tally, prepare_file
from preflight.data.token_counts import count_tokens, token_statistics
from preflight.data.write_records import NOT_RENDERED, OTHER_SHAPE, TOO_LONG, Output, write
from preflight.findings import say


def look(args: argparse.Namespace, records: Records, recipe: Recipe, target: Path | None) -> dict[str, Any]:
    """Prepare, compare and (with a target) write; what was seen, as plain data."""
    with workshop(target) as folder:
        workers = args.workers or min(8, os.cpu_count() or 1)
        with Progress(records.size_bytes, "reading") as progress:
            pieces, tally = prepare_file(records, folder, "piece", recipe, workers, progress.to)
        found = repeats.read_lines(pieces)
        main_family = max(tally.families, key=lambda name: tally.families[name], default=None)
        repeats.find_exact(pieces, found)
        if recipe.near_texts:
            repeats.find_same_words(pieces, found)
            if records.size_bytes > (32 << 20):
                say("looking for near duplicates")
            repeats.find_near(pieces, found, folder, args.similarity)
        repeats.find_conflicts(pieces, found)
        state = _decided(found, args)
        others = _mark_other_shapes(pieces, state, main_family, OTHER_SHAPE)
        counts, token_facts = _tokens(args, pieces, state, folder)
        side = _split(args, pieces, state, found)
        observed = _observed(records, recipe, tally, found, args)
        observed |= {"main_family": main_family, "other_shape_rows": others, "tokens": token_facts}
        output = Output(args, records, pieces, state, side, counts, folder, target, main_family)
        observed["written"] = write(output, observed) if target is not None else None
        observed["kept_rows"] = output.kept
        observed["test_rows"] = output.test if args.test_share else None
    return observed


def _decided(found: repeats.Duplicates, args: argparse.Namespace) -> bytearray:
    """Which records are left out: duplicates that are only reported stay."""
    state = bytearray(found.state)
    near = (args.near_duplicates or "drop") == "drop"
    kept = {
        kind
        for kind, drop in ((repeats.EXACT, args.duplicates == "drop"), (repeats.SAME_WORDS, near), (repeats.NEAR, near))
        if not drop
    }
    if kept:
        state = bytearray(0 if value in kept else value for value in state)
    return state


def _mark_other_shapes(pieces: list[Piece], state: bytearray, family: str | None, mark: int) -> int:
    """Records of another family than most: one file holds one kind of training record."""
    count = index = 0
    for piece in pieces:
        for key in piece.each_key():
            if FAMILIES[key[6]] != family and not state[index]:
                state[index] = mark
                count += 1
            index += 1
    return count


def _tokens(
    args: argparse.Namespace, pieces: list[Piece], state: bytearray, folder: Path
) -> tuple[Any, dict[str, Any] | None]:
    if not args.tokenizer:
        return None, None
    from preflight.machine import Machine

    say(f"counting tokens (up to {args.timeout_s:g} s)")
    with Progress(len(state), "tokens") as progress:
        limit = args.max_tokens if args.over_long != "keep" else None
        model = str(Path(args.tokenizer).resolve())
        counts = count_tokens(Machine(), pieces, state, folder, model, args.python, limit, args.timeout_s, progress.to)
    facts: dict[str, Any] = {**counts.facts, "trouble": counts.trouble or None, "max_tokens": args.max_tokens}
    facts.pop("turn_tokens", None)
    if counts.trouble:
        return None, facts
    over = truncated = failed = 0
    for index, tokens in enumerate(counts.tokens):
        if state[index]:
            continue
        if tokens < 0:
            state[index] = NOT_RENDERED
            failed += 1
        elif args.max_tokens and args.over_long != "keep" and counts.first[index]:
            over += 1
            if args.over_long == "truncate" and counts.first[index] > 0:
                truncated += 1
            else:
                state[index] = TOO_LONG
        elif args.max_tokens and tokens > args.max_tokens:
            over += 1
    facts |= {"over_long_rows": over, "truncated_rows": truncated, "not_rendered_rows": failed}
    facts |= token_statistics(counts, state, args.max_tokens)
    return counts, facts


def _split(
    args: argparse.Namespace, pieces: list[Piece], state: bytearray, found: repeats.Duplicates
) -> bytearray | None:
    if not args.test_share:
        return None
    return test_side(pieces, state, args.test_share, args.seed, found.partner)


def _observed(
    records: Records, recipe: Recipe, tally: Tally, found: repeats.Duplicates, args: argparse.Namespace
) -> dict[str, Any]:
    shape = max(tally.shapes, key=lambda name: tally.shapes[name], default=None)
    problems: dict[str, str] = {}
    for places in tally.problem_places.values():
        for entry in places:
            row = str(entry["row"])
            problems[row] = f"{problems[row]}; {entry['what']}" if row in problems else entry["what"]
    ordered = dict(sorted(problems.items(), key=lambda item: int(item[0]))[:200])
    roles = dict(sorted(tally.roles.items()))
    return {
        "file": records.path.name,
        "size_bytes": records.size_bytes,
        "container": records.container,
        "encoding": tally.encoding,
        "format": shape,
        "shapes": dict(tally.shapes.most_common()),
        "rows": tally.rows,
        "usable_rows": tally.kept,
        "messages_rows": tally.families.get("chat", 0),
        "bad_lines": [entry["line"] or entry["row"] for entry in tally.bad_places],
        "bad_count": sum(tally.bad.values()),
        "bad_reasons": dict(tally.bad.most_common()),
        "bad_records": tally.bad_places[:50],
        "notes": dict(sorted(tally.notes.items())),
        "role_map": roles,
        "problem_rows": tally.problem_rows,
        "problem_counts": dict(tally.problems.most_common()),
        "problems": ordered,
        "problem_places": {code: places[:20] for code, places in sorted(tally.problem_places.items())},
        "usable_without_change": [row for row, _ in tally.first_turns if str(row) not in problems],
        "first_rows": [{"row": row, "turns": list(turns)} for row, turns in tally.first_turns],
        "changes": dict(tally.changes.most_common()),
        "change_lines": dict(sorted(tally.change_lines.items())),
        "personal_data": dict(tally.personal.most_common()),
        "personal_data_lines": dict(sorted(tally.personal_lines.items())),
        "columns_left_out": dict(tally.left_out.most_common(50)),
        "turns": {str(count): rows for count, rows in sorted(tally.turns.items())[:50]},
        "tool_rows": tally.tool_rows,
        "tool_arguments": dict(tally.arguments),
        "weighted_rows": tally.weighted_rows,
        "duplicates": {
            **found.counts,
            "pairs": [
                {"line": line, "same_as_line": earlier, "kind": kind} for line, earlier, kind in sorted(found.pairs)
            ],
            "exact_action": args.duplicates,
            "near_action": args.near_duplicates or "drop",
            "near_asked_for": args.near_duplicates is not None,
            "near_not_looked": found.near_looked or None,
        },
        "same_prompt_other_answer": found.conflicts,
        "same_prompt_lines": [list(pair) for pair in found.conflict_lines[:20]],
        "schema_given": recipe.schema is not None,
        "output_format": recipe.output_format,
    }


class Progress:
    """A bar on stderr, only when that is a terminal and the work is long."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what = total, what
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and self.total > (16 << 20 if self.what == "reading" else 5000):
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self._bar = tqdm(total=self.total, desc=self.what, unit="B", unit_scale=True, leave=False)
        return self

    def to(self, position: int) -> None:
        """Show that much as done."""
        if self._bar is not None:
            self._bar.update(max(0, position - self._bar.n))

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
