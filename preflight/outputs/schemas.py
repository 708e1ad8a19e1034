"""Does a JSON value fit a JSON Schema? Drafts 3 to 2020-12, nothing fetched, no pattern that runs for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from preflight.console import UsageError
from preflight.outputs.lenient_json import json_type
from preflight.processes import decode

# One value is compared for at most this long: a pattern such as (a+)+$ would take years on 40 letters.
PATTERN_LIMIT_S = 2.0


@dataclass(frozen=True)
class SchemaPart:
    """One JSON Schema inside what the user gave: the answer format or the arguments of one tool."""

    schema: Any
    kind: str = "response"  # or "tool"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    field: str = ""  # the provider field it stood in, such as input_schema; "" for a bare schema


@dataclass(frozen=True)
class SchemaFile:
    """A schema file: the bare schema that outputs must fit (`main`), all schemas in it, and the request around them."""

    path: Path
    main: SchemaPart
    parts: tuple[SchemaPart, ...]
    request: dict[str, Any] | None = None


@dataclass(frozen=True)
class SchemaError:
    """Where a value leaves the schema. `pointer`: JSON Pointer into the value. `rule`: the schema's keyword."""

    pointer: str
    rule: str
    expected: str
    got: str
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data; `path` is the pointer with dots, as people write it."""
        path = ".".join(part.replace("~1", "/").replace("~0", "~") for part in self.pointer.split("/")[1:])
        return {
            "pointer": self.pointer,
            "path": path,
            "rule": self.rule,
            "expected": self.expected,
            "got": self.got,
            "message": self.message,
        }


@dataclass
class Fit:
    """How a value fits: `errors`, or `unknown` when it could not be told (a pattern ran too long, a `$ref` is open)."""

    errors: list[SchemaError] = field(default_factory=list)
    unknown: str = ""

    @property
    def valid(self) -> bool | None:
        """None: could not tell."""
        return None if self.unknown else not self.errors


def read_schema(path: str | os.PathLike[str]) -> SchemaFile:
    """The schema file, unwrapped from what providers put around a schema. Raises UsageError when it is none."""
    file = Path(path)
    try:
        text = decode(file.read_bytes())
    except OSError as error:
        raise UsageError(f"--schema {path}: cannot be read ({error.strerror})") from error
    try:
        value = json.loads(text)
    except RecursionError:
        raise UsageError(f"--schema {path}: nested too deep to be read") from None
    except ValueError as error:
        raise UsageError(f"--schema {path}: not JSON ({error})") from None
    parts, request = unwrap(value)
    if not parts:
        kind = "a list without tool definitions" if isinstance(value, list) else json_type(value)
        raise UsageError(f"--schema {path}: holds {kind}; allowed: a JSON Schema, a response_format, tools, a request")
    main = next((part for part in parts if part.kind == "response"), parts[0])
    return SchemaFile(file, main, tuple(parts), request)


def unwrap(value: Any) -> tuple[list[SchemaPart], dict[str, Any] | None]:
    """The schemas in a bare schema, a response format, one tool, a list of tools or a whole request body."""
    if isinstance(value, bool):
        return [SchemaPart(value)], None
    if isinstance(value, list):
        return [part for tool in value for part in _tool_parts(tool)], {"tools": value}
    if not isinstance(value, dict):
        return [], None
    if any(isinstance(value.get(key), list) for key in ("messages", "contents", "tools")) or "response_format" in value:
        return _request_parts(value), value
    part = _response_part(value)
    if part is not None:
        return [part], None
    tools = _tool_parts(value)
    if tools:
        return tools, None
    return [SchemaPart(value)], None


def _request_parts(body: dict[str, Any]) -> list[SchemaPart]:
    parts: list[SchemaPart] = []
    text = body.get("text")
    formats = [body.get("response_format"), text.get("format") if isinstance(text, dict) else None]
    formats += [body.get("output_format"), body.get("generationConfig"), body.get("output_config")]
    for candidate in formats:
        if isinstance(candidate, dict):
            part = _response_part(candidate.get("format", candidate))
            if part is not None:
                parts.append(part)
    for tool in body.get("tools") or []:
        parts.extend(_tool_parts(tool))
    return parts


def _response_part(value: Any) -> SchemaPart | None:
    if not isinstance(value, dict):
        return None
    if value.get("type") == "json_schema":
        inner = value.get("json_schema", value)
        if isinstance(inner, dict) and isinstance(inner.get("schema"), (dict, bool)):
            strict = inner.get("strict")
            return SchemaPart(
                inner["schema"],
                "response",
                _text(inner.get("name")),
                _text(inner.get("description")),
                strict if isinstance(strict, bool) else None,
                "response_format",
            )
    for key in ("responseJsonSchema", "responseSchema", "response_schema", "response_json_schema"):
        if isinstance(value.get(key), dict):
            return SchemaPart(value[key], "response", field=key)
    if set(value) <= {"name", "description", "schema", "strict"} and isinstance(value.get("schema"), dict):
        strict = value.get("strict")
        return SchemaPart(
            value["schema"], "response", _text(value.get("name")), None, strict if isinstance(strict, bool) else None
        )
    return None


def _tool_parts(tool: Any) -> list[SchemaPart]:
    if not isinstance(tool, dict):
        return []
    for key in ("functionDeclarations", "function_declarations"):
        if isinstance(tool.get(key), list):
            return [part for declared in tool[key] for part in _tool_parts(declared)]
    function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
    if not isinstance(function, dict):
        return []
    for key in ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema"):
        if isinstance(function.get(key), dict) and "name" in function:
            strict = function.get("strict", tool.get("strict"))
            return [
                SchemaPart(
                    function[key],
                    "tool",
                    _text(function["name"]),
                    _text(function.get("description")),
                    strict if isinstance(strict, bool) else None,
                    key,
                )
            ]
    if function is not tool and "name" in function:  # a function without arguments
        return [SchemaPart({"type": "object", "properties": {}}, "tool", _text(function["name"]), field="parameters")]
    return []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# ---------------------------------------------------------------------------------------------------------------------
# Patterns


def python_pattern(pattern: str) -> str:
    """An ECMA 262 pattern, which JSON Schema uses, in Python's dialect. Raises re.error when Python has no such thing.

    Differences that matter: `$` also matches before a last line end in Python; `\\d` and `\\w` mean ASCII in ECMA 262;
    named groups are written otherwise; `\\/` is an escape.
    """
    made: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            following = pattern[at + 1 : at + 2]
            if following in ("d", "w", "D", "W"):
                inside = {"d": "0-9", "w": "A-Za-z0-9_"}.get(following)
                if inside:
                    made.append(inside if in_class else f"[{inside}]")
                else:
                    made.append({"D": "[^0-9]", "W": "[^A-Za-z0-9_]"}[following] if not in_class else "\\" + following)
            elif following == "/":
                made.append("/")
            elif following in ("p", "P"):
                raise re.error("Unicode property escapes (\\p) are not known to Python's `re`")
            elif following == "u" and pattern[at + 2 : at + 3] == "{":
                end = pattern.find("}", at)
                made.append(re.escape(chr(int(pattern[at + 3 : end], 16))) if end > 0 else "\\u")
                at = end + 1 if end > 0 else at + 2
                continue
            elif following == "k" and pattern[at + 2 : at + 3] == "<":
                end = pattern.find(">", at)
                made.append(f"(?P={pattern[at + 3 : end]})")
                at = end + 1
                continue
            elif following == "-" or (following and not following.isalnum()):
                made.append("\\" + following)
            else:
                made.append("\\" + following)
            at += 2
            continue
        if in_class:
            in_class = character != "]"
            made.append("\\[" if character == "[" else character)
        elif character == "[":
            in_class = True
            made.append("[")
            if pattern[at + 1 : at + 2] == "^":
                made.append("^")
                at += 1
        elif pattern.startswith("(?<", at) and pattern[at + 3 : at + 4] not in ("=", "!"):
            made.append("(?P<")
            at += 3
            continue
        else:
            made.append("\\Z" if character == "$" else character)
        at += 1
    result = "".join(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        re.compile(result)
    return result


def may_run_away(pattern: str) -> bool:
    """A repetition stands inside or beside another one, so that matching may take time that grows with a power of the
    text or worse. Errs on the side of True."""
    try:
        from re import _parser as sre  # type: ignore[attr-defined]
    except ImportError:  # Python 3.10
        import sre_parse as sre
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return True
    return _repeats(parsed) > 1


def _repeats(parsed: Any) -> int:
    """How many unbounded repetitions a parsed pattern holds; one inside another counts ten."""
    count = 0
    for operation, argument in parsed:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = argument
            within = _repeats(inner)
            count += within * 10 if most > 10 else within
            count += 1 if most > 1000 else 0
        elif name == "SUBPATTERN":
            count += _repeats(argument[-1])
        elif name == "BRANCH":
            count += sum(_repeats(branch) for branch in argument[1])
        elif name in ("ASSERT", "ASSERT_NOT"):
            count += _repeats(argument[1])
        elif name == "ATOMIC_GROUP":
            count += _repeats(argument)
        elif name == "GROUPREF_EXISTS":
            count += sum(_repeats(branch) for branch in argument[1:] if branch is not None)
    return count


class _TooLong(Exception):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[bool]:
    """Interrupts even a running pattern match; yields False where that cannot be done (Windows, other threads)."""
    possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not possible:
        yield False
        return

    def stop(number: int, frame: Any) -> None:
        raise _TooLong

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, stop)
    pending, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield True
    finally:
        # Somebody else's alarm goes on where it was.
        rest = max(0.001, pending - (time.monotonic() - began)) if pending else 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, rest, interval)


# ---------------------------------------------------------------------------------------------------------------------
# Validation

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    "items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "propertyNames", "not",
    "if", "then", "else", "additionalItems", "contentSchema", "extends",
)  # fmt: skip


def subschemas(schema: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every schema inside a schema with its path, the schema itself first. Not followed: `$ref`."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        yield path, node
        if not isinstance(node, dict):
            continue
        inner: list[tuple[tuple[str | int, ...], Any]] = []
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                inner += [
                    ((*path, key, name), item) for name, item in node[key].items() if isinstance(item, (dict, bool))
                ]
        for key in (*_LISTS, "items"):
            if isinstance(node.get(key), list):
                inner += [((*path, key, index), item) for index, item in enumerate(node[key])]
        inner += [((*path, key), node[key]) for key in _SINGLES if isinstance(node.get(key), (dict, bool))]
        waiting.extend(reversed(inner))


def pointer_of(path: Any) -> str:
    """The JSON Pointer of a path of keys and indexes."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


class Validator:
    """A schema ready to be compared with values.

    `draft`: such as "2020-12". `problem`: why the schema is not valid ("" when it is); values are then not compared.
    `notes`: what was assumed. `open_refs`: `$ref`s that lead outside and are not followed.
    """

    def __init__(self, schema: Any, folder: Path | None = None) -> None:
        try:
            import jsonschema
        except ImportError:
            raise UsageError("jsonschema is not installed in this Python: `pip install jsonschema`") from None
        self.schema = schema
        self.problem = ""
        self.notes: list[str] = []
        self.runaway_patterns: list[str] = []
        self.unknown_patterns: list[str] = []
        self.open_refs: list[str] = []
        self._originals: dict[str, str] = {}
        self._class = self._choose(schema)
        self.draft = _draft_name(self._class)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Its own test of patterns asks Python's `re`, which does not know all of ECMA 262.
                self._class.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
        except jsonschema.exceptions.SchemaError as error:
            self.problem = f"{pointer_of(error.absolute_path) or '/'}: {_short(error.message)}"
            return
        except (RecursionError, re.error) as error:
            self.problem = f"it cannot be checked: {type(error).__name__} {_short(str(error))}"
            return
        translated = self._translated(schema)
        validators: Any = jsonschema.validators
        extended = validators.extend(self._class, {"pattern": _pattern, "patternProperties": _pattern_properties})
        self._validator = extended(translated, registry=_registry(translated, self._class, folder))
        self.open_refs = self._open_refs()

    def _choose(self, schema: Any) -> Any:
        import jsonschema.validators
        from jsonschema import Draft4Validator, Draft202012Validator

        validators: Any = jsonschema.validators
        named = schema.get("$schema") if isinstance(schema, dict) else None
        if isinstance(named, str):
            found = validators.validator_for(schema, default=None)
            if found is None:
                self.notes.append(f"$schema {named!r} is no known draft; read as 2020-12")
            return found or Draft202012Validator
        if (
            isinstance(schema, dict)
            and not _is_valid(Draft202012Validator, schema)
            and _is_valid(Draft4Validator, schema)
        ):
            self.notes.append("no $schema; it is not valid in draft 2020-12 and valid in draft 4: read as draft 4")
            return Draft4Validator
        return Draft202012Validator

    def _translated(self, schema: Any) -> Any:
        """The schema with its patterns in Python's dialect; what cannot be translated is left out and listed."""
        if not isinstance(schema, dict):
            return schema
        copy = json.loads(json.dumps(schema))
        for _, node in subschemas(copy):
            if not isinstance(node, dict):
                continue
            if isinstance(node.get("pattern"), str):
                translated = self._pattern(node["pattern"])
                if translated is None:
                    del node["pattern"]
                else:
                    node["pattern"] = translated
            if isinstance(node.get("patternProperties"), dict):
                node["patternProperties"] = {
                    made: item
                    for pattern, item in node["patternProperties"].items()
                    if (made := self._pattern(pattern)) is not None
                }
        return copy

    def _pattern(self, pattern: str) -> str | None:
        try:
            translated = python_pattern(pattern)
        except (re.error, ValueError, OverflowError, RecursionError):
            self.unknown_patterns.append(pattern)
            return None
        if may_run_away(translated):
            self.runaway_patterns.append(pattern)
        self._originals[translated] = pattern
        return translated

    def _open_refs(self) -> list[str]:
        from referencing.exceptions import Unresolvable

        found = []
        resolver = self._validator._resolver
        for path, node in subschemas(self.schema):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                reference = node.get(key) if isinstance(node, dict) else None
                if isinstance(reference, str):
                    try:
                        resolver.lookup(reference)
                    except Unresolvable:
                        # A reference below another $id resolves against that, which only validation knows.
                        if not any("$id" in inner for _, inner in _above(self.schema, path) if isinstance(inner, dict)):
                            found.append(reference)
                    except Exception:
                        found.append(reference)
        return list(dict.fromkeys(found))

    def check(self, value: Any, limit: int = 20) -> Fit:
        """How a value fits: at most `limit` errors, in the order of the value."""
        from referencing.exceptions import Unresolvable

        if self.problem:
            return Fit(unknown=f"the schema itself is not valid: {self.problem}")
        fit = Fit()
        try:
            with _time_limit(PATTERN_LIMIT_S) as limited:
                if not limited and self.runaway_patterns and _has_long_text(value):
                    return Fit(unknown=f"the pattern {self.runaway_patterns[0]!r} may run for ever; not tried")
                for error in self._validator.iter_errors(value):
                    fit.errors.extend(_errors_of(error, self._originals))
                    if len(fit.errors) >= limit:
                        break
        except _TooLong:
            patterns = self.runaway_patterns
            culprit = f"the pattern {patterns[0]!r}" if patterns else "comparing it"
            return Fit(unknown=f"{culprit} ran longer than {PATTERN_LIMIT_S:g} s on this value and was stopped")
        except Unresolvable as error:
            return Fit(unknown=f"a $ref cannot be followed without the network: {_short(str(error))}")
        except RecursionError:
            return Fit(unknown="the schema refers to itself without end, or the value is nested too deep")
        fit.errors.sort(key=lambda error: error.pointer)
        if not fit.errors and self.unknown_patterns:
            return Fit(unknown=f"the pattern {self.unknown_patterns[0]!r} is not known to Python and was not compared")
        return fit

    @property
    def types(self) -> tuple[str, ...] | None:
        """The JSON types that a fitting value can have at its root; None when the schema does not say."""
        return _types(self.schema, self.schema, 0)


def _above(schema: Any, path: tuple[str | int, ...]) -> Iterator[tuple[int, Any]]:
    node = schema
    for index, part in enumerate(path):
        if index:
            yield index, node
        node = node[part] if not isinstance(node, bool) else node
    yield len(path), node


def _types(node: Any, root: Any, depth: int) -> tuple[str, ...] | None:
    if not isinstance(node, dict) or depth > 20:
        return None
    if "type" in node:
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        return tuple(kind for kind in kinds if isinstance(kind, str))
    if isinstance(node.get("enum"), list):
        return tuple(dict.fromkeys(json_type(item) for item in node["enum"]))
    if "const" in node:
        return (json_type(node["const"]),)
    if isinstance(node.get("$ref"), str) and node["$ref"].startswith("#"):
        return _types(local_target(root, node["$ref"]), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(node.get(key), list):
            branches = [_types(branch, root, depth + 1) for branch in node[key]]
            if any(branch is None for branch in branches):
                return None
            return tuple(dict.fromkeys(kind for branch in branches for kind in branch or ()))
    if isinstance(node.get("allOf"), list):
        for branch in node["allOf"]:
            found = _types(branch, root, depth + 1)
            if found is not None:
                return found
    return ("object",) if "properties" in node and "required" in node else None


def local_target(root: Any, reference: str) -> Any:
    """What a local `$ref` (`#/$defs/x`, `#`) points to; None when it points nowhere."""
    node = root
    for part in unquote(reference[1:]).split("/")[1:] if reference != "#" else []:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _is_valid(validator: Any, schema: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jsonschema import FormatChecker

            validator.check_schema(schema, format_checker=FormatChecker(formats=()))
    except Exception:
        return False
    return True


def _draft_name(validator: Any) -> str:
    address = str(validator.META_SCHEMA.get("$schema") or validator.META_SCHEMA.get("$id", ""))
    match = re.search(r"draft[-/]?(\d{4}-\d\d|\d\d)", address)
    return match.group(1).lstrip("0") if match else address


def _registry(schema: Any, validator: Any, folder: Path | None) -> Any:
    """The known meta-schemas and files beside the schema; nothing is ever fetched."""
    import importlib

    # Their attrs-made classes confuse type checkers.
    referencing: Any = importlib.import_module("referencing")
    exceptions: Any = importlib.import_module("referencing.exceptions")
    specification_with: Any = importlib.import_module("referencing.jsonschema").specification_with
    known: Any = importlib.import_module("jsonschema_specifications").REGISTRY
    dialect = str(validator.META_SCHEMA.get("$schema") or validator.META_SCHEMA.get("$id"))
    specification = specification_with(dialect, default=None) or specification_with(
        "https://json-schema.org/draft/2020-12/schema"
    )

    def beside(uri: str) -> Any:
        parts = urlsplit(uri)
        if folder is None or parts.scheme or parts.netloc or not parts.path:
            raise exceptions.NoSuchResource(ref=uri)
        file = (folder / unquote(parts.path)).resolve()
        if folder.resolve() not in file.parents or not file.is_file() or file.stat().st_size > (16 << 20):
            raise exceptions.NoSuchResource(ref=uri)
        try:
            contents = json.loads(decode(file.read_bytes()))
        except (OSError, ValueError, RecursionError):
            raise exceptions.NoSuchResource(ref=uri) from None
        return referencing.Resource.from_contents(contents, default_specification=specification)

    return known.combine(referencing.Registry(retrieve=beside))


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not re.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        for key, item in instance.items():
            if re.search(pattern, key):
                yield from validator.descend(item, inner, path=key, schema_path=pattern)


def _has_long_text(value: Any, limit: int = 15) -> bool:
    if isinstance(value, str):
        return len(value) > limit
    if isinstance(value, dict):
        return any(_has_long_text(key) or _has_long_text(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_long_text(item) for item in value)


def _errors_of(error: Any, originals: dict[str, str]) -> Iterator[SchemaError]:
    """One error of jsonschema in our words; for a failed anyOf also the branch that came closest."""
    pointer = pointer_of(error.absolute_path)
    rule, wanted, value = str(error.validator), error.validator_value, error.instance
    if rule == "type":
        kinds = wanted if isinstance(wanted, list) else [wanted]
        yield SchemaError(pointer, rule, " or ".join(map(str, kinds)), json_type(value), _hint(kinds, value))
    elif rule == "required":
        match = re.match(r"'(.*)' is a required property", error.message, re.DOTALL)
        name = match.group(1) if match else "?"
        yield SchemaError(pointer_of([*error.absolute_path, name]), rule, f"the property '{name}'", "absent")
    elif rule in ("additionalProperties", "unevaluatedProperties") and isinstance(value, dict):
        known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        extras = [key for key in value if key not in known]
        listed = ", ".join(f"'{key}'" for key in extras[:8])
        allowed = ", ".join(f"'{key}'" for key in list(known)[:12])
        yield SchemaError(pointer, rule, f"only the properties {allowed}" if allowed else "no other property", listed)
    elif rule in ("anyOf", "oneOf") and error.context:
        # The branch that was followed furthest into the value is the one that was meant.
        closest = max(error.context, key=lambda inner: len(inner.absolute_path))
        inner = next(_errors_of(closest, originals), None)
        detail = f"closest: {inner.pointer or '/'} {inner.expected}, got {inner.got}" if inner else ""
        count = len(wanted) if isinstance(wanted, list) else 0
        yield SchemaError(pointer, rule, f"one of {count} forms", _shown(value), detail)
    elif rule == "oneOf":
        yield SchemaError(pointer, rule, "exactly one of the forms", _shown(value), "more than one form fits")
    else:
        wanted = originals.get(wanted, wanted) if rule == "pattern" else wanted
        expected = "this value never" if rule == "None" else _expectation(rule, wanted)
        yield SchemaError(pointer, "false" if rule == "None" else rule, expected, _shown(value))


def _hint(kinds: list[Any], value: Any) -> str:
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return ""
        if json_type(inner) in kinds or (json_type(inner) == "integer" and "number" in kinds):
            return f"the {json_type(inner)} is written as a string"
    return ""


def _expectation(rule: str, wanted: Any) -> str:
    words = {
        "minimum": ">= {}", "maximum": "<= {}", "exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}",
        "minLength": "at least {} characters", "maxLength": "at most {} characters", "minItems": "at least {} items",
        "maxItems": "at most {} items", "pattern": "a match of {}", "const": "{}", "enum": "one of {}",
        "multipleOf": "a multiple of {}", "uniqueItems": "items that differ", "format": "the format {}",
        "minProperties": "at least {} properties", "maxProperties": "at most {} properties",
    }  # fmt: skip
    return words.get(rule, rule + " {}").format(_shown(wanted, 160))


def _shown(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:200]
