#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["filelock>=3.12", "jsonschema>=4.18", "numpy>=1.26", "tqdm>=4.65"]
# ///
"""Is this chat data fit for training, and what does it look like cleaned?

Reads messages, ShareGPT, Alpaca, prompt and completion, preference pairs and plain text from JSON Lines, JSON, CSV,
Parquet and Arrow, in any encoding. Without `--out` it only looks. With it, it writes messages as JSON Lines that TRL
loads as they are; what cannot be used is set aside with its line and reason. The input is never touched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preflight import console
from preflight.console import UsageError
from preflight.data.data_checks import CHECKS
from preflight.data.prepare import Recipe
from preflight.data.records import Unreadable, read_records
from preflight.findings import Finding, Level, Section, exit_code, quote, run_checks
from preflight.redact import redacted
from preflight.words import Words, words_of

STAGE = "data_preprocessor"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=(__doc__ or "").strip(),
        epilog="examples:\n  python data_preprocessor.py train.json\n"
        "  python data_preprocessor.py train.jsonl --out clean.jsonl --schema schema.json --tokenizer MODEL_FOLDER\n\n"
        f"{console.EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("input", nargs="?", metavar="FILE", help="the data")
    made.add_argument("--input", "--data", dest="input_flag", metavar="FILE", help=argparse.SUPPRESS)
    made.add_argument(
        "--out",
        "--output",
        metavar="PATH",
        help="where to write: a name ending in .jsonl, or a folder (needed to split)",
    )
    made.add_argument("--encoding", help="the file's encoding, when the detection is wrong (such as gb18030)")
    made.add_argument(
        "--role-map",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="what an unknown role means, e.g. bing=assistant",
    )
    made.add_argument(
        "--format", choices=("messages", "prompt-completion"), default="messages", help="default: messages"
    )
    made.add_argument("--keep-columns", default="", metavar="A,B", help="other columns to write too (default: none)")
    made.add_argument(
        "--tool-arguments",
        choices=("keep", "object", "text"),
        default="keep",
        help="write tool-call arguments as they are, as objects (what most templates want) or as JSON text",
    )
    made.add_argument("--no-personal-data", action="store_true", help="do not look for what looks like personal data")
    answers = made.add_argument_group("strict JSON answers")
    answers.add_argument(
        "--schema", metavar="FILE", help="JSON Schema of the answers: adds the instruction, checks answers"
    )
    answers.add_argument(
        "--schema-in", choices=("inline", "name"), default="inline", help="write the schema out, or its name"
    )
    answers.add_argument("--instruction-turn", choices=("system", "user"), default="system", help="default: system")
    answers.add_argument(
        "--targets", choices=("all", "last", "none"), default="all", help="answers that must fit (all)"
    )
    answers.add_argument("--no-recover", action="store_true", help="set answers aside that only need peeling, too")
    repeats = made.add_argument_group("duplicates and split")
    repeats.add_argument("--duplicates", choices=("drop", "report"), default="drop", help="exact ones (drop)")
    repeats.add_argument("--near-duplicates", choices=("drop", "report", "off"), help="near ones (drop)")
    repeats.add_argument("--similarity", type=float, default=0.85, metavar="SHARE", help="of near duplicates (0.85)")
    repeats.add_argument(
        "--test-share", type=float, default=0.0, metavar="SHARE", help="split off a test side (0: none)"
    )
    repeats.add_argument(
        "--group-by", metavar="COLUMN", help="never split equal values of this column (default: prompts)"
    )
    repeats.add_argument("--seed", type=int, default=0, help="of the split (0)")
    tokens = made.add_argument_group("tokens")
    tokens.add_argument("--tokenizer", "--model", metavar="DIR", help="count real tokens with this model's tokenizer")
    tokens.add_argument("--max-tokens", type=int, metavar="N", help="the training length")
    tokens.add_argument(
        "--over-long",
        choices=("drop", "truncate", "keep"),
        default="drop",
        help="truncate leaves out old exchanges (drop)",
    )
    tokens.add_argument("--python", metavar="PATH", help="the Python that has transformers (default: looked for)")
    tokens.add_argument("--timeout-s", type=float, default=3600, metavar="S", help="for counting (3600)")
    made.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default: as many as cores, at most 8)"
    )
    made.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    made.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    console.add_language(made)
    made.add_argument("--verbose", action="store_true", help="also print sources and notes, and the label mask")
    return made


def read_recipe(args: argparse.Namespace) -> Recipe:
    """What is done to each record. Raises UsageError."""
    from preflight.data.strict_instruction import strict_instruction
    from preflight.outputs.schemas import Validator, read_schema

    role_map = {}
    for entry in args.role_map:
        name, _, role = entry.partition("=")
        if not name or role not in ("user", "assistant", "system", "tool"):
            raise UsageError(f"--role-map {entry}: allowed is NAME=user, NAME=assistant, NAME=system or NAME=tool")
        role_map[name] = role
    schema, instruction = None, None
    if args.schema:
        part = read_schema(args.schema).main
        schema = part.schema
        problem = Validator(schema).problem
        if problem:
            raise UsageError(f"--schema {args.schema}: not a valid JSON Schema ({problem})")
        named = None
        if args.schema_in == "name":
            named = part.name or (schema.get("title") if isinstance(schema, dict) else None) or Path(args.schema).stem
        instruction = strict_instruction(schema, args.instruction_turn, named)
    return Recipe(
        role_map=role_map,
        instruction=instruction,
        schema=schema,
        check_targets=args.targets,
        recover_targets=not args.no_recover,
        tool_arguments=args.tool_arguments,
        output_format=args.format,
        keep_columns=tuple(name.strip() for name in args.keep_columns.split(",") if name.strip()),
        group_by=args.group_by,
        near_texts=args.near_duplicates != "off",
        look_for_personal_data=not args.no_personal_data,
    )


def check_arguments(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The input and the target. Raises UsageError when the flags cannot be meant so."""
    from preflight.data.publish import check_target

    if bool(args.input) == bool(args.input_flag):
        raise UsageError("FILE: name one data file, for example `python data_preprocessor.py train.jsonl`")
    source = Path(args.input or args.input_flag)
    target = Path(args.out) if args.out else None
    if not 0 <= args.test_share < 1:
        raise UsageError(f"--test-share {args.test_share}: allowed is 0 to less than 1")
    if not 0.5 <= args.similarity <= 1:
        raise UsageError(f"--similarity {args.similarity}: allowed is 0.5 to 1")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: allowed is 1 or more")
    if args.max_tokens and not args.tokenizer:
        raise UsageError("--max-tokens: needs --tokenizer DIR, because lengths are counted in real tokens")
    if args.tokenizer and not Path(args.tokenizer).is_dir():
        raise UsageError(f"--tokenizer {args.tokenizer}: no such folder; name a model directory")
    if args.test_share and target is not None and target.suffix == ".jsonl":
        raise UsageError(f"--out {target}: with --test-share name a folder; it gets train.jsonl and test.jsonl")
    if target is not None:
        check_target(target, [source])
    return source, target


# ---------------------------------------------------------------------------------------------------------------------
# Say


def unreadable(error: Unreadable, source: Path) -> Section:
    """The section for a file that holds no records."""
    finding = Finding(
        error.code,
        Level.FAIL,
        quote(error.what, 200),
        error.why,
        error.fix or ("name another file",),
        "preflight/data/records.py, kinds of files",
    )
    return Section(STAGE, {"file": source.name, "rows": 0}, (finding,))


def main(argv: Sequence[str] | None = None) -> int:
    """Look at the data, write it cleaned when asked; returns the exit code."""
    args = parser().parse_args(argv)
    source, target = check_arguments(args)
    recipe = read_recipe(args)
    try:
        from preflight.data.preprocess import look

        records = read_records(source, args.encoding)
        observed = look(args, records, recipe, target)
        section = Section(STAGE, observed, run_checks(CHECKS, observed))
    except Unreadable as error:
        section = unreadable(error, source)
    except OSError as error:  # a full disk, a folder without rights, a source that vanished
        place = error.filename or target or source
        raise UsageError(f"{place}: {error.strerror or error}; nothing was written") from error
    shown = Section(section.stage, redacted(section.observed), _clean(section.findings))
    if args.json:
        print(json.dumps(shown.as_json(), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        console.print_section(shown, args.color, args.verbose, args.lang)
        if args.verbose:
            print_mask(shown.observed, words_of(args.lang))
    return exit_code([section])


def _clean(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(
        Finding(f.code, f.level, redacted(f.what), redacted(f.why), tuple(redacted(list(f.fix))), f.source)
        for f in findings
    )


def print_mask(observed: dict[str, Any], words: Words) -> None:
    """The label mask of one sample: what is trained on stands between marks."""
    mask = (observed.get("tokens") or {}).get("label_mask")
    if mask:
        print("\n" + words.template("label mask of one sample (trained text between >> and <<):"))
        print("".join(f">>{run['text']}<<" if run["trained"] else run["text"] for run in mask))


def command() -> None:
    """Entry point of the installed command."""
    sys.exit(console.run_main(main))


if __name__ == "__main__":
    command()
