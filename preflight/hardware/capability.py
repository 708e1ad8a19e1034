"""What a GPU can do for fine-tuning, from its compute capability: number formats, attention, quantisation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from preflight.facts import table

if TYPE_CHECKING:
    from preflight.gpus import Gpu

SOURCE = "facts/FACTS.md sections 5 and 6 (PyTorch sdp_utils.cpp, flash-attention and bitsandbytes documentation)"


@dataclass(frozen=True)
class Capability:
    """What hardware of one compute capability does natively; None where the facts do not say.

    `sdpa` lists the fused attention backends that PyTorch can choose on it, best first; "math" is always there.
    """

    compute_capability: str
    family: str
    bf16_native: bool
    fp16_fast: bool
    fp8_native: bool
    flash_attention_2: bool
    flash_attention_3: bool
    sdpa: tuple[str, ...]
    fused_attention_with_gqa: bool
    nf4: bool
    int8_optimizers: bool
    llm_int8: bool


def parsed(compute_capability: str | None) -> tuple[int, int] | None:
    """ "8.6" as (8, 6); None for anything else."""
    found = re.fullmatch(r"\s*(\d{1,2})\.(\d)\s*", compute_capability or "")
    return (int(found.group(1)), int(found.group(2))) if found else None


def family_of(cc: tuple[int, int]) -> str:
    """The architecture's name as torch_wheels.json lists it."""
    wanted = f"{cc[0]}.{cc[1]}"
    for name, capabilities in table("torch_wheels")["families"].items():
        if any(str(item).split()[0] == wanted for item in capabilities):
            return str(name)
    return {2: "Fermi", 3: "Kepler", 12: "Blackwell"}.get(cc[0], "unlisted family")


def capability_of(compute_capability: str | None) -> Capability | None:
    """What a card of this compute capability can do; None when it is not known."""
    cc = parsed(compute_capability)
    if cc is None:
        return None
    flash = cc >= (8, 0)
    sdpa = [
        *(["cudnn"] if cc[0] in (9, 10) else []),
        *(["flash"] if flash else []),
        *(["efficient"] if cc >= (5, 0) else []),
        "math",
    ]
    return Capability(
        compute_capability=f"{cc[0]}.{cc[1]}",
        family=family_of(cc),
        bf16_native=cc >= (8, 0),
        # Pascal's GeForce cards run fp16 at 1/64 of the fp32 rate; tensor cores begin with Volta.
        fp16_fast=cc >= (7, 0) or cc == (6, 0),
        fp8_native=cc >= (8, 9),
        flash_attention_2=flash,
        flash_attention_3=cc == (9, 0),
        sdpa=tuple(sdpa),
        # The memory-efficient kernel rejects grouped-query head counts: without flash a GQA model falls to math.
        fused_attention_with_gqa=flash,
        nf4=cc >= (6, 0),
        int8_optimizers=cc >= (6, 0),
        llm_int8=cc >= (7, 5),
    )


def capability_from_name(name: str | None) -> str | None:
    """The compute capability of a card by its name or chip, from NVIDIA's published lists; None when not listed.

    "NVIDIA GeForce RTX 3090", "GA102 [GeForce RTX 3090]" and "A100-SXM4-80GB" are names; so is "8.6" itself.
    """
    if not name:
        return None
    direct = parsed(name.lower().removeprefix("sm_").removeprefix("compute_"))
    if direct:
        return f"{direct[0]}.{direct[1]}"
    packed = re.fullmatch(r"(?i)(?:sm_?|compute_?)(\d{1,2})(\d)[a-f]?", name.strip())
    if packed:
        return f"{packed.group(1)}.{packed.group(2)}"
    facts = table("compute_capability")
    chip = re.search(r"\b(G[FKMPVAHB]\d\w{2,3}|TU\d{3}|AD\d{3})(?:GLM?|M|S)?\b", name)
    if chip:
        for length in (5, 6):
            found = facts["chips"].get(chip.group(1)[:length])
            if found:
                return str(found)
    text = re.sub(r"(?i)geforce|nvidia|\(r\)|\(tm\)|corporation|laptop gpu|mobile", " ", name)
    text = re.sub(
        r"(?i)\b(rtx|gtx|gt|mx)\s*-?\s*(?=\d)", lambda m: "MX" if m.group(1).lower() == "mx" else m.group(1) + " ", text
    )
    text = " ".join(text.split())
    for pattern, value in facts["names"]:
        if re.search(pattern, text, re.IGNORECASE):
            return str(value)
    return None


def completed(gpu: Gpu) -> Gpu:
    """The GPU with its compute capability taken from its name where no tool gave it."""
    if gpu.vendor != "nvidia" or gpu.compute_capability:
        return gpu
    return replace(gpu, compute_capability=capability_from_name(gpu.name))
