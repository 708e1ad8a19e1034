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
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preflight.console import UsageError, parser, run_main, run_stage
from preflight.findings import Finding, Level, Section, run_checks, say
from preflight.machine import Machine, choose_python
from preflight.task import exam_checks
from preflight.task.harness import check_harness, no_result
from preflight.task.red_team import MOST_PER_KIND, check_red_team

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
    what.add_argument(
        "--backend",
        choices=("transformers", "llama.cpp", "server"),
        help="default: by the form of --model and --base-url",
    )
    what.add_argument(
        "--red-team", type=_pairs, nargs="?", const=2, metavar="N", help="also N pairs of each kind of injection (2)"
    )
    what.add_argument(
        "--harness-task", metavar="TASK", action="append", default=[], help="task (or its YAML) to run through lm-eval"
    )
    what.add_argument("--encoding", help="encoding of the data (default: detected)")
    what.add_argument("--limit", type=_positive, default=200, help="samples per file (default 200), drawn by seed")
    judged = made.add_argument_group("how it is judged")
    judged.add_argument("--schema", metavar="FILE", help="JSON Schema for records without a rule of their own")
    judged.add_argument("--scorer", choices=SCORERS, help="how to compare with a reference (default: by its form)")
    judged.add_argument(
        "--scorer-file", metavar="FILE", help="Python file whose score(output, record) judges; it is run"
    )
    judged.add_argument("--rouge-threshold", type=_share, metavar="SHARE", help="ROUGE-L from which it passes (0.5)")
    judged.add_argument("--tiers", type=_tiers, default=(0.2, 0.5), metavar="20,50", help="thresholds in percent")
    judged.add_argument("--shots", type=_positive, metavar="N", help="also ask with N examples in the prompt, paired")
    judged.add_argument("--before", metavar="FILE", help="compare two finished exams (their --json), paired, …")
    judged.add_argument("--after", metavar="FILE", help="… before and after the training")
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
    how.add_argument("--no-thinking", action="store_true", help="ask reasoning models for the answer alone")
    how.add_argument("--debug", action="store_true", help="show prompt, token ids, raw output and score of each sample")
    return made


# Exit codes of an exam that was ended from outside; what was answered until then is kept.
ENDED = {"interrupted": 130, "terminated": 143}
SCORERS = ("exact", "contains", "numeric", "choice", "json_equal", "rouge_l", "regex")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _pairs(text: str) -> int:
    value = _positive(text)
    if value > MOST_PER_KIND:
        raise argparse.ArgumentTypeError(f"there are {MOST_PER_KIND} pairs of each kind")
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
    from preflight.outputs.schemas import Validator, read_schema
    from preflight.task.samples import ReadingRules, read_samples

    if not args.data and not args.red_team and not args.harness_task:
        raise UsageError("--data: is missing; name a file of samples (JSONL, JSON, CSV, Parquet)")
    if args.scorer_file and not Path(args.scorer_file).is_file():
        raise UsageError(f"--scorer-file {args.scorer_file}: no such file; it must define score(output, record)")
    schema = read_schema(args.schema).main.schema if args.schema else None
    if schema is not None:
        problem = Validator(schema).problem
        if problem:
            raise UsageError(f"--schema {args.schema}: is not a valid JSON Schema ({problem})")
    scorer = "function" if args.scorer_file else args.scorer
    rules = ReadingRules(scorer, schema, args.rouge_threshold, args.limit, args.seed, args.encoding)
    return [read_samples(path, rules) for path in args.data]


def look_and_judge(machine: Machine, args: argparse.Namespace) -> Section:
    """Read the data, let the model answer, judge the answers. Without a model only the data is looked at."""
    if args.before or args.after:
        return compare_two(args)
    from preflight.task import exam_run

    files = read_data(args)
    observed: dict[str, Any] = {"data": [file.as_json() for file in files]}
    samples = [sample for file in files for sample in file.samples if sample.number not in file.repeated]
    asks_anything = samples or args.red_team or args.harness_task
    if not (args.model or args.base_url) or not asks_anything:
        checks = (exam_checks.check_data, *((check_model_asked,) if samples else ()))
        return Section(STAGE, observed, run_checks(checks, observed))
    observed = {"model_name": exam_run.model_name(args), **observed}
    if samples or args.red_team:
        observed |= exam_run.examine(machine, args, samples)
        args.interrupted = observed["generation"]["trouble"]
    if args.harness_task and args.interrupted not in ENDED:
        try:
            observed["harness"] = ask_harness(machine, args)
        except (KeyboardInterrupt, SystemExit) as ended:
            if "generation" not in observed:
                raise
            args.interrupted = "interrupted" if isinstance(ended, KeyboardInterrupt) else "terminated"
            observed["harness"] = no_result(args.interrupted)
    return Section(STAGE, observed, run_checks(CHECKS, observed))


def check_model_asked(observed: Mapping[str, Any]) -> Finding:
    """Only reached when no model was named."""
    return Finding(
        "model-not-asked",
        Level.OK,
        "Only the data was looked at: no model was named.",
        "Nothing is said about any model; name one with `--model` to examine it.",
        source="task_evaluator.py",
    )


def compare_two(args: argparse.Namespace) -> Section:
    """The section about two finished exams."""
    from preflight.task.exam_files import check_comparison, compare_exams, read_exam

    if not (args.before and args.after):
        raise UsageError("--before and --after: both are needed; each is what `--json` printed, or a report's JSON")
    observed = {
        "data": [],
        "comparison": compare_exams(read_exam(args.before, "--before"), read_exam(args.after, "--after")),
    }
    return Section(STAGE, observed, run_checks((check_comparison,), observed))


def ask_harness(machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """Run the named tasks of lm-evaluation-harness."""
    from preflight.task.exam_run import job_of
    from preflight.task.harness import run_harness, task_names

    names, folder = task_names(args.harness_task)
    python = choose_python(machine, args.python, ("torch", "transformers", "lm_eval"))
    say(f"running {', '.join(names)} with lm-eval in {python.path}")
    job = {
        **job_of(args),
        "tasks": names,
        "include_path": folder,
        "limit": args.limit,
        "shots": args.shots,
        "device": "cuda" if args.device == "auto" and has_cuda(machine) else args.device.replace("auto", "cpu"),
    }
    return run_harness(machine, python.path, job)


def has_cuda(machine: Machine) -> bool:
    """Whether an NVIDIA driver answers; the harness wants to be told the device."""
    return machine.run(["nvidia-smi", "-L"], timeout_s=15).ok


CHECKS = (
    exam_checks.check_data,
    exam_checks.check_generation,
    exam_checks.check_own_function,
    exam_checks.check_tasks,
    exam_checks.check_prompt,
    exam_checks.check_latency,
    exam_checks.check_target,
    exam_checks.check_few_shot,
    check_red_team,
    check_harness,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exam and return the exit code; an interrupted one still writes what it has."""
    args = make_parser().parse_args(argv)
    args.interrupted = ""
    code = run_stage(STAGE, args, look_and_judge)
    return ENDED.get(args.interrupted, code)


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
