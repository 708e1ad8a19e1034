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
from preflight.cures import HASHES, fixed_requirements, loads, prove, shown
from preflight.diagnosis import check_installation, check_resolution, check_stages, failures
from preflight.findings import Finding, Level, Section, quote, run_checks, say
from preflight.installers import find_installer, read_pip_settings
from preflight.machine import Interpreter, Machine, choose_python
from preflight.requirements import (
    Requirements,
    hash_mode_offenders,
    packaging,
    read_requirements,
    tested_set,
    unusable_here,
)
from preflight.sandbox import sweep
from preflight.stack import Request, current_variables, run_stages, try_stack

# --- looking -------------------------------------------------------------------------------------------------------

# Run in the interpreter under test: what markers and wheel tags are compared with.
_ABOUT = """
import json, os, platform, sys, sysconfig
v = sys.implementation.version
print(json.dumps({
 "markers": {
  "implementation_name": sys.implementation.name,
  "implementation_version": "%d.%d.%d" % v[:3],
  "os_name": os.name, "platform_machine": platform.machine(), "platform_release": platform.release(),
  "platform_system": platform.system(), "platform_version": platform.version(),
  "python_full_version": platform.python_version(),
  "platform_python_implementation": platform.python_implementation(),
  "python_version": ".".join(platform.python_version_tuple()[:2]), "sys_platform": sys.platform},
 "libc": list(platform.libc_ver()), "mac": platform.mac_ver()[0], "prefix": sys.prefix, "base_prefix": sys.base_prefix,
 "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")), "bits": 64 if sys.maxsize > 2**32 else 32,
 "externally_managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))}))
"""


def read_python(machine: Machine, chosen: Interpreter) -> dict[str, Any]:
    """What the interpreter under test is: markers, libc, tags. Raises UsageError when it cannot run at all."""
    answer = machine.run([chosen.path, "-c", _ABOUT], timeout_s=30)
    found = answer.lines_of_json()
    if not found:
        if machine.replayed:
            return {}
        raise UsageError(f"--python {chosen.path}: does not run ({quote(answer.errors or answer.trouble, 200)})")
    return found[0]


def accepted_tags(about: Mapping[str, Any]) -> frozenset[str] | None:
    """The wheel tags that the interpreter accepts, or None when they cannot be told from here."""
    markers = about.get("markers") or {}
    if markers.get("implementation_name") != "cpython" or markers.get("sys_platform") != sys.platform:
        return None
    tags = packaging("tags")
    version = tuple(int(part) for part in str(markers["python_version"]).split("."))
    flavour = f"cp{version[0]}{version[1]}{'t' if about.get('free_threaded') else ''}"
    platforms = list(tags.platform_tags())
    made = {str(tag) for tag in tags.cpython_tags(version, abis=[flavour], platforms=platforms)}
    made |= {str(tag) for tag in tags.compatible_tags(version, interpreter=flavour.rstrip("t"), platforms=platforms)}
    return frozenset(made)


def has_gpu(machine: Machine) -> bool:
    """Whether an accelerator seems to be here (quick: device files, nvidia-smi -L)."""
    if machine.list("/dev/nvidia[0-9]*") or machine.list("/dev/kfd") or machine.list("/dev/davinci[0-9]*"):
        return True
    answer = machine.run(["nvidia-smi", "-L"], timeout_s=15)
    return answer.ok and "GPU 0" in answer.text


# --- judging -------------------------------------------------------------------------------------------------------


def check_lines(found: Requirements) -> list[Finding]:
    """Whether every line of the requirements could be understood."""
    name = os.path.basename(found.path)
    if found.problems:
        said = "; ".join(
            f"{os.path.basename(problem.file)} line {problem.number} ({quote(problem.text, 60)}): {problem.reason}"
            for problem in found.problems[:5]
        )
        more = f" (and {len(found.problems) - 5} more)" if len(found.problems) > 5 else ""
        return [
            Finding(
                "requirement-line-refused",
                Level.FAIL,
                f"{len(found.problems)} line(s) of {name} cannot be used: {said}{more}.",
                "pip would stop at the first of them, before anything is installed.",
                ("correct or remove the line, then run again",),
                "pip documentation, requirements file format",
            )
        ]
    skipped = f", {len(found.skipped)} skipped by their marker" if found.skipped else ""
    return [
        Finding(
            "requirements-read",
            Level.OK,
            f"{len(found.active)} requirements of {name} apply here{skipped}.",
            source="pip documentation, requirements file format",
        )
    ]


def check_hashes(found: Requirements) -> list[Finding]:
    """pip's all-or-nothing rule for hashes."""
    offending = hash_mode_offenders(found)
    if not offending:
        return []
    said = "; ".join(f"{item.shown()} (line {item.number}) {reason}" for item, reason in offending[:5])
    return [
        Finding(
            "hash-mode",
            Level.FAIL,
            f"pip will refuse the file: some lines have hashes, but {quote(said, 240)}.",
            "In --require-hashes mode, all requirements must have their versions pinned with == and have a hash, "
            "dependencies included. One line with --hash turns the mode on for all.",
            (
                "pin and hash every line: `pip-compile --generate-hashes` or `uv pip compile --generate-hashes`",
                "or remove the hashes",
            ),
            "pip documentation, secure installs: hash-checking mode",
        )
    ]


def check_local(found: Requirements, tags: frozenset[str] | None, python: str) -> list[Finding]:
    """Local files and folders that cannot be installed by this interpreter, and lines that need more than an index."""
    bad = unusable_here(found, tags, python)
    if not bad:
        return []
    said = "; ".join(
        f"{quote(os.path.basename(item.target.rstrip('/')) or item.text, 90)} {reason}" for item, reason in bad[:5]
    )
    remote = [item for item in found.active if item.kind in ("vcs", "url")]
    if remote:
        said += "; " + ", ".join(f"{quote(item.text, 60)} needs network access" for item in remote[:2])
        said += " and git" if any(item.kind == "vcs" for item in remote) else ""
    return [
        Finding(
            "needs-attention",
            Level.WARN,
            f"The file cannot be installed here as it stands: {said}.",
            "Nothing was installed. On the machine the file was written for this may be right; here it is not.",
            (
                f"take wheels built for this interpreter ({python}), and put local files where the lines say",
                "or run this on the machine the file is for",
            ),
            "PEP 425 wheel tags; the file system",
        )
    ]


# --- the stage -----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The flags of this script."""
    made = parser(__doc__, "python env_sandbox.py --requirements requirements.txt --mode full --prove-fix")
    what = made.add_argument_group("what is tried")
    what.add_argument("--mode", choices=("quick", "full"), default="full", help="quick: torch only (default: full)")
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
    if not machine.replayed:
        removed = sweep(args.sandbox_dir)
        if removed:
            say(f"removed {removed} sandbox(es) that an earlier run left behind")
    chosen = choose_python(machine, args.python)
    about = read_python(machine, chosen)
    observed: dict[str, Any] = {
        **dict.fromkeys(("requirements", "installer", "resolve", "install", "stages", "failing_stage")),
        **dict.fromkeys(("exception", "message", "root_cause", "proof")),
        "mode": args.mode,
        "python": {
            "path": chosen.path,
            "chosen_because": chosen.why,
            "version": (about.get("markers") or {}).get("python_full_version"),
            "system": " ".join(
                str((about.get("markers") or {}).get(k)) for k in ("platform_system", "platform_machine")
            ),
            "libc": " ".join(about.get("libc") or []) or None,
        },
    }
    if args.current:
        outcome = judge_current(machine, args, chosen)
        observed.update(_observed(outcome))
        return Section("env_sandbox", observed, run_checks([check_stages], outcome))
    found = read_wanted(machine, args, about)
    observed["requirements"] = found.as_json()
    tags = accepted_tags(about) if about else None
    python_tag = "cp" + str((about.get("markers") or {}).get("python_version", "")).replace(".", "")
    findings = list(
        run_checks(
            [lambda: check_lines(found), lambda: check_hashes(found), lambda: check_local(found, tags, python_tag)]
        )
    )
    if any(finding.code in ("requirement-line-refused", "needs-attention") for finding in findings):
        observed["failing_stage"] = "static parse"
        return Section("env_sandbox", observed, tuple(findings))
    outcome = _outcome(machine, args, chosen, found)
    observed.update(_observed(outcome))
    name = os.path.basename(found.path)
    if any(finding.code == "hash-mode" for finding in findings):
        observed["hash_mode_offenders"] = [item.shown() for item, _ in hash_mode_offenders(found)]
    if not any(finding.code == "hash-mode" for finding in findings) or (outcome.get("resolve") or {}).get("ok"):
        findings += run_checks([check_resolution, check_installation], outcome, name)
        findings += run_checks([check_stages], outcome)
    if args.prove_fix and not loads(outcome):
        observed["proof"], proven = prove_fix(machine, args, chosen, found, outcome)
        findings = with_proof(findings, proven, observed["proof"])
    return Section("env_sandbox", observed, tuple(findings))


def prove_fix(
    machine: Machine, args: argparse.Namespace, chosen: Interpreter, found: Requirements, outcome: Mapping[str, Any]
) -> tuple[dict[str, Any], Finding]:
    """Try changes until the stack loads, write the file that works, and say what was tried."""
    if machine.replayed:
        proof = machine.see("proof of a fix", lambda: None) or {"proven": False, "tries": [], "said": "not recorded"}
    else:
        tries = prove(
            machine,
            make_request(machine, args, chosen, found),
            outcome,
            max_tries=args.max_tries,
            time_limit_s=args.time_limit_s,
        )
        last = tries[-1] if tries else None
        proof = {"proven": bool(last and last.proven), "tries": [one.as_json() for one in tries], "changes": None}
        if last and last.proven:
            proof["changes"] = last.changes
            proof["versions"] = {name: last.versions[name] for name in last.changes if name in last.versions}
            proof["fixed_requirements"] = fixed_requirements(found, last)
            try:
                Path(args.fixed).write_text(proof["fixed_requirements"], encoding="utf-8")
            except OSError as error:
                raise UsageError(f"--fixed {args.fixed}: cannot be written ({error.strerror})") from error
            pins = ", ".join(f"{name}=={version.split('+')[0]}" for name, version in proof["versions"].items())
            gone = ", ".join(
                f"without {name}" for name, spec in last.changes.items() if spec is None and name != HASHES
            )
            bare = "without hashes" if HASHES in last.changes else ""
            proof["short"] = ", ".join(part for part in (pins, gone, bare) if part)
            proof["fixed"] = os.path.basename(args.fixed)
            proof["said"] = (
                f"Proven here: {proof['short']}. Everything installs and every stage passes "
                f"({last.seconds:.0f} s, try {len(tries)}). {os.path.basename(args.fixed)} holds the file that works."
            )
        else:
            said = "; ".join(f"{shown(one.changes)}: {one.failing_stage or 'fails'}" for one in tries)
            proof["said"] = (
                f"No change was found that works. Tried: {said or 'nothing, because no change is known to help'}."
            )
        machine.see("proof of a fix", lambda: proof)
    if proof["proven"]:
        return proof, Finding("fix-proven", Level.OK, proof["said"], source="measured in a second sandbox")
    return proof, Finding(
        "fix-not-found",
        Level.UNKNOWN,
        proof["said"],
        "The tries are bounded in number and time; more may find one.",
        (f"run again with `--max-tries {2 * args.max_tries} --time-limit-s {2 * args.time_limit_s:.0f}`",),
        "measured in further sandboxes",
    )


def with_proof(findings: Sequence[Finding], proven: Finding, proof: Mapping[str, Any]) -> list[Finding]:
    """The findings with the proven fix first among the fixes of the first failure."""
    result = list(findings)
    at = next((index for index, one in enumerate(result) if one.level in (Level.FAIL, Level.UNKNOWN)), None)
    if proven.code == "fix-proven" and at is not None:
        one = result[at]
        fixes = (f"proven here: {proof['short']} (`pip install -r {proof['fixed']}`)", *one.fix)
        result[at] = Finding(one.code, one.level, one.what, one.why, fixes[:3], one.source)
    return [*result, proven]


def read_wanted(machine: Machine, args: argparse.Namespace, about: Mapping[str, Any]) -> Requirements:
    """The requirements to try: the given file's, or the tested set."""
    markers = about.get("markers")
    if args.requirements:
        return read_requirements(args.requirements, markers)
    return tested_set(facts.shipped("constraints.txt"), markers)


def _outcome(machine: Machine, args: argparse.Namespace, chosen: Interpreter, found: Requirements) -> dict[str, Any]:
    if machine.replayed:
        return machine.see("stack trial", lambda: None) or {}
    request = make_request(machine, args, chosen, found)
    outcome = try_stack(machine, request)
    machine.see("stack trial", lambda: outcome)
    return outcome


def make_request(machine: Machine, args: argparse.Namespace, chosen: Interpreter, found: Requirements) -> Request:
    """The trial that the flags ask for. Raises UsageError for files and folders that are not there."""
    config = model_config(args.model)
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
        config=config,
        check=args.check,
        trust_remote_code=args.trust_remote_code,
        has_gpu=has_gpu(machine),
        allow_cuda=args.allow_cuda,
        offline=args.offline,
        wheelhouse=os.path.abspath(args.wheelhouse) if args.wheelhouse else None,
        force_conflicts=args.force_conflicts,
        build_limit_s=args.build_limit_s,
        stage_limit_s=args.stage_limit_s,
        sandbox_dir=args.sandbox_dir,
        keep=args.keep,
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


def judge_current(machine: Machine, args: argparse.Namespace, chosen: Interpreter) -> dict[str, Any]:
    """The stages, loaded by the interpreter as it is. Nothing of its environment is written."""
    outcome: dict[str, Any] = {"stages": [], "failing_stage": None, "packages": []}
    nothing = Requirements("the interpreter's own packages")
    request = Request(
        nothing,
        chosen.path,
        find_installer("pip"),
        read_pip_settings(machine, chosen.path),
        mode=args.mode,
        config=model_config(args.model),
        check=args.check,
        trust_remote_code=args.trust_remote_code,
        stage_limit_s=args.stage_limit_s,
    )
    with tempfile.TemporaryDirectory(prefix="preflight-current-") as home:
        run_stages(machine, chosen.path, request, current_variables(home), home, outcome, kind="current")
    return outcome


def _observed(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome as the report keeps it: what was seen, without whole logs."""
    if not outcome:
        return {}
    resolve = outcome.get("resolve")
    found = failures(outcome)
    first = found[0].as_json() if found else {}
    trouble = next((step for step in outcome.get("install") or [] if not step["ok"]), None) or resolve or {}
    observed: dict[str, Any] = {
        "installer": outcome.get("installer"),
        "seconds": outcome.get("seconds"),
        "kept": outcome.get("kept"),
        "resolve": resolve
        and {
            **{key: resolve[key] for key in ("ok", "seconds", "download_bytes", "torch_swapped", "held_back")},
            "code": resolve.get("code"),
            "packages": {package["name"]: package["version"] for package in resolve["packages"]},
            "forced": resolve.get("forced"),
        },
        "install": [
            {key: step.get(key) for key in ("requirement", "seconds", "size_bytes", "ok", "from_source", "brought")}
            for step in outcome.get("install") or []
        ],
        "pip_check": outcome.get("pip_check"),
        "installed": {package["name"]: package["version"] for package in outcome.get("packages") or []},
        "failing_stage": outcome.get("failing_stage"),
        "exception": first.get("exception"),
        "message": first.get("message") or (quote(trouble.get("text", ""), 1500) or None),
        "root_cause": first.get("root_cause"),
        "conflict": trouble.get("conflict"),
        "missing_requirement": trouble.get("missing_requirement"),
        "build": trouble.get("build"),
        "failures": [failure.as_json() for failure in found],
        "stages": [
            {
                "stage": stage["stage"],
                "state": stage["state"],
                "seconds": stage["seconds"],
                "peak_rss_bytes": stage["peak_rss_bytes"],
                "steps": [
                    {
                        "step": step["step"],
                        "ok": step["ok"],
                        "seconds": step["seconds"],
                        "warnings": [f"{w['category']}: {quote(w['message'], 200)}" for w in step["warnings"]],
                        "printed": quote(step["printed"], 600) or None,
                        **({"facts": step["facts"]} if step["facts"] else {}),
                    }
                    for step in stage["steps"]
                ],
            }
            for stage in outcome.get("stages") or []
        ],
    }
    for name in ("missing_name", "missing_module", "provider", "consumer"):
        if first.get(name):
            observed[name] = first[name]
    return observed


def main(argv: Sequence[str] | None = None) -> int:
    """Run this stage. Returns the exit code."""
    args = make_parser().parse_args(argv)
    return run_stage("env_sandbox", args, look_and_judge)


def command() -> None:
    """Entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
