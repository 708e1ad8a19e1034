"""Which rules of a provider does a schema, a tool or a request break, where, and since when is the rule known?

The rules, their limits and words are data (`facts/schema_lint.json`); here is one function a rule that looks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from preflight.facts import table
from preflight.outputs.lenient_json import fingerprint
from preflight.outputs.schemas import SchemaPart, Validator, local_target, pointer_of, subschemas

# What people mean by a provider's name: the constrained form, which is the one that is sure to return the schema.
PROVIDERS: dict[str, tuple[str, ...]] = {
    "openai": ("openai", "openai-strict"),
    "openai-strict": ("openai", "openai-strict"),
    "openai-strict-finetuned": ("openai", "openai-strict", "openai-strict-finetuned"),
    "anthropic": ("anthropic", "anthropic-strict"),
    "anthropic-strict": ("anthropic", "anthropic-strict"),
    "gemini": ("gemini", "gemini-schema"),
    "gemini-schema": ("gemini", "gemini-schema"),
    "gemini-json-schema": ("gemini", "gemini-json-schema"),
    "llama.cpp": ("llama.cpp",),
}
# The rules say "large", "many" or "deep" and give no number; these bounds are ours.
_MANY_OPTIONAL = 20
_BIG_REPEAT = 1000
_BIG_ENUM = 200
_DEEP = 8


@dataclass(frozen=True)
class Breach:
    """One place where a rule is broken. `place`: dotted, as providers print it; "root" for the schema itself."""

    rule: str
    severity: str  # error, warning, info
    place: str
    pointer: str
    message: str
    fix: str
    provider: str
    as_of: str
    confidence: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dict(vars(self))


@dataclass(frozen=True)
class Node:
    """One schema inside the schema."""

    path: tuple[str | int, ...]
    schema: dict[str, Any]

    @property
    def place(self) -> str:
        """Where it is, dotted."""
        return ".".join(map(str, self.path)) or "root"

    @property
    def types(self) -> list[str]:
        """Its types; [] when none is said."""
        kind = self.schema.get("type")
        return [item for item in kind if isinstance(item, str)] if isinstance(kind, list) else [kind] if kind else []

    @property
    def is_object(self) -> bool:
        """It describes an object."""
        return "object" in self.types or (not self.types and "properties" in self.schema)


Hit = tuple[Node | None, str]


@dataclass
class Lint:
    """What the rules look at: one schema with its surroundings."""

    part: SchemaPart
    rule: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] | None = None
    parts: tuple[SchemaPart, ...] = ()
    nodes: list[Node] = field(default_factory=list)

    @property
    def root(self) -> Node:
        """The schema itself."""
        return self.nodes[0] if self.nodes else Node((), {})

    @property
    def numbers(self) -> list[int]:
        """The numbers that the rule's text names, in order."""
        return [int(number) for number in re.findall(r"(?<![\w.-])\d+(?![\w.-])", self.rule["check"])]

    @property
    def keywords(self) -> list[str]:
        """The schema keywords that the rule's text lists."""
        text = re.sub(r"^.*?(?:outside|other than)\s", "", self.rule["check"])
        words = re.split(r"[,/]\s*|\s+", text)
        return [word for word in words if re.fullmatch(r"\$?[a-z]+[A-Za-z]*", word) and word not in _FILLERS]

    @property
    def pattern(self) -> str:
        """The regular expression in the rule's text."""
        match = re.search(r"\^\S*\$", self.rule["check"])
        return match.group() if match else ""


_FILLERS = {"present"}


def _each(lint: Lint, keep: Callable[[Node], Any], message: str = "") -> Iterator[Hit]:
    for node in lint.nodes:
        found = keep(node)
        if found:
            yield node, message or (found if isinstance(found, str) else "")


def _present(lint: Lint, keywords: list[str], where: Callable[[Node], bool] = lambda node: True) -> Iterator[Hit]:
    for node in lint.nodes:
        if where(node):
            for keyword in keywords:
                if keyword in node.schema:
                    yield node, f"'{keyword}' is not permitted"


# --- any provider ----------------------------------------------------------------------------------------------------


def _any_valid(lint: Lint) -> Iterator[Hit]:
    problem = Validator(lint.part.schema).problem
    if problem:
        yield None, f"not a valid JSON Schema: {problem}"


def _required_exists(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        required, properties = node.schema.get("required"), node.schema.get("properties")
        # Without own properties `required` may speak about those of an outer or a referenced schema.
        if isinstance(required, list) and isinstance(properties, dict):
            for name in required:
                if name not in properties:
                    yield node, f"'required' names '{name}', which is not in properties"


def _type_missing(lint: Lint) -> Iterator[Hit]:
    enough = ("type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const", "$dynamicRef", "$recursiveRef", "not", "if")
    for node in lint.nodes:
        in_condition = bool({"if", "then", "else", "not", "dependentSchemas", "allOf"} & set(map(str, node.path)))
        if not in_condition and not any(key in node.schema for key in enough):
            yield node, "no type, anyOf, $ref, enum or const"
        properties = node.schema.get("properties")
        for name, value in properties.items() if isinstance(properties, dict) else ():
            if value is True:
                yield node, f"the property '{name}' is true: anything is allowed"


def _enum_bad(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        values = node.schema.get("enum")
        if isinstance(values, list):
            if not values:
                yield node, "'enum' is empty"
            elif len({fingerprint(value) for value in values}) < len(values):
                yield node, "'enum' holds a value twice"


def _dup_tool(lint: Lint) -> Iterator[Hit]:
    names = [part.name for part in lint.parts if part.kind == "tool" and part.name]
    name = lint.part.name
    if lint.part.kind == "tool" and name and names.count(name) > 1:
        yield None, f"the tool name '{name}' is used {names.count(name)} times"


# --- OpenAI ----------------------------------------------------------------------------------------------------------


def _root_object(lint: Lint) -> Iterator[Hit]:
    root = lint.root
    target = root
    if isinstance(root.schema.get("$ref"), str) and "type" not in root.schema:
        resolved = local_target(root.schema, root.schema["$ref"])
        target = Node((), resolved) if isinstance(resolved, dict) else root
    if target.types != ["object"]:
        yield root, "the root must be of type object"
    elif "anyOf" in root.schema:
        yield root, "the root must not be an anyOf"


def _addprops_false(lint: Lint) -> Iterator[Hit]:
    yield from _each(
        lint,
        lambda node: node.is_object and node.schema.get("additionalProperties") is not False,
        "'additionalProperties' is required to be supplied and to be false",
    )


def _all_required(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        properties = node.schema.get("properties")
        if node.is_object and isinstance(properties, dict):
            required = node.schema.get("required")
            listed = required if isinstance(required, list) else []
            for name in properties:
                if name not in listed:
                    yield node, f"'required' must include every key in properties; missing '{name}'"


def _keywords_of_rule(lint: Lint) -> Iterator[Hit]:
    yield from _present(lint, lint.keywords)


def _anyof_first_keys(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        firsts: dict[str, Any] = {}
        for branch in node.schema.get("anyOf") or []:
            properties = branch.get("properties") if isinstance(branch, dict) else None
            if not isinstance(properties, dict) or not properties:
                continue
            key = next(iter(properties))
            inner = properties[key] if isinstance(properties[key], dict) else {}
            mark = inner.get("const", inner.get("enum"))
            if key in firsts and (mark is None or firsts[key] is None or firsts[key] == mark):
                yield node, f"two object branches begin with the same key '{key}' and nothing tells them apart"
                break
            firsts[key] = mark


def _limit_props(lint: Lint) -> Iterator[Hit]:
    count = sum(
        len(node.schema["properties"]) for node in lint.nodes if isinstance(node.schema.get("properties"), dict)
    )
    if count > lint.numbers[0]:
        yield None, f"{count} properties in all; at most {lint.numbers[0]}"


def object_depth(schema: Any) -> int:
    """Levels of objects inside objects, local `$ref`s followed once; arrays do not count."""

    def depth(node: Any, seen: tuple[str, ...]) -> int:
        if not isinstance(node, dict) or len(seen) > 200:
            return 0
        below = 0
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
            below = depth(local_target(schema, reference), (*seen, reference))
        inner: list[Any] = []
        for key in ("properties", "patternProperties"):
            inner += list(node[key].values()) if isinstance(node.get(key), dict) else []
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            inner += node[key] if isinstance(node.get(key), list) else []
        inner += [node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
        own = 1 if Node((), node).is_object else 0
        return own + max([below, *(depth(item, seen) for item in inner)], default=0)

    return depth(schema, ())


def _limit_depth(lint: Lint) -> Iterator[Hit]:
    depth = object_depth(lint.part.schema)
    if depth > lint.numbers[0]:
        yield None, f"objects are nested {depth} levels deep; at most {lint.numbers[0]}"


def _limit_strings(lint: Lint) -> Iterator[Hit]:
    total = 0
    for node in lint.nodes:
        for key in ("properties", "$defs", "definitions"):
            total += sum(map(len, node.schema[key])) if isinstance(node.schema.get(key), dict) else 0
        values = [*(node.schema.get("enum") or []), node.schema.get("const")]
        total += sum(len(value) for value in values if isinstance(value, str))
    if total > lint.numbers[0]:
        yield None, f"names, enum and const values have {total} characters; at most {lint.numbers[0]}"


def _limit_enum(lint: Lint) -> Iterator[Hit]:
    most, long_list, long_text = lint.numbers[:3]
    enums = [(node, node.schema["enum"]) for node in lint.nodes if isinstance(node.schema.get("enum"), list)]
    count = sum(len(values) for _, values in enums)
    if count > most:
        yield None, f"{count} enum values in all; at most {most}"
    for node, values in enums:
        length = sum(len(value) for value in values if isinstance(value, str))
        if len(values) > long_list and length > long_text:
            yield (
                node,
                f"one enum of {len(values)} values with {length} characters; at most {long_text} above {long_list}",
            )


def _name(lint: Lint) -> Iterator[Hit]:
    if lint.part.name is not None and not re.match(lint.pattern, lint.part.name):
        yield None, f"the name '{lint.part.name}' does not match {lint.pattern}"


def _tools_count(lint: Lint) -> Iterator[Hit]:
    tools = [part for part in lint.parts if part.kind == "tool"]
    if len(tools) > lint.numbers[0] and lint.part is tools[0]:
        yield None, f"{len(tools)} tools; at most {lint.numbers[0]}"


def _desc_len(lint: Lint) -> Iterator[Hit]:
    length = len(lint.part.description or "")
    if length > lint.numbers[0]:
        yield None, f"the description has {length} characters; above {lint.numbers[0]} some were refused"


def _parallel_strict(lint: Lint) -> Iterator[Hit]:
    body = lint.request or {}
    if (
        lint.part.kind == "tool"
        and lint.part.strict
        and "messages" in body
        and body.get("parallel_tool_calls") is not False
    ):
        yield None, "a strict tool with parallel tool calls allowed"


def _reasoning_tools(lint: Lint) -> Iterator[Hit]:
    body = lint.request or {}
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else body.get("reasoning_effort")
    kinds = [tool.get("type") for tool in body.get("tools") or [] if isinstance(tool, dict)]
    built_in = [kind for kind in kinds if isinstance(kind, str) and kind not in ("function", "custom")]
    if effort == "minimal" and built_in and lint.part is (lint.parts or (lint.part,))[0]:
        yield None, f"{', '.join(built_in)} with reasoning effort minimal"


def _array_items(lint: Lint) -> Iterator[Hit]:
    yield from _each(
        lint,
        lambda node: "array" in node.types and "items" not in node.schema and "prefixItems" not in node.schema,
        "array schema missing items",
    )


_ANNOTATIONS = {"$ref", "$defs", "definitions", "$schema", "$id"}


def _ref_siblings(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        beside = sorted(set(node.schema) - _ANNOTATIONS)
        if isinstance(node.schema.get("$ref"), str) and beside:
            yield node, f"$ref cannot have keywords {', '.join(beside[:4])} beside it"


_LOOKAROUND = re.compile(r"(?<!\\)\(\?<?[=!]")


def _lookaround(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        pattern = node.schema.get("pattern")
        if isinstance(pattern, str) and _LOOKAROUND.search(pattern):
            yield node, f"the pattern '{pattern}' looks ahead or behind"


def _odd_pattern(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        pattern = node.schema.get("pattern")
        if isinstance(pattern, str) and (
            _LOOKAROUND.search(pattern) or re.search(r"(?<!\\)(?:\\\\)*\\[bB1-9]", pattern)
        ):
            yield node, f"the pattern '{pattern}' looks around, refers back or names a word boundary"


def _openai_format(lint: Lint) -> Iterator[Hit]:
    known = re.findall(r"[\w-]+", lint.rule["check"].partition("outside ")[2])
    for node in lint.nodes:
        if isinstance(node.schema.get("format"), str) and "string" in node.types and node.schema["format"] not in known:
            yield node, f"'{node.schema['format']}' is not a valid format"


def _older_draft(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        if isinstance(node.schema.get("items"), list):
            yield node, "'items' is a list"
        for key in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(node.schema.get(key), bool):
                yield node, f"'{key}' is true or false, not a number"


# --- Anthropic -------------------------------------------------------------------------------------------------------


def _input_object(lint: Lint) -> Iterator[Hit]:
    if lint.part.kind != "tool":
        return
    if lint.root.types != ["object"]:
        yield lint.root, "input_schema must be of type object"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in lint.root.schema:
            yield lint.root, f"input_schema does not support {key} at the top level"


def _recursive(lint: Lint) -> Iterator[Hit]:
    root = lint.part.schema
    edges: dict[str, set[str]] = {}
    for node in lint.nodes:
        reference = node.schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            edges.setdefault(pointer_of(node.path), set()).add(reference[1:])
    for node in lint.nodes:
        reference = node.schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#") or local_target(root, reference) is None:
            continue
        waiting, seen = [reference[1:]], set()
        own = pointer_of(node.path)
        while waiting:
            target = waiting.pop()
            if own == target or own.startswith(target + "/") or target == "":
                yield node, f"recursive $ref '{reference}'"
                break
            if target not in seen:
                seen.add(target)
                waiting += [
                    to for at, tos in edges.items() if at == target or at.startswith(target + "/") for to in tos
                ]


def _min_items(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        if isinstance(node.schema.get("minItems"), int) and node.schema["minItems"] > 1:
            yield node, f"'minItems' is {node.schema['minItems']}; only 0 or 1"
        for key in ("maxItems", "uniqueItems"):
            if key in node.schema:
                yield node, f"'{key}' is not permitted"


def _external_ref(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        reference = node.schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            yield node, f"'$ref' leads outside: {reference}"


def _enum_primitive(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        if any(isinstance(value, (dict, list)) for value in node.schema.get("enum") or []):
            yield node, "'enum' holds an object or a list"


def _optional_count(lint: Lint) -> Iterator[Hit]:
    count = 0
    for node in lint.nodes:
        properties, required = node.schema.get("properties"), node.schema.get("required") or []
        if isinstance(properties, dict):
            count += sum(name not in required for name in properties)
    if count > _MANY_OPTIONAL:
        yield None, f"{count} optional parameters"


def _draft_2020(lint: Lint) -> Iterator[Hit]:
    from jsonschema import Draft202012Validator, FormatChecker

    if lint.part.kind != "tool" and lint.part.field != "input_schema":
        return
    try:
        Draft202012Validator.check_schema(lint.part.schema, format_checker=FormatChecker(formats=()))
    except Exception as error:
        yield None, f"not valid in draft 2020-12: {str(getattr(error, 'message', error))[:120]}"


def _pairing(lint: Lint) -> Iterator[Hit]:
    if lint.part is not (lint.parts or (lint.part,))[0]:
        return
    messages = (lint.request or {}).get("messages")
    open_ids: list[str] = []
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        blocks = message.get("content") if isinstance(message, dict) else None
        blocks = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
        results = [str(block.get("tool_use_id")) for block in blocks if block.get("type") == "tool_result"]
        for identity in open_ids:
            if identity not in results:
                yield None, f"messages.{number}: no tool_result for the tool_use {identity} before it"
        for identity in results:
            if identity not in open_ids:
                yield None, f"messages.{number}: a tool_result for {identity} without its tool_use before it"
        open_ids = [str(block.get("id")) for block in blocks if block.get("type") == "tool_use"]
    for identity in open_ids:
        yield None, f"the tool_use {identity} is the last message and has no tool_result"


# --- Gemini ----------------------------------------------------------------------------------------------------------


def _outside_subset(lint: Lint) -> Iterator[Hit]:
    allowed = {*lint.keywords, "$schema"}
    for node in lint.nodes:
        for key in node.schema:
            if key not in allowed:
                yield node, f"'{key}' is not in the supported subset"


def _not_in_gemini(lint: Lint) -> Iterator[Hit]:
    keywords = re.findall(r"\$?\w+", lint.rule["check"].split(", type as")[0])
    yield from _present(lint, keywords)
    yield from _each(lint, lambda node: isinstance(node.schema.get("type"), list), "'type' is a list")


def _empty_object(lint: Lint) -> Iterator[Hit]:
    yield from _each(
        lint,
        lambda node: node.types == ["object"] and not node.schema.get("properties"),
        "an object without properties",
    )


def _enum_not_string(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        values = node.schema.get("enum")
        if isinstance(values, list) and (
            (node.types and "string" not in node.types) or any(not isinstance(value, str) for value in values)
        ):
            yield node, "'enum' on another type than string"


def _gemini_format(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        if "string" in node.types and "format" in node.schema and node.schema["format"] not in ("enum", "date-time"):
            yield node, f"format '{node.schema['format']}' of a string"


def _complexity(lint: Lint) -> Iterator[Hit]:
    values = sum(len(node.schema.get("enum") or []) for node in lint.nodes)
    depth = object_depth(lint.part.schema)
    if depth > _DEEP:
        yield None, f"objects are nested {depth} levels deep"
    if values > _BIG_ENUM:
        yield None, f"{values} enum values"
    if len(lint.nodes) > _BIG_REPEAT:
        yield None, f"{len(lint.nodes)} schemas inside the schema"


def _thought_signature(lint: Lint) -> Iterator[Hit]:
    if lint.part is not (lint.parts or (lint.part,))[0]:
        return
    contents = (lint.request or {}).get("contents")
    for number, content in enumerate(contents if isinstance(contents, list) else []):
        for part in (content.get("parts") if isinstance(content, dict) else None) or []:
            if (
                isinstance(part, dict)
                and "functionCall" in part
                and not ({"thoughtSignature", "thought_signature"} & part.keys())
            ):
                yield None, f"contents.{number}: a functionCall without its thoughtSignature (needed by Gemini 3)"


# --- llama.cpp -------------------------------------------------------------------------------------------------------


def _addprops_default(lint: Lint) -> Iterator[Hit]:
    yield from _each(
        lint,
        lambda node: node.is_object and "additionalProperties" not in node.schema,
        "'additionalProperties' is absent, which means false here",
    )


def _silent(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        for key in re.findall(r"\$?\w+", lint.rule["check"]):
            if key in node.schema:
                yield node, f"'{key}' is skipped silently"


def _mix(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        for key in ("anyOf", "oneOf"):
            if "properties" in node.schema and key in node.schema:
                yield node, f"'properties' together with '{key}'"


def _number_range(lint: Lint) -> Iterator[Hit]:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    for node in lint.nodes:
        if "number" in node.types:
            for key in keys:
                if key in node.schema:
                    yield node, f"'{key}' of a number"


def _pattern_anchors(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        pattern = node.schema.get("pattern")
        if isinstance(pattern, str) and not (pattern.startswith("^") and pattern.endswith("$")):
            yield node, f"the pattern '{pattern}' is not anchored at both ends"


def _lcp_ref(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        reference = node.schema.get("$ref")
        if not isinstance(reference, str):
            continue
        if not reference.startswith("#"):
            yield node, f"'$ref' leads outside: {reference}"
        else:
            target = local_target(lint.part.schema, reference)
            if isinstance(target, dict) and any(
                "$ref" in item for _, item in subschemas(target) if isinstance(item, dict)
            ):
                yield node, f"'{reference}' holds another $ref"


def _lcp_format(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        if node.schema.get("format") in re.findall(r"\w+", lint.rule["check"]):
            yield node, f"format '{node.schema['format']}'"


def _big_repeat(lint: Lint) -> Iterator[Hit]:
    for node in lint.nodes:
        for key in ("maxItems", "maxLength", "minItems"):
            if isinstance(node.schema.get(key), int) and node.schema[key] > _BIG_REPEAT:
                yield node, f"'{key}' is {node.schema[key]}"


def _numeric(lint: Lint) -> Iterator[Hit]:
    yield from _present(lint, lint.keywords)


LOOKS: dict[str, Callable[[Lint], Iterator[Hit]]] = {
    "oai-root-object": _root_object,
    "oai-addprops-false": _addprops_false,
    "oai-all-required": _all_required,
    "oai-unsupported-composition": _keywords_of_rule,
    "oai-oneof": lambda lint: _present(lint, ["oneOf"]),
    "oai-default": lambda lint: _present(lint, ["default"]),
    "oai-anyof-first-keys": _anyof_first_keys,
    "oai-limit-props": _limit_props,
    "oai-limit-depth": _limit_depth,
    "oai-limit-strings": _limit_strings,
    "oai-limit-enum": _limit_enum,
    "oai-ft-model-keywords": _keywords_of_rule,
    "oai-pattern-props": _keywords_of_rule,
    "oai-ref-siblings": _ref_siblings,
    "oai-pattern-lookaround": _lookaround,
    "oai-format": _openai_format,
    "oai-schema-draft": _older_draft,
    "oai-name": _name,
    "oai-tools-count": _tools_count,
    "oai-desc-len": _desc_len,
    "oai-parallel-strict": _parallel_strict,
    "oai-reasoning-tools": _reasoning_tools,
    "oai-array-items": _array_items,
    "ant-tool-name": _name,
    "ant-input-object": _input_object,
    "ant-strict-recursive": _recursive,
    "ant-strict-numeric": _numeric,
    "ant-strict-string": _numeric,
    "ant-strict-pattern": _odd_pattern,
    "ant-strict-array": _min_items,
    "ant-strict-ref": _external_ref,
    "ant-strict-enum": _enum_primitive,
    "ant-strict-optional-count": _optional_count,
    "ant-schema-draft": _draft_2020,
    "ant-pairing": _pairing,
    "gem-openapi-subset": _outside_subset,
    "gem-schema-ref": _not_in_gemini,
    "gem-jsonschema": _outside_subset,
    "gem-empty-object": _empty_object,
    "gem-enum-string": _enum_not_string,
    "gem-format": _gemini_format,
    "gem-name": _name,
    "gem-complexity": _complexity,
    "gem-thought-signature": _thought_signature,
    "lcp-addprops-default": _addprops_default,
    "lcp-silent": _silent,
    "lcp-mix": _mix,
    "lcp-number-range": _number_range,
    "lcp-pattern-anchors": _pattern_anchors,
    "lcp-ref": _lcp_ref,
    "lcp-prefixitems": lambda lint: _present(lint, ["prefixItems"]),
    "lcp-format": _lcp_format,
    "lcp-big-repeat": _big_repeat,
    "json-nullable": lambda lint: _each(
        lint, lambda node: node.schema.get("nullable") is True, "'nullable' is ignored: null stays forbidden"
    ),
    "any-valid": _any_valid,
    "any-required-exists": _required_exists,
    "any-type-missing": _type_missing,
    "any-enum-empty": _enum_bad,
    "any-dup-tool": _dup_tool,
}


def lint(
    parts: tuple[SchemaPart, ...], provider: str | None, request: dict[str, Any] | None = None, strict: bool = True
) -> list[Breach]:
    """The rules that the schemas break, in the order of the table and of the schema.

    `provider`: a key of PROVIDERS, or None for the rules that hold everywhere. `strict` False leaves out the rules of
    the constrained forms; a schema that says `"strict": false` itself is treated so too.
    """
    facts = table("schema_lint")
    wanted = PROVIDERS[provider] if provider else ()
    found: list[Breach] = []
    for part in parts:
        nodes = [Node(path, node) for path, node in subschemas(part.schema) if isinstance(node, dict)]
        loose = not strict or part.strict is False
        shown = f"tool {part.name}: " if part.kind == "tool" and part.name and len(parts) > 1 else ""
        taken: set[tuple[str, str]] = set()
        for rule in facts["rules"]:
            providers = [name for name in rule["providers"] if name == "*" or name in wanted]
            if loose:
                providers = [name for name in providers if not name.endswith(("-strict", "-strict-finetuned"))]
            if not providers:
                continue
            looked = Lint(part, rule, request, parts, nodes)
            for node, message in LOOKS[rule["id"]](looked):
                place = f"{shown}{node.place if node else 'root'}"
                text = message or rule["message"]
                if (place, text) in taken:
                    continue
                # Two Gemini rules name the same keyword; one of them is enough.
                if rule["id"] == "gem-schema-ref" and any(
                    at == place and text.split()[0] in said for at, said in taken
                ):
                    continue
                taken.add((place, text))
                found.append(
                    Breach(
                        rule["id"],
                        rule["severity"],
                        place,
                        "#" + pointer_of(node.path if node else ()),
                        text,
                        rule["fix"],
                        providers[0],
                        facts["as_of"],
                        rule["confidence"],
                        rule["source"],
                    )
                )
    return found
