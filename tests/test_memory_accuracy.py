"""The estimates against published measurements that nobody fitted, and against each other."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy import (
    answer_of,
    closed,
    config_of,
    errors_of,
    figures,
    keep,
    kept_rehearsals,
    quantile,
    summary,
)
from benchmarks.agreement import gap_pct
from benchmarks.calibration import document_from
from benchmarks.measured_rows import read_rows
from preflight.console import UsageError
from preflight.memory.errors import interval
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests" / "configs"
KEPT = json.loads((ROOT / "tests" / "rehearsed_peaks.json").read_text())
# Where formulas and rehearsal part by more than 3 %, and why.
_LOOP = "float32 experts on the CPU run in a loop that keeps its inputs; CUDA's grouped product of frozen ones does not"
EXPLAINED = {("ibm-granite__granite-3.0-3b-a800m-instruct", "qlora"): _LOOP}


@pytest.fixture(scope="module")
def compared():
    return closed(read_rows(ROOT / "benchmarks" / "measured.jsonl"), CONFIGS)


def test_formulas_meet_the_bar_on_transformers_rows_of_certain_length(compared):
    chosen = [i for i in compared if i.row.hugging_face and i.row.certain and i.row.quality == "A"]
    made = figures(errors_of(chosen, "allocated"))
    assert made["n"] >= 60
    assert made["median_abs_pct"] <= 2.5
    assert made["p95_abs_pct"] <= 8


def test_formulas_meet_the_bar_over_all_frameworks(compared):
    made = figures(errors_of(compared, "allocated"))
    assert made["n"] >= 120
    assert made["median_abs_pct"] <= 2  # asked: 6
    assert made["p95_abs_pct"] <= 6


def test_no_run_that_failed_is_called_yes_and_none_that_fitted_no(compared):
    assert [i.row.id for i in compared if i.row.kind == "oom" and answer_of(i) == "yes"] == []
    assert [i.row.id for i in compared if i.row.kind == "fits" and answer_of(i) == "no"] == []


def test_every_row_is_compared_or_left_out_with_its_reason(compared):
    assert len(compared) == 379
    assert all(item.estimate is not None or item.left_out for item in compared)


def test_the_json_has_the_agreed_keys():
    command = [sys.executable, "benchmarks/accuracy.py", "--evidence", "closed", "--json", "--only", "fms-main-mistral"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)["closed"]
    for metric in ("allocated", "reserved"):
        assert {"n", "median_abs_pct", "p95_abs_pct", "bias_pct"} <= set(made[metric])
    assert {"oom_called_yes", "fits_called_no", "left_out"} <= set(made)


def test_quantiles_by_hand():
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.95) == pytest.approx(3.85)
    assert figures([-2.0, 1.0, 3.0]) == {"n": 3, "median_abs_pct": 2.0, "p95_abs_pct": 2.9, "bias_pct": 0.667}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{broken", "line 1"), (b"", "no rows"), (b"\n\n", "no rows"), (b"\xff\xfe\x00", "UTF-8")],
)
def test_a_damaged_row_file_is_a_one_line_error(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_rows(file)
    assert "\n" not in str(caught.value)


def test_a_missing_row_file_and_a_missing_folder_are_one_line_errors(tmp_path):
    for flags in (["--rows", str(tmp_path / "none.jsonl")], ["--configs", str(tmp_path / "none")]):
        done = subprocess.run(
            [sys.executable, "benchmarks/accuracy.py", *flags], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "none" in done.stderr


ODD = (
    None,
    [],
    {},
    "",
    "x" * 5000,
    -1,
    0,
    1e308,
    True,
    "\0",
    "../../../etc/passwd",
    [1],
    {"a": 1},
    10**30,
    float("nan"),
)


def test_rows_with_odd_columns_are_left_out_with_a_reason_or_compared(tmp_path):
    """Each column in turn missing, and of every odd kind; the columns inside of columns too."""
    row = read_rows(ROOT / "benchmarks" / "measured.jsonl")[60].raw
    made = []
    for key in row:
        made.append({k: v for k, v in row.items() if k != key})
        made += [{**row, key: value} for value in ODD]
        if isinstance(row[key], dict):
            made += [{**row, key: {**row[key], inner: value}} for inner in row[key] for value in ODD]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(one) for one in made] + ["[1, 2]", '"text"', "null", "7", "{}"]
    file.write_text("\n".join(lines))
    rows = read_rows(file)
    assert len(rows) == len(lines)
    found = closed(rows, CONFIGS)
    assert all(item.estimate is not None or item.left_out for item in found)
    reasons = summary(found)["left_out"]
    assert "a JSON list, not an object" in reasons
    assert not [reason for reason in reasons if "could not be counted" in reason]  # no fault of ours among them


def test_a_config_outside_the_folder_is_not_read(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "secret.json").write_text('{"model_type": "llama"}')
    row = read_rows(ROOT / "benchmarks" / "measured.jsonl")[60]
    for name in ("../secret.json", str(tmp_path / "secret.json"), "\0", "x" * 5000):
        assert config_of(replace(row, raw={**row.raw, "config": name}), tmp_path / "configs") is None


# -- the intervals


FACTS = json.loads((ROOT / "facts" / "memory_errors.json").read_text())


def test_the_intervals_are_those_of_the_named_rows(compared):
    """Nothing in the table comes from elsewhere: made again from the rows that it names, it is the same."""
    named = [item for item in compared if item.row.id in FACTS["rows"]["closed"]]
    assert len(named) == len(FACTS["rows"]["closed"]) >= 100
    assert all(item.row.quality in ("A", "B") and item.row.hugging_face for item in named)
    made = document_from({"closed": named}, FACTS)
    assert made["evidence"]["closed"] == FACTS["evidence"]["closed"]
    assert made["held_out"]["closed"] == FACTS["held_out"]["closed"]


@pytest.mark.parametrize("evidence", ["closed", "rehearsed"])
def test_intervals_of_other_sources_hold_nine_of_ten_rows(evidence):
    """Each source's rows against the interval that all other sources give."""
    found = FACTS["held_out"][evidence]
    assert len(found["by_source"]) >= 4
    assert found["rows"] >= 70
    assert found["inside"] >= 0.9 * found["rows"]


def test_a_method_that_no_row_covers_gets_a_wide_interval():
    low, high, expected = interval("rehearsed", Plan(method="full"), 60 << 30, 10 << 30, 62 << 30)
    assert expected == 62 << 30
    # (static + moving x the largest share ever seen) and the least width
    assert high >= (10 + 50 * FACTS["largest_cache"]) * 2**30
    low, high, _ = interval("closed", Plan(method="ia3"), 10 << 30, 5 << 30)
    assert low == int(0.6 * (10 << 30))
    assert high >= 1.35 * (10 << 30)


RUNNABLE = [row for row in KEPT["rows"] if "tensors_bytes" in row]


def test_formulas_and_rehearsal_agree_within_three_per_cent():
    far = {}
    close = 0
    for row in RUNNABLE:
        gap = gap_pct(row)
        key = (row["config"], row["settings"]["method"])
        if abs(gap) <= 3:
            close += 1
        elif key not in EXPLAINED:
            far[json.dumps(row["settings"]), row["config"]] = round(gap, 2)
    assert far == {}
    assert close >= 120
    assert len({row["config"] for row in RUNNABLE}) >= 25


@pytest.mark.slow
def test_the_kept_peaks_are_what_the_installed_stack_gives():
    pytest.importorskip("bitsandbytes")
    from benchmarks.agreement import config_of, plan_of
    from preflight.machine import Machine
    from preflight.memory.rehearsal import Job, rehearse

    names = ("Qwen__Qwen3-0.6B", "openai-community__gpt2", "openai__gpt-oss-20b")
    rows = [row for row in RUNNABLE if row["config"] in names and row["settings"]["method"] in ("lora", "full")]
    jobs = [Job(config_of(row["config"]), plan_of(row["settings"])) for row in rows]
    for row, made in zip(rows, rehearse(Machine(), sys.executable, jobs, 600.0), strict=True):
        assert made.trouble == ""
        assert made.replay.tensors_bytes == pytest.approx(row["tensors_bytes"], rel=0.02), row["config"]


# -- rehearsals, as they were kept from the last run with each row's own versions


@pytest.fixture(scope="module")
def kept():
    return kept_rehearsals(read_rows(ROOT / "benchmarks" / "measured.jsonl"), ROOT / "benchmarks" / "rehearsed.jsonl")


def test_rehearsals_meet_the_bar_on_transformers_rows_of_certain_length(kept):
    chosen = [i for i in kept if i.row.hugging_face and i.row.certain and i.row.quality == "A"]
    allocated, reserved = (figures(errors_of(chosen, metric)) for metric in ("allocated", "reserved"))
    assert allocated["n"] >= 60
    assert allocated["median_abs_pct"] <= 1
    assert allocated["p95_abs_pct"] <= 5
    assert reserved["n"] >= 40
    assert reserved["median_abs_pct"] <= 5
    assert reserved["p95_abs_pct"] <= 15


def test_no_rehearsed_run_that_failed_is_called_yes_and_none_that_fitted_no(kept):
    assert sum(1 for i in kept if i.row.kind == "oom" and i.estimate is not None) >= 10
    assert [i.row.id for i in kept if i.row.kind == "oom" and answer_of(i) == "yes"] == []
    assert [i.row.id for i in kept if i.row.kind == "fits" and answer_of(i) == "no"] == []


def test_the_rehearsed_intervals_are_those_of_the_named_rows(kept):
    named = [item for item in kept if item.row.id in FACTS["rows"]["rehearsed"]]
    made = document_from({"rehearsed": named}, FACTS)
    assert made["evidence"]["rehearsed"] == FACTS["evidence"]["rehearsed"]
    assert made["held_out"]["rehearsed"] == FACTS["held_out"]["rehearsed"]


@pytest.mark.slow
def test_kept_rehearsals_are_what_the_installed_stack_gives(kept):
    """One published run again: Qwen2.5-1.5B QLoRA, 512 tokens (2.79 GiB measured), with the versions that are here."""
    pytest.importorskip("bitsandbytes")
    from preflight.machine import Machine
    from preflight.memory.rehearsal import Job, rehearse

    item = next(i for i in kept if i.row.id == "cft-qwen-qwen2.5-1.5b-instruct-qlora-s512-b1-r16-steps3")
    job = Job(config_of(item.row, CONFIGS), item.row.plan)
    made = rehearse(Machine(), sys.executable, [job], 300.0)[0]
    assert made.trouble == ""
    assert made.estimate.allocated_bytes == pytest.approx(item.estimate.allocated_bytes, rel=0.02)
    assert made.estimate.allocated_bytes == pytest.approx(item.row.readings["allocated"], rel=0.02)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, kept):
    """Rehearsals that were kept are not made again; a line that a kill cut short is passed over."""
    item = next(i for i in kept if i.estimate is not None)
    file = tmp_path / "kept.jsonl"
    keep(file, item)
    with file.open("a") as stream:
        stream.write('{"id": "cut sho')
    again = kept_rehearsals([item.row], file)[0]
    assert again.estimate.allocated_bytes == item.estimate.allocated_bytes
    assert (again.estimate.low_bytes, again.estimate.high_bytes) == (item.estimate.low_bytes, item.estimate.high_bytes)


def test_ctrl_c_prints_the_figures_of_what_was_done(monkeypatch, capsys):
    import benchmarks.accuracy as accuracy

    def interrupted(rows, args, found):
        found.append(closed([rows[0]], CONFIGS)[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "rehearsed", interrupted)
    assert accuracy.main(["--evidence", "closed,rehearsed", "--json", "--only", "fms-main-mistral"]) == 130
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert made["closed"]["allocated"]["n"] > 5
    assert made["rehearsed"]["allocated"]["n"] == 1
    assert "interrupted" in said.err
