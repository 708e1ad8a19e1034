"""The odd tokenizers of tests/wild/C-template, each through the command line. Texts are transformers 5.24's."""

import json
from pathlib import Path

from sections import finding, section_of

import model_analyzer
from preflight.machine import Machine

CASES = Path(__file__).parent / "wild" / "C-template"


def analyse(case, capsys):
    """The section as `model_analyzer.py CASE --json` prints it."""
    return section_of(model_analyzer.main, [str(CASES / case)], capsys)


def test_c01_a_list_of_named_templates(capsys):
    section = analyse("C01-template-list", capsys)
    seen = section["observed"]["tokenizer"]
    assert section["level"] == "ok"
    finding(section, "multiple-templates")
    assert seen["template_names"] == ["default", "rag", "tool_use"]
    assert (seen["used_without_tools"], seen["used_with_tools"]) == ("default", "tool_use")
    assert seen["system_role"] == "supported"
    assert seen["renders"]["system+user+assistant"] == (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Answer in JSON.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|ASSISTANT_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
    )


def test_c02_a_base_model_without_template(capsys):
    section = analyse("C02-no-template-base-model", capsys)
    assert section["level"] == "warn"
    said = finding(section, "no-chat-template")
    assert section["observed"]["tokenizer"]["has_template"] is False
    assert section["observed"]["tokenizer"]["renders"] == {}
    assert "Instruct" in said["fix"][0]


def test_c03_a_template_that_lives_in_its_own_file(capsys):
    section = analyse("C03-jinja-file-only", capsys)
    seen = section["observed"]["tokenizer"]
    assert section["level"] == "ok"
    assert seen["has_template"] is True and seen["template_source"] == "chat_template.jinja"
    assert seen["system_role"] == "supported" and seen["generation_prompt"] is True
    assert seen["renders"]["system+user+assistant+generation_prompt"] == (
        "<|im_start|>system\nAnswer in JSON.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_c04_a_template_that_refuses_system_messages(capsys):
    section = analyse("C04-raises-on-system", capsys)
    seen = section["observed"]["tokenizer"]
    assert section["level"] == "warn"
    said = finding(section, "system-role-unsupported")
    assert seen["system_role"] == "raises" and seen["alternation_required"] is True
    assert seen["assistant_role_rendered_as"] == "model"
    assert seen["render_errors"]["system+user"] == "jinja2.TemplateError: System role not supported"
    assert seen["render_errors"]["user+user"] == (
        "jinja2.TemplateError: Conversation roles must alternate user/assistant/user/assistant/..."
    )
    assert seen["renders"]["user+assistant"] == (
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n{}<end_of_turn>\n"
    )
    assert "first user message" in said["fix"][0] and "data_preprocessor" in said["fix"][0]


def test_c05_a_missing_endif(capsys):
    section = analyse("C05-syntax-error", capsys)
    seen = section["observed"]["tokenizer"]
    assert section["level"] == "fail"
    said = finding(section, "template-syntax-error")
    assert seen["has_template"] is True and seen["compiles"] is False
    assert seen["error"] == (
        "jinja2.TemplateSyntaxError: Encountered unknown tag 'endfor'. You probably made a nesting mistake. Jinja is "
        "expecting this tag, but currently looking for 'elif' or 'else' or 'endif'. The innermost block that needs to "
        "be closed is 'if'."
    )
    assert "endif" in said["fix"][0]


def test_c06_what_only_transformers_environment_can_render(capsys):
    section = analyse("C06-needs-transformers-jinja-env", capsys)
    seen = section["observed"]["tokenizer"]
    assert section["level"] == "ok"
    assert seen["compiles_in_transformers"] is True and seen["system_role"] == "supported"
    assert seen["plain_jinja2_error"] == (
        "TemplateSyntaxError: Encountered unknown tag 'continue'. Jinja was looking for the following tags: 'elif' or "
        "'else' or 'endif'. The innermost block that needs to be closed is 'if'."
    )
    assert seen["renders"]["user+assistant"] == '<s><|user|>"Hi"<|assistant|>"{}"|4'


def test_c06_keeps_chinese_text_as_it_is(tmp_path):
    """The conversation of the case itself, through the same child's environment."""
    case = json.loads((CASES / "C06-needs-transformers-jinja-env" / "case.json").read_text(encoding="utf-8"))
    template = json.loads(
        (CASES / "C06-needs-transformers-jinja-env" / "tokenizer_config.json").read_text(encoding="utf-8")
    )["chat_template"]
    script = tmp_path / "render.py"
    script.write_text(
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('child', sys.argv[1])\n"
        "child = importlib.util.module_from_spec(spec); spec.loader.exec_module(child)\n"
        "job = json.loads(sys.argv[2])\n"
        "made = child.environment().from_string(job['template'])\n"
        "text = child.render(made, job['messages'], False, None, {'bos_token': '<s>'})\n"
        "sys.stdout.buffer.write(text.encode('utf-8'))\n",
        encoding="utf-8",
    )
    import sys

    import preflight.children

    child = Path(preflight.children.__path__[0], "render_template.py")
    renders = case["expected"]["renders"]
    job = json.dumps({"template": template, "messages": renders["messages"]})
    answer = Machine().run([sys.executable, str(script), str(child), job])
    assert answer.text == '<s><|user|>"价格 \\"5\\""<|assistant|>"好"|4'
