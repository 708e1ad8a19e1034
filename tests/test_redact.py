"""What identifies a person or a machine is taken out; what a reader needs stays."""

from __future__ import annotations

import json
import math

import pytest

from preflight.redact import redact, redacted

UUID = "3f2a9c1e-0b4d-4c6e-9a8b-1234567890ab"


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (f"GPU 0: NVIDIA A100 (UUID: GPU-{UUID})", "GPU 0: NVIDIA A100 (UUID: GPU-<uuid>)"),
        (f"CUDA_VISIBLE_DEVICES=MIG-{UUID}", "CUDA_VISIBLE_DEVICES=MIG-<uuid>"),
        (f"MIG-GPU-{UUID}/3/0", "MIG-GPU-<uuid>/3/0"),
        (
            "    Serial Number                         : 1562022001234",
            "    Serial Number                         : <serial>",
        ),
        ("    Serial Number                         : N/A", "    Serial Number                         : N/A"),
        ("<serial>1562022001234</serial>", "<serial><redacted></serial>"),
        ("/home/alice/models/x", "/home/<user>/models/x"),
        ("File '/Users/bob/x.py'", "File '/Users/<user>/x.py'"),
        (r"C:\Users\Carol\AppData\x", r"C:\Users\<user>\AppData\x"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwx", "HF_TOKEN=<token>"),
        ("use hf_abcdefghijklmnopqrstuvwx now", "use <token> now"),
        ("Authorization: Bearer abcdef0123456789abcdef", "Authorization: Bearer <token>"),
        ("https://me:s3cret@example.org/simple", "https://<token>@example.org/simple"),
        ("OPENAI_API_KEY=sk-abcdefghijklmnopqrstuvwxyz", "OPENAI_API_KEY=<token>"),
        ('"api_key": "0123456789abcdef"', '"api_key": "<token>"'),
        ("mail dave.d@example.org please", "mail <email> please"),
        ("Linux lab-box-7 6.8.0-45-generic #45 SMP", "Linux <host> 6.8.0-45-generic #45 SMP"),
        ("ether 0a:1b:2c:3d:4e:5f up", "ether <mac> up"),
        ("card0,0x00000000000000f1,17163091968", "card0,<unique-id>,17163091968"),
        ("Nov 30 10:11:12 lab-box-7 kernel: NVRM: Xid", "Nov 30 10:11:12 <host> kernel: NVRM: Xid"),
    ],
)
def test_identities_and_secrets_are_taken_out(raw: str, clean: str) -> None:
    assert redact(raw) == clean
    assert redact(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:3b:00): 48, pid=1234, name=python, DBE",
        "driver 525.60.13 on 0000000F:01:00.0",
        "eos_token: <|im_end|>, pad_token: <pad>",
        "tokens: 4096, max_position_embeddings: 32768",
        "root: 'additionalProperties' is required",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "0x73bf and gfx1030",
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126",
        "model Qwen/Qwen2.5-7B@main",
    ],
)
def test_what_a_reader_needs_stays(text: str) -> None:
    assert redact(text) == text


def test_a_whole_document_is_redacted_and_stays_valid_json() -> None:
    document = {"path": ["/home/alice/x"], "/home/alice": {"n": 1, "x": math.nan, "y": math.inf, "ok": True, "z": None}}
    clean = redacted(document)
    assert clean == {"path": ["/home/<user>/x"], "/home/<user>": {"n": 1, "x": None, "y": None, "ok": True, "z": None}}
    json.dumps(clean, allow_nan=False)
