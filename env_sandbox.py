# /// script
# requires-python = ">=3.10"
# dependencies = ["packaging>=23", "virtualenv>=20.26", "jinja2>=3.1", "filelock>=3.12"]
# ///
"""Does this software stack install and load, stage by stage, in a clean throw-away virtualenv?  If not, which pins do?

The requirements are resolved first, then installed one by one, then loaded in a child: torch and a kernel, a two-layer
model, a LoRA step, a layer quantised to 4 bits. The virtualenv is removed afterwards, however the run ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preflight import facts
from preflight.console import UsageError, parser, run_main, run_stage
from preflight.findings import Finding, Level, Section, run_checks, say
from preflight.hardware.tdr import check_timeouts, read_timeouts, write_pair
from preflight.machine import Interpreter, Machine, choose_python, has_modules
from preflight.software import gguf_runtime
from preflight.software.abi import check_abi, stack_of
from preflight.software.cures import loads, proof_finding, proof_of, prove, with_proof
from preflight.software.diagnosis import check_installation, check_resolution, check_stages, observed_of
from preflight.software.installers import PipSettings, find_installer, read_pip_settings
from preflight.software.interpreter import accepted_tags, python_tag, read_driver, read_place, read_python, read_vendor
from preflight.software.requirement_checks import check_hashes, check_lines, check_local, check_names
from preflight.software.requirements import Requirements, hash_mode_offenders, read_requirements, tested_set
from preflight.software.sandbox import sweep
from preflight.software.stack import Request, current_variables, run_stages, try_stack
from preflight.software.wheelhouse import collect

# --- the stage -----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The flags of this script."""
    made = parser(__doc__, "python env_sandbox.py --requirements requirements.txt --mode full --prove-fix")
    what = made.add_argument_group("what is tried")
    what.add_argument(
        "--mode",
        choices=("quick", "full", "gguf"),
        default="full",
        help="quick: torch only; full: a tiny training step too; gguf: llama.cpp's binding (default: full)",
    )
    what.add_argument(
        "--requirements", metavar="FILE", help="the stack to try (default: the set tested with this program)"
    )
    what.add_argument("--current", action="store_true", help="judge an existing interpreter as it is; changes nothing")
    what.add_argument(
        "--python", metavar="PATH", help="interpreter to make the virtualenv from, or to judge (--current)"
    )
    what.add_argument("--model", metavar="DIR", help="load this model's config.json, shrunk to two layers")
    what.add_argument("--check", metavar="FILE", help="a script of yours to run in the sandbox as the last stage")
    what.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run, in the sandbox")
    what.add_argument(
        "--gguf", metavar="FILE", help="with --mode gguf: the file to load (default: a tiny one made for it)"
    )
    what.add_argument(
        "--disable-tcc",
        action="store_true",
        help="the Windows GPU timeout (TDR): show it, write .reg files that raise and restore it, apply nothing",
    )
    how = made.add_argument_group("how it is installed")
    how.add_argument("--installer", choices=("auto", "uv", "pip"), default="auto", help="default: uv when it is here")
    how.add_argument("--wheelhouse", metavar="DIR", help="a folder of wheels to install from")
    how.add_argument("--offline", action="store_true", help="use no network")
    how.add_argument("--allow-cuda", action="store_true", help="download CUDA builds although no GPU is here")
    how.add_argument("--force-conflicts", action="store_true", help="install past a conflict, to see what it breaks")
    how.add_argument("--build-limit-s", type=float, default=120.0, metavar="S", help="longest build from source (120)")
    how.add_argument("--stage-limit-s", type=float, default=300.0, metavar="S", help="longest stage (300)")
    how.add_argument("--sandbox-dir", metavar="DIR", help="where the sandbox lies (default: the user's cache folder)")
    how.add_argument("--keep", action="store_true", help="keep the sandbox, and say how to enter it")
    gather = made.add_argument_group("for a machine without a network")
    gather.add_argument("--collect", metavar="DIR", help="gather the wheels, dependencies included, and stop")
    gather.add_argument("--for-python", metavar="VERSION", help="that machine's Python, like 3.11 (default: as here)")
    gather.add_argument("--for-platform", metavar="TAG", help="like manylinux_2_28_x86_64 (default: as here)")
    cure = made.add_argument_group("what is done about a failure")
    cure.add_argument(
        "--prove-fix", action="store_true", help="try the fix in a second sandbox; write the file that works"
    )
    cure.add_argument(
        "--fixed", default="requirements.fixed.txt", metavar="FILE", help="default: requirements.fixed.txt"
    )
    cure.add_argument("--max-tries", type=int, default=8, metavar="N", help="sandboxes to try at most (8)")
    cure.add_argument("--time-limit-s", type=float, default=900.0, metavar="S", help="for all tries together (900)")
    return made


def look_and_judge(machine: Machine, args: argparse.Namespace) -> Section:
    """Try the stack and judge what happened."""
    if args.disable_tcc:
        return judge_timeouts(machine, args)
    if not machine.replayed:
        removed = sweep(args.sandbox_dir)
        if removed:
            say(f"removed {removed} sandbox(es) that an earlier run left behind")
    needs = ("llama_cpp",) if args.mode == "gguf" and not args.requirements else ("torch",) if args.current else ()
    chosen = choose_python(machine, args.python, needs)
    about = read_python(machine, chosen)
    observed = observed_first(args, chosen, about)
    if args.mode == "gguf":
        return judge_gguf(machine, args, chosen, about, observed)
    if args.collect:
        request = make_request(machine, args, chosen, read_wanted(args, about))
        observed["collected"], findings = collect(request, args.collect, args.for_python, args.for_platform)
        return Section("env_sandbox", observed, tuple(findings))
    before: list[Finding] = []
    if args.current or preinstalled(machine, args, chosen, observed):
        outcome = load_current(machine, args, chosen)
        before = judge_stack(machine, outcome, about)
        if args.current or (not args.requirements and loads_all(outcome)):
            observed.update(observed_of(outcome))
            return Section("env_sandbox", observed, tuple(before))
        observed["preinstalled"] = observed_of(outcome)
    section = judge_requirements(machine, args, chosen, about, observed)
    return Section("env_sandbox", section.observed, (*before, *section.findings))


def observed_first(args: argparse.Namespace, chosen: Interpreter, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is known before anything is tried; every key that the report reads is there."""
    markers = about.get("markers") or {}
    return {
        **dict.fromkeys(("requirements", "installer", "resolve", "install", "stages", "failing_stage", "exception")),
        **dict.fromkeys(("message", "root_cause", "proof", "place", "preinstalled", "gguf", "collected")),
        "mode": args.mode,
        "python": {
            "path": chosen.path,
            "chosen_because": chosen.why,
            "version": markers.get("python_full_version"),
            "system": f"{markers.get('platform_system')} {markers.get('platform_machine')}" if markers else None,
            "libc": " ".join(about.get("libc") or []) or None,
        },
    }


def judge_requirements(
    machine: Machine, args: argparse.Namespace, chosen: Interpreter, about: Mapping[str, Any], observed: dict[str, Any]
) -> Section:
    """Read, resolve, install and load the requirements; with --prove-fix also try what would cure a failure."""
    found = read_wanted(args, about)
    name = os.path.basename(found.path)
    observed["requirements"] = found.as_json()
    findings = list(check_lines(found))
    findings += run_checks([check_names, check_hashes], found)
    findings += run_checks([check_local], found, accepted_tags(about) if about else None, python_tag(about))
    stops = ("requirement-line-refused", "other-package-name", "needs-attention")
    if any(finding.code in stops for finding in findings):
        observed["failing_stage"] = "static parse"
        return Section("env_sandbox", observed, tuple(findings))
    outcome = machine.see("stack trial", lambda: None) if machine.replayed else None
    if not machine.replayed:
        outcome = try_stack(machine, make_request(machine, args, chosen, found))
        machine.see("stack trial", lambda: outcome)
    outcome = outcome or {}
    observed.update(observed_of(outcome))
    refused = any(finding.code == "hash-mode" for finding in findings)
    if refused:
        observed["offending"] = [item.shown() for item, _ in hash_mode_offenders(found)]
    if not refused or (outcome.get("resolve") or {}).get("ok"):
        findings += run_checks([check_resolution, check_installation], outcome, name)
        findings += judge_stack(machine, outcome, about)
    if args.prove_fix and outcome and not loads(outcome):
        if machine.replayed:
            proof = machine.see("proof of a fix", lambda: None) or {"proven": False, "said": "No proof was recorded."}
            finding = proof_finding(proof, args.max_tries, args.time_limit_s)
        else:
            request = make_request(machine, args, chosen, found)
            tries = prove(machine, request, outcome, max_tries=args.max_tries, time_limit_s=args.time_limit_s)
            proof, finding = proof_of(tries, found, args.fixed, args.max_tries, args.time_limit_s)
            machine.see("proof of a fix", lambda: proof)
        observed["proof"] = proof
        findings = with_proof(findings, finding, proof)
    if observed.get("kept"):
        findings.append(check_kept(str(observed["kept"])))
    return Section("env_sandbox", observed, tuple(findings))


def judge_stack(machine: Machine, outcome: Mapping[str, Any], about: Mapping[str, Any]) -> list[Finding]:
    """What was loaded, and whether its compiled parts fit each other."""
    if not outcome.get("packages") and not (outcome.get("resolve") or {}).get("packages"):
        return list(run_checks([check_stages], outcome))
    python = {**(outcome.get("python") or {}), "system": (about.get("markers") or {}).get("platform_system")}
    stack = stack_of(outcome, python, accepted_tags(about) if about else None, read_driver(machine))
    return list(run_checks([check_stages], outcome)) + list(run_checks([check_abi], stack))


def check_kept(folder: str) -> Finding:
    """How to enter the sandbox that was kept."""
    enter = f"{folder}\\env\\Scripts\\activate" if os.name == "nt" else f". {folder}/env/bin/activate"
    return Finding(
        "sandbox-kept",
        Level.OK,
        f"The sandbox was kept. Enter it with `{enter}`.",
        f"It is not swept; remove {folder} yourself.",
        source="--keep",
    )


def read_wanted(args: argparse.Namespace, about: Mapping[str, Any]) -> Requirements:
    """The requirements to try: the given file's, or the tested set."""
    markers = about.get("markers")
    if args.requirements:
        return read_requirements(args.requirements, markers)
    return tested_set(facts.shipped("constraints.txt"), markers)


def make_request(machine: Machine, args: argparse.Namespace, chosen: Interpreter, found: Requirements) -> Request:
    """The trial that the flags ask for. Raises UsageError for files and folders that are not there."""
    if args.check and not Path(args.check).is_file():
        raise UsageError(f"--check {args.check}: no such file")
    if args.wheelhouse and not Path(args.wheelhouse).is_dir():
        raise UsageError(f"--wheelhouse {args.wheelhouse}: no such folder")
    return Request(
        found,
        chosen.path,
        find_installer(args.installer),
        read_pip_settings(machine, chosen.path),
        mode=args.mode,
        config=model_config(args.model),
        check=args.check,
        trust_remote_code=args.trust_remote_code,
        has_gpu=read_vendor(machine) in ("nvidia", "amd"),
        allow_cuda=args.allow_cuda,
        offline=args.offline,
        wheelhouse=os.path.abspath(args.wheelhouse) if args.wheelhouse else None,
        force_conflicts=args.force_conflicts,
        build_limit_s=args.build_limit_s,
        stage_limit_s=args.stage_limit_s,
        sandbox_dir=args.sandbox_dir,
        keep=args.keep,
        gguf=args.gguf,
    )


def model_config(model: str | None) -> str | None:
    """The folder whose config.json is loaded, or None. Raises UsageError when there is none."""
    if model is None:
        return None
    path = Path(model)
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {model}: no config.json there; name a model's folder")
    return str(folder.resolve())


# --- other ways to run ---------------------------------------------------------------------------------------------


def preinstalled(machine: Machine, args: argparse.Namespace, chosen: Interpreter, observed: dict[str, Any]) -> bool:
    """Whether this is a place whose own stack should be tried first (Colab, Kaggle, a container), and it has torch."""
    observed["place"] = read_place(machine)
    if observed["place"] is None or chosen.ours or machine.replayed:
        return False
    return has_modules(machine, chosen.path, ("torch", "transformers"))


def load_current(machine: Machine, args: argparse.Namespace, chosen: Interpreter) -> dict[str, Any]:
    """The stages, loaded by the interpreter as it is. Nothing of its environment is written."""
    outcome: dict[str, Any] = {"stages": [], "failing_stage": None, "packages": []}
    wanted = (
        read_requirements(args.requirements)
        if args.requirements and args.current
        else Requirements("what is installed")
    )
    request = Request(
        wanted,
        chosen.path,
        find_installer("pip"),
        PipSettings(),
        mode=args.mode,
        config=model_config(args.model),
        check=args.check,
        trust_remote_code=args.trust_remote_code,
        stage_limit_s=args.stage_limit_s,
    )
    with tempfile.TemporaryDirectory(prefix="preflight-current-") as home:
        run_stages(machine, chosen.path, request, current_variables(home), home, outcome, kind="current")
    return outcome


def loads_all(outcome: Mapping[str, Any]) -> bool:
    """Every stage that the installed packages allow passes."""
    return bool(outcome["stages"]) and all(stage["state"] in ("ok", "absent") for stage in outcome["stages"])


def judge_gguf(
    machine: Machine, args: argparse.Namespace, chosen: Interpreter, about: Mapping[str, Any], observed: dict[str, Any]
) -> Section:
    """llama.cpp's binding: in the interpreter as it is, or in a sandbox when requirements are given."""
    vendor = read_vendor(machine)
    if args.gguf and not machine.replayed and not Path(args.gguf).is_file():
        raise UsageError(f"--gguf {args.gguf}: no such file")
    model = os.path.abspath(args.gguf) if args.gguf else None
    findings: list[Finding] = []
    if args.requirements:
        found = read_wanted(args, about)
        observed["requirements"] = found.as_json()
        findings = list(check_lines(found))
        if any(finding.level is Level.FAIL for finding in findings):
            return Section("env_sandbox", observed, tuple(findings))
        outcome = machine.see("stack trial", lambda: None) if machine.replayed else None
        if not machine.replayed:
            outcome = try_stack(machine, make_request(machine, args, chosen, found))
            machine.see("stack trial", lambda: outcome)
        observed.update(observed_of(outcome or {}))
        findings += run_checks([check_resolution, check_installation], outcome or {}, os.path.basename(found.path))
        loaded = (outcome or {}).get("gguf")
    else:
        with tempfile.TemporaryDirectory(prefix="preflight-gguf-") as home:
            loaded = gguf_runtime.load(machine, chosen.path, home, model, current_variables(home), args.stage_limit_s)
    if loaded is not None:
        observed["gguf"] = {key: value for key, value in loaded.items() if key != "printed"}
        findings += run_checks([gguf_runtime.check_gguf], loaded, vendor)
    return Section("env_sandbox", observed, tuple(findings))


def judge_timeouts(machine: Machine, args: argparse.Namespace) -> Section:
    """--disable-tcc: the Windows GPU timeout, and a pair of .reg files beside the report. Changes nothing."""
    found = read_timeouts(machine)
    written: list[str] = []
    if found["system"] == "Windows" and not machine.replayed:
        written = write_pair(Path(args.report or ".").resolve().parent if args.report else Path(), found)
    observed = {**observed_first(args, Interpreter("", "", True), {}), "gpu_timeout": found}
    return Section("env_sandbox", observed, (check_timeouts(found, written),))


def main(argv: Sequence[str] | None = None) -> int:
    """Run this stage. Returns the exit code."""
    args = make_parser().parse_args(argv)
    return run_stage("env_sandbox", args, look_and_judge)


def command() -> None:
    """Entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
