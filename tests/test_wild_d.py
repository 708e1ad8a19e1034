"""Software stacks seen in bug reports, tried for real in sandboxes: expected values are the cases' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WILD = ROOT / "tests" / "wild" / "D-env"

pytestmark = [pytest.mark.slow, pytest.mark.network]


def run(tmp_path: Path, case: str, *flags: str, file: str = "requirements.txt") -> tuple[int, dict[str, Any]]:
    """The exit code and the section that the real command line prints."""
    command = [
        sys.executable,
        str(ROOT / "env_sandbox.py"),
        "--json",
        "--requirements",
        str(WILD / case / file),
        *flags,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert "Traceback (most recent call last)" not in done.stderr, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def expected(case: str) -> dict[str, Any]:
    return json.loads((WILD / case / "case.json").read_text(encoding="utf-8"))["expected"]


def codes(section: dict[str, Any], level: str = "fail") -> list[str]:
    return [finding["code"] for finding in section["findings"] if finding["level"] == level]


def finding(section: dict[str, Any], code: str) -> dict[str, Any]:
    return next(one for one in section["findings"] if one["code"] == code)


def everything_said(section: dict[str, Any]) -> str:
    return " ".join(
        " ".join([one["what"], one["why"], *one["fix"]]) for one in section["findings"] if one["level"] != "ok"
    )


def test_peft_0_17_is_too_old_for_transformers_5_and_the_fix_is_proven(tmp_path: Path) -> None:
    case = "D01-peft-0.17-transformers-5"
    code, section = run(tmp_path, case, "--prove-fix")
    seen = section["observed"]
    assert code == 1 and section["level"] == "fail"
    assert codes(section) == ["missing-name"] == [expected(case)["code"]]
    assert seen["failing_stage"] == "import peft"
    assert seen["exception"] == "ImportError"
    assert seen["message"].startswith("cannot import name 'HybridCache' from 'transformers'")
    assert seen["pip_check"] == "passes"
    assert seen["missing_name"] == "HybridCache"
    assert seen["provider"] == "transformers 5.24.0"
    assert seen["consumer"] == "peft 0.17.1 (peft_model.py line 37)"
    assert seen["resolve"]["ok"] is True
    assert "peft>=0.18.0" in everything_said(section) and "transformers<5" in everything_said(section)
    assert "transformers -U" not in everything_said(section)
    # The older side is raised; torch and transformers stay as they were.
    assert seen["proof"]["proven"] is True
    lines = (tmp_path / "requirements.fixed.txt").read_text().splitlines()
    assert lines[0] == "torch>=2.4" and lines[1] == "transformers==5.24.0" and lines[3] == "accelerate"
    assert lines[2].startswith("peft==0.") and int(lines[2].split(".")[1]) >= 18


def test_peft_0_14_is_too_new_for_transformers_4_39_and_an_older_peft_is_proven(tmp_path: Path) -> None:
    case = "D02-peft-0.14-transformers-4.39"
    code, section = run(tmp_path, case, "--prove-fix")
    seen = section["observed"]
    assert code == 1 and codes(section) == ["missing-name"]
    assert seen["failing_stage"] == "import peft"
    assert seen["exception"] == "ImportError"
    assert seen["message"].startswith("cannot import name 'EncoderDecoderCache' from 'transformers'")
    assert seen["missing_name"] == "EncoderDecoderCache"
    said = everything_said(section)
    assert "peft==0.13.2" in said and "transformers>=4.43.0" in said
    assert "peft>=0.18" not in said  # D01's advice would be wrong here
    assert (tmp_path / "requirements.fixed.txt").read_text() == (
        "transformers==4.39.3\ntokenizers==0.15.2\npeft==0.13.2\n"
    )


def test_a_tokenizers_pin_that_transformers_excludes_is_found_before_anything_is_installed(tmp_path: Path) -> None:
    case = "D03-tokenizers-pin-conflict"
    code, section = run(tmp_path, case, "--prove-fix")
    seen = section["observed"]
    assert code == 1 and codes(section) == ["resolution-impossible"]
    assert seen["failing_stage"] == "resolve"
    assert seen["install"] == []
    assert seen["conflict"]["package"] == "tokenizers"
    wishes = {wish["by"]: wish["wants"] for wish in seen["conflict"]["wishes"]}
    assert wishes["the requirements"] == "tokenizers==0.23.3"
    assert sorted(wishes["transformers 4.57.6"].replace("tokenizers", "").split(",")) == ["<=0.23.0", ">=0.22.0"]
    assert "drop the line `tokenizers==0.23.3`" in " ".join(finding(section, "resolution-impossible")["fix"])
    assert "--no-deps" not in " ".join(finding(section, "resolution-impossible")["fix"])
    fixed = (tmp_path / "requirements.fixed.txt").read_text().splitlines()
    assert fixed[0] == "transformers==4.57.6" and fixed[1].startswith("tokenizers==0.22.")


def test_the_tokenizers_conflict_forced_in_dies_at_import_transformers(tmp_path: Path) -> None:
    case = "D03-tokenizers-pin-conflict"
    _, section = run(tmp_path, case, "--force-conflicts")
    forced = expected(case)["if_forced_with_no_deps"]
    seen = section["observed"]
    assert seen["failing_stage"] == forced["stage"] == "import transformers"
    assert seen["exception"] == forced["exception"] == "ImportError"
    assert seen["message"].startswith(forced["message"])
    assert "dependency-version" in codes(section)


def test_pandas_built_for_numpy_1_is_an_abi_clash_and_not_a_data_error(tmp_path: Path) -> None:
    case = "D04-numpy2-abi-pandas"
    code, section = run(tmp_path, case, "--prove-fix")
    seen = section["observed"]
    assert code == 1 and codes(section) == ["numpy-abi"]
    assert seen["failing_stage"] == "import pandas"
    assert seen["exception"] == "ValueError"
    assert seen["message"] == expected(case)["message"]
    assert seen["resolve"]["ok"] is True  # pip does not refuse it
    fixes = finding(section, "numpy-abi")["fix"]
    assert "pandas>=2.2.2" in " ".join(fixes)
    assert fixes.index(next(f for f in fixes if "pandas" in f)) < fixes.index(next(f for f in fixes if "numpy<2" in f))
    lines = (tmp_path / "requirements.fixed.txt").read_text().splitlines()
    assert lines[0] == "numpy==2.4.6" and lines[2] == "transformers==5.24.0"
    assert tuple(int(n) for n in lines[1].removeprefix("pandas==").split(".")) >= (2, 2, 2)


def test_a_torchvision_for_another_torch_is_named_at_the_resolve(tmp_path: Path) -> None:
    case = "D05-torchvision-mismatch-masked"
    code, section = run(tmp_path, case)
    assert code == 1 and codes(section) == ["torchvision-mismatch"]
    wishes = {wish["by"]: wish["wants"] for wish in section["observed"]["conflict"]["wishes"]}
    assert wishes == {"torchvision 0.21.0": "torch==2.6.0", "the requirements": "torch==2.13.0"}
    assert "same index as torch" in everything_said(section)


def test_a_forced_torchvision_hides_behind_a_message_of_transformers_and_the_root_is_named(tmp_path: Path) -> None:
    case = "D05-torchvision-mismatch-masked"
    check = str(WILD / case / "check.py")
    _, section = run(tmp_path, case, "--force-conflicts", "--check", check)
    seen, wanted = section["observed"], expected(case)
    assert set(codes(section)) == {"torchvision-mismatch"}
    assert seen["failing_stage"] == wanted["failing_stage"] == "import a vision model class"
    assert seen["exception"] == wanted["exception"] == "ModuleNotFoundError"
    assert seen["message"].startswith(wanted["message"])
    assert seen["root_cause"] == {"exception": "RuntimeError", "message": "operator torchvision::nms does not exist"}
    assert "module is missing" not in everything_said(section)


def test_flash_attn_needs_torch_at_build_and_is_not_built_for_an_hour(tmp_path: Path) -> None:
    case = "D06-flash-attn-needs-torch-at-build"
    code, section = run(tmp_path, case, "--prove-fix")
    seen = section["observed"]
    assert code == 1 and codes(section) == ["build-isolation"]
    assert seen["failing_stage"] == "build flash-attn==2.7.4.post1"
    assert seen["build"] == "flash-attn==2.7.4.post1"
    assert "No module named 'torch'" in seen["message"]
    said = everything_said(section)
    assert "--no-build-isolation" in said and "sdpa" in said and "nvcc" in said
    assert "pip install torch`" not in said
    assert (tmp_path / "requirements.fixed.txt").read_text() == "torch\ntransformers\n"


def test_a_local_version_without_its_index_is_not_called_nonexistent(tmp_path: Path) -> None:
    case = "D07-local-version-without-index"
    code, section = run(tmp_path, case)
    seen = section["observed"]
    assert code == 1 and codes(section) == ["no-matching-distribution"]
    assert seen["failing_stage"] == "resolve"
    assert seen["missing_requirement"] == "torch==2.1.0+cu118"
    assert seen["requirements"]["active"] == ["torch==2.1.0+cu118", "transformers>=4.40"]
    said = everything_said(section)
    assert "--extra-index-url https://download.pytorch.org/whl/cu118" in said
    assert "2.1.0 itself may well exist" in said


def test_the_index_line_is_read_and_an_index_that_does_not_answer_is_not_a_missing_version(tmp_path: Path) -> None:
    case = "D07-local-version-without-index"
    code, section = run(tmp_path, case, file="requirements-ok.txt")
    parsed = expected(case)["parsed"]["requirements-ok.txt"]
    seen = section["observed"]["requirements"]
    assert seen["options"] == parsed["options"]
    assert seen["active"] == parsed["requirements"]
    assert code == 3 and codes(section, "unknown") == ["index-unreachable"]  # index.example.org does not exist


def test_a_hash_on_one_line_only_is_pips_hash_mode(tmp_path: Path) -> None:
    case = "D08-partial-hashes"
    code, section = run(tmp_path, case)
    seen, wanted = section["observed"], expected(case)
    assert code == 1 and codes(section) == ["hash-mode"]
    assert seen["failing_stage"] == "resolve"
    assert seen["requirements"]["active"] == wanted["parsed"]  # the backslash joins, it does not make a line
    assert seen["offending"] == wanted["offending"]
    assert wanted["message"] in seen["message"]  # pip itself says so
    assert "corrupt" not in everything_said(section)


def test_every_kind_of_line_is_read_and_what_cannot_be_installed_here_is_named(tmp_path: Path) -> None:
    case = "D09-requirement-line-zoo"
    code, section = run(tmp_path, case)
    seen = section["observed"]["requirements"]
    assert code == 0 and section["level"] == "warn" and codes(section, "warn") == ["needs-attention"]
    assert section["observed"]["failing_stage"] == "static parse"
    assert sorted(seen["active"]) == sorted(
        [
            "torch==2.8.0+cu128",
            "transformers[torch]>=4.56,<6",
            "peft @ git+https://github.com/huggingface/peft.git@v0.17.1",
            "-e ./src/mytrainer",
            "./wheels/flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
            "Pillow",
            "datasets>=3",
            "pyarrow",
        ]
    )
    assert [line.split(" ;")[0] for line in seen["skipped_by_marker"]] == ["bitsandbytes==0.43.1", "triton>=3"]
    assert seen["constraints"] == ["numpy<2.3"]
    assert seen["problems"] == []
    said = finding(section, "needs-attention")["what"]
    assert "cp312" in said and "cp311" in said and "mytrainer does not exist here" in said and "git" in said


def test_old_lightning_beside_setuptools_82_misses_pkg_resources(tmp_path: Path) -> None:
    case = "D10-pkg-resources-gone"
    code, section = run(tmp_path, case, "--prove-fix")
    seen = section["observed"]
    assert code == 1 and codes(section) == ["missing-module"]
    assert seen["failing_stage"] == "import pytorch_lightning"
    assert seen["exception"] == "ModuleNotFoundError"
    assert seen["message"] == "No module named 'pkg_resources'"
    assert seen["missing_module"] == "pkg_resources"
    said = everything_said(section)
    assert "setuptools<82" in said and "lightning 2" in said
    assert "install pkg_resources" not in said
    fixed = (tmp_path / "requirements.fixed.txt").read_text().splitlines()
    assert fixed[:3] == ["pytorch-lightning==1.9.5", "lightning-utilities", "torchmetrics==0.11.4"]
    assert fixed[3].startswith("setuptools==") and int(fixed[3].split("==")[1].split(".")[0]) < 82


def test_a_new_peft_with_an_old_transformers_is_tried_and_found_to_work(tmp_path: Path) -> None:
    case = "D11-new-peft-old-transformers-is-fine"
    code, section = run(tmp_path, case)
    seen = section["observed"]
    assert code == 0 and section["level"] == "ok"
    assert seen["failing_stage"] is None
    states = {stage["stage"]: stage["state"] for stage in seen["stages"]}
    assert states["torch"] == states["transformers"] == states["peft"] == "ok"
    assert seen["installed"]["peft"] == "0.21.2" and seen["installed"]["transformers"] == "4.44.2"


def test_all_cases_of_this_group_have_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in sorted(WILD.iterdir()) if path.is_dir() and f'"{path.name}"' not in text] == []
