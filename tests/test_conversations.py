"""Conversations of every shape, with the turns written by hand."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflight.data import conversations
from preflight.data.conversations import clean_text, looks_misdecoded, plain_conversation, read_conversation, shape_of

Q, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
BAD_CALLING = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{bad"}}]}
RESULT = {"role": "tool", "content": "1"}
NEEDS_Y = {"name": "f", "parameters": {"required": ["y"]}}

# (record, shape, messages)
SHAPES: list[tuple[Any, str, list[dict[str, Any]]]] = [
    ({"messages": [Q, ANSWER]}, "openai-messages", [Q, ANSWER]),
    ([Q, ANSWER], "openai-messages", [Q, ANSWER]),
    ({"conversation": [Q, ANSWER]}, "openai-messages", [Q, ANSWER]),
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        "sharegpt",
        [{"role": "system", "content": "s"}, Q, ANSWER],
    ),
    (
        {"contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}]},
        "gemini-contents",
        [Q, ANSWER],
    ),
    ({"instruction": "q", "input": "", "output": "a"}, "alpaca", [Q, ANSWER]),
    ({"instruction": "q", "input": float("nan"), "output": "a"}, "alpaca", [Q, ANSWER]),
    (
        {"instruction": "q", "output": "a", "system": "s", "history": [["x", "y"]]},
        "alpaca",
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            Q,
            ANSWER,
        ],
    ),
    ({"prompt": "q", "completion": "a"}, "prompt-completion", [Q, ANSWER]),
    (
        {"question": "q", "answer": "a", "context": "c"},
        "prompt-completion",
        [{"role": "user", "content": "c\n\nq"}, ANSWER],
    ),
    ({"prompt": [Q], "completion": [ANSWER]}, "prompt-completion", [Q, ANSWER]),
    (
        {"prompt": "q", "response": "a", "history": [["x", "y"]]},
        "prompt-completion",
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, Q, ANSWER],
    ),
    ({"instruction": "q", "output": "a", "history": [Q, ANSWER]}, "alpaca", [Q, ANSWER, Q, ANSWER]),
    ({"conversation": [{"human": "q", "assistant": "a"}] * 2}, "pair-list", [Q, ANSWER, Q, ANSWER]),
    (
        {"conversation": [{"system": "s", "input": "q", "output": "a"}]},
        "pair-list",
        [{"role": "system", "content": "s"}, Q, ANSWER],
    ),
    ({"text": "### Human: q### Assistant: a"}, "transcript", [Q, ANSWER]),
    ({"text": "\n\nHuman: q\n\nAssistant: a"}, "transcript", [Q, ANSWER]),
    (
        {"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"},
        "transcript",
        [Q, ANSWER],
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
                ANSWER,
            ]
        },
        "openai-messages",
        [{"role": "user", "content": "x\ny"}, ANSWER],
    ),
    (
        {
            "messages": [
                Q,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "18"}]},
                ANSWER,
            ]
        },
        "anthropic-messages",
        [
            Q,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "18"},
            ANSWER,
        ],
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "18"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": '[{"name": "f", "parameters": {"type": "object", "required": ["x"]}}]',
        },
        "sharegpt",
        [
            Q,
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_2_0"}]},
            {"role": "tool", "content": "18", "tool_call_id": "call_2_0"},
            ANSWER,
        ],
    ),
    (
        {"messages": [{"role": "developer", "content": "s"}, Q, {**ANSWER, "weight": 0}], "parallel_tool_calls": False},
        "openai-messages",
        [{"role": "system", "content": "s"}, Q, {**ANSWER, "weight": 0}],
    ),
]


@pytest.mark.parametrize(("record", "shape", "messages"), SHAPES)
def test_every_shape_becomes_the_same_messages(record: Any, shape: str, messages: Any) -> None:
    found = read_conversation(record)
    assert (found.shape, found.messages, found.problems) == (shape, messages, [])


@pytest.mark.parametrize(
    ("record", "problems"),
    [
        ({"messages": []}, ["no-messages"]),
        ({"messages": [{"role": "system", "content": "s"}]}, ["no-messages"]),
        ({"messages": [Q]}, ["no-assistant-turn"]),
        ({"messages": [ANSWER, Q, ANSWER]}, ["starts-with-assistant"]),
        ({"messages": [Q, Q, ANSWER]}, ["same-role-twice"]),
        ({"messages": [Q, ANSWER, {"role": "system", "content": "s"}, Q, ANSWER]}, ["system-not-first"]),
        ({"messages": [Q, {"role": "assistant", "content": " \n"}]}, ["empty-answer"]),
        ({"messages": [Q, {"role": "assistant", "content": None}]}, ["empty-answer"]),
        ({"messages": [Q, {"role": "assistant", "content": float("nan")}]}, ["non-string-content"]),
        ({"messages": [Q, {"role": "assistant", "content": 5}]}, ["non-string-content"]),
        ({"messages": [Q, {"role": "bing", "content": "a"}]}, ["unknown-role"]),
        ({"messages": [Q, {"role": "bot", "content": "a"}]}, ["unknown-role"]),
        ({"messages": [Q, {"content": "a"}]}, ["no-role"]),
        ({"messages": [Q, "a"]}, ["turn-not-an-object"]),
        ({"instruction": "q", "output": ""}, ["empty-answer"]),
        ({"instruction": "q", "output": 5}, ["non-string-content"]),
        ({"foo": 1}, ["unknown-shape"]),
        (None, ["unknown-shape"]),
        (5, ["unknown-shape"]),
        ({"messages": [Q, BAD_CALLING]}, ["tool-arguments-not-json"]),
        ({"messages": [Q, CALLING, {**RESULT, "tool_call_id": "x"}, ANSWER]}, ["tool-result-without-call"]),
        ({"messages": [Q, {"role": "assistant", "tool_calls": [CALL]}, ANSWER]}, ["tool-call-without-result"]),
        ({"messages": [Q, {"role": "tool", "content": "1"}, ANSWER]}, ["tool-result-without-call"]),
        ({"messages": [Q, CALLING], "tools": [{"name": "g"}]}, ["tool-not-defined"]),
        ({"messages": [Q, CALLING], "tools": [NEEDS_Y]}, ["tool-arguments-incomplete"]),
        ({"messages": [Q, ANSWER], "tools": "[bad"}, ["tools-not-json"]),
        ({"chosen": "a", "rejected": "a", "prompt": "q"}, ["pair-without-difference"]),
        ({"chosen": "", "rejected": "a", "prompt": "q"}, ["empty-answer"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(record: Any, problems: list[str]) -> None:
    assert [problem.code for problem in read_conversation(record).problems] == problems


def test_a_conversation_may_end_with_its_tool_call() -> None:
    assert read_conversation({"messages": [Q, {"role": "assistant", "tool_calls": [CALL]}]}).problems == []


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"chosen": [Q, ANSWER], "rejected": [Q, {"role": "assistant", "content": "b"}]},
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        {
            "input": {"messages": [Q]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [{"role": "assistant", "content": "b"}],
        },
    ],
)
def test_preference_pairs_have_one_prompt_and_two_answers(record: Any) -> None:
    found = read_conversation(record)
    assert (found.shape, found.problems) == ("preference", [])
    assert found.messages == [Q]
    assert found.chosen == [ANSWER] and found.rejected == [{"role": "assistant", "content": "b"}]


def test_plain_text_and_labelled_completions_keep_their_kind() -> None:
    assert read_conversation({"text": "plain"}).text == "plain"
    assert shape_of({"prompt": "q", "completion": "a", "label": True}) == "unpaired-preference"
    assert read_conversation({"prompt": "q", "completion": "a", "label": False}).label is False


def test_text_is_cleaned_and_what_was_changed_is_said() -> None:
    assert clean_text("a\r\nb\x00\ufeff \n") == ("a\nb", ("line-ends", "control-characters", "white-space-at-end"))
    assert clean_text("x\ud83dy")[0] == "x\ufffdy"
    assert clean_text("\ud83d\ude00")[0] == "\U0001f600"
    assert clean_text("a\tb\n  c") == ("a\tb\n  c", ())
    assert looks_misdecoded("caf\u00c3\u00a9 na\u00c3\u00afve") and not looks_misdecoded("caf\u00e9")


KEYS = [
    "messages", "role", "content", "from", "value", "tools", "chosen", "rejected", "prompt", "parts", "completion",
    "instruction", "output", "tool_calls", "function", "arguments", "type", "text",
]  # fmt: skip
turns = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "gpt", "tool", "x"]),
            "content": st.sampled_from(["a", "b c", "", " ", None, 1]),
        },
        optional={"name": st.just("n")},
    ),
    max_size=5,
)


@settings(max_examples=400, deadline=None)
@given(messages=turns, more=st.sampled_from([{}, {"id": 1}, {"system": "s"}, {"tools": "[]"}]))
def test_the_fast_way_says_what_the_general_way_says(messages: list[Any], more: dict[str, Any]) -> None:
    record = {"messages": messages, **more}
    fast = plain_conversation(copy.deepcopy(record))
    if fast is None:
        return
    general = conversations.Conversation(shape_of(record))
    general.extras = {key: item for key, item in record.items() if key not in conversations._TAKEN}
    conversations._read_turns(general, copy.deepcopy(messages), conversations.ROLES, general.messages)
    conversations.check_turns(general)
    assert fast == general


@settings(max_examples=300, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(KEYS),
                inner,
                max_size=4,
            )
        ),
        max_leaves=15,
    )
)
def test_no_record_makes_it_raise(value: Any) -> None:
    read_conversation(value)


def test_turns_that_went_through_a_table_or_a_viewer_are_found_again() -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for record, change in (
        ({"conversations": str(turns)}, "turns-text-opened"),
        ({"messages": json.dumps(plain)}, "turns-text-opened"),
        ({"items": turns}, "turns-renamed"),
        ({"chat_history": plain, "id": 3}, "turns-renamed"),
    ):
        found = read_conversation(record)
        assert found.messages == plain and not found.problems, record
        assert change in found.changes
    # a list beside an instruction is something else, and two lists of turns are not chosen between
    assert read_conversation({"instruction": "x", "output": "y", "items": turns}).shape == "alpaca"
    assert read_conversation({"left": turns, "right": turns}).shape == "unknown"
    assert read_conversation({"messages": "[not a list"}).problems


def test_the_analysis_channel_becomes_the_thinking_of_the_answer() -> None:
    found = read_conversation(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "channel": "analysis", "content": "hm"},
                {"role": "assistant", "channel": "final", "content": "b"},
            ]
        }
    )
    assert not found.problems
    assert found.messages[1:] == [{"role": "assistant", "content": "b", "thinking": "hm"}]


@pytest.mark.parametrize("call", ["<tool_call>\n{}\n</tool_call>", "[TOOL_CALLS] []", "<|python_tag|>f()", "Action: f"])
def test_a_call_in_the_text_of_a_turn_is_a_call(call: str) -> None:
    turns = [("user", "w"), ("assistant", call), ("tool", "1"), ("tool", "2"), ("assistant", "ok")]
    found = read_conversation({"messages": [{"role": role, "content": text} for role, text in turns]})
    assert not found.problems
    turns[1] = ("assistant", "I will look")
    found = read_conversation({"messages": [{"role": role, "content": text} for role, text in turns]})
    assert [problem.code for problem in found.problems][:1] == ["tool-result-without-call"]


def test_tool_calls_given_as_text_are_opened() -> None:
    calls = '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    found = read_conversation(
        {
            "messages": [
                {"role": "user", "content": "w"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "1", "content": "x"},
                {"role": "assistant", "content": "ok"},
            ]
        }
    )
    assert not found.problems and found.messages[1]["tool_calls"][0]["function"]["name"] == "f"
