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
from collections.abc import Iterator, Sequence
from typing import Any

from preflight import console
from preflight.facts import table
from preflight.findings import Finding, Level, Section, exit_code, quote, run_checks
from preflight.json_outputs import Recovered, recover
from preflight.lenient_json import json_type
from preflight.saved_outputs import PlacedOutput, read_outputs
from preflight.schema_lint import PROVIDERS, Breach, lint
from preflight.schemas import Fit, SchemaFile, Validator, read_schema

STAGE = "validate_output_schema"
SHOWN = 1000  # results kept in `observed`; all are counted

# What was peeled off or forgiven -> how people call it.
RECOVERIES = {
    "code-fence": "a Markdown fence around the JSON",
    "reasoning-block": "reasoning before the JSON",
    "answer-tag": "tags around the JSON",
    "tool-call-tag": "tool-call tags around the JSON",
    "prose-around": "prose around the JSON",
    "end-marker": "a chat template's own marks in the text",
    "python-literals": "Python literals instead of JSON",
    "single-quotes": "single quotes instead of double quotes",
    "smart-quotes": "typographic quotes",
    "unquoted-keys": "keys without quotes",
    "trailing-comma": "a trailing comma",
    "missing-comma": "a missing comma at a line end",
    "comments": "comments",
    "raw-control-characters": "raw line ends or tabs inside strings",
    "number-spelling": "numbers that JSON does not spell so",
    "triple-quotes": "triple quotes",
    "odd-escape": "escapes that JSON does not have",
    "json-in-string": "the JSON put into a string once more",
    "escaped-quotes": "escaped quotes without a string around them",
    "repeated": "the same JSON several times",
    "bom": "a byte order mark",
    "odd-whitespace": "white space that JSON does not allow",
}
_SPEC = "RFC 8259, The JSON Data Interchange Format; JSON Schema 2020-12"


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
    made.add_argument("--verbose", action="store_true", help="also print sources, and every output that is not valid")
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Look


def judge_output(placed: PlacedOutput, validator: Validator) -> dict[str, Any]:
    """One output as plain data: level valid, recoverable, invalid or unknown; what was recovered and every error."""
    result: dict[str, Any] = {"place": placed.place, "level": "invalid", "strict_valid": False}
    if placed.text is None:
        return {**result, "code": "no-output", "message": placed.trouble, "json_parses": False, "errors": []}
    found = recover(placed.text, validator.types)
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
    fit, found = _fit(found, validator)
    result["extracted"], result["recovered_by"] = found.value, list(found.how)
    result["schema_valid_after_extraction"] = fit.valid
    result["errors"] = [error.as_json() for error in fit.errors]
    if fit.valid is None:
        return {**result, "level": "unknown", "code": "not-compared", "message": fit.unknown}
    if not fit.valid:
        return {**result, "code": "schema-mismatch", "message": ""}
    result["strict_valid"] = found.strict
    return {**result, "level": "valid" if found.strict else "recoverable", "code": "" if found.strict else "recovered"}


def _fit(found: Recovered, validator: Validator) -> tuple[Fit, Recovered]:
    fit = validator.check(found.value)
    value = found.value
    # A tool call wraps the arguments that the schema describes.
    if fit.valid is False and isinstance(value, dict) and "tool-call-tag" in found.how and "name" in value:
        inner = value.get("arguments", value.get("parameters"))
        opened = recover(inner).value if isinstance(inner, str) else inner
        inner_fit = validator.check(opened)
        if inner_fit.valid:
            how = (*found.how, "tool-call-arguments")
            return inner_fit, Recovered(opened, how, False, values=(opened,))
    return fit, found


def look(args: argparse.Namespace) -> tuple[SchemaFile, dict[str, Any]]:
    """The schema and everything seen, as plain data."""
    try:
        import jsonschema  # noqa: F401 - used by the validator
    except ImportError:
        raise console.UsageError("jsonschema is not installed in this Python: `pip install jsonschema`") from None
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
    for path in args.outputs:
        how, outputs = read_outputs(path, args.read_as, args.field, own_keys)
        read_as.append(how)
        for placed in outputs:
            result = judge_output(placed, validator)
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
# Judge


def check_schema(file: SchemaFile, seen: dict[str, Any]) -> Iterator[Finding]:
    """Is the schema itself valid, and can all of it be compared here?"""
    schema = seen["schema"]
    broken = [Breach(**item) for item in seen["schema_rules_broken"] if item["rule"] != "any-valid"]
    if schema["problem"]:
        yield Finding(
            "schema-invalid",
            Level.FAIL,
            f"{file.path.name} is not a valid JSON Schema (draft {schema['draft']}): {quote(schema['problem'])}",
            "Validators and providers refuse it, or read it otherwise than it was meant.",
            (f"correct {quote(schema['problem'].split(':')[0])} in the schema",),
            _SPEC,
        )
    else:
        notes = "; ".join(schema["notes"])
        yield Finding(
            "schema-valid", Level.OK, f"The schema is valid JSON Schema (draft {schema['draft']}).", quote(notes)
        )
    yield from _breach_findings(broken, "any provider", file)
    if schema["open_refs"]:
        listed = ", ".join(f"`{quote(reference, 80)}`" for reference in schema["open_refs"][:3])
        yield Finding(
            "ref-not-followed",
            Level.FAIL,
            f"{len(schema['open_refs'])} $ref lead outside the schema and are not followed: {listed}",
            "Nothing is fetched from the network; providers do not follow such references either.",
            ("put the referenced schema under `$defs` and refer to it as `#/$defs/NAME`",),
            "JSON Schema 2020-12 core, section 8.2.3",
        )
    if schema["slow_patterns"]:
        listed = ", ".join(f"`{quote(pattern, 60)}`" for pattern in schema["slow_patterns"][:3])
        stopped = any("ran longer" in str(result.get("message")) for result in seen["results"])
        yield Finding(
            "slow-pattern",
            Level.WARN if stopped else Level.OK,
            f"{len(schema['slow_patterns'])} patterns repeat a repetition: {listed}",
            "Such a pattern can take time that grows without bound with the length of the text; each comparison was "
            + ("stopped at its time limit." if stopped else "run under a time limit, and none reached it."),
            ("write the pattern so that no repetition stands inside or beside another on the same letters",)
            if stopped
            else (),
            "https://owasp.org/www-community/attacks/Regular_expression_Denial_of_Service_-_ReDoS",
        )
    if schema["unknown_patterns"]:
        yield Finding(
            "pattern-not-known",
            Level.UNKNOWN,
            f"Could not compare the pattern `{quote(schema['unknown_patterns'][0], 60)}`: Python does not know it.",
            "JSON Schema patterns are ECMA 262; Python lacks some of it, such as \\p{L}. Values that fail elsewhere "
            "are still found.",
            ("spell the classes out, or compare with a validator that uses an ECMA engine",),
            "JSON Schema 2020-12 core, section 6.4",
        )


def check_provider(file: SchemaFile, seen: dict[str, Any]) -> Iterator[Finding]:
    """Would the provider accept the schema?"""
    provider, as_of = seen["provider"], seen["rules_as_of"]
    if provider is None:
        counts = {name: count for name, count in seen["errors_by_provider"].items() if count}
        if counts:
            listed = ", ".join(f"{name} ({count})" for name, count in counts.items())
            what = f"No provider was named. As it is, the schema would be refused by: {listed} (rules as of {as_of})."
            yield Finding(
                "provider-not-named", Level.OK, what, "Name one with `--provider` to see the rules and places."
            )
        return
    broken = [Breach(**item) for item in seen["provider_rules_broken"]]
    if not broken:
        what = f"{provider}: none of the known rules is broken (rules as of {as_of})."
        yield Finding(
            "provider-rules-kept", Level.OK, what, "The rules move: what a provider accepts today may differ."
        )
        return
    yield from _breach_findings(broken, provider, file, bool(seen.get("accepted_in_json_schema_field")))


def _breach_findings(
    broken: list[Breach], provider: str, file: SchemaFile, other_way: bool = False
) -> Iterator[Finding]:
    """One finding a rule, with every place it is broken at."""
    rules: dict[str, list[Breach]] = {}
    for breach in broken:
        rules.setdefault(breach.rule, []).append(breach)
    for rule, breaches in rules.items():
        first = breaches[0]
        level = {"error": Level.FAIL, "warning": Level.WARN}.get(first.severity, Level.OK)
        fixes: tuple[str, ...] = (first.fix,)
        note = ""
        if other_way and level is Level.FAIL:
            level = Level.WARN
            fixes = ("send the schema in `responseJsonSchema` (tools: `parametersJsonSchema`)", first.fix)
            note = " The JSON-schema fields, accepted since November 2025, take it."
        if rule == "oai-addprops-false":
            fixes = ('add `"additionalProperties": false` to each object named above',)
        elif rule == "oai-all-required":
            fixes = ('list every key in `required`; make optional ones nullable: `"type": ["string", "null"]`',)
        places = "; ".join(f"{quote(b.place, 80)}: {quote(b.message, 120)}" for b in breaches[:6])
        more = f"; and {len(breaches) - 6} more" if len(breaches) > 6 else ""
        verb = {"error": "refuses the schema", "warning": "may not honour the schema"}.get(
            first.severity, "reads it so"
        )
        who = "Schema" if first.provider == "*" else f"{first.provider} {verb}"
        yield Finding(
            rule,
            level,
            f"{who}: {places}{more}",
            f"{first.message}. Rule as of {first.as_of}, confidence {first.confidence}; it says nothing about the "
            f"model's outputs.{note}",
            fixes if level is not Level.OK else (),
            first.source,
        )


_PROBLEMS: dict[str, tuple[str, str, str]] = {
    "multiple-json-values": (
        "hold several different JSON values",
        "Each of them parses, and which one is the answer cannot be told: taking the first or the last is a guess.",
        "ask for exactly one JSON value; stop generation after the first (a grammar or structured outputs do)",
    ),
    "truncated": (
        "are cut before the JSON ends",
        "Closing the brackets would make up an answer: what came next is not known.",
        "raise max_new_tokens (max_tokens) or ask for less; check finish_reason and the end-of-sequence token",
    ),
    "broken-json": (
        "hold JSON that cannot be read in one way only",
        "An unescaped quote or a left-out part cannot be repaired without guessing.",
        "generate under a grammar or structured outputs, or train on strict JSON answers (`data_preprocessor.py`)",
    ),
    "no-json": (
        "hold no JSON at all",
        "There is nothing to compare with the schema.",
        "put the strict output instruction into the prompt (`python data_preprocessor.py … --schema`)",
    ),
    "empty": ("are empty", "The model answered nothing.", "look at the prompt as rendered and at the stop strings"),
    "duplicate-keys": (
        "name a key twice with different values",
        "Parsers differ in which one they take (RFC 8259 section 4).",
        "generate under a grammar or structured outputs",
    ),
    "non-finite-number": (
        "hold NaN or Infinity",
        "JSON has no such numbers; strict parsers and most services refuse the whole document.",
        "allow null in the schema and ask for null where there is no number",
    ),
    "nested-too-deep": (
        "are nested too deep",
        "A model that repeats an opening bracket never ends.",
        "limit max_new_tokens, or generate under a grammar",
    ),
    "no-output": ("could not be read from the file", "", "name the field with `--field`, or `--read-as whole`"),
}


def check_outputs(file: SchemaFile, seen: dict[str, Any]) -> Iterator[Finding]:
    """Do the outputs fit?"""
    total = seen["outputs"]
    if not total:
        what = "No outputs were given; only the schema was judged."
        yield Finding("no-outputs", Level.OK, what, "Give them with `--outputs FILE`.")
        return
    if not seen["json_schema_valid"]:
        yield Finding(
            "outputs-not-compared",
            Level.UNKNOWN,
            f"{total} outputs were not compared: the schema itself is not valid.",
            "An invalid schema says nothing about values.",
            ("correct the schema first",),
            _SPEC,
        )
        return
    if seen["valid"]:
        yield _valid_finding(seen)
    if seen["recoverable"]:
        listed = ", ".join(f"{RECOVERIES.get(how, how)} ({count})" for how, count in seen["recovered_by"].items())
        yield Finding(
            "recoverable",
            Level.WARN,
            f"{seen['recoverable']} of {total} outputs are not strict JSON, but hold one value that fits: "
            f"{quote(listed)}",
            "A program that calls json.loads on the output fails; counted as not strictly valid.",
            (
                "train on answers that are JSON and nothing else (`python data_preprocessor.py … --schema`)",
                "or put the strict output instruction into the prompt, or generate under a grammar",
            ),
            _SPEC,
        )
    if seen["codes"].get("schema-mismatch"):
        yield _mismatch_finding(seen)
    for code, (words, why, fix) in _PROBLEMS.items():
        count = seen["codes"].get(code, 0)
        if count:
            example = next((r for r in seen["results"] if r["code"] == code), None)
            detail = f"{example['place']}: {example['message']}" if example and example.get("message") else ""
            yield Finding(
                code,
                Level.FAIL,
                f"{count} of {total} outputs {words}" + (f" ({quote(detail, 200)})" if detail else "."),
                why or (example["message"] if example else ""),
                (fix,),
                _SPEC,
            )
    if seen["not_compared"]:
        message = next((r["message"] for r in seen["results"] if r["level"] == "unknown"), "")
        yield Finding(
            "not-compared",
            Level.UNKNOWN,
            f"Could not tell for {seen['not_compared']} of {total} outputs: {quote(message)}",
            "Everything else about them was compared.",
            ("see the findings about the schema",),
            _SPEC,
        )


def _valid_finding(seen: dict[str, Any]) -> Finding:
    total, valid = seen["outputs"], seen["valid"]
    what = f"{valid} of {total} outputs are strictly valid: the whole text is one JSON value that fits the schema."
    return Finding("strictly-valid", Level.OK, what)


def _mismatch_finding(seen: dict[str, Any]) -> Finding:
    count, total = seen["codes"]["schema-mismatch"], seen["outputs"]
    listed = []
    for error in seen["errors_counted"][:5]:
        times = f" ({error['outputs']}x)" if error["outputs"] > 1 else ""
        expected, got = quote(error["expected"], 80), quote(error["got"], 60)
        listed.append(f"{quote(error['path'], 60)}: {error['rule']}, expected {expected}, got {got}{times}")
    places = "; ".join(listed)
    quoted = any("written as a string" in e["message"] for r in seen["results"] for e in r["errors"])
    fixes = ["say each field's type in the instruction, or generate under a grammar or structured outputs"]
    if quoted:
        fixes.insert(0, "numbers and true/false must stand without quotes: show one example answer in the prompt")
    return Finding(
        "schema-mismatch",
        Level.FAIL,
        f"{count} of {total} outputs are JSON but do not fit the schema: {places}",
        'Values are compared as they are: "42" is a string and not turned into a number; 42.0 is an integer.',
        tuple(fixes),
        _SPEC,
    )


CHECKS = (check_schema, check_provider, check_outputs)


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
        console.print_section(section, args.color, args.verbose)
        if args.verbose:
            print_results(observed["results"])
    return exit_code([section])


def print_results(results: list[dict[str, Any]]) -> None:
    """Every output that is not valid, one line each."""
    for result in results:
        if result["level"] != "valid":
            errors = "; ".join(f"{e['pointer'] or '/'} {e['expected']}, got {e['got']}" for e in result["errors"])
            why = quote(errors or result.get("message") or ", ".join(result.get("recovered_by", ())))
            print(f"  {result['place']}: {result['level']} {result['code']} {why}")


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
