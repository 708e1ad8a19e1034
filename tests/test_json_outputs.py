"""What value an output holds: a table of odd outputs, and properties over all JSON values."""

from __future__ import annotations

import ast
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflight.outputs.json_outputs import recover
from preflight.outputs.lenient_json import fingerprint
from preflight.outputs.saved_outputs import output_in

A = {"a": 1}

# (output, value, what was peeled off or forgiven)
FOUND: list[tuple[str, Any, tuple[str, ...]]] = [
    ('Sure! {"a": 1}', A, ("prose-around",)),
    ('```\n{"a":1}\n```\n', A, ("code-fence",)),
    ('~~~json\n{"a":1}\n~~~', A, ("code-fence",)),
    ('````markdown\n```json\n{"a":1}\n```\n````', A, ("code-fence",)),
    ('```json {"a":1}```', A, ("code-fence",)),
    ('Draft:\n```python\nx = {"a": 9}\n```\n```json\n{"a":1}\n```', A, ("code-fence", "prose-around")),
    ('Given `{"a": 2}`:\n```json\n{"a":1}\n```', A, ("code-fence", "prose-around")),
    ('<thinking>x {"a":2}</thinking>{"a":1}', A, ("reasoning-block",)),
    ('[THINK]{"a":2}[/THINK]{"a":1}', A, ("reasoning-block",)),
    ('\u25c1think\u25b7 {"a":2} \u25c1/think\u25b7{"a":1}', A, ("reasoning-block",)),
    ('<|START_THINKING|>{"a":2}<|END_THINKING|>{"a":1}', A, ("reasoning-block",)),
    ('<think>a<think>b</think>{"a":3}</think>{"a":1}', A, ("reasoning-block",)),
    ('the prompt opened the block {"a":2}\n</think>\n{"a":1}', A, ("reasoning-block",)),
    (
        '<|channel|>analysis<|message|>{"a":2}<|end|><|start|>assistant<|channel|>final<|message|>{"a":1}<|return|>',
        A,
        ("end-marker", "reasoning-block"),
    ),
    ('<answer>{"a":1}</answer>', A, ("answer-tag",)),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        {"name": "f", "arguments": A},
        ("tool-call-tag",),
    ),
    ('{"a":1}<|im_end|>', A, ("end-marker",)),
    ('\ufeff{"a":1}', A, ("bom",)),
    ('\u00a0{"a":1}', A, ("odd-whitespace",)),
    ('{"a":1}\n{"a":1}', A, ("repeated",)),
    ('[1] says {"a":1} [2]', A, ("prose-around",)),
    ('function f() { return 1 } {"a":1}', A, ("prose-around",)),
    ('{"a": 1,}', A, ("trailing-comma",)),
    ('{"a": 1, // one\n "b": 2 /* two */}', {"a": 1, "b": 2}, ("comments",)),
    ('{"a": 1\n "b": 2}', {"a": 1, "b": 2}, ("missing-comma",)),
    ("{a: 1, b: 'x'}", {"a": 1, "b": "x"}, ("unquoted-keys", "single-quotes")),
    ("{'a': (1, 2), 'b': u'x', 'c': None}", {"a": [1, 2], "b": "x", "c": None}, ("single-quotes", "python-literals")),
    ("{\u201ca\u201d: \u201cx\u201d}", {"a": "x"}, ("smart-quotes",)),
    ('{"a"\uff1a1\uff0c"b"\uff1a2}', {"a": 1, "b": 2}, ("full-width-marks",)),
    ('{\\n  "a": "\uff0c"\\n}', {"a": "\uff0c"}, ("escaped-whitespace",)),
    ('analysisWe need {"a":2}.assistantfinal{"a":1}', A, ("reasoning-block",)),
    ('<think>\nok\n</think>\n{"a": 1}\n</think>', A, ("reasoning-block",)),
    ('{"a": "x\ny"}', {"a": "x\ny"}, ("raw-control-characters",)),
    ('{"a": .5, "b": 0x10}', {"a": 0.5, "b": 16}, ("number-spelling",)),
    ('{"t": """x\ny"""}', {"t": "x\ny"}, ("triple-quotes",)),
    ('"{\\"a\\": 1}"', A, ("json-in-string",)),
    ('{\\"a\\": 1}', A, ("escaped-quotes",)),
    ("{'a': '\\ud83d\\ude00'}", {"a": "\U0001f600"}, ("single-quotes",)),
    ('x {"html": "<think>y</think> ```json {}```"} z', {"html": "<think>y</think> ```json {}```"}, ("prose-around",)),
]

# (output, problem)
NOT_FOUND = [
    ("", "empty"),
    (" \n", "empty"),
    ("no json here", "no-json"),
    ("The answer is 42", "no-json"),
    ("{not json}", "no-json"),
    ('{"a":1}{"a":2}', "multiple-json-values"),
    ('- {"a":1}\n- {"a":2}', "multiple-json-values"),
    ('```json\n{"a":1}\n```\n```json\n{"a":2}\n```', "multiple-json-values"),
    ('{"a": 1', "truncated"),
    ('{"a', "truncated"),
    ('{"a": tr', "truncated"),
    ("{", "truncated"),
    ('```json\n{"a": 1, "b": [1,2\n```', "truncated"),
    ('{"a": [{"b": 1}, {"b":', "truncated"),
    ('<think>never closed {"a":1}', "truncated"),
    ('{"note": "he said "hi" there"}', "broken-json"),
    ('{"a": [1, 2, ...]}', "broken-json"),
    ('{"a": bad, "b": {"a": 1}}', "broken-json"),
    ('{"re": "\\d"}', "broken-json"),
    ("{'it's': 1}", "broken-json"),
    ('{"zip": 01234}', "broken-json"),
    ('{"a": 1}\n</think>', "no-json"),
    ('{"a": NaN}', "non-finite-number"),
    ('{"a": 1e999}', "non-finite-number"),
    ('{"a":1,"a":2}', "duplicate-keys"),
    ("[" * 100_000, "nested-too-deep"),
    ('{"a":' * 100_000, "nested-too-deep"),
    ("<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", "no-json"),
]


@pytest.mark.parametrize(("output", "value", "how"), FOUND)
def test_the_one_value_is_found_and_what_was_peeled_off_is_said(output: str, value: Any, how: tuple[str, ...]) -> None:
    found = recover(output, types=("object",))
    assert (found.value, found.how, found.strict, found.problem) == (value, how, False, "")


@pytest.mark.parametrize(("output", "problem"), NOT_FOUND)
def test_what_is_ambiguous_cut_or_broken_has_no_value(output: str, problem: str) -> None:
    found = recover(output, types=("object",))
    assert found.problem == problem and found.value is None and not found.strict and not found.found


def test_a_value_that_is_the_whole_text_is_strict_and_untouched() -> None:
    text = '{"html": "<think>x</think> ```json {}```", "same": 1, "same": 1}'
    found = recover(text)
    assert found.strict and found.how == () and found.value["html"] == "<think>x</think> ```json {}```"


def test_a_bare_literal_in_a_fence_or_behind_reasoning_is_found() -> None:
    assert recover("```json\n42\n```").value == 42
    assert recover("<think>hm</think> true").value is True
    assert recover('<answer>"x"</answer>').value == "x"


def test_true_is_not_one() -> None:
    assert fingerprint(True) != fingerprint(1)
    assert fingerprint({"b": 1, "a": 2.0}) == fingerprint({"a": 2, "b": 1})
    assert recover('{"a": true}\n{"a": 1}').problem == "multiple-json-values"


def test_long_hostile_outputs_end_soon() -> None:
    began = time.monotonic()
    for text in ("{" * 50_000, '{"a": "' * 3000, "[1, " * 50_000, "```" * 50_000, "<think>" * 5000, "{a:" * 20_000):
        recover(text)
    assert time.monotonic() - began < 20


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
WRAPS = {
    "bare": "{}",
    "spaces": "\n {} \n",
    "fence": "```json\n{}\n```",
    "tilde fence": "~~~\n{}\n~~~",
    "fence with prose": "Here you are:\n```json\n{}\n```\nI hope that helps [1].",
    "reasoning": '<think>perhaps {{"draft": [1]}}?</think>\n{}',
    "reasoning and fence": "<think>\nhm\n</think>\n\n```json\n{}\n```",
    "answer tag": "<answer>{}</answer>",
    "end mark": "{}<|im_end|>",
}


@settings(max_examples=300, deadline=None)
@given(value=json_values, wrap=st.sampled_from(sorted(WRAPS)))
def test_any_json_value_survives_wrapping_and_recovering(value: Any, wrap: str) -> None:
    before, _, after = WRAPS[wrap].replace("{{", "\x00").replace("}}", "\x01").partition("{}")
    before, after = (part.replace("\x00", "{").replace("\x01", "}") for part in (before, after))
    if wrap == "fence with prose" and not isinstance(value, (dict, list)):
        return  # a literal among prose cannot be told from prose
    if wrap == "fence with prose" and isinstance(value, list) and not value:
        return  # an empty list beside a citation
    found = recover(before + json.dumps(value, ensure_ascii=False) + after)
    assert found.found, found
    assert fingerprint(found.value) == fingerprint(value)
    assert found.strict == (wrap in ("bare", "spaces"))


@settings(max_examples=300, deadline=None)
@given(value=st.dictionaries(st.text(max_size=8), json_values, min_size=1, max_size=4))
def test_any_python_literal_of_json_data_is_read_as_python_reads_it(value: dict[str, Any]) -> None:
    text = repr(value)
    assert ast.literal_eval(text) == value
    found = recover(text)
    assert found.found, (text, found)
    assert fingerprint(found.value) == fingerprint(value)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=8), json_values, min_size=1, max_size=4), data=st.data())
def test_a_cut_object_is_never_completed(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    assert recover(cut).found is False


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="{}[]\",:'`~<>/think json\n\\01ae", max_size=60))
def test_no_text_makes_it_raise(text: str) -> None:
    found = recover(text)
    assert found.found != bool(found.problem)


@pytest.mark.parametrize(
    ("record", "text", "finish"),
    [
        ("raw", "raw", None),
        ({"output": "x", "id": 1}, "x", None),
        ({"choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}]}, "x", "length"),
        (
            {
                "custom_id": "1",
                "response": {"body": {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}},
            },
            "x",
            "stop",
        ),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]}, "x", None),
        ({"type": "message", "role": "assistant", "content": [{"type": "text", "text": "x"}]}, "x", None),
        ({"candidates": [{"content": {"parts": [{"text": "x"}]}, "finishReason": "MAX_TOKENS"}]}, "x", "MAX_TOKENS"),
        ([{"generated_text": "x"}], "x", None),
        (
            {"object": "response", "output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}]},
            "x",
            None,
        ),
        ({"outputs": [{"text": "x", "finish_reason": "length"}]}, "x", "length"),
        ({"message": {"role": "assistant", "content": "x"}, "done_reason": "stop"}, "x", "stop"),
        ({"choices": [{"message": {"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}}]}, "{}", None),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "tool_use", "input": {"a": 1}}]},
            '{"a": 1}',
            None,
        ),
        ({"choices": [{"message": {"content": None, "refusal": "no"}}]}, "no", None),
        ({"other": 1}, None, None),
    ],
)
def test_the_generated_text_is_found_where_programs_save_it(record: Any, text: str | None, finish: str | None) -> None:
    saved = output_in(record)
    assert (saved.text, saved.finish_reason) == (text, finish)


def test_quotes_in_the_spelling_of_html_are_read() -> None:
    found = recover("{&quot;a&quot;: &quot;x &amp; y&quot;}")
    assert (found.value, found.how, found.strict) == ({"a": "x & y"}, ("html-entities",), False)
    assert recover('{"a": "&quot;"}').value == {"a": "&quot;"}  # inside a string it is what it is
