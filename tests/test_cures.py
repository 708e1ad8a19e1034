"""Which change is tried for which failure, and that the file that works differs as little as possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preflight.findings import Finding, Level
from preflight.machine import Machine
from preflight.software.cures import (
    HASHES,
    Try,
    fixed_requirements,
    known_cures,
    loads,
    newest_of_each_minor,
    proof_of,
    prove,
    searched_cures,
    shown,
    with_changes,
    with_proof,
)
from preflight.software.installers import Installer, PipSettings, flat_requirements
from preflight.software.requirements import Requirements, read_requirements
from preflight.software.stack import Request


def read(tmp_path: Path, text: str, name: str = "requirements.txt") -> Requirements:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_requirements(tmp_path / name)


def request_for(found: Requirements) -> Request:
    return Request(found, "python", Installer("uv", "uv", "1", "test"), PipSettings())


def tried(changes: dict[str, str | None], **versions: str) -> Try:
    return Try(changes, True, 1.0, None, {name.replace("_", "-"): value for name, value in versions.items()}, "")


def refused(code: str, **more: Any) -> dict[str, Any]:
    empty = {"wishes": [], "conflict": None, "missing_requirement": None, "build": None, "text": ""}
    return {"resolve": {"ok": False, "code": code, "packages": [], **empty, **more}, "install": [], "stages": []}


def import_failure(
    message: str, frames: list[list[Any]], packages: list[dict[str, Any]], **dates: str
) -> dict[str, Any]:
    error = [{"type": "ImportError", "message": message, "frames": frames, "link": None}]
    step = {"step": "import x", "ok": False, "error": error, "printed": "", "facts": {}, "warnings": []}
    stage = {"stage": "peft", "state": "fail", "seconds": 1, "peak_rss_bytes": 1, "steps": [step]}
    resolved = [{"name": name.replace("_", "-"), "version": "1", "uploaded": date} for name, date in dates.items()]
    return {
        "resolve": {"ok": True, "packages": resolved},
        "install": [{"ok": True, "requirement": "x", "seconds": 1.0}],
        "packages": packages,
        "stages": [stage],
        "pip_check": "passes",
    }


PACKAGES = [
    {"name": "peft", "version": "0.17.1", "top_level": ["peft"]},
    {"name": "newlib", "version": "3.0", "top_level": ["newlib"]},
]
FRAMES = [["peft/peft_model.py", 37, "<module>", "from newlib import Gone"]]


def test_a_conflict_gives_way_on_the_users_pin_first_and_never_on_torch(tmp_path: Path) -> None:
    found = read(tmp_path, "transformers==4.57.6\ntokenizers==0.23.3\n")
    wishes = [
        {"by": "transformers 4.57.6", "wants": "tokenizers>=0.22.0,<=0.23.0"},
        {"by": "the requirements", "wants": "tokenizers==0.23.3"},
    ]
    cures = known_cures(refused("resolution-impossible", conflict={"package": "tokenizers", "wishes": wishes}), found)
    assert cures[0] == {"tokenizers": ">=0.22.0,<=0.23.0"}
    assert {"transformers": ""} in cures
    found = read(tmp_path, "torch==2.13.0\ntorchvision==0.21.0\n")
    wishes = [
        {"by": "torchvision 0.21.0", "wants": "torch==2.6.0"},
        {"by": "the requirements", "wants": "torch==2.13.0"},
    ]
    cures = known_cures(refused("resolution-impossible", conflict={"package": "torch", "wishes": wishes}), found)
    assert cures == [{"torchvision": ""}, {"torchvision": None}]


@pytest.mark.parametrize(
    ("trouble", "wanted"),
    [
        (
            refused("no-matching-distribution", missing_requirement="torch==2.1.0+cu118"),
            [{"torch": "==2.1.0"}, {"torch": ""}],
        ),
        (refused("no-matching-distribution", missing_requirement="peft==99"), [{"peft": ""}]),
        (refused("build-isolation", build="flash-attn==2.7.4.post1"), [{"flash-attn": None}]),
        (refused("build-failed", build="Foo_Bar==1"), [{"foo-bar": ""}, {"foo-bar": None}]),
        (refused("hash-mode"), [{HASHES: None}]),
        (refused("index-unreachable"), []),
        (refused("disk-full"), []),
    ],
)
def test_what_is_tried_for_an_installation_that_fails(
    trouble: dict[str, Any], wanted: list[Any], tmp_path: Path
) -> None:
    assert known_cures(trouble, read(tmp_path, "torch\n")) == wanted


def test_the_older_side_of_a_missing_name_is_raised(tmp_path: Path) -> None:
    found = read(tmp_path, "peft==0.17.1\nnewlib==3.0\n")
    message = "cannot import name 'Gone' from 'newlib' (newlib/__init__.py)"
    older_consumer = import_failure(message, FRAMES, PACKAGES, peft="2025-08-21", newlib="2026-11-01")
    assert known_cures(older_consumer, found)[0] == {"peft": ">0.17.1"}
    older_provider = import_failure(message, FRAMES, PACKAGES, peft="2026-11-01", newlib="2025-08-21")
    assert known_cures(older_provider, found)[0] == {"newlib": ">3.0"}
    unknown = import_failure(message, FRAMES, PACKAGES)
    assert known_cures(unknown, found) == [{"peft": ">0.17.1"}, {"newlib": ">3.0"}]


def test_without_a_known_cure_the_suspects_are_unpinned_then_older_minors_newest_first(tmp_path: Path) -> None:
    found = read(tmp_path, "peft==0.17.1\nnewlib==3.0\n")
    outcome = import_failure("something else", FRAMES, PACKAGES)
    assert known_cures(outcome, found) == []
    versions = {"peft": ["0.17.1", "0.16.0", "0.16.1", "0.18.0rc1", "0.15.2"], "newlib": []}
    cures = searched_cures(outcome, found, lambda name: versions.get(name, []))
    assert cures == [{"peft": ""}, {"peft": "==0.16.1"}, {"peft": "==0.15.2"}]


def test_the_newest_of_each_minor_leaves_prereleases_out() -> None:
    assert newest_of_each_minor(["1.2.0", "1.2.10", "1.10.1", "2.0.0rc1", "not a version"]) == ["1.10.1", "1.2.10"]


def test_changes_are_applied_to_the_lines_and_new_names_are_added(tmp_path: Path) -> None:
    found = read(tmp_path, "transformers[torch]==4.0\npeft==0.17.1\ntorchvision\n")
    changed = with_changes(
        request_for(found), {"peft": ">=0.18", "torchvision": None, "setuptools": "<82", "transformers": ""}
    )
    assert flat_requirements(changed.requirements, changed.change) == "transformers[torch]\npeft>=0.18\n"
    assert changed.added == ("setuptools<82",)


def good(**versions: str) -> dict[str, Any]:
    step = {"step": "import x", "ok": True, "error": None, "printed": "", "facts": {}, "warnings": []}
    return {
        "resolve": {"ok": True, "packages": []},
        "install": [{"ok": True, "requirement": "x", "seconds": 1.0}],
        "packages": [{"name": name, "version": value, "top_level": []} for name, value in versions.items()],
        "stages": [{"stage": "torch", "state": "ok", "steps": [step]}],
        "failing_stage": None,
        "seconds": 2.0,
    }


def test_tries_end_at_the_first_that_loads(tmp_path: Path) -> None:
    found = read(tmp_path, "peft==0.17.1\nnewlib==3.0\n")
    outcome = import_failure("cannot import name 'Gone' from 'newlib'", FRAMES, PACKAGES)
    asked: list[str] = []

    def trial(machine: Machine, request: Request) -> dict[str, Any]:
        asked.append(flat_requirements(request.requirements, request.change).split("\n")[0])
        return {**outcome, "seconds": 1.0, "failing_stage": "import x"} if len(asked) == 1 else good(newlib="4.1")

    tries = prove(Machine(), request_for(found), outcome, trial=trial, versions_of=lambda name: [])
    assert [one.proven for one in tries] == [False, True]
    assert asked == ["peft>0.17.1", "peft==0.17.1"]
    assert tries[1].versions == {"newlib": "4.1"}


def test_tries_are_bounded_in_number_and_time(tmp_path: Path) -> None:
    found = read(tmp_path, "peft==0.17.1\n")
    outcome = import_failure("something else", FRAMES, PACKAGES)
    bad = {**outcome, "seconds": 1.0, "failing_stage": "import x"}
    versions = [f"0.{n}.0" for n in range(30)]
    tries = prove(
        Machine(), request_for(found), outcome, max_tries=3, trial=lambda m, r: bad, versions_of=lambda n: versions
    )
    assert len(tries) == 3 and not any(one.proven for one in tries)
    assert prove(Machine(), request_for(found), outcome, time_limit_s=0, trial=lambda m, r: bad) == []


def test_a_stack_that_was_not_installed_or_not_loaded_does_not_count_as_loading() -> None:
    assert loads(good(peft="1"))
    assert not loads({**good(peft="1"), "stages": []})
    assert not loads({**good(peft="1"), "install": []})
    assert not loads({})


def test_only_the_changed_line_differs_in_the_file_that_works(tmp_path: Path) -> None:
    text = (
        "# my stack\n--extra-index-url https://x.example/simple\n\ntorch>=2.4  # any\npeft == 0.17.1   # old\nnumpy\n"
    )
    found = read(tmp_path, text)
    fixed = fixed_requirements(found, tried({"peft": ">=0.18"}, peft="0.21.2"))
    assert fixed == text.replace("peft == 0.17.1", "peft==0.21.2")


def test_extras_markers_and_local_versions_are_kept_right(tmp_path: Path) -> None:
    found = read(tmp_path, 'transformers[torch]==4.0 ; python_version > "3"\ntorch==2.1.0+cu118\n')
    fixed = fixed_requirements(
        found, tried({"transformers": "", "torch": ""}, transformers="5.24.0", torch="2.13.0+cpu")
    )
    assert fixed == 'transformers[torch]==5.24.0 ; python_version > "3"\ntorch==2.13.0\n'


def test_a_left_out_line_is_gone_and_an_added_one_is_at_the_end(tmp_path: Path) -> None:
    found = read(tmp_path, "torch\nflash-attn==2.7.4.post1\ntransformers\n")
    fixed = fixed_requirements(found, tried({"flash-attn": None, "setuptools": "<82"}, setuptools="81.0.0"))
    assert fixed == "torch\ntransformers\nsetuptools==81.0.0\n"


def test_a_continued_line_is_replaced_whole_and_hashes_are_taken_off(tmp_path: Path) -> None:
    hashed = "sha256:" + "ab" * 32
    found = read(
        tmp_path, f"--require-hashes\ntqdm==4.66.4 \\\n    --hash={hashed} \\\n    --hash={hashed}\npyyaml>=6\n"
    )
    assert fixed_requirements(found, tried({HASHES: None})) == "tqdm==4.66.4\npyyaml>=6\n"
    assert (
        fixed_requirements(found, tried({"tqdm": ""}, tqdm="4.70.1")) == "--require-hashes\ntqdm==4.70.1\npyyaml>=6\n"
    )


def test_a_line_of_an_included_file_is_taken_in_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("datasets\npeft==0.17.1\n")
    found = read(tmp_path, "-r more.txt\ntorch\n")
    fixed = fixed_requirements(found, tried({"peft": ""}, peft="0.21.2"))
    assert fixed == "# more.txt, taken in because a line of it changed:\ndatasets\npeft==0.21.2\ntorch\n"
    assert fixed_requirements(found, tried({"torch": ""}, torch="2.13.0")) == "-r more.txt\ntorch==2.13.0\n"


def test_the_file_that_works_can_be_read_again(tmp_path: Path) -> None:
    found = read(tmp_path, "torch>=2.4\npeft==0.17.1 # x\n")
    again = read(tmp_path, fixed_requirements(found, tried({"peft": ""}, peft="0.21.2")), "fixed.txt")
    assert again.problems == [] and [item.shown() for item in again.items] == ["torch>=2.4", "peft==0.21.2"]


def test_the_proof_is_said_with_versions_and_put_first_among_the_fixes(tmp_path: Path) -> None:
    found = read(tmp_path, "peft==0.17.1\n")
    target = tmp_path / "fixed.txt"
    proof, finding = proof_of(
        [tried({"peft": ">=0.18", "torchvision": None}, peft="0.21.2")], found, str(target), 8, 900
    )
    assert proof["proven"] and proof["short"] == "peft==0.21.2, without torchvision"
    assert target.read_text() == "peft==0.21.2\n"
    bad = Finding("missing-name", Level.FAIL, "x", "y", ("a", "b", "c"), "z")
    result = with_proof([bad], finding, proof)
    assert result[0].fix == ("proven here: peft==0.21.2, without torchvision (`pip install -r fixed.txt`)", "a", "b")
    assert result[1].level is Level.OK


def test_no_proof_is_never_called_one(tmp_path: Path) -> None:
    found = read(tmp_path, "peft==0.17.1\n")
    failed = Try({"peft": ""}, False, 1.0, "import peft", {}, "")
    proof, finding = proof_of([failed], found, str(tmp_path / "fixed.txt"), 8, 900)
    assert not proof["proven"] and finding.level is Level.UNKNOWN and "peft unpinned: import peft" in finding.what
    assert not (tmp_path / "fixed.txt").exists()
    bad = Finding("missing-name", Level.FAIL, "x", "y", ("a",), "z")
    assert with_proof([bad], finding, proof)[0].fix == ("a",)


def test_changes_are_shown_in_words() -> None:
    assert shown({"peft": ">=0.18", "torchvision": None, "numpy": "", HASHES: None}) == (
        "peft>=0.18, without torchvision, numpy unpinned, no hashes"
    )
