#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["jsonschema>=4.18"]
# ///
"""Do model outputs fit a JSON Schema, and would a provider accept that schema?

Each output is judged as it stands (strict) and after what can safely be peeled off it: fences, reasoning, prose,
Python spellings, trailing commas. What is ambiguous or cut stays invalid. The schema is compared with the provider's
published rules. Nothing is fetched from the network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from preflight import console
from preflight.facts import table
from preflight.findings import Section, exit_code, quote, run_checks
from preflight.outputs.json_outputs import Recovered, recover
from preflight.outputs.lenient_json import json_type
from preflight.outputs.output_checks import CHECKS
from preflight.outputs.saved_outputs import PlacedOutput, read_outputs
from preflight.outputs.schema_lint import PROVIDERS, lint
from preflight.outputs.schemas import Fit, SchemaError, SchemaFile, Validator, read_schema
from preflight.words import Words, words_of

STAGE = "validate_output_schema"
SHOWN = 1000  # results kept in `observed`; all are counted


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=(__doc__ or "").strip(),
        epilog="example:\n  python validate_output_schema.py --schema schema.json --outputs outputs.jsonl "
        f"--provider openai\n\n{console.EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--schema", required=True, metavar="FILE", help="JSON Schema, response_format, tools or request")
    made.add_argument(
        "--outputs", nargs="+", metavar="FILE", default=[], help="outputs: text, JSON Lines, CSV, Parquet, a folder, -"
    )
    made.add_argument("--provider", choices=sorted(PROVIDERS), help="compare the schema with this provider's rules")
    made.add_argument("--not-strict", action="store_true", help="leave out the rules of strict (constrained) modes")
    made.add_argument(
        "--read-as",
        choices=("auto", "whole", "lines", "records"),
        default="auto",
        help="a file is one output, one a line, or one a record (default: told by its kind)",
    )
    made.add_argument("--field", metavar="NAME", help="the field that holds the output in each record")
    made.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    made.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    console.add_language(made)
    made.add_argument("--verbose", action="store_true", help="also print sources, and every output that is not valid")
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Look


def judge_output(
    placed: PlacedOutput, validator: Validator, tools: Mapping[str, Validator] | None = None
) -> dict[str, Any]:
    """One output as plain data: level valid, recoverable, invalid or unknown; what was recovered and every error.

    `tools`: the schemas of the arguments by the tool's name; a tool call is then compared with the tool that it names.
    """
    result: dict[str, Any] = {"place": placed.place, "level": "invalid", "strict_valid": False}
    if placed.text is None:
        return {**result, "code": "no-output", "message": placed.trouble, "json_parses": False, "errors": []}
    found = recover(placed.text, validator.types if not tools else None)
    result |= {
        "json_parses": found.strict or (found.found and not found.how),
        "recovered_by": list(found.how),
        "values_found": found.values_found,
        "extracted": found.value if found.found else None,
    }
    if placed.finish_reason:
        result["finish_reason"] = placed.finish_reason
    if not found.found:
        cut = placed.finish_reason in ("length", "max_tokens", "MAX_TOKENS")
        code = "truncated" if cut and found.problem in ("no-json", "empty") else found.problem
        fit_of_all = [validator.check(value).valid for value in found.values] if len(found.values) > 1 else []
        message = found.detail
        if fit_of_all:
            fitting = sum(1 for valid in fit_of_all if valid)
            message += f"; {fitting} of them fit the schema"
        return {**result, "code": code, "message": message, "schema_valid_after_extraction": None, "errors": []}
    fit, found = _fit(found, validator, tools or {})
    result["extracted"], result["recovered_by"] = found.value, list(found.how)
    result["schema_valid_after_extraction"] = fit.valid
    result["errors"] = [error.as_json() for error in fit.errors]
    if fit.valid is None:
        return {**result, "level": "unknown", "code": "not-compared", "message": fit.unknown}
    if not fit.valid:
        return {**result, "code": "schema-mismatch", "message": ""}
    result["strict_valid"] = found.strict
    return {**result, "level": "valid" if found.strict else "recoverable", "code": "" if found.strict else "recovered"}


def _fit(found: Recovered, validator: Validator, tools: Mapping[str, Validator]) -> tuple[Fit, Recovered]:
    call = found.value[0] if isinstance(found.value, list) and len(found.value) == 1 else found.value
    call = call.get("function", call) if isinstance(call, dict) else None
    arguments = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        arguments = next((call[key] for key in ("arguments", "parameters", "input", "args") if key in call), None)
        if isinstance(arguments, str):
            arguments = recover(arguments).value
    if isinstance(call, dict) and arguments is not None and tools:
        named = tools.get(call["name"])
        if named is None:
            listed = ", ".join(sorted(tools))
            return Fit([SchemaError("/name", "enum", f"one of the tools {listed}", call["name"])]), found
        return named.check(arguments), found
    fit = validator.check(found.value)
    # A tool call in its tags wraps the arguments that the schema describes.
    if fit.valid is False and arguments is not None and "tool-call-tag" in found.how:
        inner_fit = validator.check(arguments)
        if inner_fit.valid:
            how = (*found.how, "tool-call-arguments")
            return inner_fit, Recovered(arguments, how, False, values=(arguments,))
    return fit, found


def look(args: argparse.Namespace) -> tuple[SchemaFile, dict[str, Any]]:
    """The schema and everything seen, as plain data."""
    file = read_schema(args.schema)
    validator = Validator(file.main.schema, file.path.resolve().parent)
    breaches = lint(file.parts, args.provider, file.request, not args.not_strict)
    everywhere = [breach for breach in breaches if breach.provider == "*"]
    of_provider = [breach for breach in breaches if breach.provider != "*"]
    observed: dict[str, Any] = {
        "schema": {
            "json_schema_valid": not validator.problem,
            "problem": validator.problem or None,
            "draft": validator.draft,
            "notes": validator.notes,
            "open_refs": validator.open_refs,
            "slow_patterns": validator.runaway_patterns,
            "unknown_patterns": validator.unknown_patterns,
        },
        "json_schema_valid": not validator.problem,
        "provider": args.provider,
        "rules_as_of": table("schema_lint")["as_of"],
        "provider_errors": [f"{b.place}: {b.message}" for b in of_provider if b.severity == "error"],
        "provider_rules_broken": [breach.as_json() for breach in of_provider],
        "schema_rules_broken": [breach.as_json() for breach in everywhere],
    }
    if args.provider and args.provider.startswith("gemini") and args.provider != "gemini-json-schema":
        other = lint(file.parts, "gemini-json-schema", file.request)
        observed["accepted_in_json_schema_field"] = not any(b.severity == "error" for b in other)
    if args.provider is None:
        observed["errors_by_provider"] = _by_provider(file)
    observed |= _look_at_outputs(args, file, validator)
    observed["outcome"] = _outcome(observed)
    return file, observed


def _outcome(seen: dict[str, Any]) -> str:
    """The worst of: schema-problem, invalid, not-compared, recoverable, valid; the schema apart from the outputs."""
    if seen["invalid"]:
        return "invalid"
    if seen["provider_errors"] or not seen["json_schema_valid"]:
        return "schema-problem"
    return next((name for name in ("not_compared", "recoverable") if seen[name]), "valid").replace("_", "-")


def _by_provider(file: SchemaFile) -> dict[str, int]:
    counts = {}
    for provider in ("openai-strict", "anthropic-strict", "gemini-schema", "gemini-json-schema", "llama.cpp"):
        breaches = lint(file.parts, provider, file.request)
        counts[provider] = sum(1 for b in breaches if b.severity == "error" and b.provider != "*")
    return counts


def _look_at_outputs(args: argparse.Namespace, file: SchemaFile, validator: Validator) -> dict[str, Any]:
    levels: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    recoveries: Counter[str] = Counter()
    errors: Counter[tuple[str, str, str, str]] = Counter()
    results: list[dict[str, Any]] = []
    schema = file.main.schema
    own_keys = set(schema.get("properties") or ()) if isinstance(schema, dict) else set()
    read_as: list[str] = []
    folder = file.path.resolve().parent
    tools = {part.name: Validator(part.schema, folder) for part in file.parts if part.kind == "tool" and part.name}
    for path in args.outputs:
        how, outputs = read_outputs(path, args.read_as, args.field, own_keys)
        read_as.append(how)
        for placed in outputs:
            result = judge_output(placed, validator, tools)
            levels[result["level"]] += 1
            if result["code"]:
                codes[result["code"]] += 1
            if result["level"] == "recoverable":
                recoveries.update(result["recovered_by"])
            for error in result["errors"]:
                errors[(error["path"] or "(root)", error["rule"], error["expected"], error["got"][:40])] += 1
            if len(results) < SHOWN:
                results.append({"file": path, **result} if len(args.outputs) > 1 else result)
    total = sum(levels.values())
    return {
        "outputs_read_as": read_as,
        "outputs": total,
        "valid": levels["valid"],
        "recoverable": levels["recoverable"],
        "invalid": levels["invalid"],
        "not_compared": levels["unknown"],
        "codes": dict(sorted(codes.items())),
        "recovered_by": dict(recoveries.most_common()),
        "errors_counted": [
            {"path": path, "rule": rule, "expected": expected, "got": got, "outputs": count}
            for (path, rule, expected, got), count in errors.most_common(50)
        ],
        "results": results,
        "results_left_out": total - len(results),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Say


def main(argv: Sequence[str] | None = None) -> int:
    """Validate; returns the exit code."""
    args = parser().parse_args(argv)
    file, observed = look(args)
    section = Section(STAGE, observed, run_checks(CHECKS, file, observed))
    if args.json:
        # The outputs themselves are shown as they are; only what is not JSON is replaced.
        print(json.dumps(_finite(section.as_json()), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        console.print_section(section, args.color, args.verbose, args.lang)
        if args.verbose:
            print_results(observed["results"], words_of(args.lang))
    return exit_code([section])


def print_results(results: list[dict[str, Any]], words: Words) -> None:
    """Every output that is not valid, one line each."""
    for result in results:
        if result["level"] != "valid":
            errors = "; ".join(f"{e['pointer'] or '/'} {e['expected']}, got {e['got']}" for e in result["errors"])
            why = quote(errors or result.get("message") or ", ".join(result.get("recovered_by", ())))
            print(f"  {result['place']}: {result['level']} {result['code']} {words.text(why)}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if json_type(value) == "number" and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def command() -> None:
    """Entry point of the installed command."""
    sys.exit(console.run_main(main))


if __name__ == "__main__":
    command()
