"""What do the tokenizer files say: special tokens, ids beyond the embedding, and what the chat template makes of chats?

Templates are programs from outside: they are rendered in a sandbox, in a child with a time and a memory limit.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.findings import Finding, Level, quote
from preflight.machine import Machine
from preflight.model.model_directory import JsonFile, ModelDirectory, Reader
from preflight.model_shape import ModelShape

RENDER_LIMIT_S = 12.0
MOST_TEMPLATE_BYTES = 1 << 20
MOST_TOKENIZER_BYTES = 12 << 20
MOST_VOCABULARY_BYTES = 64 << 20
_SOURCE = "transformers 5.24, utils/chat_template_utils.py and tokenization_utils_base.py"


@dataclass(frozen=True)
class Tokenizer:
    """What the tokenizer's files hold. `templates` by name, `template_source` where the default one was found.

    `added` maps ids to the tokens added after training; `max_token_id` is the highest id that any file names.
    `strange_markers` are texts like <|im_start|> in the template that tokenizer.json has no token for.
    `damaged` maps files of the vocabulary to what is wrong with them: git-lfs, empty, web-page or cut.
    """

    present: bool
    config: JsonFile
    templates: Mapping[str, str] = field(default_factory=dict)
    template_source: str | None = None
    template_trouble: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[int, str] = field(default_factory=dict)
    max_token_id: int | None = None
    max_token: str | None = None
    adds_bos: bool | None = None
    needs_code: tuple[str, ...] = ()
    strange_markers: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)

    def used(self, tools: bool) -> str | None:
        """The name of the template that transformers takes, with and without tools; None when it would refuse."""
        if tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" in self.templates:
            return "default"
        return None


@dataclass(frozen=True)
class Rendered:
    """What one template did: texts and errors by conversation; `compile_error` when it is no template at all.

    `stuck` is the step in which time or memory ran out.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    compiles: bool | None = None
    compile_error: str = ""
    line: int | None = None
    plain_error: str | None = None
    stuck: str = ""


def read_tokenizer(directory: ModelDirectory, follow_links: bool = False) -> Tokenizer:
    """Everything that the tokenizer files say, read in bounded size."""
    reader = Reader(directory.path, follow_links)
    config = reader.json("tokenizer_config.json")
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
    present = config.trouble != "absent" or any(directory.has(name) for name in names)
    templates, source, trouble = _templates(reader, directory, config)
    tokens = {
        key: text
        for key in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
        if (text := _token_text(config.object.get(key))) is not None
    }
    special = reader.json("special_tokens_map.json").object
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        text = _token_text(special.get(key))
        if key not in tokens and text is not None:
            tokens[key] = text
    added = _added_tokens(reader, config)
    highest = max(added, default=None)
    highest_name = added[highest] if highest is not None else None
    vocabulary = reader.json("vocab.json", MOST_TOKENIZER_BYTES).object
    ids = [value for value in vocabulary.values() if isinstance(value, int) and not isinstance(value, bool)]
    if ids and (highest is None or max(ids) > highest):
        highest, highest_name = max(ids), None
    adds_bos = config.object.get("add_bos_token")
    extra = config.object.get("extra_special_tokens", config.object.get("additional_special_tokens"))
    named = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    known = {*tokens.values(), *added.values(), *(text for value in named if (text := _token_text(value)))}
    return Tokenizer(
        present=present or bool(templates),
        config=config,
        templates=templates,
        template_source=source,
        template_trouble=trouble,
        tokens=tokens,
        added=added,
        max_token_id=highest,
        max_token=highest_name,
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        needs_code=tuple(
            sorted({f"{name.split('.')[0]}.py" for name in _auto_classes(config.object) if "--" not in name})
        ),
        strange_markers=_strange_markers(reader, templates.get("default", ""), known),
        damaged={name: why for name in _VOCABULARIES if (why := _damage(reader, name))},
    )


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "tekken.json")


def _damage(reader: Reader, name: str) -> str:
    """Why a file of the vocabulary is not what its name says, told by its first and last bytes; "" when it may be."""
    path = reader.root / name
    if not path.exists() or not reader.inside(path):
        return ""
    try:
        with reader.open_regular(path) as stream:
            first = stream.read(64)
            stream.seek(max(0, path.stat().st_size - 64))
            last = stream.read(64)
    except OSError:
        return ""
    if first.startswith(b"version https://git-lfs"):
        return "git-lfs"
    if not first.strip():
        return "empty"
    if first.lstrip()[:9].lower() in (b"<!doctype", b"<html>\n") or first.lstrip()[:5].lower() == b"<html":
        return "web-page"
    return "cut" if name.endswith(".json") and not last.rstrip().endswith(b"}") else ""


_MARKER = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>")


def _strange_markers(reader: Reader, template: str, known: set[str]) -> tuple[str, ...]:
    """The template's markers that are no token, where the whole tokenizer.json can be searched; else none."""
    asked = sorted(set(_MARKER.findall(template[:MOST_TEMPLATE_BYTES])) - known)
    if not asked:
        return ()
    data = reader.head("tokenizer.json", MOST_VOCABULARY_BYTES)
    if len(data) == MOST_VOCABULARY_BYTES or b'"vocab"' not in data:
        return ()
    spelled = ((marker, {json.dumps(marker), json.dumps(marker, ensure_ascii=False)}) for marker in asked)
    return tuple(marker for marker, forms in spelled if not any(form.encode() in data for form in forms))


def _auto_classes(config: Mapping[str, Any]) -> list[str]:
    mapped = config.get("auto_map")
    values = mapped.values() if isinstance(mapped, dict) else [mapped] if isinstance(mapped, list) else []
    found = []
    for value in values:
        items = value if isinstance(value, list) else [value]
        found += [item for item in items if isinstance(item, str)]
    return found


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(reader: Reader, directory: ModelDirectory, config: JsonFile) -> tuple[dict[str, str], str | None, str]:
    """Templates by name, where the default one comes from, and what is wrong; later homes win, as in transformers."""
    found: dict[str, str] = {}
    source: str | None = None
    trouble = ""
    value = config.object.get("chat_template")
    if isinstance(value, str):
        found["default"], source = value, "tokenizer_config.json"
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
                found[item["name"]] = item["template"]
                source = "tokenizer_config.json"
            else:
                trouble = "an entry of the list is not {name, template}"
    elif isinstance(value, dict):
        found.update({str(name): text for name, text in value.items() if isinstance(text, str)})
        source = "tokenizer_config.json"
    elif value is not None:
        trouble = f"chat_template is {type(value).__name__}, not text or a list of named templates"
    processor = reader.json("chat_template.json").object.get("chat_template")
    if isinstance(processor, str) and "default" not in found:
        found["default"], source = processor, "chat_template.json"
    extra = reader.root / "additional_chat_templates"
    if extra.is_dir() and reader.inside(extra):
        for path in sorted(extra.glob("*.jinja"))[:50]:
            text, _ = _text_of(reader, f"additional_chat_templates/{path.name}")
            if text is not None:
                found[path.name.removesuffix(".jinja")] = text
                source = source or "additional_chat_templates"
    if directory.has("chat_template.jinja"):
        text, why = _text_of(reader, "chat_template.jinja")
        if text is not None:
            found["default"], source = text, "chat_template.jinja"
        else:
            trouble = f"chat_template.jinja {why}"
    return found, source, trouble


def _text_of(reader: Reader, name: str) -> tuple[str | None, str]:
    path = reader.root / name
    if not reader.inside(path):
        return None, "is a link out of the directory and was not read"
    try:
        with reader.open_regular(path) as stream:
            data = stream.read(MOST_TEMPLATE_BYTES + 1)
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"
    if len(data) > MOST_TEMPLATE_BYTES:
        return None, "is larger than 1 MiB"
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError:
        return None, "is not UTF-8 text"


def _added_tokens(reader: Reader, config: JsonFile) -> dict[int, str]:
    """Ids and texts of added tokens, from every file that lists them."""
    found: dict[int, str] = {}
    decoder = config.object.get("added_tokens_decoder")
    for key, value in decoder.items() if isinstance(decoder, dict) else ():
        if str(key).isdigit() and len(str(key)) < 12:
            found[int(key)] = _token_text(value) or ""
    for text, number in reader.json("added_tokens.json").object.items():
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            found[number] = str(text)
    for item in _added_in_tokenizer_json(reader):
        number = item.get("id") if isinstance(item, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            found[number] = str(item.get("content", ""))
    return found


def _added_in_tokenizer_json(reader: Reader) -> list[Any]:
    """The list `added_tokens` of tokenizer.json, without reading the vocabulary behind it (tens of megabytes)."""
    data = reader.head("tokenizer.json", 4 << 20)
    start = data.find(b'"added_tokens"')
    if start < 0:
        return []
    text = data[start:].decode("utf-8", errors="replace")
    opening = text.find("[")
    if opening < 0:
        return []
    try:
        value, _ = json.JSONDecoder().raw_decode(text, opening)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def render_templates(tokenizer: Tokenizer) -> dict[str, Rendered]:
    """What each template makes of the test conversations; rendered by a child of our own interpreter.

    Always live, also when a recorded machine is judged: what a template makes of a chat does not depend on the machine.
    """
    if not tokenizer.templates:
        return {}
    chosen = dict(list(tokenizer.templates.items())[:20])
    with tempfile.TemporaryDirectory(prefix="preflight-template-") as folder:
        job = os.path.join(folder, "job.json")
        tokens = {key: tokenizer.tokens.get(key, "") for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        tokens = {key: value for key, value in tokens.items() if value}
        Path(job).write_text(json.dumps({"templates": chosen, "tokens": tokens}), encoding="utf-8")
        answer = Machine().ask(
            "render_template",
            sys.executable,
            [job],
            timeout_s=RENDER_LIMIT_S,
            kind="child render_template",
            cwd=folder,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
        )
    return parse_rendered(answer.lines_of_json(), chosen, answer.trouble or str(answer.exit_code))


def parse_rendered(lines: list[dict[str, Any]], names: Mapping[str, str], ended: str) -> dict[str, Rendered]:
    """The child's lines by template. What it began and did not finish is where it was stuck."""
    if not any(line.get("step") == "import" and "version" in line for line in lines):
        return {}
    finished = any(line.get("step") == "end" for line in lines)
    stuck_at: tuple[str, str] | None = None
    if not finished and lines:
        last = lines[-1]
        where = str(last.get("conversation") or "compiling")
        stuck_at = (
            str(last.get("template", "")),
            f"{where} ({'time ran out' if ended == 'timeout' else 'it was ended'})",
        )
    made: dict[str, Rendered] = {}
    for name in names:
        mine = [line for line in lines if line.get("template") == name]
        compiled = next((line for line in mine if line.get("step") == "compile"), None)
        shown = [line for line in mine if line.get("step") == "render"]
        made[name] = Rendered(
            texts={str(line["conversation"]): str(line["text"]) for line in shown if "text" in line},
            errors={str(line["conversation"]): str(line["error"]) for line in shown if "error" in line},
            compiles=None if compiled is None else "error" not in compiled,
            compile_error=str(compiled.get("error", "")) if compiled else "",
            line=compiled.get("line") if compiled else None,
            plain_error=compiled.get("plain_error") if compiled else None,
            stuck=stuck_at[1] if stuck_at and stuck_at[0] == name else "",
        )
    return made


def template_facts(tokenizer: Tokenizer, rendered: Mapping[str, Rendered]) -> dict[str, Any]:
    """The facts about chat templates, as plain data."""
    name = tokenizer.used(tools=False)
    seen = rendered.get(name or "", Rendered())
    facts: dict[str, Any] = {
        "has_template": bool(tokenizer.templates),
        "template_source": tokenizer.template_source,
        "template_names": sorted(tokenizer.templates),
        "used_without_tools": name,
        "used_with_tools": tokenizer.used(tools=True),
        "compiles": seen.compiles,
        "compiles_in_transformers": seen.compiles,
        "plain_jinja2_error": seen.plain_error,
        "error": seen.compile_error or None,
        "system_role": system_role(seen),
        "alternation_required": _alternates(seen),
        "assistant_role_rendered_as": _assistant_word(seen),
        "generation_prompt": _generation_prompt(seen),
        "generation_markers": _has_markers(tokenizer.templates.get(name or "", "")) if name else None,
        "renders": {key: text[:2000] for key, text in seen.texts.items()},
        "render_errors": dict(seen.errors),
    }
    tools = rendered.get(tokenizer.used(tools=True) or "", Rendered())
    with_tools = tools.texts.get("tools")
    facts["tools"] = None if with_tools is None else "supported" if "look_up" in with_tools else "ignored"
    return facts


def system_role(seen: Rendered) -> str | None:
    """supported, raises, dropped (the text is not in the result) or None when it could not be tried."""
    if "system+user" in seen.errors:
        return "raises" if "user" in seen.texts else None
    text = seen.texts.get("system+user")
    if text is None:
        return None
    return "supported" if "Answer in JSON." in text else "dropped"


def _alternates(seen: Rendered) -> bool | None:
    if "user" not in seen.texts:
        return None
    return "user+user" in seen.errors


def _generation_prompt(seen: Rendered) -> bool | None:
    plain, prompted = seen.texts.get("user"), seen.texts.get("user+generation_prompt")
    if plain is None or prompted is None:
        return None
    return prompted != plain


def _assistant_word(seen: Rendered) -> str | None:
    """What the assistant is called in the rendered text."""
    text = seen.texts.get("user+assistant")
    if text is None or "Hi" not in text:
        return None
    between = text[text.rindex("Hi") + 2 :]
    between = between[: between.rindex("{}")] if "{}" in between else between
    words: list[str] = re.findall(r"(?i)assistant|model|\bbot\b|\bgpt\b|chatbot", between)
    return words[-1].lower() if words else None


def _has_markers(text: str) -> bool:
    return re.search(r"\{%-?\s*generation\b", text) is not None


def end_of_turn(seen: Rendered) -> str | None:
    """The token-like text that ends the assistant's turn, such as <|im_end|>; None when there is none."""
    text = seen.texts.get("user+assistant", "")
    if "{}" not in text:
        return None
    match = re.match(r"\s*(<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\])", text[text.rindex("{}") + 2 :])
    return match.group(1) if match else None


# ---------------------------------------------------------------------------------------------------------------------
# checks


def check_tokenizer_config(tokenizer: Tokenizer) -> list[Finding]:
    """Whether tokenizer_config.json itself can be read as transformers reads it."""
    config = tokenizer.config
    if config.trouble == "absent":
        return []
    if config.trouble or config.bom:
        what = "begins with a byte-order mark" if config.bom and not config.trouble else f"is {_trouble(config)}"
        return [
            Finding(
                "tokenizer-config-not-loadable",
                Level.FAIL,
                f"tokenizer_config.json {what}: transformers cannot load this tokenizer.",
                "transformers reads it as plain UTF-8 JSON; anything else ends in a JSONDecodeError.",
                ("write tokenizer_config.json again as UTF-8 without a byte-order mark, or download it again",),
                _SOURCE,
            )
        ]
    return []


def _trouble(file: JsonFile) -> str:
    words = {
        "not-json": "not valid JSON",
        "not-utf8": "not UTF-8",
        "too-large": "too large to be a configuration",
        "too-nested": "nested too deeply",
        "not-an-object": "JSON, but no object",
        "link-outside": "a link out of the directory (not read)",
        "lfs-pointer": "a Git LFS pointer, not the file itself",
        "unreadable": "unreadable",
        "empty": "empty",
    }
    return words.get(file.trouble, file.trouble) + (f" ({quote(file.detail, 120)})" if file.detail else "")


def check_template(tokenizer: Tokenizer, rendered: Mapping[str, Rendered]) -> list[Finding]:
    """Whether there is a chat template, it compiles, ends, and renders the usual chats."""
    if not tokenizer.present or tokenizer.config.trouble not in ("", "absent"):
        return []
    if tokenizer.template_trouble:
        return [
            Finding(
                "template-not-loadable",
                Level.FAIL,
                f"The chat template cannot be used: {quote(tokenizer.template_trouble)}.",
                "transformers takes a text, a list of {name, template}, or the file chat_template.jinja.",
                ("put the template of the model's own repository back",),
                _SOURCE,
            )
        ]
    if not tokenizer.templates:
        return [
            Finding(
                "no-chat-template",
                Level.WARN,
                "This tokenizer has no chat template (neither in tokenizer_config.json nor in chat_template.jinja).",
                "apply_chat_template raises ValueError: tokenizer.chat_template is not set. Usual for base models.",
                (
                    "take the template of the model's -Instruct version, add its special tokens, and save it with the "
                    "adapter: `tokenizer.chat_template = ...; tokenizer.save_pretrained(OUTPUT)`",
                    "or train on plain prompts; evaluation must use the same format as training",
                ),
                _SOURCE,
            )
        ]
    name = tokenizer.used(tools=False)
    if name is None:
        return [
            Finding(
                "no-default-template",
                Level.WARN,
                f"The templates are named {_named(tokenizer)}; none is `default`.",
                "apply_chat_template raises unless chat_template=NAME is given.",
                ("pass `chat_template=NAME` everywhere, or name one of them default",),
                _SOURCE,
            )
        ]
    seen = rendered.get(name)
    if seen is None:
        return [
            Finding(
                "template-not-tried",
                Level.UNKNOWN,
                "Could not tell whether the chat template works: it was not rendered.",
                "Rendering needs the Python package jinja2, in the interpreter that runs this program.",
                ("`pip install jinja2`",),
                _SOURCE,
            )
        ]
    findings = _judge_rendering(tokenizer, name, seen)
    for other, result in rendered.items():
        if other != name and result.compiles is False:
            findings.append(
                Finding(
                    "template-syntax-error",
                    Level.WARN,
                    f"The template {quote(other, 60)} does not compile: {quote(result.compile_error)}",
                    "It is used only when it is asked for by name"
                    + (", or when tools are passed." if other == "tool_use" else "."),
                    ("correct it, or take it out",),
                    _SOURCE,
                )
            )
    return findings


def _named(tokenizer: Tokenizer) -> str:
    return ", ".join(quote(name, 40) for name in sorted(tokenizer.templates))


def _judge_rendering(tokenizer: Tokenizer, name: str, seen: Rendered) -> list[Finding]:
    if seen.compiles is False:
        where = f" (line {seen.line})" if seen.line else ""
        return [
            Finding(
                "template-syntax-error",
                Level.FAIL,
                f"The chat template does not compile{where}: {quote(seen.compile_error)}",
                "Every use of apply_chat_template will raise this error.",
                (_syntax_fix(seen.compile_error), "or take the template of the model's own repository again"),
                _SOURCE,
            )
        ]
    if seen.stuck:
        return [
            Finding(
                "template-does-not-end",
                Level.FAIL,
                f"The chat template does not finish: {quote(seen.stuck)}, after at most {RENDER_LIMIT_S:.0f} s.",
                "A chat of a few words must render in milliseconds; this one loops or grows without end.",
                ("do not use this template; take one from a source you trust",),
                _SOURCE,
            )
        ]
    if "user" not in seen.texts and "system+user" in seen.texts:
        return [
            Finding(
                "system-role-required",
                Level.WARN,
                f"The chat template fails without a system message: {quote(seen.errors.get('user', ''))}",
                "Every conversation needs one, in training as in evaluation.",
                ("put a system message in front of every conversation",),
                _SOURCE,
            )
        ]
    if "user" not in seen.texts and "content-parts" not in seen.texts:
        error = seen.errors.get("user", "no text came back")
        unsafe = "SecurityError" in error
        return [
            Finding(
                "template-unsafe" if unsafe else "template-fails",
                Level.FAIL,
                f"The chat template fails on a single user message: {quote(error)}",
                "It reaches for what the sandbox forbids." if unsafe else "No conversation can be rendered with it.",
                ("do not use this template; take the one of the model's own repository",),
                _SOURCE,
            )
        ]
    lost = _text_lost(seen)
    if lost is not None:
        return [lost]
    findings: list[Finding] = []
    role = system_role(seen)
    alternates = _alternates(seen)
    if role == "raises":
        also = " It also wants user and assistant to alternate." if alternates else ""
        findings.append(
            Finding(
                "system-role-unsupported",
                Level.WARN,
                f"The chat template refuses a system message: {quote(seen.errors['system+user'])}",
                f"Data with system messages will stop the training run at that sample.{also}",
                (
                    "put the system text in front of the first user message, in training, in evaluation and in "
                    "data_preprocessor (its instruction, too)",
                ),
                _SOURCE,
            )
        )
    elif role == "dropped":
        findings.append(
            Finding(
                "system-role-dropped",
                Level.WARN,
                "The chat template leaves a system message out without a word.",
                "The model would be trained and evaluated without the instruction that the data contains.",
                ("put the system text in front of the first user message",),
                _SOURCE,
            )
        )
    elif alternates:
        findings.append(
            Finding(
                "roles-must-alternate",
                Level.OK,
                f"The chat template wants alternating roles: {quote(seen.errors['user+user'])}",
                "Two messages of the same role in a row must be joined before training.",
                source=_SOURCE,
            )
        )
    if not findings or role == "supported":
        findings.insert(0, _template_ok(tokenizer, name, seen))
    header = _answer_header(seen)
    if header and _generation_prompt(seen) is False:
        findings.append(
            Finding(
                "no-generation-prompt",
                Level.OK,
                f"The chat template ignores add_generation_prompt, but answers begin with {quote(header, 60)!r}.",
                "Asked for an answer, the model does not see that beginning and goes on with the user's text.",
                (
                    "end the template with {% if add_generation_prompt %} and that beginning, or take the template of "
                    "the model's own repository",
                ),
                _SOURCE,
            )
        )
    return findings


def _answer_header(seen: Rendered) -> str | None:
    """What stands before the answer and after the question, such as <|im_start|>assistant; None when nothing does."""
    asked, answered = seen.texts.get("user", ""), seen.texts.get("user+assistant", "")
    if not asked or not answered.startswith(asked) or "{}" not in answered[len(asked) :]:
        return None
    rest = answered[len(asked) :]
    return rest[: rest.index("{}")].strip() or None


def _text_lost(seen: Rendered) -> Finding | None:
    """A template that renders messages without their text: the user's, or the answer that is to be learned."""
    asked = seen.texts.get("user")
    if asked is not None and "Hi" not in asked:
        if "Hi" in seen.texts.get("content-parts", ""):
            return Finding(
                "template-needs-content-parts",
                Level.WARN,
                "The chat template leaves out messages whose content is plain text: it takes lists of parts.",
                "Vision models' templates are like that; plain text vanishes without an error.",
                ('write every message as `"content": [{"type": "text", "text": "..."}]`, also in evaluation',),
                _SOURCE,
            )
        empty = "" if asked.strip() else " It renders nothing at all."
        return Finding(
            "template-drops-messages",
            Level.FAIL,
            f"The chat template renders a user message without its text.{empty}",
            "It is valid Jinja, so nothing fails: the model would be trained on empty conversations.",
            ("take the template of the model's own repository",),
            _SOURCE,
        )
    answered = seen.texts.get("user+assistant")
    if answered is not None and "{}" not in answered and "Hi" in answered:
        return Finding(
            "template-drops-answers",
            Level.WARN,
            "The chat template renders an assistant message without its text.",
            "The answers are what is to be learned; with this template there is nothing to learn.",
            ("take the template of the model's own repository",),
            _SOURCE,
        )
    return None


def _template_ok(tokenizer: Tokenizer, name: str, seen: Rendered) -> Finding:
    several = len(tokenizer.templates) > 1
    notes = []
    if several:
        with_tools = tokenizer.used(tools=True)
        notes.append(f"Without tools `{name}` is used, with tools `{with_tools}`; the others only by name.")
    if tokenizer.template_source == "chat_template.jinja" and not tokenizer.config.object.get("chat_template"):
        notes.append(
            "It lives only in chat_template.jinja: transformers before 4.43 and some servers do not read that."
        )
    if seen.plain_error:
        notes.append("It needs transformers' Jinja environment (a plain one refuses it).")
    if not _has_markers(tokenizer.templates[name]):
        notes.append(
            "It has no {% generation %} markers: assistant_only_loss needs them (TRL replaces the templates it knows)."
        )
    if _generation_prompt(seen) is False:
        notes.append("add_generation_prompt changes nothing.")
    what = (
        f"{len(tokenizer.templates)} chat templates ({_named(tokenizer)})"
        if several
        else f"The chat template ({tokenizer.template_source})"
    )
    return Finding(
        "multiple-templates" if several else "chat-template",
        Level.OK,
        f"{what}: compiled and rendered; system messages: {system_role(seen) or 'could not tell'}.",
        " ".join(notes),
        source=_SOURCE,
    )


def _syntax_fix(error: str) -> str:
    match = re.search(r"unknown tag '(\w+)'.*innermost block that needs to be closed is '(\w+)'", error)
    if match:
        tag, block = match.groups()
        return f"close the {{% {block} %}} with {{% end{block} %}} before {{% {tag} %}}"
    return "correct the template at the place that the error names"


def check_token_ids(tokenizer: Tokenizer, shape: ModelShape | None, config: Mapping[str, Any]) -> list[Finding]:
    """Whether every token id has a row in the embedding table; also those that config.json names."""
    rows = shape.vocab_size if shape else None
    highest, named = tokenizer.max_token_id, tokenizer.max_token
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        for number in eos_ids({"eos_token_id": config.get(key)}):
            if highest is None or number > highest:
                highest, named = number, key
    if rows is None or highest is None or (tokenizer.max_token_id is None and highest < rows):
        return []
    if highest >= rows:
        name = f" ({quote(named, 60)})" if named else ""
        return [
            Finding(
                "tokenizer-larger-than-embedding",
                Level.WARN,
                f"The highest token id is {highest}{name}, but the embedding has {rows} rows.",
                "The first batch that holds this token (padding does) ends in an index error, on a GPU in a "
                "device-side assert.",
                (
                    "use an existing token instead, for padding `tokenizer.pad_token = tokenizer.unk_token`",
                    "or `model.resize_token_embeddings(len(tokenizer))` and train and save the new rows, with "
                    "modules_to_save=[embed_tokens, lm_head] in the LoRA configuration",
                ),
                "transformers 5.24, PreTrainedModel.resize_token_embeddings; PEFT documentation, LoRA, new tokens",
            )
        ]
    return [
        Finding(
            "token-ids-fit",
            Level.OK,
            f"Every token id named in the files (up to {highest}) has a row in the embedding ({rows}).",
        )
    ]


def check_special_tokens(
    tokenizer: Tokenizer, rendered: Mapping[str, Rendered], eos_ids: tuple[int, ...]
) -> list[Finding]:
    """Padding that is also the end, an end of turn that is not the end of generation, and BOS twice."""
    findings: list[Finding] = []
    pad, eos, bos = (tokenizer.tokens.get(f"{name}_token") for name in ("pad", "eos", "bos"))
    if pad is not None and pad == eos:
        findings.append(
            Finding(
                "pad-is-eos",
                Level.WARN,
                f"Padding and end-of-sequence are the same token ({quote(pad, 60)}).",
                "A collator that masks padding by its id (DataCollatorForLanguageModeling) masks the end, too: the "
                "model never learns to stop.",
                (
                    "set another padding token, for example `tokenizer.pad_token = tokenizer.unk_token`",
                    "or use a collator that masks by attention_mask (TRL's SFTTrainer does)",
                ),
                "transformers 5.24, data/data_collator.py, DataCollatorForLanguageModeling",
            )
        )
    seen = rendered.get(tokenizer.used(tools=False) or "", Rendered())
    turn = end_of_turn(seen)
    by_text = {text: number for number, text in tokenizer.added.items()}
    if turn and eos and turn != eos and turn in by_text and eos_ids and by_text[turn] not in eos_ids:
        findings.append(
            Finding(
                "wrong-eos-for-chat",
                Level.WARN,
                f"Chat turns end with {quote(turn, 60)} (id {by_text[turn]}), but generation stops only at "
                f"{', '.join(str(i) for i in eos_ids)} ({quote(eos, 60)}).",
                "The model goes on talking after its answer.",
                (f"add {by_text[turn]} to eos_token_id in generation_config.json",),
                "transformers 5.24, generation/stopping_criteria.py, EosTokenCriteria",
            )
        )
    text = seen.texts.get("user", "")
    if bos and text.startswith(bos) and tokenizer.adds_bos:
        doubled = text.startswith(bos + bos)
        findings.append(
            Finding(
                "bos-doubled" if doubled else "bos-in-template",
                Level.WARN if doubled else Level.OK,
                f"The template itself writes {quote(bos, 40)} twice."
                if doubled
                else f"The template writes {quote(bos, 40)}, and the tokenizer adds it again to a text.",
                "A beginning of sequence that comes twice is not what the model was trained with."
                if doubled
                else "apply_chat_template(tokenize=True) does not double it; tokenizing a rendered text does.",
                ("take one of the two out of the template",) if doubled else (),
                _SOURCE,
            )
        )
    return findings


def eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids at which generation stops, from generation_config.json or else config.json."""
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        good = tuple(number for number in ids if isinstance(number, int) and not isinstance(number, bool))
        if good:
            return good
    return ()
