"""From the plan that fits to a project that runs: configuration, training script, evaluation, pins, README."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preflight import launch
from preflight.console import UsageError
from preflight.facts import shipped, table
from preflight.plan import Plan
from preflight.training_config import METHODS, configuration, recipe_plan, render, settings
from preflight.training_data import Split, write_data
from preflight.wheels import INDEX

EVALUATOR_NEEDS = ("jsonschema", "psutil", "filelock", "packaging", "tqdm", "PyYAML", "Jinja2")


def pins(plan: Plan, record: Mapping[str, Any] | None = None) -> tuple[list[str], str]:
    """(requirement lines, where they were proven): what the sandbox loaded where it did, else the tested set."""
    needed = ["torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors"]
    if plan.quantised or "8bit" in plan.optimizer_name() or "paged" in plan.optimizer_name():
        needed.append("bitsandbytes")
    tested = _constraints()
    proven = _proven(record)
    lines = []
    for name in needed:
        version = proven.get(name) or tested.get(name) or table("training_keys")["versions"].get(name)
        if name == "torch" and not proven:
            version = _older(version, (_observed(record, "gpu_probe").get("torch_build") or {}).get("release"))
        # A local version (2.13.0+cpu) names one build; which build fits is the machine's matter.
        lines.append(f"{name}=={version.split('+')[0]}" if version else name)
    where = (
        "the versions that the sandbox loaded and tried on this machine" if proven else "the versions that are tested"
    )
    return lines, where


def _older(tested: str | None, fitting: Any) -> str | None:
    """The tested release, or the one that fits the machine when that is older (an old GPU or driver)."""
    if not isinstance(fitting, str) or tested is None:
        return tested
    return min(tested, fitting, key=lambda release: [int(part) for part in re.findall(r"\d+", release)])


def _constraints() -> dict[str, str]:
    found = {}
    for line in shipped("constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)", line)
        if match:
            found[match[1]] = match[2]
    return found


def _proven(record: Mapping[str, Any] | None) -> dict[str, str]:
    """Versions in the software section of a report, when that section has no fail and its stack loaded."""
    section = ((record or {}).get("sections") or {}).get("env_sandbox") or {}
    observed = _observed(record, "env_sandbox")
    if section.get("level") not in ("ok", "warn") or observed.get("failing_stage"):
        return {}
    versions = observed.get("installed")
    if not isinstance(versions, Mapping):
        return {}
    return {str(name): str(version) for name, version in versions.items() if version}


# --- the whole -----------------------------------------------------------------------------------------------------


def write_recipe(
    folder: str | os.PathLike[str],
    model: str,
    train_data: str | os.PathLike[str],
    plan: Plan,
    record: Mapping[str, Any] | None = None,
    *,
    eval_data: str | os.PathLike[str] | None = None,
    on_cpu: bool | None = None,
) -> list[Path]:
    """Writes a project that trains `model` by `plan` and evaluates it; returns its files.

    `record` is the report's JSON (verdict, sections), for the reasons and the pins. `train_data`: conversations of any
    shape; without `eval_data` a part of them is held out for the evaluation. `on_cpu` None: the CPU when the record
    says that no accelerator is here and none was named. Raises UsageError when the folder is not empty or cannot be
    written, when there is nothing to train on, or when the plan is not covered.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--recipe {folder}: exists and is not empty; name a new folder")
    on_cpu = _without_gpu(record) if on_cpu is None else on_cpu
    plan = recipe_plan(plan, on_cpu)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"--recipe {folder}: cannot be written ({error.strerror or error})") from error
    try:
        temporary.chmod(0o755)
        (temporary / "data").mkdir()
        split = write_data(temporary / "data", Path(train_data), Path(eval_data) if eval_data is not None else None)
        _write_files(temporary, model, plan, record, split, eval_data is not None, on_cpu)
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"--recipe {folder}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _write_files(
    folder: Path, model: str, plan: Plan, record: Mapping[str, Any] | None, split: Split, own_eval: bool, on_cpu: bool
) -> None:
    path = Path(model).expanduser()
    name = str(path.resolve()) if path.exists() else model
    expected, parameters = _expected(path, plan)
    judged = [f"Judged: {_judged(record)}"] if _judged(record) else []
    if expected:
        low, high = (size / 2**30 for size in expected)
        judged.append(f"Expected of this plan: {low:.2f} to {high:.2f} GiB of tensors and cache (closed form).")
    groups = settings(plan, name, split.train, parameters, on_cpu)
    lines, where = pins(plan, record)
    tested = _constraints()
    texts = {
        "training_config.yaml": configuration(groups, judged),
        "train.py": render("train.py.j2", expected_peak=repr(expected)),
        "evaluate.py": render("evaluate.py.j2", written_by=json.dumps(str(_home()))),
        "requirements.txt": render(
            "requirements.txt.j2",
            proof=f"Pins: {where}.",
            python="3.11" if "transformers==5." in " ".join(lines) else "",
            options=_torch_source(on_cpu),
            pins=lines,
            evaluator_pins=[f"{name}=={tested[name]}" if name in tested else name for name in EVALUATOR_NEEDS],
        ),
        "README.md": render(
            "README.md.j2",
            model_name=path.name,
            method_words=METHODS[plan.method],
            judged=record is not None,
            python_words=" of Python 3.11 or newer",
            count=split,
            eval_origin="your evaluation data" if own_eval else "held out, the same as valid.jsonl",
            notes=[*_notes(split, plan), *_weights_note(path), _torch_note(record, lines[0])],
            judged_lines=judged,
        ),
    }
    if plan.gpus > 1:
        texts |= launch.launch_files(plan)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8", newline="\n")


def _observed(record: Mapping[str, Any] | None, stage: str) -> Mapping[str, Any]:
    section = ((record or {}).get("sections") or {}).get(stage) or {}
    observed = section.get("observed")
    return observed if isinstance(observed, Mapping) else {}


def _without_gpu(record: Mapping[str, Any] | None) -> bool:
    seen = _observed(record, "model_analyzer")
    if ((seen.get("memory") or {}).get("budget") or {}).get("assumed"):
        return False  # judged for a card that was named by its size, which need not be here
    card = (seen.get("card") or {}).get("name")
    return _observed(record, "gpu_probe").get("gpu_present") is False and card in (None, "CPU")


def _torch_note(record: Mapping[str, Any] | None, pin: str) -> str:
    """Which build of torch to install first: the one that the hardware stage chose, in the pinned release."""
    command = (_observed(record, "gpu_probe").get("torch_build") or {}).get("command")
    if isinstance(command, str) and "torch==" in command:
        pinned = re.sub(r"torch==\S+", pin, command)
        return f"Install torch first, in the build for this machine: `{pinned}`"
    return (
        "Install torch first where the build matters (a GPU with an older driver, or none at all): "
        "`bash install_pytorch.sh` of finetune-preflight names the command."
    )


def _torch_source(on_cpu: bool) -> list[str]:
    """Lines that keep gigabytes of CUDA libraries off a Linux machine without a GPU: its index has the CPU build.

    Not where a folder of wheels that pip is told of has a torch already: that machine may not reach the index.
    """
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    if not on_cpu or sys.platform != "linux" or any(glob.glob(os.path.join(at, "torch-*.whl")) for at in folders):
        return []
    return [
        "# The build of torch for the CPU, without gigabytes of CUDA libraries.",
        f"--extra-index-url {INDEX}cpu",
    ]


def _weights_note(model: Path) -> list[str]:
    if not model.is_dir() or any(model.glob("*.safetensors")) or any(model.glob("*.bin")):
        return []
    return [
        f"There are no weight files in {model}: put them there, or set `model_name_or_path` in training_config.yaml to "
        "a directory or a hub id that has them."
    ]


def _home() -> Path:
    """The folder that holds task_evaluator.py."""
    return shipped("templates").parent


def _notes(split: Split, plan: Plan) -> list[str]:
    notes = []
    if split.left_out:
        listed = ", ".join(f"{count} x {reason}" for reason, count in sorted(split.left_out.items()))
        notes.append(f"Left out of the training data: {listed}. `python data_preprocessor.py` says more.")
    if split.train < 50:
        notes.append(f"{split.train} conversations are few: expect the model to learn the form, not the task.")
    if split.eval < 27:
        notes.append(
            f"{split.eval} evaluation samples tell only large differences from chance: 27 are needed to see 35 % "
            "become 72 %, 93 for 30 % to 50 %."
        )
    if plan.gpus > 1:
        notes.append(f"On {plan.gpus} GPUs: `{launch.commands(plan)[0]}` in place of `python train.py`.")
    return notes


def _judged(record: Mapping[str, Any] | None) -> str:
    """The memory verdict in words of a report's record; "" when there is none."""
    section = ((record or {}).get("sections") or {}).get("model_analyzer") or {}
    return next((str(f["what"]) for f in section.get("findings", ()) if f["code"].startswith("memory-fit-")), "")


def _expected(model: Path, plan: Plan) -> tuple[list[int] | None, int | None]:
    """([lower, upper] bytes of the peak, tensors and cache; parameters) by the closed form. None: could not tell."""
    from preflight.memory.closed_form import NoEstimate, estimate
    from preflight.model_shape import read_shape

    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8-sig"))
        shape = read_shape(config)
    except (OSError, ValueError):
        return None, None
    try:
        made = estimate(shape, plan)
    except NoEstimate:
        return None, shape.parameters
    return [made.low_bytes, made.high_bytes], shape.parameters
