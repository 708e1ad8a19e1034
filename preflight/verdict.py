"""From the sections of a report to one answer: yes, marginal, no or "could not tell", why, and the next command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from preflight.findings import Level

# What each stage answers; also the order in which its facts are shown.
QUESTIONS = {
    "gpu_probe": "Is the hardware usable?",
    "env_sandbox": "Does the software load?",
    "model_analyzer": "Does the model fit?",
    "task_evaluator": "Does the task need it?",
}
SCRIPTS = {stage: f"python {stage}.py" for stage in QUESTIONS}
# A weak result on the task is a reason to fine-tune, never an obstacle to it.
OBSTACLE_STAGES = ("gpu_probe", "env_sandbox", "model_analyzer")
# The findings that answer a stage's question, by the start of their code; its worst finding is told beside them.
ANSWERED_BY = {
    "gpu_probe": ("gpu-usable", "no-gpu"),
    "env_sandbox": ("stack-loads",),
    "model_analyzer": ("memory-fit-",),
    "task_evaluator": ("task-",),
}
ON_THE_CPU = " On the CPU only: no GPU was found, so expect minutes where a GPU takes seconds."
ANSWERS = {
    "yes": "Yes, this can be fine-tuned here.",
    "marginal": "Marginal: it may fit or fail, depending on what the estimate cannot see.",
    "no": "No, not like this.",
    "could not tell": "Could not tell: something that decides could not be determined.",
}


def judge(record: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict over a report's record, as plain data: answer, sentence, facts, stages, next_command, next_why.

    "no" when hardware, software or memory fails; "could not tell" when one of these is unknown or was not run;
    "marginal" when the memory estimate straddles what is free; else "yes".
    """
    sections: Mapping[str, Any] = record.get("sections", {})
    findings = [(stage, finding) for stage in QUESTIONS if stage in sections for finding in sections[stage]["findings"]]
    failed = [(s, f) for s, f in findings if f["level"] == Level.FAIL.value and s in OBSTACLE_STAGES]
    unknown = [(s, f) for s, f in findings if f["level"] == Level.UNKNOWN.value and s in OBSTACLE_STAGES]
    missing = [stage for stage in OBSTACLE_STAGES if not sections.get(stage, {}).get("findings")]
    fit = [(s, f) for s, f in findings if f["code"].startswith("memory-fit-")]
    loads = any(f["code"].startswith(ANSWERED_BY["env_sandbox"]) for _, f in findings)
    marginal = [(s, f) for s, f in fit if f["code"] == "memory-fit-marginal"]
    if failed:
        answer, deciding = "no", failed
    elif marginal:
        answer, deciding = "marginal", marginal + unknown
    elif unknown or missing or not fit or not loads:
        answer, deciding = "could not tell", unknown
    else:
        answer, deciding = "yes", fit
    facts = [{"stage": stage, "what": finding["what"]} for stage, finding in deciding[:3]]
    facts += [
        {"stage": stage, "what": f"Not run yet: `{SCRIPTS[stage]}` ({QUESTIONS[stage].lower()})"} for stage in missing
    ]
    task = [(s, f) for s, f in findings if s == "task_evaluator" and f["code"].startswith("task-")]
    facts += [{"stage": stage, "what": finding["what"]} for stage, finding in task[:3]]
    sentence = ANSWERS[answer]
    if answer in ("yes", "marginal") and any(f["code"] == "no-gpu" for _, f in findings):
        sentence += ON_THE_CPU
    command, why = _next_step(record, answer, deciding, missing)
    return {
        "answer": answer,
        "sentence": sentence,
        "facts": facts,
        "stages": [_stage_line(stage, sections.get(stage), record.get("job") or {}) for stage in QUESTIONS],
        "next_command": command,
        "next_why": why,
        "notes": _notes(record),
    }


def _stage_line(stage: str, section: Mapping[str, Any] | None, job: Mapping[str, Any]) -> dict[str, str]:
    """One row of the summary's table: the stage's question, its level, and what answers it."""
    if section is None:
        model = job.get("model") or "MODEL"
        more = {
            "model_analyzer": f" {model}",
            "task_evaluator": f" --model {model} --data {job.get('data') or 'YOUR_EVAL.jsonl'}",
        }.get(stage, "")
        told = f"Not run: `{SCRIPTS[stage]}{more}` answers it."
        return {"stage": stage, "question": QUESTIONS[stage], "level": "not run", "what": told}
    findings = section["findings"]
    worst = next((f for f in findings if f["level"] == section["level"]), None)
    answers = [f for f in findings if f["code"].startswith(ANSWERED_BY[stage])]
    said = [first_sentence(f["what"]) for f in answers[:3]]
    if worst is not None and worst not in answers and (worst["level"] != Level.OK.value or not said):
        said.append(first_sentence(worst["what"]))
    return {"stage": stage, "question": QUESTIONS[stage], "level": section["level"], "what": " ".join(said)}


def first_sentence(text: str) -> str:
    """The first sentence: what a table cell has room for; the whole stands above it and in the stage's section."""
    return re.split(r"(?<=[.!?]) (?=[A-Z`\d])", text, maxsplit=1)[0]


def _next_step(
    record: Mapping[str, Any], answer: str, deciding: list[tuple[str, Any]], missing: list[str]
) -> tuple[str, str]:
    """The one thing to do now, and why."""
    job = record.get("job") or {}
    model = job.get("model") or "MODEL"
    data = f" --data {job['data']}" if job.get("data") else ""
    for stage, finding in deciding:
        if answer in ("no", "could not tell", "marginal") and finding["fix"]:
            return finding["fix"][0], f"the first fix of {finding['code']} ({stage})"
    if missing:
        return f"`python -m preflight {model}{data}`", "it runs the stages that are still missing"
    if "task_evaluator" not in record.get("sections", {}):
        return (
            f"`python task_evaluator.py --model {model} --data YOUR_EVAL.jsonl`",
            "it shows what the untouched model already can do, before anything is trained",
        )
    # The data of this run were for the exam; a model must not be trained on them.
    model, data = ("", "") if job and not job.get("model") else (model, " --data YOUR_TRAINING_DATA.jsonl")
    words = " ".join(f"python -m preflight {model}{data} --recipe ./recipe".split())
    return f"`{words}`", "nothing stands in the way, and this writes the project that trains by that plan"


def _notes(record: Mapping[str, Any]) -> list[str]:
    """What a reader must know to trust the whole: sections about different models."""
    models = {
        stage: section["observed"].get("model_name")
        for stage, section in record.get("sections", {}).items()
        if isinstance(section["observed"].get("model_name"), str)
    }
    if len(set(models.values())) > 1:
        listed = ", ".join(f"{stage}: {name}" for stage, name in models.items())
        return [f"The sections below are about different models ({listed}); run the main job again for one of them."]
    return []
