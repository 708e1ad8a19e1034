"""One trial of a software stack: a fresh virtualenv, the requirements resolved and installed, the stages loaded."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.findings import say
from preflight.machine import Answer, Machine
from preflight.software import bytecode, gguf_runtime
from preflight.software.installers import (
    ASKED,
    Environment,
    Installer,
    PipSettings,
    Resolution,
    conflicting,
    cpu_builds_of_torch,
    cuda_packages,
    failing_build,
    failure_code,
    flat_constraints,
    flat_requirements,
    mask,
    missing_requirement,
    parse_wishes,
)
from preflight.software.requirements import Requirements, normal_name
from preflight.software.sandbox import offline_environment, sandbox

STAGES = ("torch", "transformers", "peft", "bitsandbytes")
_CORE = {"torch", "numpy", "transformers", "peft", "bitsandbytes", "accelerate", "tokenizers"}
# Nothing to import, or nothing that says anything about training.
_NO_IMPORT = re.compile(r"(?:nvidia-.*|cuda-.*|types-.*|.*-stubs|pip|wheel|setuptools|triton|ninja|cmake|.*-config)$")
_NOT_A_MODULE = {
    "tests",
    "test",
    "docs",
    "doc",
    "examples",
    "example",
    "benchmarks",
    "scripts",
    "tools",
    "build",
    "src",
}
# Unpacked, a CPU stack is 0.95 GiB and a CUDA one 5 to 7 GiB (measured; the wheels' own sizes are known only after
# resolving, when the sandbox already exists).
NEEDED_BYTES = 3 << 29
_TEXT_LIMIT = 12000
VISION = "a vision model class"  # the child knows what to do for it


@dataclass(frozen=True)
class Request:
    """What is to be tried, and how."""

    requirements: Requirements
    base_python: str
    installer: Installer
    settings: PipSettings
    mode: str = "full"
    config: str | None = None
    check: str | None = None
    trust_remote_code: bool = False
    has_gpu: bool = False
    allow_cuda: bool = False
    offline: bool = False
    wheelhouse: str | None = None
    force_conflicts: bool = False
    build_limit_s: float = 120.0
    stage_limit_s: float = 300.0
    sandbox_dir: str | None = None
    keep: bool = False
    extra_constraints: tuple[str, ...] = ()
    change: Callable[[str, str], str | None] | None = None
    added: tuple[str, ...] = ()
    gguf: str | None = None


def try_stack(machine: Machine, request: Request) -> dict[str, Any]:
    """What happened, as plain JSON data: installer, resolve, install, pip_check, stages, failing_stage, seconds.

    Raises UsageError when no sandbox or virtualenv can be made.
    """
    began = time.monotonic()
    with sandbox(request.sandbox_dir, NEEDED_BYTES, request.keep) as place:
        environment = Environment(
            request.installer,
            request.settings,
            place.folder,
            request.base_python,
            place.environment,
            offline=request.offline,
            wheelhouse=request.wheelhouse,
        )
        environment.create()
        outcome: dict[str, Any] = {
            "installer": request.installer.as_json(),
            "create_seconds": environment.seconds_to_create,
            "free_bytes": place.free_bytes,
            "kept": str(place.folder) if request.keep else None,
            "resolve": None,
            "install": [],
            "pip_check": None,
            "stages": [],
            "failing_stage": None,
        }
        flat = place.folder / "tmp" / "requirements.txt"
        lines = flat_requirements(request.requirements, request.change) + "".join(f"{line}\n" for line in request.added)
        flat.write_text(lines, encoding="utf-8")
        fixed = place.folder / "tmp" / "constraints.txt"
        fixed.write_text(
            flat_constraints(request.requirements) + "".join(f"{line}\n" for line in request.extra_constraints),
            encoding="utf-8",
        )
        constraints = [str(fixed)] if fixed.stat().st_size else []
        resolution = _resolve(environment, request, flat, constraints, outcome)
        if resolution is not None and _install(environment, request, flat, resolution, constraints, outcome):
            shared = request.installer.name == "uv" and request.mode == "full"
            outcome["bytecode_restored"] = bytecode.restore(place.folder / "env") if shared else 0
            checked = environment.check()
            outcome["pip_check"] = "passes" if checked.exit_code == 0 else _short(checked.text + checked.errors, 2000)
            work = place.folder / "work"
            if request.mode == "gguf":
                model = os.path.abspath(request.gguf) if request.gguf else None
                outcome["gguf"] = gguf_runtime.load(
                    machine, environment.python, str(work), model, place.environment, request.stage_limit_s
                )
            else:
                run_stages(machine, environment.python, request, place.environment, str(work), outcome)
            _add_sizes(outcome)
            if shared:
                bytecode.keep(place.folder / "env")
    outcome["seconds"] = round(time.monotonic() - began, 2)
    return outcome


def _short(text: str, limit: int = _TEXT_LIMIT) -> str:
    return text if len(text) <= limit else text[: limit // 3] + "\n[...]\n" + text[-2 * limit // 3 :]


def _resolve(
    environment: Environment, request: Request, flat: Path, constraints: list[str], outcome: dict[str, Any]
) -> Resolution | None:
    """The resolution to install, or None when there is none (the reason is in `outcome["resolve"]`)."""
    hash_mode = request.requirements.hash_mode
    say(f"resolving with {'pip (hashes are judged as pip does)' if hash_mode else request.installer.name}")
    resolution = environment.resolve(str(flat), constraints, hash_mode)
    swapped = held = None
    cuda = cuda_packages(resolution)
    if resolution.ok and cuda and not request.has_gpu and not request.allow_cuda:
        smaller, swapped = _with_cpu_torch(environment, request, flat, constraints, resolution)
        if smaller is not None:
            resolution = smaller
        else:
            known = [package.size_bytes for package in resolution.packages]
            held = {
                "packages": [f"{package.name} {package.version}" for package in cuda],
                "download_bytes": sum(size or 0 for size in known),
                "sizes_unknown": sum(size is None for size in known),
            }
    sizes = [package.size_bytes for package in resolution.packages]
    about: dict[str, Any] = {
        "ok": resolution.ok,
        "seconds": resolution.seconds,
        "packages": [package.as_json() for package in resolution.packages],
        "download_bytes": sum(size for size in sizes if size is not None),
        "sizes_unknown": sum(size is None for size in sizes),
        "torch_swapped": swapped,
        "held_back": held,
    }
    outcome["resolve"] = about
    if not resolution.ok:
        about.update(trouble_of(resolution.text, resolution.trouble))
        outcome["failing_stage"] = "build" if about["code"] in ("build-isolation", "build-failed") else "resolve"
        if about["code"] == "resolution-impossible" and request.force_conflicts:
            return _forced(environment, request, flat, about, constraints)
        return None
    if held is not None:
        outcome["failing_stage"] = "download"
        return None
    # Unpacked, wheels take about 2.5 times their size (measured: 288 MB of wheels, 1.06 GB unpacked), beside the cache.
    wanted = 4 * about["download_bytes"]
    if wanted > outcome["free_bytes"]:
        about["disk_needed_bytes"] = wanted
        outcome["failing_stage"] = "download"
        return None
    return resolution


def trouble_of(text: str, trouble: str = "") -> dict[str, Any]:
    """What an installer's words say: code, the conflict with who wants what, the missing requirement, the build."""
    code = "installer-timeout" if trouble == "timeout" else failure_code(text)
    wishes = parse_wishes(text)
    clash = conflicting(wishes) if code == "resolution-impossible" else None
    module = re.search(r"No module named '([\w.]+)'", text)
    return {
        "code": code,
        "text": _short(text),
        "wishes": [wish.as_json() for wish in wishes],
        "conflict": {"package": clash[0], "wishes": [wish.as_json() for wish in clash[1]]} if clash else None,
        "missing_requirement": missing_requirement(text) if code == "no-matching-distribution" else None,
        "build": failing_build(text) if code.startswith("build-") else None,
        "build_wants": module.group(1) if module and code.startswith("build-") else None,
    }


def _with_cpu_torch(
    environment: Environment, request: Request, flat: Path, constraints: list[str], first: Resolution
) -> tuple[Resolution | None, dict[str, Any] | None]:
    """The same requirements with a CPU build of torch, where one is at hand and the requirements allow it.

    Without a GPU the CUDA libraries are gigabytes that cannot be exercised; imports and CPU steps are the same.
    """
    before = first.package("torch")
    places = [*request.settings.find_links, *request.requirements.values("--find-links")]
    for version in reversed(cpu_builds_of_torch([*places, *([request.wheelhouse] if request.wheelhouse else [])])):
        extra = environment.folder / "tmp" / "cpu.txt"
        extra.write_text(f"torch=={version}\n", encoding="utf-8")
        again = environment.resolve(str(flat), [*constraints, str(extra)])
        if again.ok and not cuda_packages(again):
            constraints.append(str(extra))
            swap = {
                "from": before.version if before else None,
                "to": version,
                "why": "no GPU here; the CUDA build is large",
            }
            return again, swap
    return None, None


def _forced(
    environment: Environment, request: Request, flat: Path, about: dict[str, Any], constraints: list[str]
) -> Resolution | None:
    """What is installed when the requirements' own pin overrides everybody else's wish, as people force it.

    uv can override; pip cannot, so with pip there is nothing to try.
    """
    conflict = about.get("conflict") or {}
    asked = [wish["wants"] for wish in conflict.get("wishes", []) if wish["by"] == ASKED]
    if not asked or request.installer.name != "uv":
        about["forced"] = {"package": conflict.get("package"), "ok": False}
        return None
    override = environment.folder / "tmp" / "overrides.txt"
    override.write_text("".join(f"{line}\n" for line in asked), encoding="utf-8")
    environment.overrides = str(override)
    resolution = environment.resolve(str(flat), constraints)
    held = cuda_packages(resolution) and not request.has_gpu and not request.allow_cuda
    if held:
        resolution, _ = _with_cpu_torch(environment, request, flat, constraints, resolution)  # type: ignore[assignment]
    about["forced"] = {"package": conflict["package"], "lines": asked, "ok": resolution is not None and resolution.ok}
    return resolution if about["forced"]["ok"] else None


def _install(
    environment: Environment,
    request: Request,
    flat: Path,
    resolution: Resolution,
    constraints: list[str],
    outcome: dict[str, Any],
) -> bool:
    """Install requirement by requirement; whether all of them went in."""
    pins = environment.folder / "tmp" / "pins.txt"
    pins.write_text(
        "".join(f"{p.name}=={p.version}\n" for p in resolution.packages if p.version and p.filename), encoding="utf-8"
    )
    lines = [line for line in flat.read_text(encoding="utf-8").splitlines() if line and not _is_option(line)]
    options = [line for line in flat.read_text(encoding="utf-8").splitlines() if line and _is_option(line)]
    if request.mode == "quick":
        here = [name for name in ("torch", "numpy") if resolution.package(name) is not None]
        lines = [line for line in lines if _name_of(line) in here] or here
    sources = [line for line in lines if _from_source(line, resolution)]
    # What must be built comes first: a build that fails should not cost a gigabyte of downloads before it.
    groups = [[line] for line in sources]
    for package in resolution.packages:
        if package.from_source and package.filename and not any(_name_of(line) == package.name for line in sources):
            groups.append([f"{package.name}=={package.version}"])
    building = len(groups)
    ready = [line for line in lines if line not in sources]
    groups += [[line] for line in ready[:12]] + ([ready[12:]] if len(ready) > 12 else [])
    before: set[str] = set()
    for index, group in enumerate(groups):
        limit_s = request.build_limit_s if index < building else environment.timeout_s
        say(f"installing {mask(', '.join(group))[:100]} (up to {limit_s:.0f} s)")
        one = environment.folder / "tmp" / "one.txt"
        one.write_text("\n".join([*options, *group]) + "\n", encoding="utf-8")
        used = [] if request.requirements.hash_mode else [str(pins), *constraints]
        built = index < building
        done = environment.install(
            ["-r", str(one)],
            used,
            dependencies=not built,
            timeout_s=request.build_limit_s if built else None,
        )
        entry: dict[str, Any] = {
            "requirement": group[0].split(" --hash")[0] if len(group) == 1 else f"{len(group)} more requirements",
            "seconds": done.seconds,
            "ok": done.ok,
            "from_source": built,
            "brought": sorted(_installed_names(environment) - before),
        }
        before = before | set(entry["brought"])
        outcome["install"].append(entry)
        if not done.ok:
            entry.update(trouble_of(done.text, done.trouble))
            if built and done.trouble == "timeout":
                entry["code"] = "build-too-long"
            if built and entry["build"] is None:
                entry["build"] = group[0].split(" --hash")[0]
            outcome["failing_stage"] = f"build {entry['build']}" if built else "install"
            return False
    return True


def _installed_names(environment: Environment) -> set[str]:
    """The distributions in the virtualenv, by their normal names."""
    folders = [*environment.folder.glob("env/lib/*/site-packages/*.dist-info")]
    folders += environment.folder.glob("env/Lib/site-packages/*.dist-info")
    return {normal_name(folder.name.split("-")[0]) for folder in folders}


def _add_sizes(outcome: dict[str, Any]) -> None:
    """How much disk each requirement took, with what it brought along."""
    sizes = {normal_name(package["name"]): package.get("size_bytes") for package in outcome.get("packages") or []}
    for step in outcome["install"]:
        known = [sizes.get(name) for name in step.get("brought", [])]
        step["size_bytes"] = sum(size for size in known if size is not None)


def _is_option(line: str) -> bool:
    return line.startswith("-") and not line.startswith(("-e ", "--editable"))


def _name_of(line: str) -> str:
    match = re.match(r"[A-Za-z0-9][\w.-]*", line)
    return normal_name(match.group(0)) if match else ""


def _from_source(line: str, resolution: Resolution) -> bool:
    package = resolution.package(_name_of(line)) if not line.startswith(("-", "/", ".")) else None
    return package is not None and package.from_source


# --- loading -------------------------------------------------------------------------------------------------------


def run_stages(
    machine: Machine,
    python: str,
    request: Request,
    variables: Mapping[str, str],
    work: str,
    outcome: dict[str, Any],
    kind: str = "load_stack",
) -> None:
    """Load the stack in a child of `python`; fills `stages`, `python`, `packages` and `failing_stage` of `outcome`."""
    stages = STAGES[:1] if request.mode == "quick" else STAGES
    spec = {
        "stages": list(stages),
        "present_only": True,
        "limits": dict.fromkeys((*STAGES, "imports", "check"), request.stage_limit_s),
        "device": "auto",
        "config": request.config,
        "trust_remote_code": request.trust_remote_code,
        "work": work,
        "imports": [],
        "check": None,
    }
    limit_s = request.stage_limit_s * len(stages)
    say(f"loading {', '.join(stages)} (up to {limit_s:.0f} s)")
    answer = _ask(machine, python, spec, variables, limit_s + 30, work, f"{kind} chain")
    read = read_stages(answer, stages)
    outcome["python"], outcome["packages"] = read["python"], read["packages"]
    outcome["stages"] = read["stages"]
    if request.mode == "full":
        early, late = other_imports(request, outcome["packages"])
        first = _run_imports(machine, python, request, spec, variables, work, early, f"{kind} imports")
        last = _run_imports(machine, python, request, spec, variables, work, late, f"{kind} further imports")
        # Before transformers and peft: they may fail only because one of these is broken.
        outcome["stages"] = [*outcome["stages"][:1], *first, *outcome["stages"][1:], *last]
        if request.check:
            say(f"running {os.path.basename(request.check)} (up to {request.stage_limit_s:.0f} s)")
            spec.update(stages=["check"], check=os.path.abspath(request.check))
            answer = _ask(machine, python, spec, variables, request.stage_limit_s + 30, work, f"{kind} check")
            outcome["stages"] += read_stages(answer, ["check"])["stages"]
    for stage in outcome["stages"]:
        bad = next((step for step in stage["steps"] if not step["ok"]), None)
        if bad is not None and outcome["failing_stage"] in (None, "resolve"):
            outcome["failing_stage"] = bad["step"]  # of a forced installation, what it broke says more


def _ask(
    machine: Machine,
    python: str,
    spec: dict[str, Any],
    variables: Mapping[str, str],
    timeout_s: float,
    work: str,
    kind: str,
) -> Answer:
    return machine.ask(
        "load_stack", python, [json.dumps(spec)], timeout_s, env=dict(variables), kind=kind, cwd=work or None
    )


def _run_imports(
    machine: Machine,
    python: str,
    request: Request,
    spec: dict[str, Any],
    variables: Mapping[str, str],
    work: str,
    pending: list[list[str]],
    kind: str,
) -> list[dict[str, Any]]:
    """Import what else was asked for. After a failure the rest is tried in a new process, free of what it left."""
    steps: list[dict[str, Any]] = []
    state, seconds, peak = "ok", 0.0, None
    tries = 0
    while pending and tries < 6:
        say(f"importing {', '.join(module for _, module in pending)[:100]} (up to {request.stage_limit_s:.0f} s)")
        spec = {**spec, "stages": ["imports"], "imports": pending}
        name = kind + (f" {tries + 1}" if tries else "")
        answer = _ask(machine, python, spec, variables, request.stage_limit_s + 30, work, name)
        stage = next((s for s in read_stages(answer, ["imports"])["stages"]), None)
        if stage is None:
            break
        tries += 1
        seconds += stage["seconds"] or 0.0
        peak = max(peak or 0, stage["peak_rss_bytes"] or 0) or None
        done = 0
        for step in stage["steps"]:
            steps.append(step)
            done += 1
            if not step["ok"]:
                state = "fail"
                break
        pending = pending[max(done, 1) :]
    if not steps:
        return []
    return [
        {
            "stage": kind.split(" ", 1)[1],
            "state": state,
            "seconds": round(seconds, 3),
            "peak_rss_bytes": peak,
            "steps": steps,
        }
    ]


def other_imports(request: Request, packages: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], list[list[str]]]:
    """[distribution, module] of everything asked for by name that no stage covers.

    First those that do not build on transformers, peft or accelerate, then those that do (trl, sentence-transformers).
    """
    asked = {normal_name(item.name) for item in request.requirements.active if item.name}
    names = {normal_name(str(package["name"])) for package in packages}
    early: list[list[str]] = []
    late: list[list[str]] = []
    for package in packages:
        name = normal_name(str(package["name"]))
        if name not in asked or name in _CORE or _NO_IMPORT.match(name):
            continue
        modules = [m for m in package["top_level"] if not m.startswith("_") and m.lower() not in _NOT_A_MODULE]
        same = [m for m in modules if normal_name(m) == name]
        wanted = {normal_name(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in package.get("requires") or []}
        builds_on = wanted & {"transformers", "peft", "accelerate"}
        for module in same or modules[:3]:
            (late if builds_on else early).append([str(package["name"]), module])
    # Vision classes of transformers are the first to notice a torchvision that was built for another torch.
    vision = [["transformers", VISION]] if {"torchvision", "transformers", "torch"} <= names else []
    return vision + sorted(early), sorted(late)


def read_stages(answer: Answer, stages: Sequence[str]) -> dict[str, Any]:
    """The child's events as stages with their steps; what died, hung or was not reached is said.

    States: ok, fail, crashed, timeout, absent (its package is not installed), not-reached.
    """
    events = answer.lines_of_json()
    printed = printed_by_step(answer.errors)
    python = next((_without(event, "event") for event in events if event.get("event") == "python"), {})
    packages: list[dict[str, Any]] = next(
        (event["packages"] for event in events if event.get("event") == "packages"), []
    )
    found: list[dict[str, Any]] = []
    broken = False
    for name in stages:
        steps = []
        for event in events:
            if event.get("event") == "step" and event.get("stage") == name:
                steps.append(
                    {
                        "step": event["step"],
                        "ok": bool(event["ok"]),
                        "needed": bool(event.get("needed", True)),
                        "seconds": event.get("seconds"),
                        "warnings": event.get("warnings", []),
                        "printed": printed.get(f"{name}/{event['step']}", ""),
                        "facts": event.get("facts", {}),
                        "error": event.get("error"),
                    }
                )
        end = next((e for e in events if e.get("event") == "stage" and e.get("stage") == name), None)
        absent = any(e.get("event") == "absent" and e.get("stage") == name for e in events)
        not_tried = next((e["why"] for e in events if e.get("event") == "not-tried" and e.get("stage") == name), None)
        started = [e["step"] for e in events if e.get("event") == "start" and e.get("stage") == name]
        there = any(name in package["top_level"] for package in packages) or name in ("imports", "check")
        state = ("not-reached" if there else "absent") if broken else "ok"
        if absent:
            state = "absent"
        elif end is not None:
            state = "ok" if end["ok"] else "fail"
        elif not broken:
            step = started[-1] if started else "start the interpreter"
            hung = answer.trouble == "timeout" or "Timeout (" in answer.errors
            state = "timeout" if hung else "crashed"
            steps.append(
                {
                    "step": step,
                    "ok": False,
                    "needed": True,
                    "seconds": None,
                    "warnings": [],
                    "printed": printed.get(f"{name}/{step}", answer.errors[-4000:] if not started else ""),
                    "facts": {},
                    "error": [{"type": state, "message": _how_it_ended(answer, hung), "frames": [], "link": None}],
                }
            )
        broken = broken or state in ("fail", "crashed", "timeout")
        found.append(
            {
                "stage": name,
                "state": state,
                "seconds": end.get("seconds") if end else None,
                "peak_rss_bytes": end.get("peak_rss_bytes") if end else None,
                "not_tried": not_tried,
                "steps": steps,
            }
        )
    return {"python": python, "packages": packages, "stages": found}


def _without(event: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in names}


def _how_it_ended(answer: Answer, hung: bool) -> str:
    if hung:
        return "did not finish in time and was ended"
    if answer.exit_code is None:
        return f"the interpreter could not be started ({answer.trouble or answer.errors})"
    import signal

    if answer.exit_code < 0:
        try:
            return f"the process was ended by {signal.Signals(-answer.exit_code).name}"
        except ValueError:
            return f"the process was ended by signal {-answer.exit_code}"
    return f"the process ended with exit code {answer.exit_code}"


def printed_by_step(errors: str) -> dict[str, str]:
    """What each step wrote on stderr, by "stage/step"."""
    found: dict[str, str] = {}
    for part in errors.split("\x1e")[1:]:
        name, _, text = part.partition("\n")
        text = text.strip()
        if text:
            found[name] = _short(text, 6000)
    return found


def current_variables(home: str) -> dict[str, str]:
    """Variables under which a child changes nothing in the interpreter's own environment."""
    return {**offline_environment(home), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": home}
