"""The preprocessor: what it writes, what it leaves out, and what survives sudden ends."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data_preprocessor
from preflight.console import UsageError
from preflight.data.packing import packing, percentile
from preflight.data.personal_data import personal_data
from preflight.data.prepare import near_text
from preflight.data.strict_instruction import strict_instruction

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def save(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def load(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = data_preprocessor.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def sentence(random_: random.Random, words: int) -> str:
    return " ".join("".join(random_.choices("abcdefghijklmnop", k=random_.randint(3, 8))) for _ in range(words))


# ---------------------------------------------------------------------------------------------------------------------
# Duplicates and split


def test_duplicates_are_told_from_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_ = random.Random(1)
    template = (
        "Decide whether this review is positive or negative. Answer with one word and do not explain it. Review: "
    )
    templated = [chat(template + sentence(random_, 8), random_.choice(["yes", "no"])) for _ in range(200)]
    base = [chat(sentence(random_, 60), sentence(random_, 40)) for _ in range(100)]
    exact = [{**record, "id": 7} for record in base[:5]]
    louder = [
        chat(record["messages"][0]["content"].upper() + " .", record["messages"][1]["content"]) for record in base[5:10]
    ]
    near = []
    for record in base[10:15]:
        words = record["messages"][0]["content"].split()
        near.append(chat(" ".join([*words[:30], "zzz", *words[31:]]), record["messages"][1]["content"]))
    other_answer = [chat(record["messages"][0]["content"], sentence(random_, 30)) for record in base[15:20]]
    file = save(tmp_path / "d.jsonl", [*templated, *base, *exact, *louder, *near, *other_answer])
    code, document = run(capsys, str(file), "--out", str(tmp_path / "out.jsonl"))
    found = document["observed"]["duplicates"]
    assert (found["exact"], found["same_words"], found["near"]) == (5, 5, 5)
    pairs = {(pair["line"], pair["same_as_line"]) for pair in found["pairs"]}
    assert pairs == {(300 + n, 200 + n) for n in range(1, 16)}
    assert document["observed"]["same_prompt_other_answer"] == 5
    assert load(tmp_path / "out.jsonl") == [*templated, *base, *other_answer]
    aside = load(tmp_path / "out.set-aside.jsonl")
    assert [entry["line"] for entry in aside] == list(range(301, 316))
    assert code == 0


def test_nothing_is_left_to_find_in_what_was_cleaned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_ = random.Random(6)
    words = [sentence(random_, 1) for _ in range(400)]
    base = [" ".join(random_.choices(words, k=40)) for _ in range(40)]
    records = []
    for _ in range(300):
        question = random_.choice(base).split()
        for _ in range(random_.randint(0, 3)):
            question[random_.randrange(40)] = random_.choice(words)
        records.append(chat("Please answer shortly: " + " ".join(question), random_.choice(["yes", "no"])))
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    _, first = run(capsys, str(save(tmp_path / "d.jsonl", records)), "--out", str(one))
    _, second = run(capsys, str(one), "--out", str(two))
    assert first["observed"]["duplicates"]["near"] > 20 and second["observed"]["duplicates"]["near"] == 0
    assert one.read_bytes() == two.read_bytes()


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=127), max_size=40))
def test_words_of_ascii_are_those_of_any_text(text: str) -> None:
    assert near_text(text) + " \u00e9".encode() == near_text(text + " \u00e9").strip() or not near_text(text)


def test_numbers_and_short_answers_tell_records_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "the quick brown fox jumps over the lazy dog while the cat sleeps in the warm afternoon sun " * 3
    records = [chat(f"{text} item {n}", "same") for n in (1, 2)] + [chat(text, "yes"), chat(f"{text} indeed", "no")]
    _, document = run(capsys, str(save(tmp_path / "d.jsonl", records)))
    assert document["observed"]["duplicates"]["near"] == 0
    assert document["observed"]["kept_rows"] == 4


def test_duplicates_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(tmp_path / "d.jsonl", [chat("q", "a"), chat("q", "a"), chat("Q", "A")])
    _, document = run(capsys, str(file), "--duplicates", "report", "--near-duplicates", "report")
    assert document["observed"]["kept_rows"] == 3
    assert document["observed"]["duplicates"]["exact"] == 1 and document["observed"]["duplicates"]["same_words"] == 1


def test_a_split_leaks_no_prompt_and_does_not_depend_on_the_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_ = random.Random(2)
    prompts = [sentence(random_, 5) for _ in range(100)]
    records = [chat(prompts[n % 100], sentence(random_, 4)) for n in range(300)]
    run(capsys, str(save(tmp_path / "d.jsonl", records)), "--out", str(tmp_path / "one"), "--test-share", "0.2")
    run(capsys, str(save(tmp_path / "e.jsonl", records[::-1])), "--out", str(tmp_path / "two"), "--test-share", "0.2")
    train, test = load(tmp_path / "one" / "train.jsonl"), load(tmp_path / "one" / "test.jsonl")
    assert len(train) + len(test) == 300 and 50 <= len(test) <= 60
    asked = [{record["messages"][0]["content"] for record in side} for side in (train, test)]
    assert not asked[0] & asked[1]
    assert {record["messages"][0]["content"] for record in load(tmp_path / "two" / "test.jsonl")} == asked[1]


def test_a_column_can_hold_records_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [chat(f"q{n}", "a", document=n % 10) for n in range(100)]
    arguments = [
        "--out",
        str(tmp_path / "o"),
        "--test-share",
        "0.3",
        "--group-by",
        "document",
        "--keep-columns",
        "document",
    ]
    run(capsys, str(save(tmp_path / "d.jsonl", records)), *arguments, "--near-duplicates", "off")
    sides = [{record["document"] for record in load(tmp_path / "o" / name)} for name in ("train.jsonl", "test.jsonl")]
    assert not sides[0] & sides[1] and len(sides[1]) == 3


# ---------------------------------------------------------------------------------------------------------------------
# Strict JSON answers


def test_answers_are_held_to_the_schema_and_the_instruction_is_added_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "s.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    records = [
        chat("1", '{"a": 1}'),
        chat("2", 'Sure:\n```json\n{"a": 2}\n```'),
        chat("3", '{"a": "3"}'),
        chat("4", '{"a": 4}{"a": 5}'),
        chat("5", "no json"),
    ]
    file = save(tmp_path / "d.jsonl", records)
    _, document = run(capsys, str(file), "--schema", str(schema), "--out", str(tmp_path / "o.jsonl"))
    written = load(tmp_path / "o.jsonl")
    assert [record["messages"][-1]["content"] for record in written] == ['{"a": 1}', '{"a": 2}']
    assert document["observed"]["changes"]["target-rewritten-as-json"] == 1
    problems = document["observed"]["problem_counts"]
    assert problems == {"target-schema-mismatch": 1, "target-multiple-json-values": 1, "target-no-json": 1}
    system = written[0]["messages"][0]
    assert system["role"] == "system" and json.dumps(SCHEMA, separators=(",", ":")) in system["content"]
    run(capsys, str(tmp_path / "o.jsonl"), "--schema", str(schema), "--out", str(tmp_path / "again.jsonl"))
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "o.jsonl").read_bytes()


@pytest.mark.parametrize("turn", ["system", "user"])
@pytest.mark.parametrize("named", [None, "Answer"])
def test_the_instruction_stands_once_however_often_it_is_added(turn: str, named: str | None) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    instruction = strict_instruction(SCHEMA, turn, named)
    assert instruction.add_to(messages) is True
    once = json.dumps(messages)
    assert instruction.add_to(messages) is False and json.dumps(messages) == once
    newer = strict_instruction({"type": "array"}, turn, named and "Other")
    assert newer.add_to(messages) is True
    assert once.count("one JSON value") == json.dumps(messages).count("one JSON value") == 1
    assert messages[0]["content"].startswith("Be brief.")


# ---------------------------------------------------------------------------------------------------------------------
# The same bytes, all of them, or none


def test_one_process_and_several_write_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preflight.data.spool.PIECE_BYTES", 50_000)
    random_ = random.Random(3)
    lines = [json.dumps(chat(sentence(random_, 30), sentence(random_, 30))) for _ in range(600)]
    lines[100] = lines[50]
    lines[200] = '{"messages": [{"role": "us'
    lines[300] = ""
    lines[400] = json.dumps({"messages": []})
    file = tmp_path / "d.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    documents = []
    for workers in ("1", "2"):
        _, document = run(capsys, str(file), "--workers", workers, "--out", str(tmp_path / f"{workers}.jsonl"))
        documents.append(document)
        assert document["observed"]["bad_lines"] == [201]
        assert document["observed"]["rows"] == 598 and document["observed"]["problems"] == {"400": "no messages"}
    for name in ("{}.jsonl", "{}.set-aside.jsonl"):
        assert (tmp_path / name.format(1)).read_bytes() == (tmp_path / name.format(2)).read_bytes()
    for document in documents:
        del document["observed"]["written"]
        document["findings"] = [f for f in document["findings"] if f["code"] != "written"]
    assert documents[0] == documents[1]


texts = st.sampled_from(
    ["a", "A", "a.", "hello world", '```json\n{"a": 1}\n```', '{"a": 2}', "x\r\ny", "\u4f60\u597d ", "", "  "]
)
any_record = st.one_of(
    st.builds(chat, texts, texts),
    st.builds(lambda q, a: {"instruction": q, "input": "", "output": a}, texts, texts),
    st.builds(
        lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}, texts, texts
    ),
    st.builds(lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b}, texts, texts, texts),
    st.builds(lambda t: {"text": t}, texts),
    st.just({"foo": 1}),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(any_record, min_size=1, max_size=12),
    flags=st.sampled_from([[], ["--schema"], ["--format", "prompt-completion"]]),
)
def test_preprocessing_twice_gives_the_same_bytes_as_once(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], records: list[Any], flags: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("t")
    if flags == ["--schema"]:
        (folder / "s.json").write_text('{"type": "object"}', encoding="utf-8")
        flags = ["--schema", str(folder / "s.json")]
    one, two = folder / "one.jsonl", folder / "two.jsonl"
    run(capsys, str(save(folder / "d.jsonl", records)), "--out", str(one), *flags)
    if one.stat().st_size:
        run(capsys, str(one), "--out", str(two), *flags)
        assert two.read_bytes() == one.read_bytes()
        assert not (folder / "two.set-aside.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_killed_run_leaves_the_old_or_the_complete_new_output(tmp_path: Path, form: str) -> None:
    random_ = random.Random(4)
    old = save(tmp_path / "old.jsonl", [chat("old", "old")])
    new = save(tmp_path / "new.jsonl", [chat(sentence(random_, 40), sentence(random_, 40)) for _ in range(4000)])
    target = tmp_path / ("out.jsonl" if form == "file" else "out")
    script = [sys.executable, str(ROOT / "data_preprocessor.py")]
    more = ["--out", str(target), "--workers", "2"] + (["--test-share", "0.5"] if form == "folder" else [])

    def state() -> dict[str, str]:
        files = [target] if form == "file" else sorted(target.iterdir())
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    began = time.monotonic()
    subprocess.run([*script, str(new), *more], check=True, capture_output=True)
    whole_s = time.monotonic() - began
    new_state = state()
    subprocess.run([*script, str(old), *more], check=True, capture_output=True)
    old_state = state()
    assert new_state != old_state
    seen = Counter()
    for attempt in range(10):
        process = subprocess.Popen([*script, str(new), *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # Most kills near the end, where files are put in place.
        share = random_.random() if attempt % 2 else 0.7 + 0.4 * random_.random()
        time.sleep(whole_s * share)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = state()
        assert found in (old_state, new_state)
        seen["new" if found == new_state else "old"] += 1
        subprocess.run([*script, str(old), *more], check=True, capture_output=True)
        assert state() == old_state
        assert [item.name for item in tmp_path.iterdir() if ".part-" in item.name] == [], "left-overs are removed"
    assert sum(seen.values()) == 10


@pytest.mark.skipif(os.name != "posix", reason="resource limits")
def test_a_full_disk_is_one_line_and_leaves_the_old_output(tmp_path: Path) -> None:
    file = save(tmp_path / "d.jsonl", [chat("q" * 5000, f"a{n}") for n in range(100)])
    out = save(tmp_path / "o.jsonl", [chat("old", "old")])
    before = out.read_bytes()
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000)); "
    limited += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = str(ROOT / "data_preprocessor.py")
    command = [sys.executable, "-c", limited, script, str(file), "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "nothing was written" in ended.stderr
    assert out.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["d.jsonl", "o.jsonl"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, {130}), (signal.SIGTERM, {143, -15})])
def test_an_interrupted_run_cleans_up(tmp_path: Path, number: signal.Signals, codes: set[int]) -> None:
    text = sentence(random.Random(5), 100)
    file = save(tmp_path / "d.jsonl", [chat(f"{n} {text}", f"{text} {n}") for n in range(9000)])
    out = tmp_path / "o.jsonl"
    command = [sys.executable, str(ROOT / "data_preprocessor.py"), str(file), "--out", str(out), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not list(tmp_path.glob(".o.jsonl.part-*")):
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in codes or out.exists(), errors.decode()
    assert b"Traceback" not in errors, errors.decode()
    assert list(tmp_path.glob(".o.jsonl.part-*")) == []


def test_the_input_is_never_touched_or_swallowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(tmp_path / "d.jsonl", [chat("q", "a")])
    for out in (file, tmp_path):
        with pytest.raises(UsageError, match="input"):
            data_preprocessor.main([str(file), "--out", str(out)])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="holds other files"):
        data_preprocessor.main([str(file), "--out", str(foreign)])
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    with pytest.raises(UsageError, match="input"):
        data_preprocessor.main([str(file), "--out", str(link)])
    assert load(file) == [chat("q", "a")]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--test-share", "1.5"], "--test-share 1.5"),
        (["--max-tokens", "10"], "--tokenizer"),
        (["--role-map", "x=boss"], "--role-map x=boss"),
        (["--out", "o.jsonl", "--test-share", "0.1"], "folder"),
        (["--out", "/nowhere/at/all.jsonl"], "does not exist"),
        (["--tokenizer", "/nowhere"], "no such folder"),
        (["--similarity", "0.1"], "--similarity 0.1"),
    ],
)
def test_bad_usage_names_the_flag(tmp_path: Path, flags: list[str], part: str) -> None:
    file = save(tmp_path / "d.jsonl", [chat("q", "a")])
    with pytest.raises(UsageError) as caught:
        data_preprocessor.main([str(file), *flags])
    assert part in str(caught.value)


def test_what_is_no_data_is_a_fail_with_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    code, document = run(capsys, str(tmp_path / "d.jsonl"))
    assert code == 1 and document["findings"][0]["code"] == "git-lfs-pointer"
    assert "git lfs pull" in document["findings"][0]["fix"][0]


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of output


def test_kinds_of_records_are_not_mixed_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    file = save(tmp_path / "d.jsonl", [pair, {**pair, "prompt": "r"}, chat("q", "a")])
    _, document = run(capsys, str(file), "--out", str(tmp_path / "o.jsonl"))
    assert load(tmp_path / "o.jsonl")[0] == {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    assert document["observed"]["other_shape_rows"] == 1
    (entry,) = load(tmp_path / "o.set-aside.jsonl")
    assert entry["line"] == 3 and entry["reasons"][0].startswith("other-shape")


@pytest.mark.parametrize(
    ("record", "code"), [({"foo": 1}, "unknown-shape"), ({"input_ids": [1], "labels": [1]}, "already-tokenised")]
)
def test_records_without_a_known_shape_are_a_fail_that_says_what_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: Any, code: str
) -> None:
    exit_code, document = run(capsys, str(save(tmp_path / "d.jsonl", [record])))
    levels = {finding["code"]: finding["level"] for finding in document["findings"]}
    assert exit_code == 1 and levels[code] == "fail" and levels["no-usable-rows"] == "fail"


def test_prompt_and_completion_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(tmp_path / "d.jsonl", [chat("q", "a")])
    run(capsys, str(file), "--out", str(tmp_path / "o.jsonl"), "--format", "prompt-completion")
    assert load(tmp_path / "o.jsonl") == [
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    ]


def test_tool_arguments_are_written_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    record = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    }
    file = save(tmp_path / "d.jsonl", [record])
    for form, wanted in (("keep", '{"x": 1}'), ("object", {"x": 1}), ("text", '{"x": 1}')):
        run(capsys, str(file), "--out", str(tmp_path / "o.jsonl"), "--tool-arguments", form)
        (written,) = load(tmp_path / "o.jsonl")
        assert written["messages"][1]["tool_calls"][0]["function"]["arguments"] == wanted


# ---------------------------------------------------------------------------------------------------------------------
# Personal data, packing


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("write to ann.lee@example.org today", {"email"}),
        ("card 4111 1111 1111 1111 please", {"payment_card"}),
        ("number 4111 1111 1111 1112 is none", set()),
        ("IBAN DE89 3704 0044 0532 0130 00.", {"iban"}),
        ("call +49 30 1234 5678", {"phone"}),
        ("call (555) 123-4567 now", {"phone"}),
        ("SSN 123-45-6789", {"us_social_security"}),
        ("from 8.8.8.8 and 192.168.0.1", {"ip_address"}),
        ("at 192.168.0.1 or version 1.2.3.4000", set()),
        ("key hf_abcdefghijklmnopqrstuvwx", {"secret"}),
        ("on 2024-01-02 10:20 we saw 1234567890 things for 19.99", set()),
        ("pi is 3.14159265358979", set()),
    ],
)
def test_personal_data_is_found_by_checked_forms(text: str, kinds: set[str]) -> None:
    assert personal_data(text) == kinds


def test_personal_data_is_counted_by_line_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(tmp_path / "d.jsonl", [chat("q", "a"), chat("who?", "ann.lee@example.org")])
    _, document = run(capsys, str(file))
    assert document["observed"]["personal_data_lines"] == {"email": [2]}
    assert "ann.lee" not in json.dumps(document)


def test_packing_by_hand() -> None:
    # 60+40 fill one sequence of 100, 50+50 another, 30+20+10 a third.
    found = packing(Counter({60: 1, 40: 1, 50: 2, 30: 1, 20: 1, 10: 1}), 100)
    assert (found.samples, found.sequences) == (7, 3)
    assert found.filled == pytest.approx(260 / 300, abs=1e-4) and found.filled_unpacked == pytest.approx(
        260 / 700, abs=1e-4
    )
    assert packing(Counter({100: 3}), 100).sequences == 3
    assert packing(Counter({10: 1000}), 100).sequences == 100
    assert packing(Counter({250: 2}), 100).sequences == 2
    assert percentile(Counter({1: 95, 2: 4, 9: 1}), 0.95) == 1 and percentile(Counter({1: 95, 2: 4, 9: 1}), 0.99) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Tokens

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[A] {% generation %}{{ m.content }} [END]{% endgeneration %} "
    "{% else %}[{{ m.role[0] | upper }}] {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[A] {% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A model directory whose tokenizer makes one token a word."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[A]": 1, "[END]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_tokens_are_counted_with_the_real_tokenizer_and_template(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    # [U] one two [A] three [END]: 6 tokens, of which `three [END]` are trained on.
    records = [chat("one two", "three"), chat("one two four five", "three four five six")]
    code, document = run(
        capsys, str(save(tmp_path / "d.jsonl", records)), "--tokenizer", str(tokenizer), "--python", sys.executable
    )
    tokens = document["observed"]["tokens"]
    assert tokens["trouble"] is None
    assert (tokens["samples"], tokens["tokens"], tokens["p50"], tokens["max"]) == (2, 6 + 11, 6, 11)
    assert tokens["trained_tokens"] == 2 + 5
    assert tokens["trained_share"] == pytest.approx(7 / 17, abs=1e-4)
    assert [(run["trained"], run["tokens"], run["text"].strip()) for run in tokens["label_mask"]] == [
        (False, 4, "[U] one two [A]"),
        (True, 2, "three [END]"),
    ]
    assert tokens["assistant_mask"] == {"mask_tokens": 2, "answer_tokens": 2, "tokens": 6}
    assert tokens["per_turn"]["user"] == {"p50": 2, "p95": 4, "max": 4}
    levels = {finding["code"]: finding["level"] for finding in document["findings"]}
    assert levels["assistant-mask"] == "ok" and code == 0


def test_over_long_samples_lose_old_exchanges_or_are_set_aside(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    long_chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "old " * 10},
            {"role": "assistant", "content": "old " * 10},
            {"role": "user", "content": "new"},
            {"role": "assistant", "content": "answer"},
        ]
    }
    records = [chat("q", "a"), long_chat, chat("word " * 50, "a")]
    file = save(tmp_path / "d.jsonl", records)
    out = tmp_path / "o.jsonl"
    arguments = [
        str(file),
        "--tokenizer",
        str(tokenizer),
        "--python",
        sys.executable,
        "--max-tokens",
        "12",
        "--out",
        str(out),
    ]
    _, document = run(capsys, *arguments, "--over-long", "truncate")
    assert [[m["content"] for m in record["messages"]] for record in load(out)] == [["q", "a"], ["s", "new", "answer"]]
    assert (
        document["observed"]["tokens"]["over_long_rows"] == 2 and document["observed"]["tokens"]["truncated_rows"] == 1
    )
    # [S] s [U] new [A] answer [END]
    assert document["observed"]["tokens"]["max"] == 7
    run(capsys, *arguments)
    assert len(load(out)) == 1
    assert [entry["line"] for entry in load(tmp_path / "o.set-aside.jsonl")] == [2, 3]


def test_a_template_without_marks_for_answers_is_said(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    file = tokenizer / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    file.write_text(json.dumps({**config, "chat_template": plain}), encoding="utf-8")
    _, document = run(
        capsys,
        str(save(tmp_path / "d.jsonl", [chat("one", "two")])),
        "--tokenizer",
        str(tokenizer),
        "--python",
        sys.executable,
    )
    assert document["observed"]["tokens"]["trained_tokens"] == 2, "found by rendering each turn"
    (finding,) = [finding for finding in document["findings"] if finding["code"] == "no-assistant-mask"]
    assert finding["level"] == "warn" and "prompt-completion" in finding["fix"][0]


def test_a_folder_without_a_tokenizer_is_unknown_and_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "empty").mkdir()
    file = save(tmp_path / "d.jsonl", [chat("q", "a")])
    code, document = run(capsys, str(file), "--tokenizer", str(tmp_path / "empty"), "--python", sys.executable)
    (finding,) = [finding for finding in document["findings"] if finding["code"] == "tokens-not-counted"]
    assert finding["level"] == "unknown" and code == 3
    assert "tokens" not in (document["observed"]["tokens"] or {})


# ---------------------------------------------------------------------------------------------------------------------
# Speed, memory, words


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from preprocess_throughput import generate, measure
    finally:
        sys.path.pop(0)
    generate(tmp_path / "d.jsonl", 40)
    script = [sys.executable, str(ROOT / "data_preprocessor.py"), str(tmp_path / "d.jsonl"), "--workers", "2"]
    seconds, peak_bytes, code = measure([*script, "--out", str(tmp_path / "o.jsonl")])
    assert code == 0
    assert peak_bytes < 500 << 20
    assert seconds < 300


def test_every_warn_and_fail_has_a_why_a_fix_and_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps(record)
        for record in [
            chat("q", "a"), chat("q", "a"), chat("q", "b"), chat("x", ""), {"foo": 1}, {"text": "plain"},
            {"messages": [{"role": "bing", "content": "a"}]}, chat("caf\u00c3\u00a9 na\u00c3\u00afve", "a"),
            {"messages": [*chat("e", "f")["messages"], {"role": "user", "content": "g"}]},
            {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "1"}]},
            chat("ann@example.org", "a"),
        ]
    ]  # fmt: skip
    lines += ['{"a": NaN}', '{"a": 1, "a": 2}', "{'a': None}", "no", '{"messages": [']
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    code, document = run(capsys, str(file))
    codes = {finding["code"] for finding in document["findings"]}
    assert {
        "duplicates", "same-prompt-other-answer", "needs-review", "tool-data", "mixed-shapes", "looks-misdecoded",
        "ends-with-user", "personal-data", "non-finite-number", "duplicate-keys", "python-literals", "not-json",
        "truncated",
    } <= codes  # fmt: skip
    for finding in document["findings"]:
        if finding["level"] in ("warn", "fail"):
            assert finding["why"] and finding["fix"] and finding["source"], finding["code"]
    assert code == 0


def test_help_comes_at_once() -> None:
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "data_preprocessor.py"), "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Is this chat data fit for training" in ended.stdout
    assert time.monotonic() - began < 1.5
