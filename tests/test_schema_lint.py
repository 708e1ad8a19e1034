"""Every provider rule of the table has a schema that breaks it, at the place written by hand, and one that keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from preflight.facts import table
from preflight.outputs.schema_lint import LOOKS, PROVIDERS, Breach, Lint, Node, lint, object_depth
from preflight.outputs.schemas import SchemaPart, unwrap

TEXT: dict[str, Any] = {"type": "string"}


def strict(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object schema that every strict mode takes."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def nested(levels: int) -> dict[str, Any]:
    schema = strict({"x": TEXT})
    for _ in range(levels - 1):
        schema = strict({"x": schema})
    return schema


def tool(name: str = "f", description: str = "", parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters or strict({"x": TEXT}), **more}
    return {"type": "function", "function": function}


def broken(value: Any, provider: str | None, **options: Any) -> list[Breach]:
    parts, request = unwrap(value)
    return lint(tuple(parts), provider, request, **options)


LOCAL = {"$defs": {"a": {**strict({"b": {"$ref": "#/$defs/b"}})}, "b": TEXT}}
RECURSIVE = strict({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
ANTHROPIC_HISTORY = {
    "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "x"}]},
    ],
    "tools": [{"name": "f", "input_schema": strict({"x": TEXT})}],
}
GEMINI_HISTORY = {
    "contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}],
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "object", "properties": {"x": TEXT}}}]}],
}

# rule -> (provider, what breaks it, place)
CASES: dict[str, tuple[str | None, Any, str]] = {
    "oai-root-object": ("openai", {"type": "array", "items": TEXT}, "root"),
    "oai-addprops-false": ("openai", strict({"p": {**strict({}), "additionalProperties": True}}), "properties.p"),
    "oai-all-required": ("openai", {**strict({"x": TEXT, "y": TEXT}), "required": ["x"]}, "root"),
    "oai-unsupported-composition": ("openai", strict({"x": {"allOf": [TEXT]}}), "properties.x"),
    "oai-oneof": ("openai", strict({"x": {"oneOf": [TEXT, {"type": "null"}]}}), "properties.x"),
    "oai-default": ("openai", strict({"x": {**TEXT, "default": "a"}}), "properties.x"),
    "oai-anyof-first-keys": (
        "openai",
        strict({"x": {"anyOf": [strict({"k": TEXT, "a": TEXT}), strict({"k": TEXT, "b": TEXT})]}}),
        "properties.x",
    ),
    "oai-limit-props": ("openai", strict({f"p{number}": TEXT for number in range(5001)}), "root"),
    "oai-limit-depth": ("openai", nested(11), "root"),
    "oai-limit-strings": ("openai", strict({"x": {**TEXT, "const": "a" * 120_001}}), "root"),
    "oai-limit-enum": ("openai", strict({"x": {**TEXT, "enum": [f"v{number}" for number in range(1001)]}}), "root"),
    "oai-ft-model-keywords": ("openai-strict-finetuned", strict({"x": {**TEXT, "pattern": "^a$"}}), "properties.x"),
    "oai-pattern-props": ("openai", strict({"x": {"type": "array", "items": TEXT, "contains": TEXT}}), "properties.x"),
    "oai-ref-siblings": (
        "openai",
        {**strict({"x": {"$ref": "#/$defs/a", "description": "d"}}), "$defs": {"a": strict({"y": TEXT})}},
        "properties.x",
    ),
    "oai-pattern-lookaround": ("openai", strict({"x": {**TEXT, "pattern": "^(?!a)b$"}}), "properties.x"),
    "oai-format": ("openai", strict({"x": {**TEXT, "format": "uri"}}), "properties.x"),
    "oai-schema-draft": ("openai", strict({"x": {"type": "array", "items": [TEXT]}}), "properties.x"),
    "ant-strict-pattern": ("anthropic", strict({"x": {**TEXT, "pattern": "^\\bb$"}}), "properties.x"),
    "json-nullable": ("openai", strict({"x": {**TEXT, "nullable": True}}), "properties.x"),
    "oai-name": ("openai", tool("get weather"), "root"),
    "oai-tools-count": ("openai", [tool(f"f{number}") for number in range(129)], "tool f0: root"),
    "oai-desc-len": ("openai", tool(description="a" * 1025), "root"),
    "oai-parallel-strict": ("openai", {"messages": [], "tools": [tool(strict=True)]}, "root"),
    "oai-reasoning-tools": (
        "openai",
        {"messages": [], "tools": [{"type": "web_search"}, tool()], "reasoning": {"effort": "minimal"}},
        "root",
    ),
    "oai-array-items": ("openai", strict({"x": {"type": "array"}}), "properties.x"),
    "ant-tool-name": ("anthropic", {"name": "a b", "input_schema": strict({"x": TEXT})}, "root"),
    "ant-input-object": ("anthropic", {"name": "f", "input_schema": {"anyOf": [strict({"x": TEXT})]}}, "root"),
    "ant-strict-recursive": ("anthropic", RECURSIVE, "properties.next.anyOf.0"),
    "ant-strict-numeric": ("anthropic", strict({"x": {"type": "integer", "minimum": 0}}), "properties.x"),
    "ant-strict-string": ("anthropic", strict({"x": {**TEXT, "maxLength": 9}}), "properties.x"),
    "ant-strict-array": ("anthropic", strict({"x": {"type": "array", "items": TEXT, "minItems": 2}}), "properties.x"),
    "ant-strict-ref": ("anthropic", strict({"x": {"$ref": "https://example.com/s.json"}}), "properties.x"),
    "ant-strict-enum": ("anthropic", strict({"x": {"enum": [{"a": 1}]}}), "properties.x"),
    "ant-strict-optional-count": (
        "anthropic",
        {**strict({f"p{number}": TEXT for number in range(21)}), "required": []},
        "root",
    ),
    "ant-schema-draft": (
        "anthropic",
        {"name": "f", "input_schema": strict({"x": {"type": "number", "minimum": 0, "exclusiveMinimum": True}})},
        "root",
    ),
    "ant-pairing": ("anthropic", ANTHROPIC_HISTORY, "root"),
    "gem-openapi-subset": ("gemini", {"type": "object", "properties": {"x": {**TEXT, "$id": "c"}}}, "properties.x"),
    "gem-schema-ref": ("gemini", {"type": "object", "properties": {"x": {"type": ["string"]}}}, "properties.x"),
    "gem-jsonschema": ("gemini-json-schema", strict({"x": {"not": TEXT, "type": "integer"}}), "properties.x"),
    "gem-empty-object": ("gemini", {"type": "object", "properties": {"x": {"type": "object"}}}, "properties.x"),
    "gem-enum-string": (
        "gemini",
        {"type": "object", "properties": {"x": {"type": "integer", "enum": [1, 2]}}},
        "properties.x",
    ),
    "gem-format": ("gemini", {"type": "object", "properties": {"x": {**TEXT, "format": "uri"}}}, "properties.x"),
    "gem-name": ("gemini", {"functionDeclarations": [{"name": "1f", "parameters": strict({"x": TEXT})}]}, "root"),
    "gem-complexity": ("gemini", nested(9), "root"),
    "gem-thought-signature": ("gemini", GEMINI_HISTORY, "root"),
    "lcp-addprops-default": ("llama.cpp", {"type": "object", "properties": {"x": TEXT}}, "root"),
    "lcp-silent": ("llama.cpp", strict({"x": {"type": "array", "items": TEXT, "uniqueItems": True}}), "properties.x"),
    "lcp-mix": ("llama.cpp", strict({"x": TEXT}, anyOf=[{"required": ["x"]}]), "root"),
    "lcp-number-range": ("llama.cpp", strict({"x": {"type": "number", "minimum": 0}}), "properties.x"),
    "lcp-pattern-anchors": ("llama.cpp", strict({"x": {**TEXT, "pattern": "a+"}}), "properties.x"),
    "lcp-ref": ("llama.cpp", {**strict({"x": {"$ref": "#/$defs/a"}}), **LOCAL}, "properties.x"),
    "lcp-prefixitems": (
        "llama.cpp",
        strict({"x": {"type": "array", "items": TEXT, "prefixItems": [TEXT]}}),
        "properties.x",
    ),
    "lcp-format": ("llama.cpp", strict({"x": {**TEXT, "format": "email"}}), "properties.x"),
    "lcp-big-repeat": ("llama.cpp", strict({"x": {**TEXT, "maxLength": 100_000}}), "properties.x"),
    "any-valid": (None, {"type": "strin"}, "root"),
    "any-required-exists": (None, {**strict({"x": TEXT}), "required": ["x", "y"]}, "root"),
    "any-type-missing": (None, strict({"x": {"description": "d"}}), "properties.x"),
    "any-enum-empty": (None, strict({"x": {"enum": [1, 1]}}), "properties.x"),
    "any-dup-tool": (None, [tool("f"), tool("f")], "tool f: root"),
}  # fmt: skip


def test_every_rule_of_the_table_is_looked_for_and_tested() -> None:
    ids = {rule["id"] for rule in table("schema_lint")["rules"]}
    assert ids == set(LOOKS) == set(CASES)


@pytest.mark.parametrize("rule", sorted(CASES))
def test_a_broken_rule_is_found_at_its_place(rule: str) -> None:
    provider, value, place = CASES[rule]
    found = [breach for breach in broken(value, provider) if breach.rule == rule]
    assert found and found[0].place == place
    (row,) = [row for row in table("schema_lint")["rules"] if row["id"] == rule]
    assert (found[0].severity, found[0].source) == (row["severity"], row["source"])
    assert found[0].as_of == "2026-11-30" and found[0].fix and found[0].message


@pytest.mark.parametrize("provider", [*sorted(set(PROVIDERS) - {"gemini", "gemini-schema"}), None])
def test_a_strict_schema_breaks_no_rule(provider: str | None) -> None:
    schema = strict(
        {
            "name": TEXT,
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": TEXT},
            "kind": {**TEXT, "enum": ["a"]},
        }
    )
    assert [breach for breach in broken(schema, provider) if breach.severity != "info"] == []
    assert broken([tool("f", "short", schema), tool("g", "short", schema)], provider) == []


def test_gemini_takes_its_own_subset() -> None:
    schema = {"type": "object", "properties": {"x": {**TEXT, "nullable": True}}, "required": ["x"]}
    assert broken(schema, "gemini") == []


def test_limits_are_not_broken_at_the_limit() -> None:
    assert not any(breach.rule == "oai-limit-depth" for breach in broken(nested(10), "openai"))
    assert object_depth(nested(10)) == 10
    (rule,) = [row for row in table("schema_lint")["rules"] if row["id"] == "oai-limit-props"]
    schema = strict({f"p{number}": TEXT for number in range(5000)})
    looked = Lint(SchemaPart(schema), rule, nodes=[Node((), schema)])
    assert list(LOOKS["oai-limit-props"](looked)) == []


def test_a_schema_that_is_not_strict_is_not_held_to_the_strict_rules() -> None:
    loose = {"type": "object", "properties": {"x": TEXT}}
    assert broken(loose, "openai", strict=False) == []
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": loose, "strict": False}}
    assert broken(wrapped, "openai") == []
    assert len(broken(loose, "openai")) == 2


def test_every_nested_object_is_named() -> None:
    inner = {"type": "object", "properties": {"y": TEXT}, "required": ["y"]}
    schema = {**strict({"a": {"type": "array", "items": inner}}), "$defs": {"d": inner}}
    places = [breach.place for breach in broken(schema, "openai") if breach.rule == "oai-addprops-false"]
    assert places == ["properties.a.items", "$defs.d"]


@pytest.mark.parametrize(
    "value",
    [
        tool("f"),
        {"type": "function", "name": "f", "parameters": strict({"x": TEXT})},
        {"name": "f", "input_schema": strict({"x": TEXT})},
        {"name": "f", "inputSchema": strict({"x": TEXT})},
        {"functionDeclarations": [{"name": "f", "parameters": strict({"x": TEXT})}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": strict({"x": TEXT})}}},
        {"text": {"format": {"type": "json_schema", "name": "f", "schema": strict({"x": TEXT})}}, "tools": []},
        {"generationConfig": {"responseSchema": strict({"x": TEXT})}, "contents": []},
    ],
)
def test_schemas_are_found_in_what_providers_put_around_them(value: Any) -> None:
    (part,), _ = unwrap(json.loads(json.dumps(value)))
    assert part.schema == strict({"x": TEXT})


@pytest.mark.parametrize(
    "schema",
    [
        {**strict({"x": {"$ref": "#/$defs/a"}}), "$defs": {"a": strict({"y": TEXT})}},
        strict({"x": {**TEXT, "pattern": "^(?:a|b)(?P<n>c)\\(?=d$"}}),  # groups, and a bracket that is a letter
        strict({"x": {**TEXT, "format": "date-time"}}),
        strict({"x": {"type": "number", "exclusiveMinimum": 0}}),
        strict({"x": {"type": ["string", "null"]}}),
        strict({"format": TEXT, "pattern": TEXT, "nullable": TEXT}),  # properties of these names
    ],
)
def test_what_the_strict_mode_takes_is_not_refused(schema: Any) -> None:
    assert broken(schema, "openai") == []
