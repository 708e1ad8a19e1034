"""What the outcome of a trial means: findings from plain data, with the root cause, the two sides and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflight.findings import Finding, Level, quote
from preflight.software.explain import Match, fill, first_match, fixes_of
from preflight.software.requirements import normal_name

_SOURCE = "preflight/children/load_stack.py, run in the sandbox"
_PIP = "pip documentation, dependency resolution"


@dataclass(frozen=True)
class Failure:
    """One step that failed: its stage, the chain outermost first, the root cause and the known error it matches.

    `consumer` is the distribution whose code raised it, `provider` the one that lacks something; None: not known.
    """

    stage: str
    step: str
    state: str
    chain: Sequence[Mapping[str, Any]]
    root: Mapping[str, Any]
    match: Match | None
    consumer: Mapping[str, Any] | None
    consumer_place: str | None
    provider: Mapping[str, Any] | None
    missing_name: str | None
    missing_module: str | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        outer = self.chain[0]
        return {
            "stage": self.stage,
            "failing_stage": self.step,
            "exception": outer["type"],
            "message": quote(outer["message"], 600),
            "root_cause": {"exception": self.root["type"], "message": quote(self.root["message"], 600)},
            "chain": [f"{item['type']}: {quote(item['message'], 300)}" for item in self.chain],
            "signature": self.match.signature.id if self.match else None,
            "code": code_of(self),
            "missing_name": self.missing_name,
            "missing_module": self.missing_module,
            "provider": named(self.provider),
            "consumer": named(self.consumer) and f"{named(self.consumer)}{self.consumer_place or ''}",
        }


def named(package: Mapping[str, Any] | None) -> str | None:
    """A distribution with its version, for the reader."""
    return f"{package['name']} {package['version']}" if package else None


def code_of(failure: Failure) -> str:
    """The code of the finding for a failed step."""
    if failure.match is not None:
        return failure.match.code
    if failure.state == "timeout":
        return "step-timeout"
    if failure.state == "crashed":
        return "step-crashed"
    return "step-failed"


def failures(outcome: Mapping[str, Any]) -> list[Failure]:
    """The failed steps of all stages in order, one per root cause."""
    found: list[Failure] = []
    packages = outcome.get("packages") or []
    seen: set[tuple[str, str]] = set()
    for stage in outcome.get("stages", []):
        for step in stage["steps"]:
            if step["ok"] or not step["error"]:
                continue
            failure = _failure(stage, step, packages)
            key = (str(failure.root["type"]), re.sub(r"\d+", "", str(failure.root["message"]))[:160])
            if key not in seen:
                found.append(failure)
            seen.add(key)
    return found


def _failure(stage: Mapping[str, Any], step: Mapping[str, Any], packages: Sequence[Mapping[str, Any]]) -> Failure:
    chain = step["error"]
    root = root_of(chain)
    match = _known(chain, root, str(step.get("printed", "")), str(stage["state"]))
    where = root if root.get("frames") else next((item for item in chain if item.get("frames")), root)
    consumer, place = _raised_in(where, packages)
    name = re.search(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'", root["message"])
    module = re.search(r"No module named '([\w.]+)'", root["message"])
    attribute = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", root["message"])
    provider = None
    if name:
        provider = _owner(name.group(2), packages)
    elif attribute:
        provider = _owner(attribute.group(1), packages)
    return Failure(
        stage["stage"],
        step["step"],
        "ok" if stage["state"] == "ok" else stage["state"],
        chain,
        root,
        match,
        consumer,
        place,
        provider,
        name.group(1) if name else attribute.group(2) if attribute else None,
        module.group(1) if module else None,
    )


def root_of(chain: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The exception that the others come from: `raise … from` is followed to its end.

    An exception that was merely being handled (`context`) counts as the cause only below a wrapper that says nothing
    itself ("Failed to import …", "Could not import module …").
    """
    index = 0
    while index + 1 < len(chain):
        link, message = chain[index].get("link"), str(chain[index]["message"])
        wrapper = re.search(r"Failed to import|Could not import|see its traceback|numpy\.core\.multiarray", message)
        if link == "cause" or (link == "context" and wrapper):
            index += 1
        else:
            break
    return chain[index]


def _known(chain: Sequence[Mapping[str, Any]], root: Mapping[str, Any], printed: str, state: str) -> Match | None:
    """The known error: of the root cause, else of what wraps it (outwards), else of what was printed."""
    order = list(chain[: _index(chain, root) + 1])[::-1]
    whole = "\n".join(frame[0] for item in chain for frame in item.get("frames", []))
    generic: Match | None = None
    for item in order:
        frames = "\n".join(frame[3] for frame in item.get("frames", []))
        match = first_match(f"{item['type']}: {item['message']}\n{frames if state == 'crashed' else ''}")
        if match is None and whole:
            match = first_match(f"{item['type']}: {item['message']}\n{whole}")
            match = match if match is not None and match.start < len(f"{item['type']}: {item['message']}") else None
        if match is not None and not match.signature.row.get("wrapper"):
            if not match.signature.row.get("generic"):
                return match
            generic = generic or match
    if printed and (generic is None or state == "crashed"):
        match = first_match(printed)
        row = match.signature.row if match else {}
        if match is not None and row.get("severity") == "error" and (state == "crashed" or not row.get("generic")):
            return match
    return generic


def _index(chain: Sequence[Mapping[str, Any]], item: Mapping[str, Any]) -> int:
    return next(index for index, other in enumerate(chain) if other is item)


def _owner(module: str, packages: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    top = module.split(".")[0]
    found = [package for package in packages if top in package["top_level"]]
    exact = [package for package in found if normal_name(package["name"]) == normal_name(top)]
    return next(iter(exact or found), None)


def _raised_in(
    item: Mapping[str, Any], packages: Iterable[Mapping[str, Any]]
) -> tuple[Mapping[str, Any] | None, str | None]:
    """The distribution that holds the last line of the traceback, and " (file line N)"."""
    for file, line, _, _ in reversed(item.get("frames") or []):
        if file.startswith(("/", "<")) or re.match(r"[A-Za-z]:", file):
            continue
        package = _owner(file.split("/")[0].removesuffix(".py"), packages)
        if package is not None:
            short = file.split("/", 1)[1] if "/" in file else file
            return package, f" ({short} line {line})"
    return None, None


# --- findings of the installation ----------------------------------------------------------------------------------


def check_resolution(outcome: Mapping[str, Any], file: str) -> list[Finding]:
    """Whether the requirements can be met together, and what would be downloaded."""
    resolve = outcome.get("resolve")
    if resolve is None:
        return []
    findings: list[Finding] = []
    if not resolve["ok"]:
        findings.append(resolve_finding(resolve, file))
        return findings
    if resolve["held_back"]:
        held = resolve["held_back"]
        size = f"{held['download_bytes'] / 2**30:.1f} GiB" + (" or more" if held["sizes_unknown"] else "")
        findings.append(
            Finding(
                "cuda-download-held-back",
                Level.UNKNOWN,
                f"Not installed: {size} would be downloaded, with {len(held['packages'])} CUDA packages, and no GPU "
                f"is here.",
                "Without a GPU the CUDA build says no more than a CPU build, and none was found that meets the "
                "requirements.",
                (
                    "run again with `--allow-cuda` to download it all the same",
                    "put a CPU wheel of torch into a folder and run again with `--wheelhouse FOLDER`",
                ),
                "the resolver's own list; sizes from the index",
            )
        )
        return findings
    if resolve.get("disk_needed_bytes"):
        need, free = resolve["disk_needed_bytes"], outcome["free_bytes"]
        return [
            Finding(
                "disk-too-small",
                Level.UNKNOWN,
                f"Not installed: about {need / 2**30:.1f} GiB would be needed with downloads, {free / 2**30:.1f} GiB "
                f"are free.",
                "Nothing was downloaded; whether the stack loads could not be tried.",
                ("free disk space, or name a larger disk with `--sandbox-dir DIR`",),
                "sizes from the index; 4 times the wheels, measured",
            )
        ]
    if resolve["torch_swapped"]:
        swap = resolve["torch_swapped"]
        findings.append(
            Finding(
                "cpu-build-used",
                Level.OK,
                f"torch {swap['to']} was tried in place of {swap['from']}: no GPU is here, and the CUDA build is "
                f"gigabytes.",
                "Both meet the requirements. Imports and CPU steps are alike; `--allow-cuda` takes the other.",
                source="the resolver's own list",
            )
        )
    count = len(resolve["packages"])
    findings.append(
        Finding(
            "requirements-resolve",
            Level.OK,
            f"The requirements can be met together: {count} packages, found in {resolve['seconds']:.1f} s.",
            source=f"dry run of {outcome['installer']['name']}",
        )
    )
    return findings


def resolve_finding(trouble: Mapping[str, Any], file: str) -> Finding:
    """The finding for a resolution or installation that failed, from the installer's own words."""
    code, text = trouble["code"], str(trouble.get("text", ""))
    last = quote(_telling_line(text), 240)
    if code == "resolution-impossible":
        return _conflict_finding(trouble, file, last)
    if code == "no-matching-distribution":
        return _no_match_finding(trouble, last)
    if code == "build-isolation":
        return _build_isolation_finding(trouble)
    known = {
        "hash-mode": (
            Level.FAIL,
            "pip refuses the file: one line has a hash, so all must be pinned with == and hashed.",
            "As soon as one requirement has a hash, pip checks hashes for all, dependencies included.",
            (
                "pin and hash every line: `pip-compile --generate-hashes` or `uv pip compile --generate-hashes`",
                "or remove the hashes",
            ),
            "pip documentation, secure installs: hash-checking mode",
        ),
        "hash-mismatch": (
            Level.FAIL,
            f"A downloaded file has another hash than the requirements say: {last}",
            "The file on the index was changed, the hash is of another file (another platform's wheel), or a mirror "
            "alters files.",
            ("compute the hash anew with `pip hash FILE` after checking where the file comes from",),
            "pip documentation, secure installs: hash-checking mode",
        ),
        "index-refused": (
            Level.FAIL,
            f"The package index refused access: {last}",
            "The address needs a user name and a token, or the token has expired.",
            ("check the credentials in pip's configuration: `pip config list`",),
            "HTTP status 401 or 403 of the index",
        ),
        "index-unreachable": (
            Level.UNKNOWN,
            f"Could not tell: a package index did not answer ({last}).",
            "Nothing is known about the requirements themselves; the network, a proxy or the index's name is the "
            "trouble.",
            (
                "check the addresses in the file and in `pip config list`, then run again",
                "without a network: `--offline --wheelhouse FOLDER`, with wheels that `--collect FOLDER` gathered "
                "elsewhere",
            ),
            "the installer's own words",
        ),
        "repository-unreachable": (
            Level.UNKNOWN,
            f"Could not tell: a requirement comes from a repository that could not be fetched ({last}).",
            "Requirements of the form git+https://… need git and network access to that host.",
            ("install git and check the network, or name a released version instead of the repository",),
            "pip documentation, VCS support",
        ),
        "python-version-conflict": (
            Level.FAIL,
            f"A requirement does not exist for this Python: {last}",
            "Each release says which Python versions it supports; this one is outside.",
            (
                "use a Python that all requirements support: `--python PATH`",
                "or allow another version of that requirement",
            ),
            "Requires-Python of the release",
        ),
        "wheel-not-supported": (
            Level.FAIL,
            f"A wheel is for another Python or system: {last}",
            "A wheel's tags (Python, ABI, platform) must be among those the interpreter accepts.",
            ("take the wheel for this Python and system; `python -m pip debug --verbose` lists the accepted tags",),
            "PEP 425, PEP 600",
        ),
        "build-failed": (
            Level.FAIL,
            f"{trouble.get('build') or 'A package'} has no wheel for this system and could not be built: {last}",
            "It would have to be compiled here; the compiler's own words are in the report's details.",
            ("take a version that has a wheel for this Python and system", "or install what its build asks for"),
            "the build backend's own words",
        ),
        "build-too-long": (
            Level.UNKNOWN,
            f"Could not tell: {trouble.get('build') or 'a package'} has no wheel here and did not finish building in "
            f"time.",
            "Building can take an hour (CUDA extensions) and is not done unasked.",
            (
                "run again with `--build-limit-s 3600` to let it build",
                "or use a version, or another package, that has a wheel",
            ),
            "measured: the time limit was reached",
        ),
        "installer-timeout": (
            Level.UNKNOWN,
            "Could not tell: the installer did not finish in time.",
            "The network is slow or an index does not answer.",
            ("run the command again: what was downloaded is kept by uv",),
            "measured: the time limit was reached",
        ),
        "disk-full": (
            Level.UNKNOWN,
            "Could not tell: the disk is full, so the stack could not be installed.",
            "A CPU stack takes 1 GiB, a CUDA stack 5 to 7 GiB.",
            ("name a folder with more room: `--sandbox-dir DIR`",),
            "the installer's own words",
        ),
    }
    level, what, why, fix, source = known.get(code) or (
        Level.UNKNOWN,
        f"Could not tell: the installer failed: {last}",
        "Its words fit none of the known kinds of failure; they are in the report's details.",
        ("read them, change what they name, and run again", "or try the other installer: `--installer pip`"),
        "the installer's own words",
    )
    return Finding(code, level, what, why, fix, source)


def _telling_line(text: str) -> str:
    """The line of an installer's output that says most."""
    lines = [re.sub(r"^[\s│×╰─▶├▶|>]+", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("WARNING:", "[notice]", "hint:", "note:"))]
    for pattern in (r"^(?:cause: )?Because ", r"ModuleNotFoundError|ImportError", r"^(?:ERROR|error|cause):", r"."):
        matching = [line for line in lines if re.search(pattern, line)]
        if matching:
            return re.sub(r"^(?:ERROR|error|cause): ", "", matching[0] if pattern != "." else matching[-1])
    return "no words were left"


_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchtext", "triton", "xformers")


def _conflict_finding(trouble: Mapping[str, Any], file: str, last: str) -> Finding:
    conflict = trouble.get("conflict")
    if not conflict:
        return Finding(
            "resolution-impossible",
            Level.FAIL,
            f"The requirements cannot be met together: {last}",
            "The resolver found no set of versions; its whole account is in the report's details.",
            ("loosen one of the pins it names and run again", "`--prove-fix` tries to find which one"),
            _PIP,
        )
    wishes = conflict["wishes"]
    package = conflict["package"]
    said = "; ".join(
        f"{file} asks for {wish['wants']}"
        if wish["by"] == "the requirements"
        else f"{wish['by']} wants {wish['wants']}"
        for wish in wishes
    )
    asked = next((wish for wish in wishes if wish["by"] == "the requirements"), None)
    needing = next((wish for wish in wishes if wish["by"] != "the requirements"), None)
    companion = next(
        (
            str(wish["by"])
            for wish in wishes
            if package == "torch" and normal_name(str(wish["by"]).split(" ")[0]) in _TORCH_COMPANIONS
        ),
        None,
    )
    if companion:
        name = companion.split(" ")[0]
        return Finding(
            "torchvision-mismatch" if name == "torchvision" else f"{name}-mismatch",
            Level.FAIL,
            f"{companion} is made for another torch: {said}.",
            f"Each {name} release is compiled against one torch release. Forced in with --no-deps or from two "
            f"indexes it "
            "fails at run time (`operator torchvision::nms does not exist`, undefined symbols), often behind another "
            "message.",
            (
                f"drop the {name} pin, so that the resolver takes the release for this torch, from the same index as "
                f"torch",
                f"or remove {name}: training on text does not need it",
            ),
            "https://github.com/pytorch/vision#installation, version table",
        )
    fixes = []
    if asked and needing:
        fixes.append(
            f"drop the line `{quote(asked['wants'], 80)}`: {needing['by']} chooses {package} itself"
            if needing["by"].count(" ") and _pins_exactly(asked["wants"])
            else f"loosen `{quote(asked['wants'], 80)}`"
        )
        fixes.append(f"or pin {package} to what {needing['by']} wants: `{quote(needing['wants'], 80)}`")
    else:
        fixes.append(f"loosen the pin of one of those who ask for {package}")
    other = f"or take another release of {str(needing['by']).split(' ')[0]}; " if needing else ""
    fixes.append(f"{other}`--prove-fix` tries it in a second sandbox and writes the file that works")
    return Finding(
        "resolution-impossible",
        Level.FAIL,
        f"The requirements cannot be met together, because of {package}: {said}.",
        "No version is in both ranges. Installing past the resolver (pip's no-deps option) only moves the failure to "
        "run time.",
        tuple(fixes),
        _PIP,
    )


def _pins_exactly(wants: str) -> bool:
    return "==" in wants


def _no_match_finding(trouble: Mapping[str, Any], last: str) -> Finding:
    missing = trouble.get("missing_requirement") or ""
    local = re.fullmatch(r"([\w.-]+)\s*={2,3}\s*([^+\s]+)\+([\w.]+)", missing)
    if local:
        name, version, variant = local.groups()
        index = f"https://download.pytorch.org/whl/{variant}"
        return Finding(
            "no-matching-distribution",
            Level.FAIL,
            f"{missing} is on none of the indexes that were asked.",
            f"+{variant} marks a build that PyPI does not carry; it lies on an index of its own. {name} {version} "
            f"itself "
            "may well exist on PyPI, as another build.",
            (
                f"add the line `--extra-index-url {index}` (or another index that carries {variant} builds)",
                f"or drop `+{variant}`, and take the build that PyPI has",
            ),
            "pip documentation, finding packages; PEP 440, local versions",
        )
    return Finding(
        "no-matching-distribution",
        Level.FAIL,
        f"No distribution was found for {quote(missing, 80) or 'a requirement'}: {last}",
        "The name or version is not on the indexes that were asked, or has no file for this Python and system.",
        (
            "check the spelling and the version: `pip index versions NAME`",
            "or add the index that carries it: `--extra-index-url URL` in the file",
        ),
        "the installer's own words",
    )


def _build_isolation_finding(trouble: Mapping[str, Any]) -> Finding:
    build = str(trouble.get("build") or "a package")
    name = normal_name(build.split("==")[0])
    wants = str(trouble.get("build_wants") or "a module")
    fixes = [
        f"after the rest is installed: `pip install {build} --no-build-isolation`"
        + (" (needs nvcc and an Ampere or newer GPU)" if name == "flash-attn" else ""),
        "or install a prebuilt wheel for exactly this torch, CUDA and Python",
    ]
    if name == "flash-attn":
        fixes.insert(1, "or drop the line: `attn_implementation='sdpa'` needs no extra package")
    return Finding(
        "build-isolation",
        Level.FAIL,
        f"{build} cannot be built as the file stands: its build imports `{wants}` and does not declare it.",
        f"pip builds in an isolated environment, where `{wants}` is absent whatever else is installed or listed in "
        f"the file.",
        tuple(fixes),
        "pip documentation, build isolation; https://github.com/Dao-AILab/flash-attention",
    )


def check_installation(outcome: Mapping[str, Any], file: str) -> list[Finding]:
    """Whether every requirement went in, and whether the declared requirements hold afterwards."""
    steps = outcome.get("install") or []
    bad = next((step for step in steps if not step["ok"]), None)
    if bad is not None:
        return [resolve_finding(bad, file)]
    if not steps:
        return []
    seconds = sum(step["seconds"] for step in steps)
    total = sum(package.get("size_bytes") or 0 for package in outcome.get("packages") or [])
    size = f", {total / 2**20:.0f} MiB on disk" if total else ""
    findings = [
        Finding(
            "installed",
            Level.OK,
            f"Installed with {outcome['installer']['name']} in {seconds:.1f} s{size}.",
            f"{outcome['installer']['why']}." if outcome["installer"]["name"] == "pip" else "",
            source="measured in the sandbox",
        )
    ]
    checked = outcome.get("pip_check")
    if checked not in (None, "passes"):
        lines = [line for line in str(checked).splitlines() if "requires" in line or "has requirement" in line]
        findings.append(
            Finding(
                "declared-requirements-broken",
                Level.WARN,
                f"`pip check` finds declared requirements unmet: {quote('; '.join(lines[:3]) or checked, 300)}",
                "The versions were forced together. Whether it matters shows in the stages below.",
                ("install what it names, or drop the pin that forced it",),
                "pip check",
            )
        )
    return findings


# --- findings of the stages ----------------------------------------------------------------------------------------


def check_stages(outcome: Mapping[str, Any]) -> list[Finding]:
    """One finding per root cause of a failed step; one OK finding when all stages that were reached pass."""
    stages = outcome.get("stages") or []
    if not stages:
        return []
    found = failures(outcome)
    findings = [failure_finding(one, outcome) for one in found]
    states = {stage["stage"]: stage["state"] for stage in stages}
    absent = [name for name, state in states.items() if state == "absent"]
    if not found:
        versions = ", ".join(
            f"{package['name']} {package['version']}"
            for name in ("torch", "transformers", "peft", "bitsandbytes")
            for package in outcome.get("packages") or []
            if normal_name(package["name"]) == name
        )
        passed = [stage["stage"] for stage in stages if stage["state"] == "ok" and not stage.get("not_tried")]
        # Only a stack that took a training step may be said to load: the verdict rests on this code.
        trained = {"torch", "transformers", "peft"} <= set(passed)
        if passed:
            findings.append(
                Finding(
                    "stack-loads" if trained else "stages-pass",
                    Level.OK,
                    f"{'The stack loads' if trained else 'What was tried passes'}: {', '.join(passed)} "
                    f"({versions or 'no training package is installed'}).",
                    _device_note(stages),
                    source=_SOURCE,
                )
            )
    not_reached = [name for name, state in states.items() if state == "not-reached"]
    if not_reached and findings:
        first = findings[0]
        note = f" Not reached after it: {', '.join(not_reached)}."
        findings[0] = Finding(first.code, first.level, first.what + note, first.why, first.fix, first.source)
    if "torch" in absent:
        findings.append(
            Finding(
                "torch-not-installed",
                Level.WARN,
                "Nothing here installs torch, so no stage that trains could be tried.",
                "transformers and peft can be installed without torch; models are then placeholders.",
                ("add `torch` to the requirements",),
                "metadata of transformers: torch is an extra",
            )
        )
    findings += _config_findings(stages)
    for stage in stages:
        if stage.get("not_tried"):
            findings.append(
                Finding(
                    f"{stage['stage']}-not-exercised",
                    Level.WARN,
                    f"{stage['stage']} was imported only: {stage['not_tried']}.",
                    "Whether its layers and optimizers work could not be tried here.",
                    ("run this on the machine that trains, or raise it: bitsandbytes runs on the CPU from 0.46 on",),
                    _SOURCE,
                )
            )
    findings += _printed_findings(stages)
    return findings


def _config_findings(stages: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A given config.json that could not be shrunk and built: not exercised, which is not the same as broken."""
    for stage in stages:
        for step in stage["steps"]:
            chain = (step.get("facts") or {}).get("could_not_use_config")
            if not chain:
                continue
            said = f"{chain[0]['type']}: {quote(chain[0]['message'], 200)}"
            custom = "custom code" in chain[0]["message"] or "trust_remote_code" in chain[0]["message"]
            return [
                Finding(
                    "config-not-exercised",
                    Level.WARN,
                    f"The model's own config.json could not be exercised at two layers; the example's shape was used "
                    f"({said}).",
                    "The model brings its own code, which is not run unasked."
                    if custom
                    else "Shrinking does not suit every architecture: this says nothing against the model.",
                    ("run again with `--trust-remote-code`, after reading that code",)
                    if custom
                    else ("load the real model once before training, with `python model_analyzer.py DIR`",),
                    _SOURCE,
                )
            ]
    return []


def _device_note(stages: Sequence[Mapping[str, Any]]) -> str:
    for stage in stages:
        for step in stage["steps"]:
            device = (step.get("facts") or {}).get("device")
            if step["step"] == "run a kernel" and step["ok"]:
                if device == "cpu":
                    return "Everything ran on the CPU: CUDA kernels were not exercised."
                return f"The kernel ran on {device}."
    return ""


def _printed_findings(stages: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Known errors that were printed although the step went on: worth a warning, not a failure."""
    findings: dict[str, Finding] = {}
    for stage in stages:
        for step in stage["steps"]:
            if not step["ok"] or not step.get("printed"):
                continue
            match = first_match(str(step["printed"]))
            row = match.signature.row if match else {}
            if match and row.get("severity") == "error" and not row.get("generic") and match.code not in findings:
                findings[match.code] = Finding(
                    match.code,
                    Level.WARN,
                    f"`{step['step']}` went on, but printed: {quote(match.text, 200)}",
                    fill(str(row["cause"]), match.fields),
                    tuple(fill(fix, match.fields) for fix in row["fix"])[:3],
                    f"facts/error_signatures.json, {row['id']}: {row['source']}",
                )
    return list(findings.values())


def failure_finding(failure: Failure, outcome: Mapping[str, Any]) -> Finding:
    """The finding for one failed step."""
    outer, root = failure.chain[0], failure.root
    behind = "" if outer is root else f", behind {outer['type']}: {quote(str(outer['message']).split('. ')[0], 120)}"
    # "Try: pip install transformers -U" and the like is advice for another situation.
    message = re.sub(
        r"\s*(?:Try|Please try|Please run|Set the logging verbosity)\b.*", "", str(root["message"]), flags=re.S
    )
    said = f"{root['type']}: {quote(message.rstrip('.'), 240)}"
    what = f"`{failure.step}` fails: {said}{behind}."
    if failure.missing_name and failure.provider is not None and code_of(failure) == "missing-name":
        return _missing_name_finding(failure, outcome, behind)
    if code_of(failure) == "numpy-abi":
        return _numpy_finding(failure, what)
    if failure.match is not None:
        row, fields = failure.match.signature.row, failure.match.fields
        raised = f" Raised in {named(failure.consumer)}{failure.consumer_place}." if failure.consumer else ""
        return Finding(
            failure.match.code,
            Level.FAIL,
            what,
            f"{fill(str(row['cause']), fields)}{raised}",
            fixes_of(failure.match),
            f"facts/error_signatures.json, {row['id']}: {row['source']}",
        )
    if failure.state == "timeout":
        return Finding(
            "step-timeout",
            Level.UNKNOWN,
            f"Could not tell: `{failure.step}` did not finish in time.",
            "It hangs, or the machine is very busy; the stack of the hanging threads is in the report's details.",
            ("run again when the machine is idle, with `--stage-limit-s 900`",),
            _SOURCE,
        )
    if failure.state == "crashed":
        return Finding(
            "step-crashed",
            Level.FAIL,
            f"`{failure.step}` kills the interpreter: {quote(root['message'], 160)}.",
            "A compiled library crashed; Python could not raise an exception. Usual causes: a library built for "
            "another "
            "torch or CPU (SIGILL), or two copies of one runtime.",
            (
                "reinstall the package named by the step from the same index as torch",
                "`--prove-fix` tries other versions",
            ),
            _SOURCE,
        )
    raised = f" It was raised in {named(failure.consumer)}{failure.consumer_place}." if failure.consumer else ""
    return Finding(
        "step-failed",
        Level.FAIL,
        what,
        f"None of the known errors matches.{raised}",
        ("run again with `--prove-fix`: it tries other versions in further sandboxes, newest first",),
        _SOURCE,
    )


def numpy_ready(failure: Failure) -> str | None:
    """The first release of the failing package that is built for NumPy 2, or None when it is not known."""
    ready = failure.match.signature.row.get("numpy2_ready", {}) if failure.match else {}
    name = normal_name(str(failure.consumer["name"])) if failure.consumer else ""
    return ready.get(name)


def _numpy_finding(failure: Failure, what: str) -> Finding:
    assert failure.match is not None
    row, ready = failure.match.signature.row, numpy_ready(failure)
    fixes = tuple(str(fix) for fix in row["fix"])
    raised = ""
    if failure.consumer:
        raised = f" It is {named(failure.consumer)} that was compiled for another NumPy."
        if ready:
            fixes = (
                f"raise {failure.consumer['name']}: `{failure.consumer['name']}>={ready}`; keeps NumPy 2",
                fixes[-1],
            )
    return Finding(
        "numpy-abi",
        Level.FAIL,
        what,
        f"{row['cause']}{raised}",
        fixes,
        f"facts/error_signatures.json, {row['id']}: {row['source']}",
    )


def _missing_name_finding(failure: Failure, outcome: Mapping[str, Any], behind: str) -> Finding:
    provider, consumer = failure.provider, failure.consumer
    assert provider is not None
    who = f"{named(consumer)}{failure.consumer_place}" if consumer else "an importing module"
    what = (
        f"`{failure.step}` fails: {who} imports `{failure.missing_name}`, which {named(provider)} does not have"
        f" ({failure.root['type']}{behind})."
    )
    older = older_side(failure, outcome)
    checked = " pip check finds no conflict." if outcome.get("pip_check") == "passes" else ""
    row = failure.match.signature.row if failure.match else None
    if row is not None and not row.get("generic"):
        return Finding(
            "missing-name",
            Level.FAIL,
            what,
            f"{row['cause']}{checked}",
            tuple(str(fix) for fix in row["fix"])[:3],
            f"facts/error_signatures.json, {row['id']}: {row['source']}",
        )
    fixes: tuple[str, ...]
    if consumer is None or older is None:
        why = f"The two versions do not fit; which side is too old could not be told from their dates.{checked}"
        fixes = (f"raise {provider['name']}, or the package that imports from it", "`--prove-fix` tries which")
    elif older == "consumer":
        why = (
            f"{named(consumer)} is the older of the two: the name was there when it was released and is gone from "
            f"{named(provider)}.{checked}"
        )
        fixes = (
            f"raise {consumer['name']} above {consumer['version']}",
            f"or keep it and take an older {provider['name']} than {provider['version']}",
        )
    else:
        why = f"{named(provider)} is the older of the two: it lacks the name that {named(consumer)} needs.{checked}"
        fixes = (
            f"raise {provider['name']} above {provider['version']}",
            f"or keep it and take an older {consumer['name']} than {consumer['version']}",
        )
    return Finding(
        "missing-name",
        Level.FAIL,
        what,
        why,
        (*fixes, "`--prove-fix` finds the versions")[:3],
        "release dates on the index",
    )


def older_side(failure: Failure, outcome: Mapping[str, Any]) -> str | None:
    """Which of the two was released first: "consumer" or "provider"; None when a date is not known.

    A name that the older side imports was removed from the newer; a name that the newer side imports is not in the
    older one yet.
    """
    if failure.consumer is None or failure.provider is None:
        return None
    dates = {
        normal_name(package["name"]): package.get("uploaded")
        for package in (outcome.get("resolve") or {}).get("packages", [])
    }
    consumer = dates.get(normal_name(failure.consumer["name"]))
    provider = dates.get(normal_name(failure.provider["name"]))
    if not consumer or not provider or consumer == provider:
        return None
    return "consumer" if consumer < provider else "provider"


# --- what the report keeps -----------------------------------------------------------------------------------------


# What pip calls these failures; uv has no names for them.
_PIPS_NAMES = {
    "resolution-impossible": "ResolutionImpossible",
    "no-matching-distribution": "DistributionNotFound",
    "hash-mode": "HashErrors",
    "build-isolation": "ModuleNotFoundError",
    "build-failed": "InstallationSubprocessError",
    "wheel-not-supported": "UnsupportedWheel",
    "index-unreachable": "NetworkConnectionError",
}


def observed_of(outcome: Mapping[str, Any]) -> dict[str, Any]:
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
        "exception": first.get("exception") or _PIPS_NAMES.get(str(trouble.get("code"))),
        "message": first.get("message")
        or (quote(_telling_line(trouble["text"]), 600) if trouble.get("text") else None),
        "installer_output": quote(str(trouble["text"])[-3000:], 3000) if trouble.get("text") else None,
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
