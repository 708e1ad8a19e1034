"""Judges which torch build fits the accelerators here, and what they can do for fine-tuning, vendor by vendor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from preflight import wheels
from preflight.console import gib
from preflight.facts import table
from preflight.findings import Finding, Level, quote
from preflight.gpus import Gpu
from preflight.hardware.capability import SOURCE as CAPABILITY_SOURCE
from preflight.hardware.capability import capability_of
from preflight.hardware.gpu_checks import Seen, again
from preflight.hardware.looking import old_jetson


def check_number_formats(seen: Seen) -> list[Finding]:
    """Native bf16, quantisation and attention on the NVIDIA cards that are here."""
    able = {gpu.name: capability_of(gpu.compute_capability) for gpu in seen.nvidia}
    known = [(name, one) for name, one in able.items() if one is not None]
    modern = [f"{quote(n)} ({c.family}, {c.compute_capability})" for n, c in known if c.bf16_native]
    old = [(n, c) for n, c in known if not c.bf16_native]
    found = []
    if modern:
        fp8 = [quote(n) for n, c in known if c.fp8_native]
        found.append(
            Finding(
                "number-formats",
                Level.OK,
                f"Native bf16, fused attention and 4-bit and 8-bit quantisation on {', '.join(modern)}.",
                f"fp8 too on {', '.join(fp8)}." if fp8 else "",
                (),
                CAPABILITY_SOURCE,
            )
        )
    if old:
        lacks = ["bf16", "FlashAttention"]
        lacks += ["LLM.int8"] if any(not c.llm_int8 for _, c in old) else []
        lacks += ["bitsandbytes (NF4 and 8-bit optimizers need 6.0)"] if any(not c.nf4 for _, c in old) else []
        slow = [quote(n) for n, c in old if not c.fp16_fast]
        cards = ", ".join(f"{quote(n)} ({c.family}, {c.compute_capability})" for n, c in old)
        found.append(
            Finding(
                "no-native-bf16",
                Level.WARN,
                f"No native {', no '.join(lacks)} on {cards}.",
                "bf16 runs emulated and slowly there, although torch.cuda.is_bf16_supported() says True. Models "
                "with grouped-query "
                "attention fall back to the math attention, whose memory grows with the square of the sequence."
                + (f" fp16 is slow too on {', '.join(slow)}." if slow else ""),
                (
                    "train in fp16 with a gradient scaler (fp16=True)"
                    + (", or in fp32 where fp16 is slow" if slow else ""),
                    "keep sequences short, and leave attn_implementation at sdpa",
                ),
                CAPABILITY_SOURCE,
            )
        )
    return found


# --- which torch


def check_driver_version(seen: Seen) -> list[Finding]:
    """Which CUDA majors this driver runs, and the newest torch build that fits the whole machine."""
    driver = seen.accelerators.driver.version
    cards = seen.nvidia
    if not cards or seen.choice is None or seen.target is None:
        return []
    choice, target = seen.choice, seen.target
    unknown = [quote(gpu.name) for gpu in cards if not gpu.compute_capability]
    if choice.version is None:
        code = (
            "driver-card-mismatch"
            if any("driver branch" in reason for reason in choice.decided_by)
            else "no-torch-build"
        )
        if driver and not wheels.cuda_majors(driver, target.system):
            code = "driver-too-old"
        return [
            Finding(
                code,
                Level.FAIL,
                f"No published torch build runs here: {'; '.join(_reason(r) for r in choice.decided_by[:2])}.",
                f"Driver {driver or 'unknown'}, compute capability {', '.join(target.capabilities) or 'unknown'}, "
                f"Python {target.python or 'unknown'}, {target.system} {target.machine}, glibc "
                f"{target.glibc or 'unknown'}.",
                again(*choice.change[:2]) if choice.change else again("use another machine or a container"),
                wheels.SOURCE,
            )
        ]
    majors = wheels.cuda_majors(driver, target.system) if driver else ()
    runs = (
        f"Driver {driver} runs builds for CUDA {' and '.join(map(str, majors))}"
        if driver
        else "The driver's version is not known"
    )
    cuda = seen.accelerators.driver.cuda or (wheels.native_cuda(driver) if driver else None)
    known = f" (it knows CUDA {cuda} by itself)" if cuda else ""
    guess = f" The compute capability of {', '.join(unknown)} could not be told." if unknown else ""
    why = [
        "nvcc, LD_LIBRARY_PATH and the toolkit's version do not have to match: the wheel brings its own CUDA libraries."
    ]
    why += [_reason(reason) + "." for reason in choice.decided_by]
    return [
        Finding(
            "torch-build",
            Level.OK,
            f"{runs}{known}; the newest torch that fits this machine: `{choice.command()}`.{guess}",
            " ".join(why),
            (),
            wheels.SOURCE,
        )
    ]


def _reason(text: str) -> str:
    return text.partition(": ")[2] or text


def check_ascend(seen: Seen) -> list[Finding]:
    """Ascend NPUs: health, memory, CANN and torch_npu."""
    chips = seen.accelerators.vendor("ascend")
    if not chips:
        return []
    found = []
    bad = [chip for chip in chips if chip.health and chip.health.upper() not in ("OK", "NA", "N/A")]
    full = [
        chip
        for chip in chips
        if chip.free_bytes is not None and chip.total_bytes and chip.free_bytes < 0.15 * chip.total_bytes
    ]
    full_said = "; ".join(f"{_chip(chip)} has {gib(chip.free_bytes)} free" for chip in full)
    if bad:
        found.append(
            Finding(
                "npu-alarm",
                Level.WARN,
                f"{', '.join(_chip(chip) for chip in bad)}: health is "
                f"{', '.join(dict.fromkeys(quote(c.health) for c in bad))}.",
                "The device reports a fault; training on it may stop or compute wrong."
                + (f" {full_said}." if full_said else ""),
                (
                    f"see the alarm: `npu-smi info -t health -i {bad[0].parent} -c {bad[0].chip}`, and leave "
                    f"these devices out with "
                    "ASCEND_RT_VISIBLE_DEVICES until it is cleared",
                    "use torch_npu with the CANN release that it pairs with",
                ),
                "npu-smi info",
            )
        )
    elif full:
        found.append(
            Finding("memory-in-use", Level.OK, f"{full_said}.", "Another program holds the rest.", (), "npu-smi info")
        )
    inference = [chip for chip in chips if re.search(r"\b310", chip.name or "")]
    if inference:
        found.append(
            Finding(
                "npu-for-inference",
                Level.WARN,
                f"{quote(inference[0].name)} is made for inference.",
                "The Ascend 310 family has no bf16 and lacks kernels that training needs; torch_npu documents training "
                "for the 910 family.",
                ("train on an Atlas with 910 chips, and use this one to run the finished model",),
                "Ascend PyTorch documentation, supported products",
            )
        )
    found.append(_torch_npu(seen, chips))
    return found


def _chip(chip: Gpu) -> str:
    physical = f", phy-id {chip.physical_id}" if chip.physical_id is not None else ""
    return f"NPU {chip.parent} chip {chip.chip}{physical}"


def _torch_npu(seen: Seen, chips: Iterable[Gpu]) -> Finding:
    pairs: dict[str, list[str]] = table("ascend_pairs")["cann"]
    source = "facts/ascend_pairs.json"
    torch_version, npu_version = seen.torch.version, seen.torch.npu_version
    if torch_version and npu_version:
        plain = re.sub(r"[+.]?(?:post|dev|rc).*|\+.*", "", npu_version)
        if plain != torch_version.split("+")[0]:
            return Finding(
                "torch-npu-mismatch",
                Level.FAIL,
                f"torch_npu {quote(npu_version)} does not pair with torch {quote(torch_version)}.",
                "torch_npu X.Y.Z works with torch X.Y.Z exactly.",
                (f"`python -m pip install torch=={plain}` (the CPU build: torch_npu adds the NPU)",),
                source,
            )
        if seen.torch.npu_available is False:
            return Finding(
                "npu-not-available",
                Level.FAIL,
                f"torch_npu {quote(npu_version)} imports but torch.npu.is_available() is False.",
                "CANN's environment is not set, or driver and CANN do not fit.",
                (
                    "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` (CANN 8.5 and newer: "
                    "/usr/local/Ascend/cann/set_env.sh)",
                ),
                source,
            )
        return Finding(
            "torch-npu", Level.OK, f"torch {quote(torch_version)} with torch_npu {quote(npu_version)}.", "", (), source
        )
    fits = pairs.get(".".join((seen.cann or "").split(".")[:2]), [])
    which = (
        f"CANN {quote(seen.cann)} pairs with torch_npu {', '.join(fits)}"
        if fits
        else (f"CANN {quote(seen.cann)} is not in the table of pairs" if seen.cann else "no CANN toolkit was seen")
    )
    return Finding(
        "torch-npu-pairing",
        Level.OK,
        f"Ascend needs torch_npu beside torch in the same version; {which}.",
        "CUDA builds, flash-attn and bitsandbytes' CUDA kernels do not run here; FlashAttention comes through "
        "torch_npu."
        + (
            " acl.json is an optional settings file and says nothing about the NPU."
            if seen.acl_json is not None
            else ""
        ),
        (),
        source,
    )


def check_amd(seen: Seen) -> list[Finding]:
    """AMD: which device to use, and whether a ROCm wheel was built for it."""
    cards = seen.accelerators.vendor("amd")
    if not cards:
        return []
    found = []
    ignored = [gpu for gpu in cards if gpu.role == "integrated, ignore"]
    training = [gpu for gpu in cards if gpu.role == "training"]
    if ignored:
        visible = ",".join(str(gpu.index) for gpu in training)
        found.append(
            Finding(
                "amd-igpu-ignored",
                Level.OK,
                f"{', '.join(quote(gpu.name) for gpu in ignored)} "
                f"({', '.join(quote(gpu.gfx or 'gfx unknown') for gpu in ignored)}, "
                f"{gib(ignored[0].total_bytes)}) is the processor's own GPU and is left out.",
                f"Hide it with HIP_VISIBLE_DEVICES={visible}: torch may otherwise hang on it or pick it as its device.",
                (),
                "AMD ROCm documentation, GPU isolation",
            )
        )
    facts = table("rocm_architectures")
    newest = list(facts["variants"])[-1]
    for gpu in training:
        if gpu.integrated:
            found.append(_apu(seen, gpu, gpu.gfx in facts["variants"][newest]))
            continue
        if gpu.gfx and gpu.gfx not in facts["variants"][newest]:
            override = facts["override"].get(gpu.gfx)
            older = [name for name, built in facts["variants"].items() if gpu.gfx in built]
            found.append(
                Finding(
                    "rocm-arch-missing",
                    Level.WARN,
                    f"No torch ROCm wheel was built for {quote(gpu.gfx)} ({quote(gpu.name)})"
                    + (f" after {older[-1]}." if older else "."),
                    "Its first kernel fails with 'invalid device function' unless it poses as a neighbour of the "
                    "same family.",
                    (
                        f"try `export HSA_OVERRIDE_GFX_VERSION={override}` (AMD does not support it; run the "
                        f"stress test afterwards)"
                        if override
                        else "build PyTorch for it, or train on another device",
                    ),
                    "facts/rocm_architectures.json",
                )
            )
    errors = [gpu for gpu in cards if gpu.ecc_uncorrected_volatile]
    for gpu in errors:
        found.append(
            Finding(
                "ecc-uncorrected",
                Level.FAIL,
                f"{quote(gpu.name)} reports {gpu.ecc_uncorrected_volatile} uncorrectable memory errors.",
                "Results computed on it cannot be trusted.",
                again("reboot, then look again: `amd-smi metric --ecc`"),
                "amd-smi",
            )
        )
    if seen.choice and seen.choice.version and seen.target and seen.target.accelerator == "rocm":
        found.append(
            Finding(
                "torch-build",
                Level.OK,
                f"The newest torch with ROCm that fits this machine: `{seen.choice.command()}`.",
                "The wheel brings its own ROCm libraries; the kernel driver and access to /dev/kfd come from the "
                "system.",
                (),
                wheels.SOURCE,
            )
        )
    return found


def _apu(seen: Seen, gpu: Gpu, built: bool) -> Finding:
    """A processor's own GPU that is the only one: it can train where ROCm wheels hold kernels for it."""
    ram = gib(seen.host.ram_available_bytes)
    if not built:
        return Finding(
            "integrated-only",
            Level.WARN,
            f"The only GPU is the processor's own ({quote(gpu.name)}, {quote(gpu.gfx or 'gfx unknown')}), for "
            f"which no ROCm wheel was built.",
            "It has few units and shares the system's memory; posing as another one (HSA_OVERRIDE_GFX_VERSION) "
            "often hangs.",
            ("train a small model on the CPU, or on another machine",),
            "facts/rocm_architectures.json",
        )
    return Finding(
        "unified-memory-apu",
        Level.OK,
        f"{quote(gpu.name)} ({quote(gpu.gfx)}) is the processor's own GPU: {gib(gpu.total_bytes)} is set aside "
        f"for it, more comes from the "
        f"system's memory ({ram} available).",
        "The amdgpu driver lends it up to about half of the RAM (GTT; amdgpu.gttsize and ttm.pages_limit raise "
        "that). What torch reports as "
        "free counts, not the part that was set aside.",
        (),
        "AMD ROCm documentation, APU memory",
    )


def check_intel_and_apple(seen: Seen) -> list[Finding]:
    """Intel XPUs and Apple chips: which torch build uses them."""
    found = []
    vendors = {gpu.vendor for gpu in seen.usable}
    for vendor, accelerator, note in (
        ("intel", "xpu", "bitsandbytes and many kernels support XPU only in part; there is no CUDA here."),
        (
            "apple",
            "mps",
            "MPS shares the memory with macOS and lets one program use about three quarters of it; bitsandbytes' "
            "8-bit optimizers do "
            "not run there.",
        ),
    ):
        if vendor in vendors and seen.choice and seen.target and seen.target.accelerator == accelerator:
            command = seen.choice.command()
            found.append(
                Finding(
                    "torch-build" if command else "no-torch-build",
                    Level.OK if command else Level.FAIL,
                    f"The newest torch for {accelerator.upper()} that fits this machine: `{command}`."
                    if command
                    else f"No published torch build for {accelerator.upper()} runs here: "
                    f"{'; '.join(seen.choice.decided_by)}.",
                    note,
                    () if command else again(*(seen.choice.change or ("use another machine",))),
                    wheels.SOURCE,
                )
            )
    return found


def check_jetson(seen: Seen) -> list[Finding]:
    """Jetson boards need NVIDIA's own torch builds."""
    l4t = dict(seen.accelerators.asked).get("tegra")
    if not old_jetson(l4t):
        return []
    return [
        Finding(
            "jetson",
            Level.WARN,
            f"This is a Jetson ({quote(l4t)}): PyPI's aarch64 CUDA wheels are for servers and do not drive it.",
            "Before JetPack 7 its GPU driver is part of the L4T system, and torch must be built for that "
            "JetPack; bitsandbytes needs a "
            "source build.",
            (
                "take NVIDIA's torch wheel or container for this JetPack "
                "(docs.nvidia.com/deeplearning/frameworks/install-pytorch-jetson-platform)",
            ),
            "facts/FACTS.md sections 4 and 6",
        )
    ]


def choice_json(seen: Seen) -> dict[str, Any] | None:
    """The torch build that fits, for the report."""
    choice, target = seen.choice, seen.target
    if choice is None or target is None:
        return None
    return {
        "accelerator": target.accelerator,
        "release": choice.version,
        "variant": choice.variant,
        "command": choice.command(),
        "decided_by": list(choice.decided_by),
        "change": list(choice.change),
    }
