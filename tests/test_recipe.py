"""The recipe: what is written, what its training script trains on, and a real run that is killed and goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import jinja2
import pytest

from preflight.console import UsageError
from preflight.plan import Plan
from preflight.recipe import pins, write_recipe
from preflight.task.example_model import example_model
from preflight.training_data import conversation_of, prompt_key

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "examples" / "smollm2-135m-instruct"
SMALL = Plan(
    method="lora", sequence_tokens=256, micro_batch=2, lora_rank=8, lora_alpha=16, gradient_checkpointing=False
)


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def load(path: Path) -> ModuleType:
    """The generated script as a module; it imports torch only where it trains."""
    spec = importlib.util.spec_from_file_location(f"generated_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A recipe for the shipped small model directory (without weights)."""
    folder = tmp_path_factory.mktemp("recipes") / "mine"
    data = ROOT / "examples" / "judge-train.jsonl"
    write_recipe(folder, str(TOKENIZER), data, SMALL, eval_data=ROOT / "examples" / "judge.jsonl", on_cpu=True)
    return folder


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_files_are_there_and_their_code_passes_ruff(project):
    names = sorted(path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file())
    assert names == [
        "README.md",
        "data/eval.jsonl",
        "data/judge.schema.json",
        "data/train.jsonl",
        "data/valid.jsonl",
        "evaluate.py",
        "requirements.txt",
        "train.py",
        "training_config.yaml",
    ]
    for command in (["check"], ["format", "--check"]):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), "--no-cache", "."],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
    readme = (project / "README.md").read_text(encoding="utf-8")
    for command in ("python -m pip install -r requirements.txt", "python train.py", "python evaluate.py"):
        assert command in readme
    assert "Expected of this plan" in (project / "training_config.yaml").read_text(encoding="utf-8")


def test_a_long_path_of_the_program_still_passes_ruff(project, tmp_path, monkeypatch):
    monkeypatch.setattr("preflight.recipe._home", lambda: Path("/" + "long/" * 40))
    write_recipe(tmp_path / "r", "some/model", ROOT / "examples" / "judge-train.jsonl", SMALL)
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", "."]
    assert subprocess.run(command, cwd=tmp_path / "r", check=False).returncode == 0


def test_no_prompt_lies_on_two_sides(tmp_path):
    records = [chat(f"question {number % 40}", f"answer {number}") for number in range(120)]  # each prompt three times
    write_recipe(tmp_path / "r", "some/model", write_lines(tmp_path / "d.jsonl", records), SMALL)
    train, valid, asked = (read_lines(tmp_path / "r" / "data" / f"{name}.jsonl") for name in ("train", "valid", "eval"))
    assert len(train) == 90 and len(valid) == 30 and len(asked) == 30  # a quarter of 40 prompts, three times each
    prompts = [{prompt_key(record["messages"]) for record in side} for side in (train, valid)]
    assert not prompts[0] & prompts[1]
    assert asked[0]["expected"].startswith("answer ") and [m["role"] for m in asked[0]["messages"]] == ["user"]


def test_what_is_in_the_evaluation_is_not_trained_on(tmp_path):
    train = write_lines(tmp_path / "t.jsonl", [chat(f"What is {n} + 1?", str(n + 1)) for n in range(30)])
    asked = {"messages": [{"role": "user", "content": "What is  3 + 1?\n"}], "scorer": {"type": "numeric", "answer": 4}}
    files = write_recipe(tmp_path / "r", "m/m", train, SMALL, eval_data=write_lines(tmp_path / "e.jsonl", [asked]))
    assert len(files) == 8
    kept = read_lines(tmp_path / "r/data/train.jsonl") + read_lines(tmp_path / "r/data/valid.jsonl")
    assert len(kept) == 29 and all(record["messages"][0]["content"] != "What is 3 + 1?" for record in kept)
    assert read_lines(tmp_path / "r/data/eval.jsonl") == [asked]
    assert "1 x in-evaluation-data" in (tmp_path / "r/README.md").read_text(encoding="utf-8")


def test_bad_records_are_left_out_and_counted(tmp_path):
    data = tmp_path / "d.jsonl"
    good = [json.dumps(chat(f"q{n}", f"a{n}")) for n in range(10)]
    data.write_text(
        "\n".join([*good, "{broken", json.dumps({"messages": [{"role": "user", "content": "open"}]})]) + "\n"
    )
    write_recipe(tmp_path / "r", "m/m", data, SMALL)
    readme = (tmp_path / "r/README.md").read_text(encoding="utf-8")
    assert "1 x no-assistant-turn" in readme and "Left out of the training data" in readme


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"prompt": "p", "completion": "c"}, "c"),
        ({"instruction": "i", "input": "", "output": "o"}, "o"),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "g"),
        ({"messages": [{"role": "user", "content": "u"}], "expected": {"verdict": "yes"}}, '{"verdict": "yes"}'),
        ({"messages": [{"role": "user", "content": "u"}], "scorer": {"type": "numeric", "answer": 7}}, "7"),
    ],
)
def test_conversations_of_any_shape_get_their_answer(record, answer):
    found = conversation_of(record)
    assert not isinstance(found, str)
    assert found[0][-1] == {"role": "assistant", "content": answer}


def test_samples_that_only_name_keywords_are_nothing_to_train_on(tmp_path):
    with pytest.raises(UsageError, match="no conversation with an answer to train on"):
        write_recipe(tmp_path / "r", "m/m", ROOT / "examples" / "questions.jsonl", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_touched(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("kept")
    with pytest.raises(UsageError, match="is not empty"):
        write_recipe(tmp_path / "mine", "m/m", ROOT / "examples" / "judge-train.jsonl", SMALL)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_the_pins_are_those_that_the_sandbox_proved():
    lines, where = pins(Plan(method="qlora"))
    assert (
        "bitsandbytes==0.50.2" in lines and "torch==2.13.0" in lines and any(line.startswith("trl==") for line in lines)
    )
    assert "tested" in where
    section = {"level": "ok", "observed": {"installed": {"torch": "2.14.1+cu126", "transformers": "5.20.0"}}}
    lines, where = pins(Plan(method="lora"), {"sections": {"env_sandbox": section}})
    assert lines[:2] == ["torch==2.14.1", "transformers==5.20.0"] and "sandbox" in where
    assert not any(line.startswith("bitsandbytes") for line in lines)
    broken = {"sections": {"env_sandbox": {**section, "level": "fail"}}}
    assert "torch==2.13.0" in pins(Plan(method="lora"), broken)[0]
    old_card = {"gpu_probe": {"level": "ok", "observed": {"torch_build": {"release": "2.7.1"}}}}
    assert pins(Plan(method="lora"), {"sections": old_card})[0][0] == "torch==2.7.1"


def test_a_machine_without_gpu_gets_a_recipe_for_its_cpu(tmp_path):
    build = {"command": "python -m pip install torch==2.15.0 --index-url https://download.pytorch.org/whl/cpu"}
    record = {
        "sections": {
            "gpu_probe": {"level": "warn", "observed": {"gpu_present": False, "torch_build": build}},
            "model_analyzer": {
                "observed": {"card": {"name": "CPU"}},
                "findings": [{"code": "memory-fit-yes", "what": "LoRA r=8 fits: 1.59 GiB of tensors."}],
            },
        }
    }
    data = ROOT / "examples" / "judge-train.jsonl"
    write_recipe(tmp_path / "r", str(TOKENIZER), data, Plan(method="qlora"), record)
    text = (tmp_path / "r/training_config.yaml").read_text(encoding="utf-8")
    assert "\nuse_cpu: true\n" in text and "\ndtype: float32\n" in text and "load_in_4bit" not in text
    assert "# Judged: LoRA r=8 fits: 1.59 GiB of tensors.\n" in text
    readme = (tmp_path / "r/README.md").read_text(encoding="utf-8")
    assert "`python -m pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu`" in readme
    record["sections"]["model_analyzer"]["observed"]["card"]["name"] = "RTX 4080"  # judged for another machine
    write_recipe(tmp_path / "s", str(TOKENIZER), data, Plan(method="qlora"), record)
    text = (tmp_path / "s/training_config.yaml").read_text(encoding="utf-8")
    assert "\nload_in_4bit: true\n" in text and "use_cpu" not in text


def test_a_card_that_was_named_by_its_size_counts_although_this_machine_has_none(tmp_path):
    record = {
        "sections": {
            "gpu_probe": {"level": "warn", "observed": {"gpu_present": False}},
            "model_analyzer": {"observed": {"card": {"name": None}, "memory": {"budget": {"assumed": True}}}},
        }
    }
    write_recipe(tmp_path / "r", "m/m", ROOT / "examples" / "judge-train.jsonl", Plan(method="qlora"), record)
    text = (tmp_path / "r/training_config.yaml").read_text(encoding="utf-8")
    assert "\nload_in_4bit: true\n" in text and "use_cpu" not in text


@pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch for Linux alone brings CUDA libraries")
def test_requirements_for_a_cpu_name_the_index_of_the_cpu_build_unless_a_wheel_lies_here(tmp_path, monkeypatch):
    data = ROOT / "examples" / "judge-train.jsonl"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    write_recipe(tmp_path / "a", "m/m", data, SMALL, on_cpu=True)
    text = (tmp_path / "a/requirements.txt").read_text(encoding="utf-8")
    assert "\n--extra-index-url https://download.pytorch.org/whl/cpu\ntorch==2.13.0\n" in text
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    write_recipe(tmp_path / "b", "m/m", data, SMALL, on_cpu=True)
    assert "index" not in (tmp_path / "b/requirements.txt").read_text(encoding="utf-8")
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").unlink()
    write_recipe(tmp_path / "c", "m/m", data, SMALL, on_cpu=False)
    assert "index" not in (tmp_path / "c/requirements.txt").read_text(encoding="utf-8")


def test_a_model_without_weights_gets_a_note_that_says_where_to_put_them(project):
    assert "There are no weight files in" in (project / "README.md").read_text(encoding="utf-8")


# --- what is trained on ---------------------------------------------------------------------------------------------


def renderer(template: str):
    """What tokenizers do with a chat template, without a tokenizer."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string(template)

    def render(messages, add_generation_prompt=False):
        return compiled.render(
            messages=messages, add_generation_prompt=add_generation_prompt, eos_token="</s>", bos_token="<s>"
        )

    return render


CHATML = (TOKENIZER / "chat_template.jinja").read_text(encoding="utf-8")
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORCED_THINKING = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}|{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
HIDDEN = "{{ messages | length }} turns: {% for m in messages %}{{ m['content'] }}|{% endfor %}"
TURNS = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second"},
]


def test_every_answer_of_a_conversation_is_found_by_its_template(project):
    train = load(project / "train.py")
    whole, spans = train.answer_spans(renderer(CHATML), TURNS)
    assert [whole[start:end] for start, end in spans] == ["first<|im_end|>\n", "second<|im_end|>\n"]
    special = ["<|im_start|>", "<|im_end|>"]
    kept = [train.without_trailing_space(whole, span, special) for span in spans]
    assert [whole[start:end] for start, end in kept] == ["first<|im_end|>", "second<|im_end|>"]


def test_a_template_that_drops_earlier_thinking_makes_each_answer_a_sample(project):
    train, render = load(project / "train.py"), renderer(THINKING)
    assert train.answer_spans(render, TURNS) is None
    whole, [(start, end)] = train.last_answer_span(render, TURNS)
    assert whole[start:end] == "<think>\n\n</think>\n\nsecond<|im_end|>\n"
    whole, [(start, end)] = train.last_answer_span(render, TURNS[:2])
    assert whole[start:end] == "<think>\n\n</think>\n\nfirst<|im_end|>\n"


def test_a_thinking_block_that_only_the_prompt_opens_is_not_part_of_the_question(project):
    train = load(project / "train.py")
    assert train.answer_spans(renderer(FORCED_THINKING), TURNS) is None
    whole, [(start, end)] = train.last_answer_span(renderer(FORCED_THINKING), TURNS[:2])
    assert whole[start:end] == "first|"


def test_a_template_that_hides_where_the_answer_begins_is_refused(project):
    train = load(project / "train.py")
    with pytest.raises(train.Stop, match="where the answer begins cannot be told"):
        train.last_answer_span(renderer(HIDDEN), TURNS[:2])


class Fast:
    """The example's real tokenizer, with the part of transformers' interface that the script uses."""

    is_fast = True
    all_special_tokens = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def __init__(self) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        self.inner = tokenizers.Tokenizer.from_file(str(example_model() / "tokenizer.json"))

    def __call__(self, text, add_special_tokens=False, return_offsets_mapping=False):
        encoded = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def decode(self, ids):
        return self.inner.decode(ids, skip_special_tokens=False)

    def apply_chat_template(self, messages, tokenize=False, **options):
        return renderer(CHATML)(messages, **options)


class Slow(Fast):
    is_fast = False


@pytest.mark.parametrize("kind", [Fast, Slow])
def test_exactly_the_tokens_of_the_answers_carry_the_loss(project, kind):
    train, tokenizer = load(project / "train.py"), kind()
    turns = [dict(turn) for turn in TURNS]
    turns[1]["content"] = "größer als 日本 🙂"
    [sample] = train.samples_of(tokenizer, {"messages": turns})
    kept = [label for label in sample.labels if label != train.IGNORED]
    assert tokenizer.decode(kept) == "größer als 日本 🙂<|im_end|>second<|im_end|>"
    assert all(label in (train.IGNORED, token) for token, label in zip(sample.input_ids, sample.labels, strict=True))
    assert tokenizer.decode(sample.input_ids) == renderer(CHATML)(turns)


def test_what_is_cut_and_dropped_is_counted(project, tmp_path, capsys):
    train = load(project / "train.py")
    data = write_lines(
        tmp_path / "d.jsonl", [chat("short?", "yes"), chat("long? " * 60, "lost"), chat("short?", "word " * 80)]
    )
    samples, count = train.read_samples(data, Fast(), 64)
    assert len(samples) == 2 and (count["conversations"], count["cut"], count["dropped"]) == (3, 2, 1)
    train.describe("training", samples, count, Fast(), 64)
    assert "carry the loss; 2 cut at 64, 1 dropped" in capsys.readouterr().out
    with pytest.raises(train.Stop, match="raise max_length"):
        train.describe("training", [], count, Fast(), 64)


def test_training_on_everything_is_refused(project):
    train = load(project / "train.py")
    sample = train.Tokenized([1, 2, 3], [1, 2, 3])
    count = {"conversations": 1, "tokens": 3, "trained_tokens": 3, "cut": 0, "dropped": 0}
    with pytest.raises(train.Stop, match="every token would be trained on"):
        train.describe("training", [sample], count, Fast(), 64)


# --- resuming -------------------------------------------------------------------------------------------------------


def test_a_torn_checkpoint_is_not_resumed_from(project, tmp_path):
    train = load(project / "train.py")
    for name, state in (("4", '{"global_step": 4}'), ("8", '{"global_step": 8}'), ("12", '{"global_st'), ("16", None)):
        (tmp_path / f"checkpoint-{name}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(state)
    assert train.last_complete_checkpoint(tmp_path).name == "checkpoint-8"


def test_a_run_with_other_settings_does_not_go_on_from_old_checkpoints(project, tmp_path):
    train = load(project / "train.py")
    assert train.checkpoint_to_resume(tmp_path, {"seed": 42, "max_length": 256}, False) is None
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4}')
    resumed = train.checkpoint_to_resume(tmp_path, {"seed": 42, "max_length": 256}, False)
    assert resumed == str(tmp_path / "checkpoint-4")
    with pytest.raises(train.Stop, match=r"other settings \(max_length\)"):
        train.checkpoint_to_resume(tmp_path, {"seed": 42, "max_length": 512}, False)
    assert train.checkpoint_to_resume(tmp_path, {"seed": 42, "max_length": 512}, True) is None
    assert not (tmp_path / "checkpoint-4").exists()


# --- before and after -----------------------------------------------------------------------------------------------


def test_before_and_after_are_compared_sample_by_sample(project):
    evaluate = load(project / "evaluate.py")
    # Exact McNemar by hand: 7 of 7 changed samples gained: 2 / 2**7; 3 and 1: 2 * (1 + 4) / 2**4.
    assert evaluate.p_value(7, 0) == 2 / 128
    assert evaluate.p_value(3, 1) == 0.625
    assert evaluate.p_value(0, 0) is None
    before, after = {"a": True, "b": False, "c": False, "x": True}, {"a": False, "b": True, "c": True, "y": True}
    assert evaluate.compare(before, after) == {
        "samples": 3,
        "right_before": 1,
        "right_after": 2,
        "gained": 2,
        "lost": 1,
        "p_value": 1.0,
    }


def test_evaluating_before_training_says_what_to_do(project):
    ended = subprocess.run([sys.executable, "evaluate.py"], cwd=project, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "run `python train.py` first" in ended.stderr


# --- a real run -----------------------------------------------------------------------------------------------------

SAME_MODEL = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, outputs = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(outputs + "/merged")
ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
with torch.no_grad():
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = untouched(ids).logits
    adapted = PeftModel.from_pretrained(untouched, outputs + "/adapter").eval()(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(outputs + "/merged", dtype=torch.float32)(ids).logits
print((adapted - merged).abs().max().item(), (before - merged).abs().max().item())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_learns_survives_kill_9_goes_on_merges_and_is_better_afterwards(tmp_path):
    for needed in ("trl", "peft", "torch"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    model, project = str(example_model()), tmp_path / "recipe"
    examples = ROOT / "examples"
    write_recipe(project, model, examples / "judge-train.jsonl", SMALL, eval_data=examples / "judge.jsonl", on_cpu=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    steps = ["--max_steps", "12", "--save_steps", "4", "--eval_strategy", "no", "--logging_steps", "1"]
    steps += ["--gradient_accumulation_steps", "1", "--learning_rate", "0.001"]

    def run(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
        return ended.stdout

    # killed in the middle of the second third
    with (tmp_path / "killed.log").open("w") as log:
        killed = subprocess.Popen(
            [sys.executable, "train.py", *steps], cwd=project, env=environment, stdout=log, stderr=log
        )
        limit = time.monotonic() + 500
        while not (project / "outputs/checkpoint-4/trainer_state.json").exists():
            assert killed.poll() is None and time.monotonic() < limit, (tmp_path / "killed.log").read_text()[-3000:]
            time.sleep(0.05)
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait(30) == -signal.SIGKILL
    assert not (project / "outputs/merged").exists()
    (project / "outputs/checkpoint-11").mkdir()  # as if it had died while writing a checkpoint

    said = run("train.py", *steps)
    assert "checkpoint-11 is incomplete" in said and "resuming from checkpoint-" in said
    assert "of them are answers and carry the loss" in said and '{"verdict": ' in said
    summary = json.loads((project / "outputs/run.json").read_text())
    assert summary["steps"] == 12 and summary["resumed_from"] in ("checkpoint-4", "checkpoint-8")
    # q, k, v, o, gate, up, down of 30 layers, r=8: 30 * 8 * (2*(576+576) + 2*(576+192) + 3*(576+1536))
    assert summary["trainable_parameters"] == 2_442_240
    losses = summary["losses"]
    assert len(losses) == 12  # those from before the kill are in the checkpoint
    assert sum(losses[-3:]) / 3 < 0.5 * losses[0]
    # Where both runs trained the same steps, they saw the same batches and gave the same losses.
    before = [
        float(line.split("loss ")[1].split(",")[0])
        for line in (tmp_path / "killed.log").read_text().splitlines()
        if line.startswith("step ")
    ]
    assert len(before) >= 4
    assert losses[: len(before)] == pytest.approx(before, abs=0.02)

    adapted_to_merged, untouched_to_merged = map(float, run("-c", SAME_MODEL, model, str(project / "outputs")).split())
    assert adapted_to_merged < 1e-3 < 0.1 < untouched_to_merged

    said = run("evaluate.py")
    assert "right before: " in said and "right after: " in said
    compared = json.loads((project / "outputs/evaluation.json").read_text())["compared"]
    assert compared["samples"] == 10
    assert compared["right_after"] > compared["right_before"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_its_requirements_install_into_a_fresh_environment_and_train_there(tmp_path):
    project, venv = tmp_path / "recipe", tmp_path / "venv"
    data = write_lines(tmp_path / "d.jsonl", [chat(f"Say {n}", f"It is {n}.") for n in range(12)])
    write_recipe(project, str(example_model()), data, SMALL, on_cpu=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    python = str(venv / ("Scripts" if os.name == "nt" else "bin") / "python")
    for command in (
        ["-m", "pip", "install", "-q", "-r", "requirements.txt"],
        ["train.py", "--max_steps", "1", "--gradient_accumulation_steps", "1", "--eval_strategy", "no"],
    ):
        ended = subprocess.run([python, *command], cwd=project, capture_output=True, text=True, timeout=500)
        assert ended.returncode == 0, ended.stderr[-2000:]
    summary = json.loads((project / "outputs/run.json").read_text())
    assert summary["steps"] == 1 and (project / "outputs/merged/config.json").is_file()


TINY = """
import sys, torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
source, target = sys.argv[1:]
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
tokens = dict(vocab_size=49152, bos_token_id=1, eos_token_id=2, pad_token_id=2)
config = LlamaConfig(tie_word_embeddings=True, **tokens, **sizes)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.chat_template = None  # a base model: the script brings a plain template and saves it
tokenizer.save_pretrained(target)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_bits_and_full_fine_tuning_run_too_and_a_base_model_gets_a_template(tmp_path):
    for needed in ("trl", "peft", "torch", "bitsandbytes"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(folder: Path, *arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
        )
        assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
        return ended.stdout

    tiny = tmp_path / "tiny"
    run(tmp_path, "-c", TINY, str(example_model()), str(tiny))
    data = ROOT / "examples" / "judge-train.jsonl"
    for plan in (
        Plan(method="qlora", sequence_tokens=128, micro_batch=2, lora_rank=4),
        Plan(method="full", sequence_tokens=128, micro_batch=2, weight_dtype="fp32", autocast="bf16"),
    ):
        project = tmp_path / plan.method
        write_recipe(project, str(tiny), data, plan)
        said = run(project, "train.py", "--use_cpu", "--max_steps", "2", "--eval_strategy", "no")
        assert "the model has no chat template: a plain one is used" in said
        assert 'trained on in the first sample: \'{"verdict": ' in said and "note: " not in said
        merged = project / "outputs" / "merged"
        assert "### Assistant:" in (merged / "chat_template.jinja").read_text(encoding="utf-8")
        assert "quantization_config" not in json.loads((merged / "config.json").read_text(encoding="utf-8"))
        assert (project / "outputs" / "adapter").exists() == plan.adapters
