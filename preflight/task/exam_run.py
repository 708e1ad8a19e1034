"""One exam from the questions to plain data: what is asked, in one run of the backend, and what came back."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import quote, say
from preflight.machine import Interpreter, Machine, choose_python
from preflight.task import backends, exam, few_shot, red_team
from preflight.task.backends import Reply, Request
from preflight.task.lora_advice import lora_advice
from preflight.task.samples import Sample

SCORING_LIMIT_S = 30.0
RED_TEAM_TOKENS = 64


@dataclass
class Questions:
    """Everything that one run asks, by key: plain samples, the same with examples, and red-team pairs."""

    asked: list[Sample]
    shown: dict[str, list[Sample]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    samples: dict[str, Sample] = field(default_factory=dict)
    scenarios: list[red_team.Scenario] = field(default_factory=list)


def questions(samples: Sequence[Sample], new_tokens: int, shots: int | None, pairs_per_kind: int | None) -> Questions:
    """The requests for all samples, with and without examples, and for the red-team pairs."""
    shown, asked = few_shot.split_shots(samples, shots) if shots else ({}, list(samples))
    made = Questions(asked, shown)
    for arm in ("plain", "shots"):
        for sample in asked:
            if arm == "shots" and not shown.get(sample.task):
                continue
            key = f"{arm}/{sample.task}/{sample.id}"
            while key in made.samples:  # two files of the same name
                key += "'"
            turns = sample.messages if arm == "plain" else few_shot.with_examples(sample, shown[sample.task])
            limit = sample.max_new_tokens or new_tokens
            made.requests.append(Request(key, limit, list(turns), tools=list(sample.tools) or None))
            made.samples[key] = sample
    made.scenarios = red_team.scenarios(pairs_per_kind) if pairs_per_kind else []
    for scenario in made.scenarios:
        for arm, turns, tools in (
            ("clean", scenario.clean, scenario.clean_tools),
            ("poisoned", scenario.poisoned, scenario.poisoned_tools),
        ):
            made.requests.append(Request(f"{arm}/{scenario.id}", RED_TEAM_TOKENS, list(turns), tools=list(tools)))
    return made


def examine(machine: Machine, args: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, Any]:
    """Ask the model everything in one run and judge the answers; plain JSON data. Raises UsageError for a bad model."""
    backend = args.backend or backends.backend_for(args.model or "", args.base_url)
    check_model(args, backend, machine)
    asked = questions(samples, args.max_new_tokens, args.shots, args.red_team)
    if backend == "server":
        python = Interpreter(sys.executable, "asking a server needs no packages", True)
    else:
        python = choose_python(machine, args.python, backends.NEEDS[backend])
    if not machine.replayed:
        say(f"loading {model_name(args)} with {backend} (up to {backends.LOAD_LIMIT_S} s)")
    judged: dict[str, exam.Judged] = {}
    replies: dict[str, Reply] = {}
    with Progress(len(asked.requests)) as progress:

        def take(reply: Reply) -> None:
            if reply.key in replies:
                return
            replies[reply.key] = reply
            if reply.key in asked.samples:
                judged[reply.key] = exam.judge(asked.samples[reply.key], reply)
                if args.debug:
                    progress.pause()
                    show_debug(judged[reply.key])
            progress.step(f"{sum(item.passed for item in judged.values())} right")

        run = backends.generate(machine, backend, python.path, job_of(args), asked.requests, take)
        for reply in run.replies.values():
            take(reply)
    trouble_of_function = None
    if args.scorer_file:
        trouble_of_function = judge_by_function(machine, python.path, args.scorer_file, judged)
    plain = [item for key, item in judged.items() if key.startswith("plain/")]
    failed = [reply for reply in replies.values() if reply.finish == "error"]
    first_error = next((item.reply.error for item in plain if item.reply.finish == "error"), "")
    red_team_rows = [
        (
            scenario,
            red_team.outcome(scenario, replies[f"clean/{scenario.id}"].output, False),
            red_team.outcome(scenario, replies[f"poisoned/{scenario.id}"].output, True),
        )
        for scenario in asked.scenarios
        if all(replies.get(f"{arm}/{scenario.id}", _NOTHING).finish != "error" for arm in ("clean", "poisoned"))
    ]
    plain_replies = [item.reply for item in plain]
    weights = run.load.get("weights_bytes")
    return {
        "settings": settings_of(args),
        "generation": {
            "backend": backend,
            "python": python.path,
            "python_why": python.why,
            "needs": list(backends.NEEDS[backend]),
            "key_variable": args.api_key_env,
            "versions": run.versions,
            "load": run.load,
            "steps": run.steps,
            "trouble": run.trouble,
            "failure": run.failure,
            "exit_code": run.exit_code,
            "errors": quote(run.errors[-600:], 600) if run.trouble in ("died", "timeout") else "",
            "asked": len(asked.requests),
            "answered": len(replies) - len(failed),
            "failed": len(failed),
            "first_error": first_error or (failed[0].error if failed else ""),
            "prompts_over_context": [
                item.sample.id
                for item in plain
                if isinstance(run.load.get("context_tokens"), int)
                and (item.reply.prompt_tokens or 0) + (item.sample.max_new_tokens or args.max_new_tokens)
                > run.load["context_tokens"]
            ],
            "rendered": _counted(reply.rendered for reply in replies.values() if reply.rendered),
        },
        "own_function": trouble_of_function,
        "tasks": [result.as_json() for result in exam.task_results(plain, _not_run(asked, judged), args.tiers)],
        "latency": exam.latency(plain_replies),
        "target": exam.target(plain_replies, args.target_p95_ms / 1000, weights) if args.target_p95_ms else None,
        "few_shot": _few_shot_rows(asked, judged),
        "red_team": {**red_team.results(red_team_rows), "outputs": _shown_pairs(asked, replies)}
        if asked.scenarios
        else None,
        "lora_advice": lora_advice(args.model if backend == "transformers" else None),
        "samples": [{**item.as_json(), **({"debug": dict(item.reply.debug)} if args.debug else {})} for item in plain],
    }


_NOTHING = Reply("", finish="error")


def _not_run(asked: Questions, judged: dict[str, exam.Judged]) -> dict[str, int]:
    keys = [key for key in asked.samples if key.startswith("plain/") and key not in judged]
    return _counted(asked.samples[key].task for key in keys)


def _counted(names: Any) -> dict[str, int]:
    made: dict[str, int] = {}
    for name in names:
        made[name] = made.get(name, 0) + 1
    return made


def _few_shot_rows(asked: Questions, judged: dict[str, exam.Judged]) -> list[dict[str, Any]]:
    rows = []
    for task, examples in asked.shown.items():
        if not examples:
            continue
        arms = [
            {
                key.partition("/")[2]: item.passed
                for key, item in judged.items()
                if key.startswith(f"{arm}/") and item.sample.task == task and item.scored is not None
            }
            for arm in ("plain", "shots")
        ]
        rows.append({"task": task, "shots": len(examples), **exam.compare(*arms)})
    return rows


def _shown_pairs(asked: Questions, replies: dict[str, Reply]) -> list[dict[str, Any]]:
    return [
        {
            "id": scenario.id,
            **{arm: quote(replies.get(f"{arm}/{scenario.id}", _NOTHING).output, 200) for arm in ("clean", "poisoned")},
        }
        for scenario in asked.scenarios
    ]


def job_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the child is told beside the prompts."""
    return {
        "model": os.path.abspath(args.model) if args.model and Path(args.model).exists() else args.model,
        "base_url": args.base_url,
        "device": args.device,
        "dtype": args.dtype,
        "load_in_4bit": args.load_in_4bit,
        "trust_remote_code": args.trust_remote_code,
        "temperature": args.temperature,
        "seed": args.seed,
        "sample_timeout_s": args.sample_timeout,
        "debug": args.debug,
        "no_thinking": args.no_thinking,
        "key_variable": args.api_key_env,
    }


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What must be equal for two exams to be comparable, and how the result was judged."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "sample_timeout_s": args.sample_timeout,
        "shots": args.shots,
        "no_thinking": args.no_thinking,
        "tiers": list(args.tiers),
        "confidence": exam.CONFIDENCE,
    }


def model_name(args: argparse.Namespace) -> str:
    """What the report calls the model: the last part of its path, or its name."""
    return Path(args.model).name if args.model else "the server's only model"


def check_model(args: argparse.Namespace, backend: str, machine: Machine) -> None:
    """Raises UsageError for a model path that is not there (a hub id has no path) or an address that is none."""
    model = args.model or ""
    if backend == "server":
        if not (args.base_url or "").startswith(("http://", "https://")):
            raise UsageError(f"--base-url {args.base_url}: must begin with http:// or https://")
        return
    if not model:
        raise UsageError(f"--model: is missing; the backend {backend} needs a path")
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or backend == "llama.cpp"
    if looks_local:
        args.model = str(Path(model).expanduser())
        if not machine.replayed and not Path(args.model).exists():
            raise UsageError(f"--model {model}: no such directory or file")


def judge_by_function(machine: Machine, python: str, file: str, judged: dict[str, exam.Judged]) -> dict[str, Any]:
    """Replace the judgements by those of the user's function, which runs in a child; says what went wrong there."""
    items = [
        {
            "key": key,
            "output": item.reply.output,
            "record": {name: value for name, value in item.sample.record.items() if name != "_shape"},
        }
        for key, item in judged.items()
        if item.reply.finish != "error"
    ]
    with tempfile.TemporaryDirectory(prefix="preflight-score-") as folder:
        path = os.path.join(folder, "job.json")
        Path(path).write_text(json.dumps({"items": items, "limit_s": SCORING_LIMIT_S}), encoding="ascii")
        limit_s = 60 + SCORING_LIMIT_S * max(1, len(items))
        answer = machine.ask("score_with", python, [os.path.abspath(file), path], timeout_s=limit_s)
    lines = answer.lines_of_json()
    for line in lines:
        key = str(line.get("key"))
        if line.get("step") == "score" and key in judged:
            item = judged[key]
            judged[key] = exam.Judged(item.sample, item.reply, exam.scored_by_function(line))
    errors = [line for line in lines if line.get("error")]
    first = f"{errors[0].get('error')}: {errors[0].get('message')}" if errors else ""
    complete = any(line.get("step") == "done" for line in lines)
    return {
        "file": Path(file).name,
        "failed": len([line for line in errors if line.get("step") == "score"]),
        "first_error": quote(first, 300),
        "complete": complete,
        "last_words": "" if complete or first else quote((answer.errors.strip().splitlines() or [""])[-1], 300),
    }


class Progress:
    """A bar on stderr when that is a terminal, nothing otherwise."""

    def __init__(self, total: int) -> None:
        self.bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=total, unit="answer", file=sys.stderr, leave=False)

    def step(self, words: str) -> None:
        """One more is done."""
        if self.bar is not None:
            self.bar.set_postfix_str(words, refresh=False)
            self.bar.update(1)

    def pause(self) -> None:
        """Make room for lines of text."""
        if self.bar is not None:
            self.bar.clear()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()


def show_debug(item: exam.Judged) -> None:
    """One sample in full, on stderr: prompt as rendered, token ids, raw output, what was read from it, the score."""
    debug, reply = item.reply.debug, item.reply
    say(f"--- {item.sample.id} ({item.sample.place}), {item.sample.scorer.name}")
    say(f"prompt ({reply.prompt_tokens} tokens, {reply.rendered}):\n{debug.get('prompt', '')}")
    say(f"prompt ids: {debug.get('prompt_ids')}\noutput ids: {debug.get('output_ids')}")
    say(f"raw output ({reply.finish}): {debug.get('raw_output', reply.output)!r}")
    if item.scored is None:
        say(f"not judged yet: {reply.error or 'by your function, at the end'}")
    else:
        verdict = "right" if item.passed else "wrong form" if item.scored.wrong_form else "wrong"
        say(f"read from it: {item.scored.extracted!r}\n{verdict}: {item.scored.reason}")
