"""What follows from comparing outputs with a schema, and the schema with a provider's rules?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from preflight.findings import Finding, Level, quote
from preflight.outputs.schema_lint import Breach
from preflight.outputs.schemas import SchemaFile

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
    "html-entities": "HTML's spelling of quotes (&quot;)",
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
    "full-width-marks": "full-width colons or commas",
    "escaped-whitespace": "line ends written out as \\\\n",
    "tool-call-arguments": "the arguments taken out of a tool call",
    "odd-whitespace": "white space that JSON does not allow",
}
_SPEC = "RFC 8259, The JSON Data Interchange Format; JSON Schema 2020-12"


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
