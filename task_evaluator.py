# /// script
# requires-python = ">=3.10"
# dependencies = ["filelock>=3.12", "jinja2>=3.1", "jsonschema>=4.18", "packaging>=23", "tqdm>=4.65"]
# ///
"""How well does the untouched model already do my task, how fast, how sure is that, and what follows?

Every record of the data file is put to the model, one at a time, and its answer is judged by a rule: keywords, a
reference answer, a number, a choice, a JSON Schema. The share of right answers comes with its interval.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preflight.console import UsageError, parser, run_main, run_stage
from preflight.findings import Finding, Level, Section, run_checks, say
from preflight.machine import Machine, choose_python

STAGE = "task_evaluator"
# Long enough for a sentence or a small JSON object; a longer limit costs time on every answer that does not stop.
NEW_TOKENS = 64


def make_parser() -> argparse.ArgumentParser:
    """The exam's flags."""
    made = parser(__doc__, "python task_evaluator.py --model ./my-model --data my-eval.jsonl")
    what = made.add_argument_group("what is examined")
    what.add_argument("--model", metavar="MODEL", help="model directory, hub id, GGUF file, or the server's model name")
    what.add_argument("--data", metavar="FILE", action="append", default=[], help="samples; may be given several times")
    what.add_argument("--base-url", metavar="URL", help="ask an OpenAI-compatible server instead of loading a model")
    what.add_argument("--api-key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable that holds its key")
    what.add_argument("--encoding", help="encoding of the data (default: detected)")
    what.add_argument("--limit", type=_positive, default=200, help="samples per file (default 200), drawn by seed")
    judged = made.add_argument_group("how it is judged")
    judged.add_argument("--schema", metavar="FILE", help="JSON Schema for records without a rule of their own")
    judged.add_argument("--scorer", choices=SCORERS, help="how to compare with a reference (default: by its form)")
    judged.add_argument("--rouge-threshold", type=_share, metavar="SHARE", help="ROUGE-L from which it passes (0.5)")
    judged.add_argument("--tiers", type=_tiers, default=(0.2, 0.5), metavar="20,50", help="thresholds in percent")
    judged.add_argument("--shots", type=_positive, metavar="N", help="also ask with N examples in the prompt, paired")
    judged.add_argument("--target-p95-ms", type=_milliseconds, metavar="MS", help="is the P95 of an answer below this?")
    how = made.add_argument_group("how it is run")
    how.add_argument("--max-new-tokens", type=_positive, default=NEW_TOKENS, help=f"default {NEW_TOKENS}")
    how.add_argument("--temperature", type=_temperature, default=0.0, help="default 0: greedy")
    how.add_argument("--seed", type=int, default=0, help="default 0")
    how.add_argument("--sample-timeout", type=_seconds, default=120.0, metavar="S", help="per answer (default 120 s)")
    how.add_argument("--python", metavar="PATH", help="interpreter in which the model runs (default: the active one)")
    how.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    how.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    how.add_argument("--load-in-4bit", action="store_true", help="load with bitsandbytes nf4, as QLoRA would")
    how.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run, in the child")
    how.add_argument("--debug", action="store_true", help="show prompt, token ids, raw output and score of each sample")
    return made


SCORERS = ("exact", "contains", "numeric", "choice", "json_equal", "rouge_l", "regex")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must lie above 0 and be at most 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError("must lie above 0 and be at most 86400")
    return value


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError("must be a number of milliseconds above 0")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 5:
        raise argparse.ArgumentTypeError("must lie between 0 and 5")
    return value


def _tiers(text: str) -> tuple[float, ...]:
    try:
        edges = tuple(float(part) / 100 for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError("must be percentages such as 20,50") from error
    if not edges or any(not 0 < edge < 1 for edge in edges) or list(edges) != sorted(set(edges)):
        raise argparse.ArgumentTypeError("must be rising percentages between 0 and 100, such as 20,50")
    return edges


def read_data(args: argparse.Namespace) -> list[Any]:
    """The sample files. Raises UsageError when one cannot be read."""
    from preflight.samples import ReadingRules, read_samples
    from preflight.schemas import Validator, read_schema

    if not args.data:
        raise UsageError("--data: is missing; name a file of samples (JSONL, JSON, CSV, Parquet)")
    schema = read_schema(args.schema).main.schema if args.schema else None
    if schema is not None:
        problem = Validator(schema).problem
        if problem:
            raise UsageError(f"--schema {args.schema}: is not a valid JSON Schema ({problem})")
    rules = ReadingRules(args.scorer, schema, args.rouge_threshold, args.limit, args.seed, args.encoding)
    return [read_samples(path, rules) for path in args.data]


def look_and_judge(machine: Machine, args: argparse.Namespace) -> Section:
    """Read the data, let the model answer, judge the answers. Without a model only the data is looked at."""
    from preflight import exam_checks

    files = read_data(args)
    observed: dict[str, Any] = {"data": [file.as_json() for file in files]}
    samples = [sample for file in files for sample in file.samples if sample.number not in file.repeated]
    if not args.model and not args.base_url:
        return Section(STAGE, observed, (*run_checks((exam_checks.check_data,), observed), _not_asked()))
    if not samples:
        return Section(STAGE, observed, run_checks((exam_checks.check_data,), observed))
    observed = {"model_name": model_name(args), **observed, **examine(machine, args, samples)}
    args.interrupted = observed["generation"]["trouble"] == "interrupted"
    return Section(STAGE, observed, run_checks(CHECKS, observed))


def _not_asked() -> Finding:
    return Finding(
        "model-not-asked",
        Level.OK,
        "Only the data was looked at: no model was named.",
        "Nothing is said about any model; name one with `--model` to examine it.",
        source="task_evaluator.py",
    )


def model_name(args: argparse.Namespace) -> str:
    """What the report calls the model: the last part of its path, or its name."""
    return Path(args.model).name if args.model else "the server's only model"


def examine(machine: Machine, args: argparse.Namespace, samples: Sequence[Any]) -> dict[str, Any]:
    """Ask the model everything in one run of the backend and judge the answers; plain JSON data."""
    from preflight import backends, exam, few_shot
    from preflight.lora_advice import lora_advice

    backend = backends.backend_for(args.model or "", args.base_url)
    check_model_path(args, backend, machine)
    python = sys.executable if backend == "server" else choose_python(machine, args.python, backends.NEEDS[backend])
    python_path, python_why = (python, "") if isinstance(python, str) else (python.path, python.why)
    limit = args.max_new_tokens
    shown, asked = few_shot.split_shots(samples, args.shots) if args.shots else ({}, list(samples))
    requests = [
        backends.Request(f"plain/{sample.task}/{sample.id}", sample.max_new_tokens or limit, list(sample.messages))
        for sample in asked
    ]
    requests += [
        backends.Request(
            f"shots/{sample.task}/{sample.id}",
            sample.max_new_tokens or limit,
            few_shot.with_examples(sample, shown[sample.task]),
        )
        for sample in asked
        if shown.get(sample.task)
    ]
    by_key = {f"plain/{sample.task}/{sample.id}": sample for sample in asked}
    by_key |= {f"shots/{sample.task}/{sample.id}": sample for sample in asked}
    judged: dict[str, exam.Judged] = {}

    def take(reply: backends.Reply) -> None:
        if reply.key in by_key and reply.key not in judged:
            judged[reply.key] = exam.judge(by_key[reply.key], reply)
            progress.step(f"{sum(item.passed for item in judged.values())} right")
            if args.debug:
                show_debug(judged[reply.key])

    job = {
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
        "key_variable": args.api_key_env,
    }
    if not machine.replayed:
        say(f"loading {model_name(args)} with {backend} (up to {backends.LOAD_LIMIT_S} s)")
    with Progress(len(requests)) as progress:
        run = backends.generate(machine, backend, python_path, job, requests, take)
        for key in by_key:
            if key in run.replies:
                take(run.replies[key])
    plain = [item for key, item in judged.items() if key.startswith("plain/")]
    replies = [item.reply for item in plain]
    missing: dict[str, int] = {}
    for sample in asked:
        if f"plain/{sample.task}/{sample.id}" not in judged:
            missing[sample.task] = missing.get(sample.task, 0) + 1
    results = exam.task_results(plain, missing, args.tiers)
    errors = [item.reply.error for item in judged.values() if item.scored is None]
    rendered: dict[str, int] = {}
    for item in judged.values():
        if item.reply.rendered:
            rendered[item.reply.rendered] = rendered.get(item.reply.rendered, 0) + 1
    comparisons = []
    for task, examples in shown.items():
        arms = [
            {
                item.sample.id: item.passed
                for key, item in judged.items()
                if key.startswith(arm) and item.sample.task == task and item.scored is not None
            }
            for arm in ("plain/", "shots/")
        ]
        if examples:
            comparisons.append({"task": task, "shots": len(examples), **exam.compare(*arms)})
    weights = run.load.get("weights_bytes")
    return {
        "settings": {
            "max_new_tokens": limit,
            "temperature": args.temperature,
            "seed": args.seed,
            "sample_timeout_s": args.sample_timeout,
            "shots": args.shots,
            "tiers": list(args.tiers),
            "confidence": exam.CONFIDENCE,
        },
        "generation": {
            "backend": backend,
            "python": python_path,
            "python_why": python_why,
            "needs": list(backends.NEEDS[backend]),
            "key_variable": args.api_key_env,
            "versions": run.versions,
            "load": run.load,
            "steps": run.steps,
            "trouble": run.trouble,
            "failure": run.failure,
            "exit_code": run.exit_code,
            "errors": run.errors[-600:] if run.trouble in ("died", "timeout") else "",
            "asked": len(requests),
            "answered": len(judged) - len(errors),
            "failed": len(errors),
            "first_error": errors[0] if errors else "",
            "rendered": rendered,
        },
        "tasks": [result.as_json() for result in results],
        "latency": exam.latency(replies),
        "target": exam.target(replies, args.target_p95_ms / 1000, weights) if args.target_p95_ms else None,
        "few_shot": comparisons,
        "lora_advice": lora_advice(args.model if backend == "transformers" else None),
        "samples": [{**item.as_json(), **({"debug": dict(item.reply.debug)} if args.debug else {})} for item in plain],
    }


def check_model_path(args: argparse.Namespace, backend: str, machine: Machine) -> None:
    """Raises UsageError for a model path that is not there; a hub id has no path."""
    model = args.model or ""
    if backend == "server":
        if not args.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url {args.base_url}: must begin with http:// or https://")
        return
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or backend == "llama.cpp"
    if not machine.replayed and looks_local and not Path(model).expanduser().exists():
        raise UsageError(f"--model {model}: no such directory or file")
    args.model = str(Path(model).expanduser()) if looks_local else model


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
        if self.bar is not None:
            self.bar.set_postfix_str(words, refresh=False)
            self.bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()


def show_debug(item: Any) -> None:
    """One sample in full, on stderr: prompt as rendered, token ids, raw output, what was read from it, the score."""
    debug, reply = item.reply.debug, item.reply
    say(f"--- {item.sample.id} ({item.sample.place}), {item.sample.scorer.name}")
    say(f"prompt ({reply.prompt_tokens} tokens, {reply.rendered}):\n{debug.get('prompt', '')}")
    say(f"prompt ids: {debug.get('prompt_ids')}\noutput ids: {debug.get('output_ids')}")
    say(f"raw output ({reply.finish}): {debug.get('raw_output', reply.output)!r}")
    if item.scored is None:
        say(f"not judged: {reply.error}")
    else:
        verdict = "right" if item.passed else "wrong form" if item.scored.wrong_form else "wrong"
        say(f"read from it: {item.scored.extracted!r}\n{verdict}: {item.scored.reason}")


def _checks() -> tuple[Any, ...]:
    from preflight import exam_checks as checks

    return (
        checks.check_data,
        checks.check_generation,
        checks.check_tasks,
        checks.check_prompt,
        checks.check_latency,
        checks.check_target,
        checks.check_few_shot,
    )


CHECKS = _checks()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exam and return the exit code; an interrupted one still writes what it has."""
    args = make_parser().parse_args(argv)
    args.interrupted = False
    code = run_stage(STAGE, args, look_and_judge)
    return 130 if args.interrupted else code


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
