"""The child that generates with transformers, on tiny random models: prompts as rendered, limits, four bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from preflight.machine import Machine
from preflight.task import backends
from preflight.task.backends import Request

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

# Like Gemma's: no system turn, no tools, turns must alternate.
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '[' + m.role + '] ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}{{ 'TOOLS ' + tools | tojson + ' ' }}{% endif %}{% for m in messages %}{{ '[' + m.role + '] ' }}"
    "{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name + ' ' }}{% endfor %}{{ (m.content or '') + ' ' }}"
    "{% endfor %}{{ '[assistant] ' }}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama with a character tokenizer, without a chat template."""
    import tokenizers
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    characters = {chr(code): index for index, code in enumerate(range(32, 127))}
    vocabulary = {**characters, "<unk>": 95, "</s>": 96}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    made.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=96, bos_token_id=None, pad_token_id=96,
    )  # fmt: skip
    random_model = transformers.LlamaForCausalLM(config)
    random_model.lm_head.weight.data[96] = 0.0  # never the most likely one: it does not stop by itself
    random_model.save_pretrained(folder)
    return folder


def ask(folder: Path, *requests: Request, template: str | None = None, **job: Any) -> backends.Run:
    path = folder / "chat_template.jinja"
    path.unlink(missing_ok=True)
    if template is not None:
        path.write_text(template)
    given = {"model": str(folder), "device": "cpu", "dtype": "auto", "sample_timeout_s": 60, "debug": True, **job}
    return backends.generate(Machine(), "transformers", sys.executable, given, requests)


def turns(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {}},
}
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"c": 1}}}]},
    {"role": "tool", "name": "get_weather", "content": "7 degrees"},
]


def test_a_base_model_is_asked_in_question_and_answer_form(tiny: Path) -> None:
    run = ask(tiny, Request("k", 5, turns(("system", "Be brief."), ("user", "2+2?"))))
    assert run.trouble == "" and run.load["chat_template"] is False and run.load["dtype"] == "float32"
    reply = run.replies["k"]
    assert reply.rendered == "plain text", reply.error
    assert reply.debug["prompt"] == "Be brief.\n\nQuestion: 2+2?\n\nAnswer:"
    assert reply.new_tokens is not None and reply.new_tokens <= 5 and reply.finish in ("length", "stop")
    assert len(reply.debug["output_ids"]) == reply.new_tokens
    assert len(reply.debug["prompt_ids"]) == reply.prompt_tokens


def test_a_strict_template_gets_one_user_turn_with_everything_in_it(tiny: Path) -> None:
    run = ask(
        tiny,
        Request("plain", 3, turns(("user", "Hi"))),
        Request("system", 3, turns(("system", "Be brief."), ("user", "Hi"))),
        Request("tools", 3, CALLED, tools=[WEATHER]),
        Request("long", 400, turns(("user", "Hi"))),
        template=STRICT_TEMPLATE,
        sample_timeout_s=0.3,
    )
    replies = run.replies
    assert replies["plain"].debug["prompt"] == "[user] Hi [assistant] "
    assert replies["system"].debug["prompt"] == "[user] Be brief.\n\nHi [assistant] "
    assert replies["system"].rendered == "chat template, system text in the user turn"
    told = replies["tools"].debug["prompt"]
    assert "get_weather" in told and "Weather of a city" in told and "7 degrees" in told and told.count("[user]") == 2
    # 400 tokens of this model take longer than 0.3 s: what is there by then is kept.
    assert replies["long"].finish == "time-out" and 0 < (replies["long"].new_tokens or 0) < 400


def test_a_template_that_knows_tools_gets_them_as_they_are(tiny: Path) -> None:
    run = ask(tiny, Request("k", 2, CALLED, tools=[WEATHER]), template=TOOL_TEMPLATE, temperature=1.0, seed=3)
    prompt = run.replies["k"].debug["prompt"]
    assert run.replies["k"].rendered == "chat template with tools"
    assert prompt.startswith("TOOLS [") and "CALL get_weather" in prompt and "[tool] 7 degrees" in prompt
    again = ask(tiny, Request("k", 2, CALLED, tools=[WEATHER]), template=TOOL_TEMPLATE, temperature=1.0, seed=3)
    assert again.replies["k"].output == run.replies["k"].output


def test_four_bits_load_as_qlora_would(tiny: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = ask(tiny, Request("k", 3, turns(("user", "Hi"))), template=STRICT_TEMPLATE, load_in_4bit=True)
    assert run.trouble == "", run.failure
    assert run.load["quantised"] == "nf4" and run.replies["k"].new_tokens is not None
    # The seven linear layers of both blocks in half a byte: well under the 0.5 MB of the float32 model.
    assert run.load["weights_bytes"] < 200_000
