"""The card's video engines: is an encoder there, what uses it now, which codecs does this generation know?"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflight.facts import table
from preflight.findings import Finding, Level, quote
from preflight.gpus import Gpu, merged
from preflight.hardware.capability import family_of, parsed
from preflight.machine import Machine

SOURCE = "facts/video_codecs.json (NVIDIA Video Encode and Decode GPU Support Matrix); NVML encoder capacity"


@dataclass(frozen=True)
class Video:
    """One card's engines. `capacity` is NVML's encoder capacity in percent per codec; None where NVML was not asked.

    `encode` and `decode` list the generation's codecs; sessions and use are of this moment and say nothing of presence.
    """

    gpu: Gpu
    encode: tuple[str, ...] | None = None
    decode: tuple[str, ...] | None = None
    capacity: Mapping[str, int | None] | None = None
    encoder_listed_absent: bool = False

    @property
    def has_encoder(self) -> bool | None:
        """From capacity where it was read, else from the support matrix; None when neither tells."""
        if self.capacity is not None:
            return any(value is not None for value in self.capacity.values())
        if self.encoder_listed_absent or self.encode == ():
            return False
        return True if self.encode else None


def read_video(machine: Machine, gpus: Sequence[Gpu]) -> list[Video]:
    """The engines of the NVIDIA cards: sessions and use from nvidia-smi, capacity from NVML where it can be asked."""
    from preflight.hardware.nvidia_log import parse_log

    cards = [gpu for gpu in gpus if gpu.vendor == "nvidia" and gpu.parent is None]
    if not cards:
        return []
    # "DECODER" is no type of -d: decoder use stands under UTILIZATION
    details = machine.run(["nvidia-smi", "-q", "-d", "ENCODER_STATS,UTILIZATION"], timeout_s=15.0)
    more = parse_log(details.text).gpus if "GPU 0" in details.text else []
    cards = merged(cards, more)
    asked = machine.ask("ask_nvml", sys.executable, timeout_s=15.0)
    by_index = {int(line["device"]): line for line in asked.lines_of_json() if "device" in line}
    return [_video(gpu, by_index.get(gpu.index)) for gpu in cards]


def _video(gpu: Gpu, nvml: Mapping[str, Any] | None) -> Video:
    facts = table("video_codecs")
    cc = parsed(gpu.compute_capability)
    row: Mapping[str, list[str]] | None = None
    if cc is not None:
        family = family_of(cc)
        row = facts["generations"].get(f"{family} {cc[0]}.{cc[1]}")
        if row is None and (family, cc[0]) == ("Blackwell", 10):
            row = facts["generations"]["Blackwell 10.0"]
        row = row or facts["generations"].get(family)
    return Video(
        gpu=gpu,
        encode=tuple(row["encode"]) if row else None,
        decode=tuple(row["decode"]) if row else None,
        capacity=nvml.get("encoder_capacity") if nvml else None,
        encoder_listed_absent=bool(re.search(facts["no_encoder"], gpu.name or "")),
    )


def check_video(videos: Sequence[Video]) -> list[Finding]:
    """Presence, use and codecs; idle is never called absent."""
    found = []
    for video in videos:
        gpu = video.gpu
        name = f"GPU {gpu.index} ({quote(gpu.name)})"
        use = []
        if gpu.encoder_sessions is not None:
            use.append(f"{gpu.encoder_sessions} encoding sessions now")
        if gpu.encoder_pct is not None:
            use.append(f"encoder {gpu.encoder_pct:.0f} %")
        if gpu.decoder_pct is not None:
            use.append(f"decoder {gpu.decoder_pct:.0f} %")
        using = (
            f" In use: {', '.join(use)} (0 means idle, not absent)." if use else " What uses it now could not be told."
        )
        decodes = f"decodes {', '.join(video.decode)}" if video.decode else "its decoder could not be told"
        measured = video.capacity is not None
        if video.has_encoder is False:
            what = f"{name} has no video encoder (NVENC); it {decodes}."
            why = "Data-centre compute cards and the smallest parts are built without one."
        elif video.has_encoder is None:
            what = f"Whether {name} has a video encoder could not be told; {decodes}."
            why = "Neither NVML nor the support matrix knows this card."
        else:
            what = f"{name} encodes {', '.join(video.encode or ('video',))} (NVENC) and {decodes} (NVDEC)."
            why = "NVML reports the encoder's capacity." if measured else "From the support matrix of its generation."
        help_text = (
            " When a media program's GPU acceleration does not come on: the codec must be in these lists (AV1 "
            "decoding begins "
            "with RTX 30, AV1 encoding with RTX 40), the program must be built with NVENC/NVDEC, in a container "
            "NVIDIA_DRIVER_CAPABILITIES must hold `video`, and GeForce cards limit the number of encoding sessions."
        )
        level = Level.UNKNOWN if video.has_encoder is None and video.decode is None else Level.OK
        fix = (
            ("test it: `ffmpeg -f lavfi -i nullsrc -c:v h264_nvenc -frames:v 1 -f null -`",)
            if level is Level.UNKNOWN
            else ()
        )
        found.append(Finding("video-engines", level, what, why + using + help_text, fix, SOURCE))
    return found


def as_json(videos: Sequence[Video]) -> list[dict[str, Any]]:
    """The facts that the report keeps."""
    return [
        {
            "gpu": video.gpu.index,
            "encoder_present": video.has_encoder,
            "encoder_capacity_pct": dict(video.capacity) if video.capacity is not None else None,
            "encode": None if video.encode is None else list(video.encode),
            "decode": None if video.decode is None else list(video.decode),
            "encoder_sessions": video.gpu.encoder_sessions,
            "encoder_pct": video.gpu.encoder_pct,
            "decoder_pct": video.gpu.decoder_pct,
        }
        for video in videos
    ]
