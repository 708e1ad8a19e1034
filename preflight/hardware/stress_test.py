"""The stress test: does the device hold under load, compute right, and reach the speed it should?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from preflight.console import gib
from preflight.facts import table
from preflight.findings import Finding, Level, quote, say
from preflight.gpus import Gpu
from preflight.hardware.torch_state import crash_detail, how_it_ended
from preflight.machine import CHILDREN, Answer, Interpreter, Machine

SOURCE = "preflight/children/stress.py, run on this device"
TELEMETRY_HERTZ = 8.0
CURVE_POINTS = 120
# In the order in which they are shown.
READINGS = ("utilization_pct", "memory_used_bytes", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")


@dataclass(frozen=True)
class StressResult:
    """What one run measured. None where it did not get that far.

    `tflops` counts two operations per multiply-add, over the time the products themselves took. `copy_gb_per_s` counts
    each byte once read and once written, in 10^9 bytes. `sag_pct` is the loss of speed from the first to the last
    quarter of the run. `curve` holds the course of the readings (see `curve`). `ended` is complete, interrupted
    (Ctrl-C), terminated (SIGTERM), or how the child ended.
    """

    device: str
    ended: str = "complete"
    seconds: float = 0.0
    dtype: str | None = None
    size: int | None = None
    products: int = 0
    tflops: float | None = None
    tflops_theoretical: float | None = None
    copy_gb_per_s: float | None = None
    copy_bytes: int | None = None
    copy_gb_per_s_theoretical: float | None = None
    longest_kernel_s: float | None = None
    sag_pct: float | None = None
    stalls: tuple[float, ...] = ()
    wrong_results: int = 0
    wrong_where: tuple[str, ...] = ()
    held_bytes: int | None = None
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[str, list[float | None]] = field(default_factory=dict)
    last_step: str = ""
    error: str = ""
    name: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The figures that the report keeps."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


def run(
    machine: Machine,
    interpreter: Interpreter,
    device: str,
    duration_s: float,
    *,
    gpu: Gpu | None = None,
    dtype: str | None = None,
    flip_a_bit: int | None = None,
) -> StressResult:
    """Run the test in a child that can be killed; Ctrl-C and SIGTERM end it and give what was measured so far."""
    bus = (gpu.pci_bus_id if gpu else None) or ""
    telemetry = [sys.executable, str(CHILDREN / "telemetry.py"), device, bus, str(TELEMETRY_HERTZ)]
    spec = {
        "device": device,
        "duration_s": duration_s,
        "dtype": dtype,
        "flip_a_bit": flip_a_bit,
        "telemetry": telemetry,
    }
    lines: list[Mapping[str, Any]] = []
    show = progress(duration_s, f"stress test on {device}")

    def on_line(line: Mapping[str, Any]) -> None:
        lines.append(line)
        show(line)

    limit_s = 2 * duration_s + 120
    if not machine.replayed:
        say(f"stress test on {device}: {duration_s:.0f} s of load (ended after {limit_s:.0f} s whatever happens)")
    try:
        answer = machine.ask(
            "stress", interpreter.path, [json.dumps(spec)], timeout_s=limit_s, on_line=on_line, kind="child stress"
        )
        how = how_it_ended(answer, limit_s)
    except KeyboardInterrupt:
        answer, how = Answer(), "interrupted"
    except SystemExit:  # what SIGTERM becomes, see console.py
        answer, how = Answer(), "terminated"
    finally:
        show({})
    return measured(lines or answer.lines_of_json(), device, how, answer.errors)


def progress(duration_s: float, title: str) -> Callable[[Mapping[str, Any]], None]:
    """A function that moves a bar with each line of the child; an empty line closes it. Nothing when no terminal."""
    if not sys.stderr.isatty():
        return lambda line: None
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda line: None
    import shutil

    form = "{desc}: {percentage:3.0f} %|{bar}| {n:.0f}/{total:.0f} s"
    # some terminals report no size, and tqdm would then draw nothing
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    bar = tqdm(total=duration_s, desc=title, unit="s", bar_format=form, ncols=width, nrows=24)

    def move(line: Mapping[str, Any]) -> None:
        if not line:
            bar.close()
        elif "at_s" in line:
            bar.n = min(duration_s, float(line["at_s"]))
            bar.refresh()

    return move


def measured(lines: Iterable[Mapping[str, Any]], device: str, how: str | None, errors: str = "") -> StressResult:
    """The result out of the child's lines; `how` says how it ended when it did not end by itself."""
    found = list(lines)
    steps = {str(line["step"]): line for line in found if "step" in line}
    batches = [line for line in found if "batch" in line]
    begun = [str(line["begin"]) for line in found if "begin" in line]
    prepare, copied, warm = steps.get("prepare", {}), steps.get("copy", {}), steps.get("warm-up", {})
    flop = warm.get("flop")
    work_s = sum(float(line["work_s"]) for line in batches)
    products = sum(int(line["count"]) for line in batches)
    wrong = {
        "matrix products": sum(int(line.get("wrong", 0)) for line in batches),
        "the first product (against exact values)": int(warm.get("wrong", 0)),
        "memory that was kept": int(steps.get("memory", {}).get("wrong", 0)),
        "the copy": 0 if copied.get("right", True) else 1,
    }
    complete = "end" in steps
    ended = "complete" if complete else (how or "stopped without a word")
    last = next((name for name in reversed(begun) if name not in steps), begun[-1] if begun else "start")
    last_line = errors.strip().splitlines()[-1] if errors.strip() else ""
    return StressResult(
        device=device,
        name=prepare.get("name"),
        ended=ended,
        seconds=float(batches[-1]["at_s"]) if batches else 0.0,
        dtype=prepare.get("dtype"),
        size=warm.get("size"),
        products=products,
        tflops=products * flop / work_s / 1e12 if flop and work_s > 0 else None,
        tflops_theoretical=theoretical_tflops(prepare),
        copy_gb_per_s=copied.get("gb_per_s"),
        copy_bytes=copied.get("bytes"),
        copy_gb_per_s_theoretical=theoretical_gb_per_s(prepare),
        longest_kernel_s=max((float(line["longest_s"]) for line in batches), default=None),
        sag_pct=sag(batches),
        stalls=tuple(round(s, 2) for line in batches if (s := float(line["gap_s"]) - float(line["work_s"])) > 2.0),
        wrong_results=sum(wrong.values()),
        wrong_where=tuple(name for name, count in wrong.items() if count),
        held_bytes=warm.get("held_bytes"),
        telemetry=telemetry_summary(found),
        curve=curve(found, flop),
        last_step="" if complete else last,
        error="" if complete else (crash_detail(errors) or last_line),
    )


def sag(batches: list[Mapping[str, Any]]) -> float | None:
    """Percent of speed lost from the first to the last quarter of the run; None under 8 batches."""
    if len(batches) < 8:
        return None
    quarter = len(batches) // 4

    def rate(part: list[Mapping[str, Any]]) -> float:
        # the median batch: one disturbed batch is no sag
        return median(int(line["count"]) / max(float(line["work_s"]), 1e-9) for line in part)

    first, last = rate(batches[:quarter]), rate(batches[-quarter:])
    return round(100.0 * (first - last) / first, 1)


def theoretical_tflops(facts: Mapping[str, Any]) -> float | None:
    """The card's dense peak from its multiprocessors and clock, for the format tested. None where a figure is missing.

    Source: facts/gpu_rates.json. Clock as the driver reports its boost clock (kHz).
    """
    rates = table("gpu_rates")
    kind = "fp32" if facts.get("dtype") == "float32" else "tensor_16bit_dense"
    per_clock = rates[kind].get(str(facts.get("capability")))
    processors, clock_khz = facts.get("multi_processor_count"), facts.get("clock_rate")
    if not (per_clock and processors and clock_khz):
        return None
    return round(float(processors) * float(per_clock) * float(clock_khz) * 1e3 / 1e12, 1)


def theoretical_gb_per_s(facts: Mapping[str, Any]) -> float | None:
    """Memory bandwidth from the memory clock (kHz) and the bus width (bits): 2 x clock x width / 8."""
    clock_khz, width = facts.get("memory_clock_rate"), facts.get("memory_bus_width")
    if not (clock_khz and width):
        return None
    return round(2 * float(clock_khz) * 1e3 * float(width) / 8 / 1e9, 1)


def telemetry_summary(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Lowest, median and highest of each reading, the throttle reasons seen, and how often samples came."""
    samples = [line["telemetry"] for line in lines if isinstance(line.get("telemetry"), dict)]
    source = next((line["telemetry_source"] for line in lines if "telemetry_source" in line), None)
    found: dict[str, Any] = {"source": source, "samples": len(samples)}
    if len(samples) > 1:
        span = float(samples[-1]["at_s"]) - float(samples[0]["at_s"])
        found["hertz"] = round((len(samples) - 1) / span, 1) if span > 0 else None
    for name in READINGS:
        values = [float(sample[name]) for sample in samples if name in sample]
        if values:
            found[name] = {"min": min(values), "median": median(values), "max": max(values)}
    reasons: dict[str, int] = {}
    for sample in samples:
        for reason in sample.get("throttle", ()):
            reasons[reason] = reasons.get(reason, 0) + 1
    found["throttle_share"] = {name: round(count / len(samples), 3) for name, count in sorted(reasons.items())}
    return found


def curve(lines: list[Mapping[str, Any]], flop: float | None) -> dict[str, list[float | None]]:
    """The course of the load in at most 120 stretches of equal length: `at_s` (their ends, from the load's start), the
    speed (`tflops`) and the mean of each reading. None where no sample fell into a stretch; empty under two batches.

    The two children's times are laid over each other by the clock that both wrote down; what was read before the load
    is left out.
    """
    batches = [line for line in lines if "batch" in line]
    duration_s = float(batches[-1]["at_s"]) if batches else 0.0
    if len(batches) < 2 or duration_s <= 0:
        return {}
    count = min(CURVE_POINTS, len(batches))
    width_s = duration_s / count

    def stretch(at_s: float) -> int:
        return min(count - 1, int(at_s / width_s))

    work_s, products = [0.0] * count, [0.0] * count
    for line in batches:
        # shared among the stretches in which it ran, so that a slow batch leaves no hole; a standstill does
        end_s, lasted_s = float(line["at_s"]), max(float(line["work_s"]), 1e-9)
        begin_s = max(0.0, end_s - lasted_s)
        for index in range(stretch(begin_s), stretch(end_s - 1e-9) + 1):
            inside_s = min(end_s, (index + 1) * width_s) - max(begin_s, index * width_s)
            work_s[index] += inside_s
            products[index] += int(line["count"]) * inside_s / lasted_s
    found: dict[str, list[float | None]] = {"at_s": [round((index + 1) * width_s, 2) for index in range(count)]}
    if flop:
        found["tflops"] = [
            _digits(n * flop / s / 1e12) if s > 0 else None for n, s in zip(products, work_s, strict=True)
        ]
    clocks = [float(line["clock_s"]) for line in lines if "clock_s" in line and "telemetry_source" not in line]
    theirs = [float(line["clock_s"]) for line in lines if "clock_s" in line and "telemetry_source" in line]
    later_s = theirs[0] - clocks[0] if clocks and theirs else 0.0
    samples = [line["telemetry"] for line in lines if isinstance(line.get("telemetry"), dict)]
    for name in READINGS:
        values: list[list[float]] = [[] for _ in range(count)]
        for sample in samples:
            at_s = float(sample["at_s"]) + later_s
            if name in sample and 0 <= at_s <= duration_s:
                values[stretch(at_s)].append(float(sample[name]))
        if any(values):
            found[name] = [_digits(sum(part) / len(part)) if part else None for part in values]
    return found


def _digits(value: float) -> float:
    """Four digits are enough for a curve, and keep the record small."""
    return float(f"{value:.4g}")


def check_stress(
    result: StressResult, tdr_delay_s: float | None = None, new_xids: tuple[int, ...] = ()
) -> list[Finding]:
    """Judge one run. `tdr_delay_s` is Windows' limit for one kernel, `new_xids` the Xids that appeared meanwhile."""
    found: list[Finding] = []
    on = f"{quote(result.name)} ({result.device})" if result.name else result.device
    if result.wrong_results:
        found.append(
            Finding(
                "stress-wrong-result",
                Level.FAIL,
                f"{on} computed wrong: {result.wrong_results} values differ, in {', '.join(result.wrong_where)}.",
                "The same product was computed again and again; its sums are whole numbers, exact in every "
                "format and order. A "
                "difference is a fault of the chip, its memory, its clocks or its power, and it ruins training "
                "silently.",
                (
                    "remove overclocking and undervolting, check the temperature, and run the test again",
                    "do not train on this device until it passes; if it fails at stock settings, replace it",
                ),
                SOURCE,
            )
        )
    if result.ended not in ("complete", "interrupted", "terminated"):
        found.append(_died(result, on))
    elif result.ended != "complete":
        found.append(
            Finding(
                "stress-interrupted",
                Level.UNKNOWN,
                f"The stress test of {on} was interrupted after {result.seconds:.0f} s; what it measured so far "
                f"is told.",
                "A shorter load shows less: heat and power faults often appear after a minute.",
                ("run it to its end: `python gpu_probe.py --stress-test`",),
                SOURCE,
            )
        )
    if new_xids:
        found.append(
            Finding(
                "stress-xid",
                Level.FAIL,
                f"While the test ran the kernel logged Xid {', '.join(map(str, new_xids))}.",
                "The driver reported a fault of the card or its link under load.",
                (
                    "see their meaning: `python gpu_probe.py`",
                    "check power, heat and the PCIe slot, then run the test again",
                ),
                "kernel log; facts/xid.json",
            )
        )
    if result.stalls:
        found.append(
            Finding(
                "stress-stalls",
                Level.WARN,
                f"{on} stood still {len(result.stalls)} times for over 2 s (longest {max(result.stalls):.1f} s).",
                "Between two batches nothing was computed: another program holds the device, the driver "
                "recovered from an "
                "error, or the machine was suspended.",
                ("end other programs that use the device, and run the test again",),
                SOURCE,
            )
        )
    found += _speed(result, on)
    if tdr_delay_s is not None and result.longest_kernel_s is not None and result.longest_kernel_s > 0.5 * tdr_delay_s:
        found.append(
            Finding(
                "tdr-risk",
                Level.WARN,
                f"The longest single kernel took {result.longest_kernel_s:.2f} s; Windows resets the driver "
                f"after {tdr_delay_s:g} s.",
                "TDR counts the time of one kernel, not the use of the card; a larger one would be cut off.",
                ("use smaller batches or shorter sequences, so that each kernel stays short",),
                "facts/FACTS.md section 1",
            )
        )
    if result.ended == "complete" and not result.wrong_results:
        found.append(
            Finding(
                "stress-passed",
                Level.OK,
                f"{on} held for {result.seconds:.0f} s: {_figures(result)}.",
                _beside(result),
                (),
                SOURCE,
            )
        )
    return found


def not_run(device: str | None, torch_works: bool) -> Finding:
    """The stress test was asked for and there is nothing to run it on."""
    if torch_works:
        what, fix = (
            "there is no accelerator that torch reaches",
            "run it on the CPU: `python gpu_probe.py --stress-test --device cpu`",
        )
    else:
        what, fix = (
            f"torch does not work in the interpreter under test{f' ({device})' if device else ''}",
            "make torch work first (see its finding)",
        )
    return Finding(
        "stress-not-run",
        Level.UNKNOWN,
        f"The stress test was not run: {what}.",
        "Whether the device holds under load is not known.",
        (fix,),
        SOURCE,
    )


def _figures(result: StressResult) -> str:
    parts = [f"{result.products} products of {result.size} x {result.size} in {result.dtype}, all right"]
    if result.tflops is not None:
        parts.append(f"{result.tflops:.2f} TFLOP/s" if result.tflops >= 0.1 else f"{result.tflops * 1000:.1f} GFLOP/s")
    if result.copy_gb_per_s is not None:
        parts.append(f"copy {result.copy_gb_per_s:.1f} GB/s ({gib(result.copy_bytes)})")
    if result.longest_kernel_s is not None:
        parts.append(f"longest kernel {result.longest_kernel_s * 1000:.1f} ms")
    if result.sag_pct is not None:
        parts.append(f"speed at the end {-result.sag_pct:+.1f} %")
    return "; ".join(parts)


def _beside(result: StressResult) -> str:
    parts = []
    if result.tflops_theoretical:
        parts.append(f"The card's own figure for that format is {result.tflops_theoretical:.0f} TFLOP/s")
    if result.copy_gb_per_s_theoretical:
        parts.append(f"its memory's is {result.copy_gb_per_s_theoretical:.0f} GB/s")
    heat = result.telemetry.get("temperature_c")
    power = result.telemetry.get("power_w")
    if heat:
        parts.append(f"at most {heat['max']:.0f} °C")
    if power:
        parts.append(f"at most {power['max']:.0f} W")
    return ("; ".join(parts) + ".") if parts else ""


def _died(result: StressResult, on: str) -> Finding:
    killed = "SIGKILL" in result.ended or "SIGTERM" in result.ended
    return Finding(
        "stress-died",
        Level.UNKNOWN if killed else Level.FAIL,
        f"The stress test of {on} did not end by itself: it {result.ended} in the step `{result.last_step}` after "
        f"{result.seconds:.0f} s of load." + (f" {quote(result.error, 200)}" if result.error else ""),
        "Somebody or the out-of-memory killer ended it: that says nothing of the device."
        if killed
        else "A process that dies or hangs under load points to the driver, the card, its power or its memory.",
        ("look for the reason: `sudo dmesg | tail -50`", "run it again: `python gpu_probe.py --stress-test`"),
        SOURCE,
    )


def _speed(result: StressResult, on: str) -> list[Finding]:
    found = []
    throttled = {
        n: s for n, s in result.telemetry.get("throttle_share", {}).items() if s > 0.05 and "clocks setting" not in n
    }
    if result.device.startswith("cpu"):
        return []
    if result.sag_pct is not None and result.sag_pct > 10:
        why = (
            f"Meanwhile it was held back by: {', '.join(throttled)}."
            if throttled
            else "No throttle reason was reported."
        )
        found.append(
            Finding(
                "stress-sag",
                Level.WARN,
                f"{on} lost {result.sag_pct:.0f} % of its speed from the first to the last quarter of the test.",
                f"{why} Long training will run at the lower speed.",
                ("clean fans, give the card air, or set a lower power limit so that it runs evenly",),
                SOURCE,
            )
        )
    slow = (
        result.copy_gb_per_s
        and result.copy_gb_per_s_theoretical
        and result.copy_gb_per_s < 0.5 * result.copy_gb_per_s_theoretical
    )
    weak = result.tflops and result.tflops_theoretical and result.tflops < 0.25 * result.tflops_theoretical
    if slow or weak:
        found.append(
            Finding(
                "stress-slow",
                Level.WARN,
                f"{on} is slower than its own figures: {result.tflops or 0:.1f} of "
                f"{result.tflops_theoretical or 0:.0f} TFLOP/s, "
                f"{result.copy_gb_per_s or 0:.0f} of {result.copy_gb_per_s_theoretical or 0:.0f} GB/s.",
                "Another program uses it, a power or clock limit is set, or it is too hot"
                + (f" (held back by: {', '.join(throttled)})." if throttled else "."),
                ("see what limits it: `nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`",),
                SOURCE,
            )
        )
    return found


# --- the minimal forward


DEFAULT_SHAPE = {"hidden": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "intermediate": 4864, "vocabulary": 151936}


def shape_of(model: str | None) -> tuple[dict[str, int], str]:
    """The numbers of the user's model for two layers, and where they come from. Raises UsageError for a bad model."""
    from preflight.console import UsageError

    if model is None:
        return dict(DEFAULT_SHAPE), "the shape of Qwen2.5-0.5B (name a model with --model)"
    from preflight.model_shape import ConfigTrouble, read_shape

    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        shape = read_shape(json.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise UsageError(f"--model {model}: config.json cannot be read ({error.strerror})") from error
    except (ConfigTrouble, ValueError, TypeError) as error:
        raise UsageError(f"--model {model}: config.json is not usable ({error})") from error
    numbers = {
        "hidden": shape.hidden_size,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.head_dim,
        "intermediate": shape.intermediate_size or (shape.moe.width if shape.moe else None),
        "vocabulary": shape.vocab_size,
    }
    missing = [name for name, value in numbers.items() if not value]
    if missing:
        raise UsageError(f"--model {model}: config.json does not give {', '.join(missing)}")
    return {
        name: int(value) for name, value in numbers.items() if value
    }, f"the shape of {path.parent.name or 'the model'}"


def minimal_forward(machine: Machine, interpreter: Interpreter, device: str, model: str | None) -> dict[str, Any]:
    """Latency and peak memory of 128 tokens through two layers; what is unknown is None."""
    shape, source = shape_of(model)
    spec = {"device": device, "tokens": 128, "layers": 2, "dtype": None, **shape}
    answer = machine.ask("minimal_forward", interpreter.path, [json.dumps(spec)], timeout_s=180.0)
    steps = {str(line["step"]): line for line in answer.lines_of_json() if "step" in line}
    ran = steps.get("forward", {})
    said = [line for line in answer.errors.strip().splitlines() if line.strip()]
    return {
        "device": device,
        "tokens": 128,
        "layers": 2,
        "shape": shape,
        "shape_from": source,
        "dtype": steps.get("import torch", {}).get("dtype"),
        "parameters": steps.get("build", {}).get("parameters"),
        "weight_bytes": steps.get("build", {}).get("weight_bytes"),
        "first_s": ran.get("first_s"),
        "median_s": ran.get("median_s"),
        "peak_bytes": ran.get("peak_bytes"),
        "peak_is": ran.get("peak_is"),
        "finite": ran.get("finite"),
        "trouble": None
        if ran
        else (how_it_ended(answer, 180.0) or "no result") + (f": {quote(said[-1])}" if said else ""),
    }


def check_forward(ran: Mapping[str, Any]) -> Finding:
    """Judge the minimal forward."""
    source = "preflight/children/minimal_forward.py, run on this device"
    if ran["median_s"] is None:
        return Finding(
            "forward-failed",
            Level.FAIL,
            f"128 tokens through two layers do not run on {ran['device']}: {quote(ran['trouble'], 200)}",
            f"Two layers of {quote(ran['shape_from'])} with random weights need little; a whole model will not "
            f"run either.",
            ("run `python gpu_probe.py` for the state of torch and the device",),
            source,
        )
    if ran["finite"] is False:
        return Finding(
            "forward-not-finite",
            Level.FAIL,
            f"128 tokens through two layers on {ran['device']} in {ran['dtype']} give values that are not finite.",
            "The weights are small random numbers: overflow here means that the device computes wrong in this format.",
            ("run `python gpu_probe.py --stress-test`",),
            source,
        )
    return Finding(
        "forward-ran",
        Level.OK,
        f"128 tokens through two layers on {ran['device']} in {ran['dtype']}: {ran['median_s'] * 1000:.1f} ms, "
        f"peak {gib(ran['peak_bytes'])}.",
        f"Random weights in {quote(ran['shape_from'])}, {ran['parameters'] / 1e6:.1f} million parameters; the "
        f"peak is "
        f"{ran['peak_is']}. The first pass took {ran['first_s'] * 1000:.0f} ms.",
        (),
        source,
    )
