"""Which change to the requirements cures a failure: proposed from what is known, proven in further sandboxes."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preflight import processes
from preflight.console import UsageError
from preflight.findings import Finding, Level, say
from preflight.machine import Machine
from preflight.software.diagnosis import Failure, code_of, failures, numpy_ready, older_side
from preflight.software.requirements import Requirement, Requirements, logical_lines, normal_name, packaging
from preflight.software.stack import Request, try_stack

# {distribution: specifier}; "" any version, None leave the line out.
Changes = dict[str, str | None]
HASHES = "--hash"  # {"--hash": None}: take the hashes off
_SEARCHED = ("peft", "transformers", "accelerate", "tokenizers", "numpy", "bitsandbytes", "torch")


@dataclass(frozen=True)
class Try:
    """One trial of a change: what it was, whether the stack then loads, and what happened if not."""

    changes: Changes
    proven: bool
    seconds: float
    failing_stage: str | None
    versions: Mapping[str, str]
    message: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {
            "changes": self.changes,
            "proven": self.proven,
            "seconds": self.seconds,
            "failing_stage": self.failing_stage,
            "message": self.message or None,
        }


def known_cures(outcome: Mapping[str, Any], found: Requirements) -> list[Changes]:
    """Changes that cure the first failure by what is known: the conflict itself, the table's pins, release dates."""
    trouble = next((step for step in outcome.get("install") or [] if not step["ok"]), None)
    resolve = outcome.get("resolve") or {}
    if trouble is None and not resolve.get("ok", True) and not resolve.get("forced"):
        trouble = resolve
    if trouble is not None:
        return _resolution_cures(trouble, found)
    failed = failures(outcome)
    return _failure_cures(failed[0], outcome) if failed else []


def _resolution_cures(trouble: Mapping[str, Any], found: Requirements) -> list[Changes]:
    code = trouble["code"]
    if code == "resolution-impossible":
        conflict = trouble.get("conflict") or {}
        wishes = conflict.get("wishes", [])
        package = str(conflict.get("package", ""))
        needing = [wish for wish in wishes if wish["by"] != "the requirements"]
        cures: list[Changes] = []
        companions = [normal_name(str(wish["by"]).split(" ")[0]) for wish in needing]
        if package == "torch":
            # The small companion yields to torch, not the other way round.
            cures += _unpinned(companions) + _left_out(companions)
        elif found.named(package) is not None:
            for wish in needing:
                wanted = re.sub(r"^[\w.-]+(?:\[[^\]]*\])?\s*", "", str(wish["wants"])).replace(" and ", ",")
                cures.append({package: wanted})
            cures.append({package: ""})
        cures += [{name: ""} for name in companions if found.named(name) is not None and {name: ""} not in cures]
        return cures
    if code == "no-matching-distribution":
        match = re.match(
            r"([\w.-]+)(?:\[[^\]]*\])?\s*(={2,3}\s*([^+\s,]+)(\+\S+)?)?", trouble.get("missing_requirement") or ""
        )
        if not match:
            return []
        name = normal_name(match.group(1))
        without_local: list[Changes] = [{name: f"=={match.group(3)}"}] if match.group(4) else []
        return [*without_local, *_unpinned([name])]
    if code in ("build-isolation", "build-failed", "build-too-long") and trouble.get("build"):
        name = normal_name(str(trouble["build"]).split("==")[0])
        return _left_out([name]) if code == "build-isolation" else [*_unpinned([name]), *_left_out([name])]
    if code in ("python-version-conflict", "wheel-not-supported"):
        names = [normal_name(str(wish["by"]).split(" ")[0]) for wish in trouble.get("wishes", [])]
        return [{name: ""} for name in names if found.named(name) is not None]
    if code == "hash-mode":
        return [{HASHES: None}]
    return []


def _failure_cures(failure: Failure, outcome: Mapping[str, Any]) -> list[Changes]:
    row = failure.match.signature.row if failure.match else {}
    consumer = normal_name(str(failure.consumer["name"])) if failure.consumer else None
    provider = normal_name(str(failure.provider["name"])) if failure.provider else None
    if code_of(failure) == "numpy-abi":
        ready = numpy_ready(failure)
        cures: list[Changes] = []
        if consumer:
            cures += [{consumer: f">={ready}"}] if ready else []
            cures.append({consumer: ""})
        return [*cures, {"numpy": "<2"}]
    if code_of(failure) == "dependency-version" and failure.match is not None:
        fields = failure.match.fields
        return [{normal_name(fields["package"]): fields["wants"]}]
    if row.get("pins"):
        return [dict(pins) for pins in row["pins"]]
    if failure.missing_name and consumer and provider and failure.consumer and failure.provider:
        raise_consumer: Changes = {consumer: f">{public(failure.consumer['version'])}"}
        lower_provider: Changes = {provider: f"<{public(failure.provider['version'])}"}
        raise_provider: Changes = {provider: f">{public(failure.provider['version'])}"}
        lower_consumer: Changes = {consumer: f"<{public(failure.consumer['version'])}"}
        older = older_side(failure, outcome)
        if older == "consumer":
            return [raise_consumer, lower_provider]
        if older == "provider":
            return [raise_provider, lower_consumer]
        return [raise_consumer, raise_provider]
    return []


def _unpinned(names: Sequence[str]) -> list[Changes]:
    return [{name: ""} for name in names]


def _left_out(names: Sequence[str]) -> list[Changes]:
    return [{name: None} for name in names]


def public(version: str) -> str:
    """The version without its local part."""
    return version.split("+")[0]


def searched_cures(
    outcome: Mapping[str, Any], found: Requirements, versions_of: Callable[[str], Sequence[str]]
) -> Sequence[Changes]:
    """Changes to try when nothing is known: first each suspect unpinned, then its older minor releases, newest first.

    Suspects: the packages the exception names, then the usual ones. `versions_of` lists a package's versions.
    """
    installed = {normal_name(p["name"]): str(p["version"]) for p in outcome.get("packages") or []}
    failed = failures(outcome)
    named = []
    if failed:
        for package in (failed[0].consumer, failed[0].provider):
            if package is not None:
                named.append(normal_name(str(package["name"])))
    suspects = [name for name in dict.fromkeys([*named, *_SEARCHED]) if name in installed]
    cures: list[Changes] = []
    for name in suspects:
        item = found.named(name)
        if item is not None and item.specifier:
            cures.append({name: ""})
    for name in suspects[:3]:
        try:
            here = packaging("version").Version(public(installed[name]))
        except Exception:  # a version no library reads
            continue
        for version in newest_of_each_minor(versions_of(name)):
            if packaging("version").Version(version) != here:
                cures.append({name: f"=={version}"})
    return cures


def newest_of_each_minor(versions: Sequence[str]) -> list[str]:
    """The newest release of each minor version, newest first; pre-releases left out."""
    best: dict[tuple[int, int], Any] = {}
    for text in versions:
        try:
            version = packaging("version").Version(text)
        except Exception:
            continue
        if version.is_prerelease or version.is_devrelease:
            continue
        key = (version.major, version.minor)
        if key not in best or version > best[key]:
            best[key] = version
    return [str(best[key]) for key in sorted(best, reverse=True)]


def versions_on_index(name: str) -> list[str]:
    """The versions of a package that pip finds on its indexes, newest first; none without a network."""
    ended = processes.run([sys.executable, "-m", "pip", "index", "versions", name], 60)
    match = re.search(r"Available versions: (.+)", ended.text)
    return [version.strip() for version in match.group(1).split(",")] if match else []


def with_changes(request: Request, changes: Changes) -> Request:
    """The request with some requirements changed; names that the file does not have are added."""
    found = request.requirements
    wanted = {normal_name(name): spec for name, spec in changes.items() if name != HASHES}

    def change(name: str, line: str) -> str | None:
        if name not in wanted:
            return line
        spec = wanted[name]
        if spec is None:
            return None
        item = found.named(name)
        extras = f"[{','.join(item.extras)}]" if item and item.extras else ""
        return f"{item.name if item and item.name else name}{extras}{spec}"

    present = {normal_name(item.name) for item in found.active if item.name}
    added = tuple(f"{name}{spec}" for name, spec in wanted.items() if spec is not None and name not in present)
    if HASHES in changes:
        bare = Requirements(found.path, [replace(item, hashes=()) for item in found.items], found.constraints)
        bare.options = [option for option in found.options if option[2] != "--require-hashes"]
        bare.files, found = found.files, bare
    return replace(request, requirements=found, change=change, added=added, force_conflicts=False)


def prove(
    machine: Machine,
    request: Request,
    outcome: Mapping[str, Any],
    *,
    max_tries: int = 8,
    time_limit_s: float = 900.0,
    trial: Callable[[Machine, Request], dict[str, Any]] = try_stack,
    versions_of: Callable[[str], Sequence[str]] = versions_on_index,
) -> list[Try]:
    """Try changes, each in a sandbox of its own, until one makes the stack load; all tries, the proven one last.

    Known cures come first; when one gets further but not through, the cure of the next failure is added to it. Then
    other versions are searched, newest first, within `max_tries` and `time_limit_s`.
    """
    began = time.monotonic()
    found = request.requirements
    queue: list[Changes] = known_cures(outcome, found)
    searched = False
    tries: list[Try] = []
    done: list[Changes] = []
    while len(tries) < max_tries and time.monotonic() - began < time_limit_s:
        if not queue:
            if searched or request.offline:
                break
            queue, searched = list(searched_cures(outcome, found, versions_of)), True
            continue
        changes = queue.pop(0)
        if changes in done:
            continue
        done.append(changes)
        say(f"trying {shown(changes)} in a fresh sandbox (try {len(tries) + 1} of at most {max_tries})")
        result = trial(machine, with_changes(request, changes))
        proven = loads(result)
        failed = failures(result)
        message = failed[0].root["message"] if failed else _installer_words(result)
        versions = {normal_name(p["name"]): str(p["version"]) for p in result.get("packages") or []}
        tries.append(Try(changes, proven, result["seconds"], result.get("failing_stage"), versions, str(message)[:300]))
        if proven:
            break
        if _progress(result) > _progress(outcome):
            deeper = [{**changes, **cure} for cure in known_cures(result, found) if not _undoes(cure, changes)]
            queue = deeper + queue
    return tries


def _undoes(cure: Changes, changes: Changes) -> bool:
    return any(name in changes for name in cure)


def _installer_words(result: Mapping[str, Any]) -> str:
    step = next((step for step in result.get("install") or [] if not step["ok"]), None) or result.get("resolve") or {}
    if step.get("held_back"):
        return "CUDA packages would have to be downloaded"
    return "" if step.get("ok") else str(step.get("text", ""))[-300:]


def loads(outcome: Mapping[str, Any]) -> bool:
    """Everything was installed, and every stage that its packages allow passes."""
    stages = outcome.get("stages") or []
    installed = all(step["ok"] for step in outcome.get("install") or []) and bool(outcome.get("install"))
    passes = all(stage["state"] in ("ok", "absent") for stage in stages)
    steps = all(step["ok"] for stage in stages for step in stage["steps"])
    return bool(stages) and installed and passes and steps


def _progress(outcome: Mapping[str, Any]) -> int:
    """How far a trial got: steps that passed, none when it was not installed."""
    return sum(step["ok"] for stage in outcome.get("stages") or [] for step in stage["steps"])


def shown(changes: Changes) -> str:
    """The changes for people: "peft>=0.18.0, without torchvision"."""
    words = []
    for name, spec in changes.items():
        if name == HASHES:
            words.append("no hashes")
        else:
            words.append(f"without {name}" if spec is None else f"{name}{spec}" if spec else f"{name} unpinned")
    return ", ".join(words)


# --- the file that works -------------------------------------------------------------------------------------------


def fixed_requirements(found: Requirements, proven: Try) -> str:
    """The user's own file with only the lines changed that had to be, pinned to the versions that were proven.

    Comments, options and order stay. A file that is included with -r takes the place of its line when one of its
    lines changes.
    """
    changes = {normal_name(name): spec for name, spec in proven.changes.items() if name != HASHES}

    def pin(item: Requirement) -> str | None:
        name = normal_name(item.name or "")
        if changes[name] is None:
            return None
        version = proven.versions.get(name)
        extras = f"[{','.join(item.extras)}]" if item.extras else ""
        marker = f" ; {item.marker}" if item.marker else ""
        return f"{item.name}{extras}{'==' + public(version) if version else changes[name]}{marker}"

    if found.files and os.path.exists(found.path):
        text = _fixed_file(found.path, found, changes, pin, HASHES in proven.changes)
    else:
        lines = []
        for item in found.active:
            line = pin(item) if item.name and normal_name(item.name) in changes else item.shown()
            lines += [line] if line is not None else []
        text = "\n".join(lines) + "\n"
    present = {normal_name(item.name) for item in found.items if item.name}
    for name, spec in changes.items():
        if name not in present and spec is not None:
            text += f"{name}=={public(proven.versions[name])}\n" if name in proven.versions else f"{name}{spec}\n"
    return text


def _fixed_file(
    path: str,
    found: Requirements,
    changes: Mapping[str, str | None],
    pin: Callable[[Requirement], str | None],
    drop_hashes: bool,
) -> str:
    raw = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    lines = raw.splitlines()
    starts = [number for number, _ in logical_lines(raw)]
    result: list[str] = []
    number = 1
    while number <= len(lines):
        line = lines[number - 1]
        end = number
        if number in starts:
            while end < len(lines) and lines[end - 1].endswith("\\"):
                end += 1
        item = next(
            (
                one
                for one in (*found.items, *found.constraints)
                if one.file == path and one.number == number and one.name
            ),
            None,
        )
        comment = re.search(r"\s+#.*$", lines[end - 1])
        tail = comment.group(0) if comment else ""
        include = re.match(r"\s*(?:-r|--requirement)[ =]+(\S+)", line)
        if item is not None and normal_name(item.name or "") in changes and item.active is not False:
            replaced = pin(item)
            if replaced is not None:
                result.append(replaced + tail)
        elif item is not None and drop_hashes and item.hashes:
            result.append(
                re.sub(r"\s*--hash[ =]\S+", "", item.shown()) + (f" ; {item.marker}" if item.marker else "") + tail
            )
        elif include and _touches(os.path.join(os.path.dirname(path), include.group(1)), found, changes):
            nested = os.path.join(os.path.dirname(path), include.group(1))
            result.append(f"# {include.group(1)}, taken in because a line of it changed:")
            result.append(_fixed_file(nested, found, changes, pin, drop_hashes).rstrip("\n"))
        elif not (drop_hashes and re.match(r"\s*--require-hashes\s*$", line)):
            result += lines[number - 1 : end]
        number = end + 1
    return "\n".join(result) + "\n"


def _touches(path: str, found: Requirements, changes: Mapping[str, str | None]) -> bool:
    return any(
        item.file == path and item.name and normal_name(item.name) in changes and item.active is not False
        for item in found.items
    )


# --- what is said about it -----------------------------------------------------------------------------------------


def proof_of(
    tries: Sequence[Try], found: Requirements, fixed: str, max_tries: int, time_limit_s: float
) -> tuple[dict[str, Any], Finding]:
    """The proof as the report keeps it and as a finding; writes the file that works to `fixed`.

    Raises UsageError when that file cannot be written.
    """
    last = tries[-1] if tries else None
    proof: dict[str, Any] = {
        "proven": bool(last and last.proven),
        "tries": [one.as_json() for one in tries],
        "changes": None,
        "versions": None,
        "fixed_requirements": None,
        "fixed": None,
    }
    if last is None or not last.proven:
        said = "; ".join(f"{shown(one.changes)}: {one.failing_stage or 'fails'}" for one in tries)
        proof["said"] = (
            f"No change was found that works. Tried: {said or 'nothing, because no change is known to help'}."
        )
    else:
        text = fixed_requirements(found, last)
        try:
            Path(fixed).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--fixed {fixed}: cannot be written ({error.strerror})") from error
        versions = {name: last.versions[name] for name in last.changes if name in last.versions}
        words = [f"{name}=={public(version)}" for name, version in versions.items()]
        words += [f"without {name}" for name, spec in last.changes.items() if spec is None and name != HASHES]
        words += ["without hashes"] if HASHES in last.changes else []
        name = os.path.basename(fixed)
        proof.update(
            changes=last.changes, versions=versions, fixed_requirements=text, fixed=name, short=", ".join(words)
        )
        proof["said"] = (
            f"Proven here: {proof['short']}. Everything installs and every stage passes ({last.seconds:.0f} s, "
            f"try {len(tries)}). {name} holds the file that works."
        )
    return proof, proof_finding(proof, max_tries, time_limit_s)


def proof_finding(proof: Mapping[str, Any], max_tries: int, time_limit_s: float) -> Finding:
    """The finding for a proof, or for tries that found none."""
    if proof["proven"]:
        return Finding("fix-proven", Level.OK, proof["said"], source="measured in another sandbox")
    return Finding(
        "fix-not-found",
        Level.UNKNOWN,
        proof["said"],
        "The tries are bounded in number and time; more may find one.",
        (f"run again with `--max-tries {2 * max_tries} --time-limit-s {2 * time_limit_s:.0f}`",),
        "measured in further sandboxes",
    )


def with_proof(findings: Sequence[Finding], finding: Finding, proof: Mapping[str, Any]) -> list[Finding]:
    """The findings with the proven fix first among the fixes of the first failure."""
    result = list(findings)
    at = next((index for index, one in enumerate(result) if one.level in (Level.FAIL, Level.UNKNOWN)), None)
    if proof["proven"] and at is not None:
        one = result[at]
        fixes = (f"proven here: {proof['short']} (`pip install -r {proof['fixed']}`)", *one.fix)
        result[at] = Finding(one.code, one.level, one.what, one.why, fixes[:3], one.source)
    return [*result, finding]
