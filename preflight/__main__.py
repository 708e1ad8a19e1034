"""Can I fine-tune this model, here?  Runs the four stages in order and writes the verdict on top of one report.

Without MODEL it runs the embedded example: a small real model and data that ship with the program.
`python -m preflight explain LOGFILE` explains the errors in a log instead; `python -m preflight render RECORD.json
--lang zh` writes the views of a report again, in another language, without running anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preflight import processes
from preflight.console import DEFAULT_REPORT, UsageError, painter, parser, print_section, run_main
from preflight.findings import Finding, Level, Section, exit_code, quote, say, section_from_json
from preflight.redact import redacted
from preflight.report import STAGES, write_sections
from preflight.verdict import judge
from preflight.words import ENGLISH, words_of

# Generous: a stage that takes longer has hung. Software downloads; the task stage generates text on a CPU.
LIMITS_S = {"gpu_probe": 300, "env_sandbox": 3600, "model_analyzer": 900, "task_evaluator": 3600}


def make_parser() -> argparse.ArgumentParser:
    """The flags of the main job; each stage has more of its own."""
    made = parser(__doc__, "python -m preflight ./my-model --data my-eval.jsonl")
    made.prog = "python -m preflight"
    made.add_argument("model", nargs="?", metavar="MODEL", help="model directory or hub id (default: the example)")
    made.add_argument("--data", metavar="FILE", help="evaluation samples for the task stage (JSONL)")
    made.add_argument("--schema", metavar="FILE", help="JSON Schema that the model's outputs must satisfy")
    made.add_argument("--config", metavar="FILE", help="training plan to judge (training_config.yaml)")
    made.add_argument("--method", choices=("auto", "full", "lora", "qlora"), default=None, help="default: auto")
    made.add_argument("--gpu-vram-gb", type=float, metavar="GIB", help="judge for a card of this size")
    made.add_argument(
        "--evidence", choices=("closed", "auto", "rehearsed"), default="auto",
        help="for the memory: formulas alone, or the training step rehearsed on fake tensors with the packages of the "
        "interpreter that is judged; auto: rehearsed where torch, transformers and peft are there (default: auto)",
    )  # fmt: skip
    made.add_argument("--recommend", action="store_true", help="show what would fit even when the plan fits already")
    made.add_argument("--requirements", metavar="FILE", help="software stack to try (default: the tested set)")
    made.add_argument("--mode", choices=("quick", "full"), default="full", help="how far the software stage goes")
    made.add_argument("--python", metavar="PATH", help="interpreter whose packages are judged")
    made.add_argument("--skip", action="append", choices=STAGES, default=[], help="leave a stage out")
    made.add_argument(
        "--recipe", metavar="DIR", help="also write a project that trains by the plan that fits, on --data, into DIR"
    )
    made.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run, in a child")
    made.add_argument("--open", action="store_true", help="show the HTML report in the browser afterwards")
    return made


def stage_command(stage: str, args: argparse.Namespace, model: str, data: list[str]) -> list[str]:
    """The command line of one stage."""
    flags: list[str] = ["--json", "--no-report"]
    if args.replay:  # what --record wrote has a folder for each stage; a plain recorded machine answers them all
        own = Path(args.replay, stage)
        flags += ["--replay", str(own if own.is_dir() else args.replay)]
    if args.record:
        flags += ["--record", str(Path(args.record, stage))]
    if args.python:
        flags += ["--python", args.python]
    if stage == "env_sandbox":
        flags += ["--mode", args.mode]
        if args.requirements:
            flags += ["--requirements", args.requirements]
        if Path(model, "config.json").is_file():  # shrunk to two layers, it is built and trained in the sandbox
            flags += ["--model", model]
    if stage == "model_analyzer":
        flags += [model] if args.gpu_vram_gb is not None else ["--here", model]
        if args.recommend:
            flags += ["--recommend"]
        if args.recipe and args.data:  # what is trained on: how long that takes
            flags += ["--data", args.data]
        for name in ("config", "method", "gpu_vram_gb", "evidence"):
            if getattr(args, name) is not None:
                flags += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if stage == "task_evaluator":
        flags += ["--model", model]
        for path in data:
            flags += ["--data", path]
        if args.schema:
            flags += ["--schema", args.schema]
    if args.trust_remote_code and stage in ("env_sandbox", "model_analyzer", "task_evaluator"):
        flags += ["--trust-remote-code"]
    return [sys.executable, _script(stage), *flags]


def _script(stage: str) -> str:
    beside = Path(__file__).resolve().parent.parent / f"{stage}.py"
    if beside.exists():  # asked for first: a file of this name in the user's folder must not be run instead
        return str(beside)
    spec = importlib.util.find_spec(stage)
    if spec is None or spec.origin is None:
        raise UsageError(f"{stage}.py: is not installed beside this program")
    return spec.origin


def run_stage(stage: str, command: list[str]) -> Section:
    """The section that a stage prints; an UNKNOWN section with the reason when it prints none.

    The stage's progress on stderr goes straight through to ours.
    """
    with tempfile.TemporaryFile() as out:
        try:
            process = processes.start(command, stdout=out)
        except OSError as error:
            return not_run(stage, f"it could not be started ({error.strerror})")
        try:
            process.wait(LIMITS_S[stage])
        except subprocess.TimeoutExpired:
            return not_run(stage, f"it was given up after its limit of {LIMITS_S[stage]} s")
        finally:
            if process.returncode is None:
                processes.kill(process, grace_s=10)
        out.seek(0)
        text = out.read().decode("utf-8", errors="replace")
    try:
        return section_from_json(json.loads(text))
    except (ValueError, KeyError, TypeError):
        if process.returncode == 2:
            reason = "it refused its input; its own line above says which"
        elif process.returncode is not None and process.returncode < 0:
            reason = f"it was ended by signal {-process.returncode}"
        else:
            reason = f"it ended with exit code {process.returncode} and printed no result"
        return not_run(stage, reason)


def not_run(stage: str, reason: str) -> Section:
    """An UNKNOWN section that says why a stage has no result."""
    finding = Finding(
        "stage-not-run",
        Level.UNKNOWN,
        f"{stage} has no result: {quote(reason)}.",
        "Nothing of this stage was checked, so nothing of it can count as passed.",
        (f"run `python {stage}.py` alone and read what it says",),
        "preflight/__main__.py",
    )
    return Section(stage, {}, (finding,))


def resolve_job(args: argparse.Namespace) -> tuple[str, list[str], dict[str, Any]]:
    """The model, the data files and what the report says of them. Raises UsageError for paths that are not there."""
    from preflight.facts import shipped

    if args.model is None:
        from preflight.task.example_model import example_model

        model = str(example_model())
        data = [str(shipped("examples", name)) for name in ("questions.jsonl", "judge.jsonl")]
        job = {"model_name": "SmolLM2-135M-Instruct (embedded example)", "model": "", "data_name": "embedded examples"}
        return model, [args.data] if args.data else data, job
    if args.data and not Path(args.data).is_file():
        raise UsageError(f"--data {args.data}: no such file")
    looks_local = args.model.startswith((".", "/", "~")) or (os.sep in args.model and args.model.count("/") != 1)
    path = Path(args.model).expanduser()
    if looks_local and not path.exists():
        raise UsageError(f"MODEL {args.model}: no such directory")
    model = str(path) if path.exists() else args.model
    if path.is_dir() and path.resolve() == shipped("examples", "smollm2-135m-instruct").resolve():
        from preflight.task.example_model import example_model

        model = str(example_model())  # the same files with their weights
    job = {"model_name": Path(args.model).name, "model": args.model}
    if args.data:
        job |= {"data": args.data, "data_name": Path(args.data).name}
    return model, [args.data] if args.data else [], job


def main(argv: Sequence[str] | None = None) -> int:
    """Run the main job, `explain` or `render`. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["explain"]:
        from preflight.software import explain

        return int(explain.main(arguments[1:]))
    if arguments[:1] == ["render"]:
        return render_again(arguments[1:])
    args = make_parser().parse_args(arguments)
    report = None if args.no_report else args.report or (None if args.json else DEFAULT_REPORT)
    if args.recipe:
        check_folder(args.recipe)
    if args.open and not report:
        raise UsageError("--open: without a report there is no page; leave --no-report out or give --report PATH")
    model, data, job = resolve_job(args)
    sections: list[Section] = []
    paint = painter(args.color)
    for number, stage in enumerate(STAGES, 1):
        if stage in args.skip:
            continue
        if stage == "task_evaluator" and not data:
            say(f"[{number}/4] {stage}: left out, because no --data was given")
            continue
        say(f"[{number}/4] {stage} …")
        began = time.monotonic()
        section = run_stage(stage, stage_command(stage, args, model, data))
        say(f"[{number}/4] {stage}: {section.level.value} ({time.monotonic() - began:.0f} s)")
        sections.append(section)
    document = {"schema": 1, "job": job, "sections": {section.stage: section.as_json() for section in sections}}
    document = redacted(document)
    verdict = judge(document)
    document["verdict"] = verdict
    if args.json:
        print(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        for section in sections:
            print_section(section_from_json(document["sections"][section.stage]), args.color, args.verbose, args.lang)
            print()
        print_verdict(verdict, paint, args.lang)
    if report:
        clean = [section_from_json(document["sections"][section.stage]) for section in sections]
        trouble = write_sections(report, clean, document["job"], args.lang)
        if trouble:
            say(f"error: {trouble}")
            return 2
        if not args.json:
            said = words_of(args.lang).template("Written: {path} (and .html for looking, .json for programs)")
            print("\n" + said.format(path=report))
        if args.open:
            show_page(Path(report).with_suffix(".html"))
    if args.recipe:
        say_recipe(args, model, document)
    return verdict_code(verdict, sections)


def say_recipe(args: argparse.Namespace, model: str, document: dict[str, Any]) -> None:
    """Write the recipe for what was just judged, or say why there is none. Raises UsageError as `write_recipe` does."""
    from preflight.facts import shipped
    from preflight.plan import plan_of
    from preflight.recipe import write_recipe

    memory = document["sections"].get("model_analyzer", {}).get("observed", {}).get("memory") or {}
    if not memory.get("plan"):
        say("--recipe: none was written, because the model stage judged no plan")
        return
    best = next(iter((memory.get("would_fit") or {}).get("best") or ()), None)
    if document["verdict"]["answer"] == "no" and (best is None or not only_memory_fails(document)):
        say("--recipe: none was written, because the verdict is no; see the fixes above")
        return
    plan = plan_of(memory["plan"])
    if memory.get("verdict") in ("marginal", "no") and best is not None and not best["plan"]["offload"]:
        plan = plan_of(best["plan"])
        say(f"--recipe: it is written for the plan that fits with certainty: `{best['flags']}`")
    elif memory.get("verdict") == "no":
        say("--recipe: none was written, because no plan that it covers fits; see the fixes above")
        return
    if args.data:
        train, held_out = args.data, None
    elif args.model is None:
        train, held_out = str(shipped("examples", "judge-train.jsonl")), str(shipped("examples", "judge.jsonl"))
    else:
        raise UsageError("--recipe: needs --data FILE, the conversations to train on")
    written = write_recipe(args.recipe, model, train, plan, document, eval_data=held_out)
    print(f"\nRecipe: {args.recipe} ({', '.join(path.name for path in written)}); start with its README.md")


def check_folder(folder: str) -> None:
    """Whether a recipe can be written there. Raises UsageError before minutes are spent on what it would hold."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--recipe {folder}: exists and is not empty; name a new folder")
    above = target.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"--recipe {folder}: cannot be written (no new folder can be made in {above})")


def only_memory_fails(document: dict[str, Any]) -> bool:
    """Whether the memory of the plan is all that stands in the way."""
    failed = [
        finding["code"]
        for section in document["sections"].values()
        for finding in section["findings"]
        if finding["level"] == Level.FAIL.value and section["stage"] != "task_evaluator"
    ]
    return bool(failed) and all(code == "memory-fit-no" for code in failed)


def show_page(page: Path) -> None:
    """Open the page in the user's browser; say where it is when none starts."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        say(f"--open: no browser could be started; the page is {page}")


def verdict_code(verdict: dict[str, Any], sections: Sequence[Section]) -> int:
    """1 when a stage failed, 3 when something that decides could not be determined, else 0."""
    code = exit_code(sections)
    return 3 if code == 0 and verdict["answer"] == "could not tell" else code


def print_verdict(verdict: dict[str, Any], paint: Any, language: str = ENGLISH) -> None:
    """The verdict for people, on stdout, last, where the eye is."""
    words = words_of(language)
    levels = {"yes": Level.OK, "marginal": Level.WARN, "no": Level.FAIL, "could not tell": Level.UNKNOWN}
    answer = paint(words.text(verdict["answer"].upper()), levels[verdict["answer"]])
    sentence = words.text(verdict["sentence"])
    print(words.template("verdict: {answer}. {sentence}").format(answer=answer, sentence=sentence))
    for fact in verdict["facts"]:
        print(f"  - {words.text(fact['what'])}")
    if verdict["next_command"]:
        print(words.template("next: {command}").format(command=words.text(verdict["next_command"])))
        print(f"      ({words.text(verdict['next_why'])})")


def render_again(argv: Sequence[str]) -> int:
    """`python -m preflight render RECORD.json`: both views of a report again, from its record alone."""
    from preflight.report import ReportTrouble, write_views
    from preflight.words import LANGUAGES

    made = argparse.ArgumentParser(
        prog="python -m preflight render",
        description="Write the views of a report again from its JSON record, in another language; nothing is run.",
        epilog="example:\n  python -m preflight render compatibility_report.json --lang zh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("record", metavar="RECORD", help="the JSON record of a report")
    made.add_argument("--lang", choices=LANGUAGES, default=ENGLISH, help="default: en")
    made.add_argument(
        "--output",
        metavar="FILE",
        help="FILE.md and FILE.html are written (default: beside the record, named by the language)",
    )
    args = made.parse_args(argv)
    record = Path(args.record)
    if not record.is_file():
        raise UsageError(f"RECORD {record}: no such file; it is the .json beside a report")
    output = Path(args.output) if args.output else record.with_suffix(f".{args.lang}.md")
    try:
        written = write_views(record, output, args.lang)
    except ReportTrouble as trouble:
        raise UsageError(str(trouble)) from trouble
    for path in written:
        print(f"Written: {path}")
    return 0


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
