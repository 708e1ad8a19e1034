"""What does this error mean, and what helps?  Reads a pasted traceback or the log of a training run.

Matches the text against the table of known errors, and does the arithmetic of an out-of-memory message.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preflight import facts
from preflight.console import UsageError
from preflight.findings import Finding, Level, Section, quote

if TYPE_CHECKING:
    from preflight.plan import Plan

_UNITS = {
    "bytes": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 2**10,
    "mb": 2**20,
    "gb": 2**30,
}
_LIMIT_BYTES = 64 << 20
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True)
class Signature:
    """One row of facts/error_signatures.json, its pattern compiled."""

    id: str
    code: str
    pattern: re.Pattern[str]
    when: re.Pattern[str] | None
    row: Mapping[str, Any]
    rank: int


@dataclass(frozen=True)
class Match:
    """A known error found in a text. `start` is a position in the text; `fields` the named numbers and names."""

    signature: Signature
    start: int
    line: int
    text: str
    fields: Mapping[str, str]

    @property
    def code(self) -> str:
        """The finding's code."""
        return self.signature.code


@cache
def signatures() -> tuple[Signature, ...]:
    """All known errors, most specific first."""
    found = []
    for rank, row in enumerate(facts.table("error_signatures")["signatures"]):
        flags = re.M | (re.S if row.get("dotall") else 0)
        found.append(
            Signature(
                row["id"],
                str(row.get("code") or row["id"].replace("_", "-")),
                re.compile(row["regex"], flags),
                re.compile(row["when"]) if row.get("when") else None,
                row,
                rank,
            )
        )
    return tuple(found)


def first_match(text: str) -> Match | None:
    """The first known error, in the table's order, that one message matches."""
    for signature in signatures():
        match = signature.pattern.search(text)
        if match and (signature.when is None or signature.when.search(text)):
            return _match(signature, match, text)
    return None


def _match(signature: Signature, match: re.Match[str], text: str) -> Match:
    names = signature.row.get("fields") or []
    fields = {name: value for name, value in zip(names, match.groups(), strict=False) if value is not None}
    return Match(signature, match.start(), text.count("\n", 0, match.start()) + 1, match.group(0), fields)


def matches(text: str) -> list[Match]:
    """Every known error in a log, the likely cause first.

    In Python's own order the first exception of a chain is the cause and later ones follow from it. A message counts
    more than a line of source code that a traceback quotes, and an error more than a warning.
    """
    found: list[Match] = []
    taken: list[tuple[int, int]] = []
    for signature in signatures():
        if signature.when is not None and not signature.when.search(text):
            continue
        for match in signature.pattern.finditer(text):
            if any(start < match.end() and match.start() < end for start, end in taken):
                continue  # a more specific row has this text
            taken.append((match.start(), max(match.end(), match.start() + 1)))
            found.append(_match(signature, match, text))
            break
    ids = {match.signature.id for match in found}
    found = [match for match in found if not ids & set(match.signature.row.get("yields_to", ()))]
    return sorted(found, key=lambda item: (*_weight(item, text), item.start, item.signature.rank))


def _weight(match: Match, text: str) -> tuple[int, int]:
    begin = text.rfind("\n", 0, match.start) + 1
    end = text.find("\n", match.start)
    line = text[begin : end if end >= 0 else len(text)]
    before = text[:begin].rstrip("\n").rsplit("\n", 1)[-1]
    quoted = re.match(r'\s*File ".*", line \d+', before) is not None and line.startswith("    ")
    worse = {"error": 0, "warning": 1, "info": 2}.get(str(match.signature.row.get("severity")), 0)
    follows = 1 if match.signature.row.get("consequence") and not worse else worse
    return (2 if quoted else 0, follows)


# --- exceptions in a log -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raised:
    """One exception of a printed traceback: where it was raised last, and its message."""

    type: str
    message: str
    file: str | None
    line: int | None


_EXCEPTION = re.compile(
    r"^(?:\[[^\]\n]{0,60}\]:?\s*|\d{4}-\d\d-\d\d[^\n]{0,40}?\s|\s*│\s*)?"
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|NotFound|Failed|Impossible))"
    r"(?::[ \t]?(.*))?$",
    re.M,
)
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


def exceptions(text: str) -> list[Raised]:
    """The exceptions that end a traceback in the text, in order (a chain's cause comes before what follows from it)."""
    found = []
    previous = 0
    for match in _EXCEPTION.finditer(text):
        part = text[previous : match.start()]
        previous = match.end()
        if "Traceback (most recent call last)" not in part and not _FRAME.search(part):
            continue
        if match.group(1).endswith("Warning"):
            continue
        frames = _FRAME.findall(part)
        message = (match.group(2) or "").strip()
        rest = text[match.end() : match.end() + 2000].split("\n\n", 1)[0]
        if not message or message.endswith(":"):
            message = f"{message} {rest.strip()}".strip()
        file, line = (frames[-1][0], int(frames[-1][1])) if frames else (None, None)
        found.append(Raised(match.group(1), message, file, line))
    return found


# --- out of memory -------------------------------------------------------------------------------------------------


def size_bytes(text: str | None) -> int | None:
    """Bytes of a size as torch prints it ("31.88 MiB"); None for none."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]+)\s*", text or "")
    if not match or match.group(2).lower() not in _UNITS:
        return None
    try:
        return round(float(match.group(1)) * _UNITS[match.group(2).lower()])
    except ValueError:
        return None


@dataclass(frozen=True)
class OutOfMemory:
    """The numbers of one CUDA out-of-memory message, in bytes (None: not in the message), and what they say.

    `kind`: other-processes, fragmentation, shortage, or fraction (a limit of the process was reached).
    """

    tried: int | None
    total: int | None
    free: int | None
    process_used: int | None
    allocated: int | None
    reserved: int | None
    reserved_unallocated: int | None
    private_pools: int | None
    others: tuple[tuple[str, int], ...]
    gpu: str | None
    kind: str
    missing: int | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {
            "tried_bytes": self.tried,
            "gpu": self.gpu,
            "total_bytes": self.total,
            "free_bytes": self.free,
            "process_used_bytes": self.process_used,
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "reserved_unallocated_bytes": self.reserved_unallocated,
            "private_pools_bytes": self.private_pools,
            "other_processes": [{"process": name, "used_bytes": used} for name, used in self.others],
            "kind": self.kind,
            "missing_bytes": self.missing,
        }


_SIZE = r"([\d.]+ ?(?:bytes|[KMGT]iB))"


def read_oom(text: str) -> OutOfMemory | None:
    """The arithmetic of the first CUDA (or HIP, XPU, NPU) out-of-memory message in a text; None when there is none.

    Fragmentation means that what is reserved but not allocated would hold the request: a *small* difference between
    reserved and allocated means there is none (the reverse is often told). Source: PyTorch, CUDA memory management;
    c10/cuda/CUDACachingAllocator.cpp, message of 1.x and 2.x.
    """
    flat = re.sub(r"\s+", " ", text)
    begin = re.search(rf"out of memory\.? Tried to allocate {_SIZE}", flat, re.I)
    if begin is None:
        return None
    part = flat[begin.start() : begin.start() + 2500]
    following = re.search(r"out of memory\.? Tried to allocate", part[30:], re.I)
    if following:
        part = part[: 30 + following.start()]

    def number(*patterns: str) -> int | None:
        for pattern in patterns:
            match = re.search(pattern, part)
            if match:
                return size_bytes(match.group(1))
        return None

    tried = size_bytes(begin.group(1))
    total = number(rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity")
    free = number(rf"of which {_SIZE} is free", rf"{_SIZE} free")
    allocated = number(rf"Of the allocated memory {_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated")
    unallocated = number(rf"{_SIZE} is reserved by PyTorch but unallocated")
    reserved = number(rf"{_SIZE} reserved in total by PyTorch", rf"{_SIZE} cached")
    process = number(rf"this process has {_SIZE} memory in use", rf"{_SIZE} (?:memory )?in use by this process")
    pools = number(rf"with {_SIZE} allocated in private pools")
    limit = number(rf"{_SIZE} allowed", rf"allowed memory {_SIZE}")
    gpu = re.search(r"GPU ?(\d+)|NPU (\d+)|XPU (\d+)", part)
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = allocated + unallocated
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    own = process if process is not None else reserved
    others = [
        (f"process {number_}", size)
        for number_, shown in re.findall(rf"Process (\d+) has {_SIZE} memory in use", part)
        if (size := size_bytes(shown)) is not None
    ]
    held = None if total is None or free is None or own is None else max(0, total - free - own)
    if process is None and len(others) == 1 and reserved is not None and others[0][1] >= reserved:
        # torch 2.1 named the process itself only by its number.
        own, held = others[0][1], None if total is None or free is None else max(0, total - free - others[0][1])
        others = []
    missing = None if tried is None or free is None else max(0, tried - free)
    kind = "shortage"
    if limit is not None or "per_process_memory_fraction" in part:
        kind = "fraction"
    elif _fragmented(tried, unallocated, free, total):
        kind = "fragmentation"
    elif tried is not None and held is not None and total is not None and _others_matter(held, total, own, tried, free):
        kind = "other-processes"
    unnamed = (held or 0) - sum(size for _, size in others)
    named = (*others, *((("processes that the message does not name", unnamed),) if unnamed > 2**28 else ()))
    return OutOfMemory(
        tried,
        total,
        free,
        own,
        allocated,
        reserved,
        unallocated,
        pools,
        named,
        next((g for g in gpu.groups() if g), None) if gpu else None,
        kind,
        missing,
    )


def _fragmented(tried: int | None, unallocated: int | None, free: int | None, total: int | None) -> bool:
    """The unused reserve would hold the request, and is more than 5 % of the GPU: less would only put the end off."""
    if tried is None or unallocated is None or unallocated < tried:
        return False
    return (free is None or free < tried) and (total is None or unallocated >= total // 20)


def _others_matter(held: int, total: int, own: int | None, tried: int, free: int | None) -> bool:
    """Others hold enough that the request would have fitted without them, and more than a context's worth."""
    context = 3 << 28  # a CUDA context and the display: up to about 0.75 GiB is nobody's fault
    return held > max(context, total // 20) and (free or 0) + held >= tried


def oom_finding(oom: OutOfMemory, savings: Sequence[str] = ()) -> Finding:
    """The finding for an out-of-memory message: which kind it is, by the numbers, and what frees how much."""
    numbers = "; ".join(
        said
        for value, said in (
            (oom.tried, f"asked for {gib(oom.tried)}"),
            (oom.free, f"free {gib(oom.free)}"),
            (oom.total, f"total {gib(oom.total)}"),
            (oom.allocated, f"allocated by torch {gib(oom.allocated)}"),
            (oom.reserved_unallocated, f"reserved but not allocated {gib(oom.reserved_unallocated)}"),
            (oom.process_used, f"in use by this process {gib(oom.process_used)}"),
        )
        if value is not None
    )
    fixes: list[str] = []
    expandable = (
        "set `PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9 `PYTORCH_CUDA_ALLOC_CONF`; not on "
        "Windows): "
        f"it can give back up to {gib(oom.reserved_unallocated)}"
    )
    smaller = gib(_half(oom.tried))
    half = f"halve the micro-batch and double gradient accumulation: the allocation that failed becomes {smaller}"
    if oom.kind == "other-processes":
        held = sum(size for _, size in oom.others)
        who = ", ".join(f"{name} {gib(size)}" for name, size in oom.others)
        why = f"Others hold {gib(held)} of this GPU ({who}): without them the request would have fitted."
        fixes.append(f"end the other processes (see `nvidia-smi`): frees {gib(held)}")
        fixes += list(savings) or [half]
    elif oom.kind == "fragmentation":
        why = (
            f"torch holds {gib(oom.reserved_unallocated)} that it reserved and does not use, more than the "
            f"{gib(oom.tried)} asked for: the free memory is in pieces (fragmentation), not used up."
        )
        fixes += [expandable, *(list(savings) or [half])]
    elif oom.kind == "fraction":
        why = "A limit for this process was reached (set_per_process_memory_fraction), not the end of the GPU's memory."
        fixes += ["raise or remove `torch.cuda.set_per_process_memory_fraction`", half]
    else:
        spare = oom.reserved_unallocated
        if spare is None:
            told = ""
        elif oom.tried is not None and spare >= oom.tried:
            told = f" The {gib(spare)} reserved but unused would hold this one request; that is too little to last."
        else:
            told = f" Only {gib(spare)} are reserved but unused, so this is not fragmentation."
        lack = f" {gib(oom.missing)} more would have served this one request." if oom.missing else ""
        why = f"The job needs more memory than there is.{told}{lack}"
        fixes += list(savings) or [
            half + "; shorter sequences act alike on activations and logits",
            "turn on `gradient_checkpointing`: keeps one activation per layer instead of all within it",
            "load the base in 4 bits (QLoRA): its weights take about a quarter of their bf16 size; "
            "`adamw_8bit` takes 2 bytes of optimizer state per trained parameter instead of 8",
        ]
    title = {
        "other-processes": "CUDA ran out of memory because other processes hold it",
        "fragmentation": "CUDA ran out of memory because the free memory is fragmented",
        "fraction": "The process reached its own limit of GPU memory",
        "shortage": "CUDA ran out of memory: the job is too big for what is there",
    }[oom.kind]
    return Finding(
        f"oom-{oom.kind}",
        Level.FAIL,
        f"{title} ({numbers}).",
        why,
        tuple(fixes[:3]),
        "facts/error_signatures.json, oom_torch2; PyTorch, CUDA memory management",
    )


def gib(count: int | None) -> str:
    """Bytes in GiB, below one in MiB, or "could not tell"."""
    if count is None:
        return "could not tell"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 or count == 0 else f"{count / 2**20:.0f} MiB"


def _half(value: int | None) -> int | None:
    return None if value is None else value // 2


# --- findings ------------------------------------------------------------------------------------------------------


def match_finding(match: Match, level: Level = Level.FAIL, where: str = "") -> Finding:
    """The finding for one known error."""
    row = match.signature.row
    shown = quote(re.sub(r"\s+", " ", match.text), 200)
    fixes = fixes_of(match)
    place = f" ({where})" if where else ""
    cause = fill(str(row["cause"]), match.fields)
    return Finding(
        match.code,
        level,
        f"{shown}{place}",
        cause,
        fixes[:3],
        f"facts/error_signatures.json, {row['id']}: {row['source']}",
    )


def fixes_of(match: Match) -> tuple[str, ...]:
    """The remedies of a known error, filled with what the message said; three at most."""
    fixes = [fill(str(fix), match.fields) for fix in match.signature.row["fix"]]
    known = facts.table("arch_support")["model_types"].get(match.fields.get("model_type", ""))
    if known and "removed" not in known and re.fullmatch(r"[\d.]+", str(known.get("first", ""))):
        fixes.insert(
            0, f"`pip install 'transformers>={known['first']}'`: the first release that knows this architecture"
        )
    return tuple(fixes[:3])


def fill(text: str, fields: Mapping[str, str]) -> str:
    """The text with {field} replaced by what the message said."""
    return re.sub(r"\{(\w+)\}", lambda m: quote(fields.get(m.group(1), m.group(0)), 120), text)


def explained(text: str, savings: Sequence[str] = ()) -> tuple[dict[str, Any], list[Finding]]:
    """What a log says: observed facts, and findings with the likely cause first."""
    text = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    found = matches(text)
    raised = exceptions(text)
    oom = read_oom(text)
    observed: dict[str, Any] = {
        "lines": text.count("\n") + (1 if text and not text.endswith("\n") else 0),
        "exceptions": [
            {"type": one.type, "message": quote(one.message, 500), "file": one.file, "line": one.line}
            for one in raised[:20]
        ],
        "matches": [
            {"signature": one.signature.id, "code": one.code, "line": one.line, "fields": dict(one.fields)}
            for one in found
        ],
        "out_of_memory": oom.as_json() if oom else None,
    }
    findings: list[Finding] = []
    for number, match in enumerate(found):
        if match.signature.id.startswith(("oom_torch", "oom_rocm", "oom_xpu", "oom_npu")) and oom is not None:
            finding = oom_finding(oom, savings)
        else:
            finding = match_finding(match, _level_of(match), f"line {match.line}")
        if number and finding.level is Level.FAIL:
            # What comes after the cause usually follows from it: worth saying, not worth a second alarm.
            finding = Finding(
                finding.code,
                Level.WARN,
                f"Also seen, probably a consequence: {finding.what}",
                finding.why,
                finding.fix,
                finding.source,
            )
        findings.append(finding)
    if not found:
        findings.append(_unknown(raised, text))
    return observed, findings


def _level_of(match: Match) -> Level:
    severity = match.signature.row.get("severity")
    return Level.OK if severity == "info" else Level.WARN if severity == "warning" else Level.FAIL


def _unknown(raised: Sequence[Raised], text: str) -> Finding:
    if raised:
        first = raised[-1] if len(raised) == 1 else raised[0]
        return Finding(
            "unknown-error",
            Level.UNKNOWN,
            f"Could not tell what {first.type} means here: {quote(first.message, 240)}",
            f"None of the {len(signatures())} known errors matches. The first exception of a chain is usually the cause"
            + (f"; it was raised in {quote(first.file, 120)} line {first.line}." if first.file else "."),
            ("run `python env_sandbox.py --requirements FILE --mode full` to see whether the stack loads at all",),
            "facts/error_signatures.json",
        )
    shown = "is empty" if not text.strip() else "holds no traceback and no known error"
    return Finding(
        "no-error-found",
        Level.UNKNOWN,
        f"Could not tell: the text {shown}.",
        "A cause can only be named from the whole message, with the lines above it.",
        ("pass the whole log, from the first line that says Traceback or Error",),
        "facts/error_signatures.json",
    )


def read_log(path: str) -> str:
    """The log's text ("-": standard input). Long logs keep their last 64 MiB. Raises UsageError when unreadable."""
    from preflight.processes import decode

    if path == "-":
        data = sys.stdin.buffer.read(_LIMIT_BYTES)
        return decode(data)
    try:
        if Path(path).is_dir():
            raise UsageError(f"{path}: is a folder; name a log file, or - for standard input")
        with open(path, "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _LIMIT_BYTES))
            return decode(stream.read())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m preflight explain LOGFILE`: explain a traceback or log. Returns the exit code."""
    from preflight.console import parser, run_stage

    made = parser(__doc__, "python -m preflight explain train.log")
    made.prog = "python -m preflight explain"
    made.add_argument(
        "log", nargs="?", default="-", metavar="LOGFILE", help="a log or traceback (default: standard input)"
    )
    made.add_argument("--model", metavar="DIR", help="the model's folder: says what each setting frees for this model")
    made.add_argument("--config", metavar="FILE", help="training_config.yaml of the run (with --model)")
    args = made.parse_args(argv)
    args.no_report = args.no_report or args.report is None  # explaining a pasted log belongs to no report unless asked

    def look_and_judge(machine: Any, given: argparse.Namespace) -> Section:
        observed, findings = explained(read_log(given.log), _savings(given))
        return Section("explain", observed, tuple(findings))

    return run_stage("explain", args, look_and_judge)


def _savings(args: argparse.Namespace) -> list[str]:
    """What each change of the run's plan frees for this model, largest first; none without --model.

    Raises UsageError when the model's config.json or the plan cannot be read.
    """
    if not args.model:
        if args.config:
            raise UsageError("--config is of use only together with --model DIR")
        return []
    from preflight.plan import Plan, read_plan

    path = Path(args.model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--model {args.model}: config.json cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UsageError(f"--model {args.model}: config.json is not JSON ({error})") from error
    return savings(config, read_plan(args.config) if args.config else Plan())


def savings(config: Mapping[str, Any], plan: Plan) -> list[str]:
    """What each open change of a plan frees, by the closed form, largest first; changes under 1 % left out."""
    from preflight.memory.closed_form import NoEstimate, estimate
    from preflight.memory.would_fit import changes
    from preflight.model_shape import ConfigTrouble, read_shape

    try:
        shape = read_shape(config)
        before = estimate(shape, plan).reserved_bytes
    except (ConfigTrouble, NoEstimate):
        return []
    found: list[tuple[int, str]] = []
    for change in changes(plan):
        try:
            freed = before - estimate(shape, change.apply(plan)).reserved_bytes
        except NoEstimate:
            continue
        if freed > before // 100:
            found.append(
                (freed, f"{change.name}: frees about {gib(freed)} of an estimated {gib(before)} ({change.cost})")
            )
    return [text for _, text in sorted(found, reverse=True)]
