"""What conversation does a record hold, whatever shape it is written in, and what is wrong with it?

Shapes: chat messages (OpenAI, Anthropic blocks, Gemini contents), ShareGPT, Alpaca, prompt and completion, transcripts,
preference pairs, plain text. A role or a turn that cannot be placed is a problem of that record, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

# Documented names only. A name that merely sounds like an assistant (bing, bard, bot) may be a second speaker.
ROLES: Mapping[str, str] = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
_LISTS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
# Lists whose entries hold a question and its answer: MOSS, Firefly, XTuner.
_PAIR_TURNS = (
    ("human", "assistant"),
    ("user", "assistant"),
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)
_TEXT_KEYS = ("text", "content", "document")
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("prompt", "output"),
    ("question", "response"),
    ("instruction", "completion"),
    ("input", "target"),
    ("source", "target"),
)
FAMILY = {
    "openai-messages": "chat",
    "anthropic-messages": "chat",
    "gemini-contents": "chat",
    "sharegpt": "chat",
    "alpaca": "chat",
    "prompt-completion": "chat",
    "transcript": "chat",
    "pair-list": "chat",
    "preference": "preference",
    "unpaired-preference": "unpaired-preference",
    "text": "text",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class Problem:
    """Why a record cannot be used as it is. `turn` counts from 1."""

    code: str
    what: str
    turn: int | None = None


@dataclass
class Conversation:
    """One record in the common form: `messages` with role user, assistant, system or tool.

    `chosen`, `rejected`: the two continuations of a preference pair, after `messages`. `text`: plain text without
    turns. `extras`: what else stood in the record and is kept. `changes`: what was altered to get here, as slugs.
    """

    shape: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    chosen: list[Message] | None = None
    rejected: list[Message] | None = None
    label: bool | None = None
    text: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    roles_seen: dict[str, str] = field(default_factory=dict)

    def problem(self, code: str, what: str, turn: int | None = None) -> None:
        """Note a problem."""
        self.problems.append(Problem(code, what, turn))

    @property
    def has_tools(self) -> bool:
        """Tool calls, tool results or tool definitions are in it."""
        return self.tools is not None or any("tool_calls" in m or m.get("role") == "tool" for m in self.messages)


def shape_of(value: Any) -> str:
    """The shape a record is written in (a key of FAMILY)."""
    if isinstance(value, list):
        return _shape_of_turns(value) if value and isinstance(value[0], dict) else "unknown"
    if isinstance(value, str):
        return _shape_of_text(value)
    if not isinstance(value, dict):
        return "unknown"
    keys = value.keys()
    if {"chosen", "rejected"} <= keys or {"preferred_output", "non_preferred_output"} <= keys:
        return "preference"
    if isinstance(value.get("contents"), list):
        return "gemini-contents"
    for key in _LISTS:
        if isinstance(value.get(key), list):
            turns = value[key]
            return "openai-messages" if not turns and key == "messages" else _shape_of_turns(turns)
    if isinstance(value.get("label"), bool) and {"prompt", "completion"} <= keys:
        return "unpaired-preference"
    if "instruction" in keys and ("output" in keys or "response" in keys):
        return "alpaca"
    if any(question in keys and answer in keys for question, answer in _PAIRS):
        return "prompt-completion"
    for key in _TEXT_KEYS:
        if isinstance(value.get(key), str):
            return _shape_of_text(value[key])
    return "unknown"


def _shape_of_turns(turns: list[Any]) -> str:
    first = next((turn for turn in turns if isinstance(turn, dict)), None)
    if first is None:
        return "openai-messages" if not turns else "unknown"
    if "from" in first or "value" in first:
        return "sharegpt"
    if "parts" in first:
        return "gemini-contents"
    if "role" in first or "content" in first:
        for turn in turns:
            for part in _list(turn.get("content")) if isinstance(turn, dict) else ():
                if isinstance(part, dict) and part.get("type") in ("tool_use", "tool_result"):
                    return "anthropic-messages"
        return "openai-messages"
    return "pair-list" if _pair(first) != (None, None) else "unknown"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_TRANSCRIPTS = (
    re.compile(r"(?:^|\n\n)(Human|Assistant): ?"),
    re.compile(r"###\s*(Human|Assistant|User):[ \n]?"),
    re.compile(r"<\|im_start\|>(system|user|assistant|tool)\n"),
    re.compile(r"<\|start_header_id\|>(system|user|assistant|ipython|tool)<\|end_header_id\|>\n\n"),
)
_TURN_END = re.compile(r"\s*(?:<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>|<\|endoftext\|>|</s>)?\s*\Z")


def _shape_of_text(text: str) -> str:
    for pattern in _TRANSCRIPTS:
        marks = [match.group(1).lower() for match in pattern.finditer(text[:100_000])]
        if "assistant" in marks and ("human" in marks or "user" in marks):
            return "transcript"
    return "text"


def _turns_of_transcript(text: str) -> list[tuple[str, str]]:
    for pattern in _TRANSCRIPTS:
        parts = pattern.split(text)
        if len(parts) >= 3:
            turns = [
                (ROLES.get(parts[index].lower(), parts[index].lower()), _TURN_END.sub("", parts[index + 1]))
                for index in range(1, len(parts), 2)
            ]
            lead = parts[0].replace("<|begin_of_text|>", "").replace("<s>", "").strip()
            return [("system", lead), *turns] if lead else turns
    return []


def read_conversation(value: Any, role_map: Mapping[str, str] | None = None) -> Conversation:
    """The conversation in one record. `role_map` adds names of roles to the documented ones (ROLES)."""
    plain = plain_conversation(value)
    if plain is not None:
        return plain
    value, how = _with_turns(value)
    shape = shape_of(value)
    found = Conversation(shape, changes=[how] if how else [])
    roles = ROLES if not role_map else {**ROLES, **{name.lower(): role for name, role in role_map.items()}}
    if shape == "unknown":
        if isinstance(value, dict) and "input_ids" in value:
            found.problem("already-tokenised", "token ids instead of text (it holds: input_ids)")
            return found
        keys = ", ".join(sorted(map(str, value))[:8]) if isinstance(value, dict) else kind_of(value)
        found.problem("unknown-shape", f"no known shape (it holds: {keys or 'nothing'})")
        return found
    record: dict[str, Any] = value if isinstance(value, dict) else {}
    found.extras = {key: item for key, item in record.items() if key not in _TAKEN}
    _read_tools(found, record)
    if shape == "text":
        _read_text(found, value)
        return found
    if shape == "preference":
        _read_preference(found, record, roles)
        return found
    if shape == "alpaca":
        _read_alpaca(found, record)
    elif shape in ("prompt-completion", "unpaired-preference"):
        _read_pair(found, record, roles)
    elif shape == "transcript":
        text = value if isinstance(value, str) else next(record[key] for key in _TEXT_KEYS if key in record)
        for role, content in _turns_of_transcript(text):
            found.messages.append({"role": role, "content": content})
        found.changes.append("transcript-to-messages")
    else:
        turns = value if isinstance(value, list) else record.get("contents")
        if not isinstance(turns, list):
            turns = next((record[key] for key in _LISTS if isinstance(record.get(key), list)), [])
        _read_system(found, record)
        _read_turns(found, _unpaired(turns) if shape == "pair-list" else turns, roles, found.messages)
    check_turns(found)
    return found


def _with_turns(value: Any) -> tuple[Any, str]:
    """The record with its list of turns where it belongs, and what was done for that.

    Two things happen on the way through tables and viewers: the list is written as text, and it has another name.
    """
    if not isinstance(value, dict):
        return value, ""
    for key in ("messages", "conversations", "conversation"):
        text = value.get(key)
        if isinstance(text, str) and text.lstrip().startswith("[") and len(text) < 1 << 22:
            turns = _opened(text)
            if turns is not None:
                return {**value, key: turns}, "turns-text-opened"
    if shape_of(value) != "unknown":
        return value, ""
    named = [key for key, item in value.items() if _is_turns(item)]
    if len(named) == 1:
        return {"messages" if key == named[0] else key: item for key, item in value.items()}, "turns-renamed"
    return value, ""


def _opened(text: str) -> list[Any] | None:
    """The turns in a text that is JSON or the str() of a list; None when it is neither."""
    from preflight.outputs.lenient_json import Broken, Cut, parse_lenient

    try:
        parsed = parse_lenient(text)
    except (Broken, Cut, RecursionError):
        return None
    value = parsed.value
    return value if _is_turns(value) and not text[parsed.end :].strip() else None


def _is_turns(value: Any) -> bool:
    """A list whose every entry says who speaks and what."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(turn, dict) and ({"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys())
            for turn in value
        )
    )


def _unpaired(turns: list[Any]) -> list[Any]:
    """Entries with a question and its answer (and sometimes a system text) as turns."""
    made: list[Any] = []
    for turn in turns:
        question, answer = _pair(turn)
        if isinstance(turn, dict) and isinstance(turn.get("system"), str) and turn["system"].strip():
            made.append({"role": "system", "content": turn["system"]})
        made += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return made


def plain_conversation(value: Any) -> Conversation | None:
    """The conversation of a record in the most common form, or None for everything else.

    The form: `messages` of role and text only, an optional system turn, then user and assistant taking turns, ending
    with the assistant. It says the same as the general way, in a third of the time.
    """
    if not isinstance(value, dict):
        return None
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages or not _PLAIN_NEVER.isdisjoint(value):
        return None
    expected = "user"
    seen: dict[str, str] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str) or not content or content.isspace():
            return None
        if role != expected:
            if role != "system" or index:
                return None
        else:
            expected = "assistant" if role == "user" else "user"
        seen[role] = role
    if expected != "user" or len(seen) < 2:
        return None
    extras = {key: item for key, item in value.items() if key not in _TAKEN} if len(value) > 1 else {}
    return Conversation("openai-messages", messages, extras=extras, roles_seen=seen)


_PLAIN_NEVER = {
    "tools", "functions", "system", "systemInstruction", "system_instruction", "system_prompt", "contents", "chosen",
    "rejected", "preferred_output", "non_preferred_output",
}  # fmt: skip
_TAKEN = {
    *_LISTS, "contents", "instruction", "input", "output", "history", "system", "systemInstruction",
    "system_instruction", "system_prompt", "prompt", "completion", "response", "question", "answer", "query", "target",
    "source", "chosen", "rejected", "preferred_output", "non_preferred_output", "label", "text", "tools", "functions",
}  # fmt: skip


def _read_tools(found: Conversation, record: dict[str, Any]) -> None:
    tools = record.get("tools")
    if tools is None and isinstance(record.get("functions"), list):
        tools = [{"type": "function", "function": function} for function in record["functions"]]
        found.changes.append("functions-to-tools")
    if isinstance(tools, str):
        if not tools.strip():
            return
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            found.problem("tools-not-json", "the `tools` text is not valid JSON")
            return
        found.changes.append("tools-text-opened")
    if tools is None or tools == []:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        found.problem("tools-not-a-list", "`tools` is not a list of tool definitions")
        return
    found.tools = tools


def _read_system(found: Conversation, record: dict[str, Any]) -> None:
    for key in ("system", "systemInstruction", "system_instruction", "system_prompt"):
        system = record.get(key)
        if isinstance(system, dict):
            system = system.get("parts", system.get("content"))
        if isinstance(system, list):
            text = "\n".join(str(part["text"]) for part in system if isinstance(part, dict) and "text" in part)
            system = text or None
        if isinstance(system, str) and system.strip():
            found.messages.append({"role": "system", "content": system})
            return


def _read_text(found: Conversation, value: Any) -> None:
    text = (
        value if isinstance(value, str) else next(value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str))
    )
    found.text = text
    if not text.strip():
        found.problem("empty-text", "the text is empty")


def _read_alpaca(found: Conversation, record: dict[str, Any]) -> None:
    _read_system(found, record)
    if not _read_history(found, record):
        return
    instruction, extra = record.get("instruction"), record.get("input")
    if not isinstance(instruction, str):
        found.problem("non-string-content", f"`instruction` is {kind_of(instruction)}, not text")
        return
    if extra is not None and not isinstance(extra, str) and extra == extra:  # NaN is pandas' empty cell
        found.problem("non-string-content", f"`input` is {kind_of(extra)}, not text")
        return
    has_input = isinstance(extra, str) and extra.strip()
    question = f"{instruction}\n\n{extra}" if has_input and instruction.strip() else extra if has_input else instruction
    _append_content(found, "user", question)
    _append_content(found, "assistant", record.get("output", record.get("response")))


def _read_history(found: Conversation, record: dict[str, Any]) -> bool:
    """Earlier turns, as pairs or as messages; False when they are neither."""
    history = _list(record.get("history"))
    if history and isinstance(history[0], dict) and {"role", "from"} & history[0].keys():
        _read_turns(found, history, ROLES, found.messages)
        return True
    for index, pair in enumerate(history, 1):
        question, answer = _pair(pair)
        if not isinstance(question, str) or not isinstance(answer, str):
            found.problem("odd-history", f"entry {index} of `history` is not a pair of texts")
            return False
        found.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return True


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, dict):
        for question, answer in _PAIR_TURNS:
            if {question, answer} <= value.keys():
                return value[question], value[answer]
    return None, None


def _append_content(found: Conversation, role: str, content: Any) -> None:
    if not isinstance(content, str):
        found.problem("non-string-content", f"the {role} text is {kind_of(content)}, not text", len(found.messages) + 1)
    found.messages.append({"role": role, "content": content if isinstance(content, str) else None})


def _read_pair(found: Conversation, record: dict[str, Any], roles: Mapping[str, str]) -> None:
    question_key, answer_key = next(
        (pair for pair in _PAIRS if pair[0] in record and pair[1] in record), ("prompt", "completion")
    )
    question, answer = record[question_key], record[answer_key]
    if isinstance(record.get("label"), bool):
        found.label = record["label"]
    _read_system(found, record)
    if not _read_history(found, record):
        return
    _read_side(found, question, "user", roles, found.messages)
    context = record.get("context")
    if isinstance(context, str) and context.strip() and found.messages and isinstance(question, str):
        found.messages[-1]["content"] = f"{context}\n\n{question}"
        found.extras.pop("context", None)
        found.changes.append("context-joined")
    _read_side(found, answer, "assistant", roles, found.messages)


def _read_side(found: Conversation, side: Any, role: str, roles: Mapping[str, str], into: list[Message]) -> None:
    """One side of a pair: a text, or a list of messages."""
    if isinstance(side, list):
        _read_turns(found, side, roles, into)
    elif isinstance(side, dict) and {"role", "content", "from", "value"} & side.keys():
        _read_turns(found, [side], roles, into)
    elif isinstance(side, str):
        turns = (
            _turns_of_transcript(side) if role == "user" and _shape_of_text(side + "\n\nAssistant:") != "text" else []
        )
        if turns:
            into += [
                {"role": turn_role, "content": content}
                for turn_role, content in turns
                if content or turn_role != "assistant"
            ]
            found.changes.append("transcript-to-messages")
        else:
            into.append({"role": role, "content": side})
    else:
        found.problem("non-string-content", f"the {role} side is {kind_of(side)}, not text", len(into) + 1)
        into.append({"role": role, "content": None})


def _read_preference(found: Conversation, record: dict[str, Any], roles: Mapping[str, str]) -> None:
    chosen, rejected = (record.get("chosen"), record.get("rejected"))
    prompt = record.get("prompt")
    if "preferred_output" in record:
        chosen, rejected = record["preferred_output"], record["non_preferred_output"]
        given = record.get("input")
        prompt = given.get("messages") if isinstance(given, dict) else given
        if isinstance(given, dict) and found.tools is None:
            _read_tools(found, given)
    _read_system(found, record)
    if prompt is None:
        prompt = next((record[key] for key in _LISTS if isinstance(record.get(key), list)), None)
    if prompt is None and isinstance(record.get("instruction"), str):
        extra = record.get("input")
        more = isinstance(extra, str) and extra.strip()
        prompt = f"{record['instruction']}\n\n{extra}" if more else record["instruction"]
    if prompt is None:
        prompt = next((record[key] for key in ("question", "query", "input") if isinstance(record.get(key), str)), None)
    if not _read_history(found, record):
        return
    sides: list[list[Message]] = []
    for side in (chosen, rejected):
        made: list[Message] = []
        if isinstance(side, str) and prompt is None and _turns_of_transcript(side):
            made = [{"role": role, "content": content} for role, content in _turns_of_transcript(side)]
        else:
            _read_side(found, side, "assistant", roles, made)
        sides.append(made)
    if prompt is not None:
        _read_side(found, prompt, "user", roles, found.messages)
    if prompt is None or (found.messages and sides[0][: len(found.messages)] == found.messages):
        # The prompt is what both sides begin with.
        shared = 0
        while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
            shared += 1
        if prompt is None:
            found.messages += sides[0][:shared]
        sides = [side[shared:] for side in sides]
        found.changes.append("prompt-taken-from-pair")
    found.chosen, found.rejected = sides
    if not found.messages:
        found.problem("no-messages", "no prompt: the two answers share no beginning")
    elif found.messages[-1].get("role") not in ("user", "tool"):
        found.problem("prompt-ends-with-assistant", "the prompt does not end with a user turn", len(found.messages))
    for name, messages in (("chosen", found.chosen), ("rejected", found.rejected)):
        if not any(_text_of(message).strip() or message.get("tool_calls") for message in messages):
            found.problem("empty-answer", f"`{name}` is empty")
    if found.chosen == found.rejected and not found.problems:
        found.problem("pair-without-difference", "`chosen` and `rejected` are the same")


# ---------------------------------------------------------------------------------------------------------------------
# Turns


def _read_turns(found: Conversation, turns: list[Any], roles: Mapping[str, str], into: list[Message]) -> None:
    pending: list[str] = []  # ids of calls that wait for their result, where the shape has none
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            found.problem("turn-not-an-object", f"turn {number} is {kind_of(turn)}, not an object", number)
            continue
        name = turn.get("role", turn.get("from", turn.get("speaker")))
        content = turn["content"] if "content" in turn else _first_of(turn, ("value", "parts", "text", "message"))
        if not isinstance(name, str):
            found.problem("no-role", f"turn {number} has no role", number)
            continue
        role = roles.get(name)
        if role is None:
            role = roles.get(name.lower())
        if role is None:
            found.problem("unknown-role", f"unknown role '{name}'", number)
            continue
        found.roles_seen[name] = "assistant" if role == "call" else role
        if name == "developer":
            found.changes.append("developer-to-system")
        if role == "call":
            _append_call(found, content, number, into, pending)
            continue
        message: Message = {"role": role}
        if isinstance(content, list):
            _read_parts(found, content, message, number, into)
            if message.pop("only-results", False):
                continue
        elif isinstance(content, str) or content is None:
            message["content"] = content
        elif role == "tool" and isinstance(content, dict):
            message["content"] = json.dumps(content, ensure_ascii=False)
            found.changes.append("tool-result-to-text")
        else:
            found.problem("non-string-content", f"content of turn {number} is {kind_of(content)}, not text", number)
            message["content"] = None
        if len(turn) > 2 or content is None:
            _read_rest(found, turn, message, number)
        if role == "tool" and "tool_call_id" not in message and pending:
            message["tool_call_id"] = pending.pop(0)
        before = into[-1] if into else {}
        if role == "assistant" and before.get("channel") == "analysis" and "tool_calls" not in before:
            # The harmony format writes the reasoning as a message of its own; chat templates take it as `thinking`.
            into.pop()
            message = {**message, "thinking": before.get("content")}
            message.pop("channel", None)
            found.changes.append("analysis-to-thinking")
        into.append(message)


def _first_of(turn: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((turn[key] for key in keys if key in turn), None)


_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "weight", "reasoning_content", "thinking", "channel", "refusal")


def _read_rest(found: Conversation, turn: dict[str, Any], message: Message, number: int) -> None:
    """The other keys of a turn: what has a meaning in training is kept."""
    for key in _MESSAGE_KEYS:
        if turn.get(key) is not None and key not in message:
            message[key] = turn[key]
    if "reasoning" in turn and isinstance(turn["reasoning"], str) and "reasoning_content" not in message:
        message["reasoning_content"] = turn["reasoning"]
    calls = message.get("tool_calls")
    if isinstance(calls, str) and calls.lstrip().startswith("["):
        try:
            message["tool_calls"] = json.loads(calls)
            found.changes.append("calls-text-opened")
        except (ValueError, RecursionError):
            pass  # the check of the calls names it
    call = turn.get("function_call")
    if isinstance(call, dict) and "tool_calls" not in message:
        message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": call}]
        found.changes.append("function-call-to-tool-calls")
    if message.get("tool_calls") == []:
        del message["tool_calls"]


def _append_call(found: Conversation, content: Any, number: int, into: list[Message], pending: list[str]) -> None:
    """A ShareGPT turn of role function_call: its text is `{"name": …, "arguments": …}`, or a list of these."""
    calls = content
    if isinstance(content, str):
        try:
            calls = json.loads(content)
        except (ValueError, RecursionError):
            found.problem("tool-call-not-json", f"the tool call in turn {number} is not valid JSON", number)
            return
    calls = calls if isinstance(calls, list) else [calls]
    made = []
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            found.problem("tool-call-not-json", f"the tool call in turn {number} has no name", number)
            return
        identity = f"call_{number}_{index}"
        pending.append(identity)
        function = {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))}
        made.append({"id": identity, "type": "function", "function": function})
    into.append({"role": "assistant", "content": None, "tool_calls": made})
    found.changes.append("function-call-to-tool-calls")


# Tool calls that data sets keep in the assistant's text, in the words of the model they are for.
_CALL_IN_TEXT = re.compile(
    r"<tool_call>|<function_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]|<\|tool_calls?_begin\|>|<functioncall>|Action:"
)
_MEDIA = {"image_url", "image", "input_image", "video", "video_url", "audio", "input_audio", "file", "document"}


def _read_parts(found: Conversation, parts: list[Any], message: Message, number: int, into: list[Message]) -> None:
    """A content list: text parts are joined by line ends (as vLLM joins them), Anthropic blocks become tool turns,
    images stay a list."""
    texts: list[str] = []
    kept: list[Any] = []
    media = False
    results: list[Message] = []
    calls: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
            kept.append({"type": "text", "text": part["text"]})
        elif kind in ("thinking", "reasoning") and isinstance(part.get("thinking", part.get("text")), str):
            message["reasoning_content"] = part.get("thinking", part.get("text"))
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input", {})}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            inner = part.get("content")
            text = inner if isinstance(inner, str) else "\n".join(_texts(inner)) if isinstance(inner, list) else ""
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        elif isinstance(part, dict) and "functionCall" in part:
            call = part["functionCall"]
            function = {"name": call.get("name"), "arguments": call.get("args", {})}
            calls.append({"id": f"call_{number}_{len(calls)}", "type": "function", "function": function})
        elif isinstance(part, dict) and "functionResponse" in part:
            text = json.dumps(part["functionResponse"].get("response"), ensure_ascii=False)
            results.append({"role": "tool", "content": text})
        elif kind in _MEDIA or (isinstance(part, dict) and "inlineData" in part):
            media = True
            kept.append(part)
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            found.problem("unknown-part", f"turn {number} holds a part of unknown type '{kind}'", number)
    if calls:
        message["tool_calls"] = calls
    if results:
        into.extend(results)
        if not texts and not media:
            message["only-results"] = True
            found.changes.append("blocks-to-tool-turns")
            return
    if media:
        message["content"] = kept
        found.changes.append("media-kept")
    else:
        message["content"] = "\n".join(texts) if texts else (None if calls else "")
        found.changes.append("parts-joined")


def _texts(parts: list[Any]) -> list[str]:
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(_texts(content)) if isinstance(content, list) else ""


def text_of(message: Message) -> str:
    """The text of a message, "" when it has none."""
    return _text_of(message)


def kind_of(value: Any) -> str:
    """The JSON kind of a value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"


def check_turns(found: Conversation) -> None:
    """Add the problems of the order and content of turns. Nothing is added when a turn could not be placed at all."""
    if any(problem.code in ("unknown-role", "no-role", "turn-not-an-object") for problem in found.problems):
        return
    messages = found.messages
    spoken = [message for message in messages if message["role"] != "system"]
    if not spoken:
        found.problem("no-messages", "no messages" if not messages else "only a system turn")
        return
    _check_content(found)
    if not any(message["role"] == "assistant" for message in spoken):
        found.problem("no-assistant-turn", "no assistant turn (nothing to train on)")
        return
    if spoken[0]["role"] == "assistant":
        found.problem("starts-with-assistant", "starts with assistant", messages.index(spoken[0]) + 1)
    before = messages[0]["role"]
    for index in range(1, len(messages)):
        role = messages[index]["role"]
        if role == before and role in ("user", "assistant") and not messages[index - 1].get("tool_calls"):
            found.problem("same-role-twice", f"two {role} turns in a row", index + 1)
            break
        if role == "system":
            found.problem("system-not-first", "a system turn stands behind others", index + 1)
            break
        before = role
    if found.has_tools:
        _check_tools(found)
    if messages[-1]["role"] == "user":
        found.changes.append("ends-with-user")


def _check_content(found: Conversation) -> None:
    already = {problem.turn for problem in found.problems}
    for number, message in enumerate(found.messages, 1):
        content = message.get("content")
        if isinstance(content, str) and content and not content.isspace():
            continue
        if number in already or message.get("tool_calls"):
            continue
        if not _text_of(message).strip() and not isinstance(message.get("content"), list):
            role = message["role"]
            if role == "assistant":
                found.problem("empty-answer", f"the assistant's answer in turn {number} is empty", number)
            elif role == "user":
                found.problem("empty-question", f"the user's turn {number} is empty", number)
            elif message.get("content") is None:
                message["content"] = ""


def _spoken_before(messages: list[Message], index: int) -> Message:
    """The last message before this one that is no tool result; an empty one when there is none."""
    return next((m for m in reversed(messages[:index]) if m["role"] != "tool"), {"role": "", "content": ""})


def _check_tools(found: Conversation) -> None:
    known = {_function_of(tool).get("name"): _function_of(tool).get("parameters") for tool in found.tools or []}
    waiting: dict[str, int] = {}
    seen: set[str] = set()
    unnamed = 0
    for number, message in enumerate(found.messages, 1):
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            found.problem("tool-calls-not-a-list", "tool_calls is not a list", number)
            continue
        for call in calls or []:
            function = _function_of(call)
            if not isinstance(function.get("name"), str):
                found.problem("tool-call-without-name", "a tool call without a name", number)
                continue
            identity = call.get("id") if isinstance(call, dict) else None
            if isinstance(identity, str):
                if identity in seen:
                    found.problem("tool-call-id-twice", f"tool call id {identity} is used twice", number)
                seen.add(identity)
                waiting[identity] = number
            else:
                unnamed += 1
            _check_arguments(found, function, known, number)
        if message["role"] == "tool":
            identity = message.get("tool_call_id")
            if isinstance(identity, str):
                if identity not in waiting:
                    found.problem("tool-result-without-call", f"tool_call_id {identity} has no matching call", number)
                waiting.pop(identity, None)
            elif _CALL_IN_TEXT.search(_text_of(_spoken_before(found.messages, number - 1))):
                pass  # the call is in the text of the turn before, as Hermes and Llama write it
            elif unnamed or waiting:
                unnamed = max(0, unnamed - 1)
                if not unnamed and waiting:
                    waiting.pop(next(iter(waiting)))
            else:
                found.problem("tool-result-without-call", "a tool result without a call before it", number)
    last = len(found.messages)
    for identity, number in waiting.items():
        # A conversation may end with its call: that is what is trained then.
        if number != last and not any(problem.code == "tool-result-without-call" for problem in found.problems):
            found.problem("tool-call-without-result", f"tool call {identity} has no result", number)


def _function_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    inner = value.get("function")
    return inner if isinstance(inner, dict) else value


def _check_arguments(found: Conversation, function: dict[str, Any], known: dict[Any, Any], number: int) -> None:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            found.problem("tool-arguments-not-json", "arguments are not valid JSON", number)
            return
    if arguments is not None and not isinstance(arguments, dict):
        found.problem("tool-arguments-not-an-object", f"arguments are {kind_of(arguments)}, not an object", number)
        return
    if not known:
        return
    name = function["name"]
    if name not in known:
        found.problem("tool-not-defined", f"the tool '{name}' is called but not defined in `tools`", number)
        return
    schema = known[name]
    if not isinstance(schema, dict):
        return
    missing = [key for key in _list(schema.get("required")) if key not in (arguments or {})]
    if missing:
        found.problem("tool-arguments-incomplete", f"arguments of '{name}' lack {', '.join(map(str, missing))}", number)


# ---------------------------------------------------------------------------------------------------------------------
# Cleaning

_DIRT = re.compile("[\r\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufeff]")
_BROKEN_UTF8 = re.compile(
    "(?:\u00c3[\u0080-\u00bf\u2018-\u201e\u2020-\u2022\u2026\u2030\u0152\u0153\u0160\u0161\u017d]|\u00e2\u20ac)"
)


def clean_text(text: str) -> tuple[str, tuple[str, ...]]:
    """The text with plain line ends and without control characters, lone surrogates, byte order marks and white space
    at its end; and what was changed, as slugs."""
    if not text:
        return text, ()
    changes: list[str] = []
    if not text.isprintable() and _DIRT.search(text):
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            changes.append("line-ends")
        if re.search("[\ud800-\udfff]", text):
            # Two halves that stand side by side are one letter; a half alone is none.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            changes.append("lone-surrogates")
        cleaned = _DIRT.sub("", text)
        if cleaned != text:
            text = cleaned
            changes.append("control-characters")
    if text[-1:].isspace():
        text = text.rstrip()
        changes.append("white-space-at-end")
    return text, tuple(changes)


def looks_misdecoded(text: str) -> bool:
    """UTF-8 that was once read as Latin-1 or Windows-1252: pairs such as A-tilde and a sign stand for accents."""
    return not text.isascii() and len(_BROKEN_UTF8.findall(text)) >= 2
