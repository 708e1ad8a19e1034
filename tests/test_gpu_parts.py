"""What gpu_probe.py looks at only when asked: Windows' timeouts and events, video engines, memory before and after."""

import json

import pytest
from machines import machine

import gpu_probe
from preflight.console import run_main
from preflight.findings import Level
from preflight.hardware.memory_baseline import check_difference, difference
from preflight.hardware.windows_gpu import WindowsGraphics, check_windows, parse_events, parse_tdr

GIB = 1 << 30


def probe(folder, capsys, *more):
    gpu_probe.main(["--replay", str(folder), "--json", *more])
    return json.loads(capsys.readouterr().out)


def finding(section, code):
    found = [one for one in section["findings"] if one["code"] == code]
    assert len(found) == 1, [(one["level"], one["code"], one["what"]) for one in section["findings"]]
    return found[0]


WDDM = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 560.94                 Driver Version: 560.94         CUDA Version: 12.6     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                  Driver-Model | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 3080      WDDM  |   00000000:01:00.0  On |                  N/A |
| 30%   47C    P8            28W /  320W  |    {used}MiB /  10240MiB |      9%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
{processes}+-----------------------------------------------------------------------------------------+
"""
UNITY = r"|    0   N/A  N/A       1404      C+G  ...\Unity\Hub\Editor\Unity.exe                  N/A |" + "\n"
DESKTOP = r"|    0   N/A  N/A       1500      C+G  C:\Windows\explorer.exe                         N/A |" + "\n"


# --- Windows

REGISTRY = r"""
HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\GraphicsDrivers
    DxgKrnlVersion    REG_DWORD    0x5013
    TdrDelay    REG_DWORD    0xa
    TdrDdiDelay    REG_DWORD    0x14
"""


def test_registry_values_are_read_and_missing_ones_are_the_defaults():
    assert parse_tdr(REGISTRY) == {
        "TdrDelay": 10,
        "TdrDdiDelay": 20,
        "TdrLevel": None,
        "TdrLimitTime": None,
        "TdrLimitCount": None,
    }
    assert WindowsGraphics(parse_tdr("")).tdr_delay_s == 2
    assert WindowsGraphics(parse_tdr(REGISTRY)).tdr_delay_s == 10


EVENTS = """Event[0]:
  Log Name: System
  Source: Display
  Event ID: 4101
  Level: Warning
  Description:
Display driver nvlddmkm stopped responding and has successfully recovered.

Event[1]:
  Source: nvlddmkm
  Event ID: 153
  Description:
\\Device\\Video3 Error occurred on GPUID: 100. GPU has fallen off the bus.

Event[2]:
  Source: nvlddmkm
  Event ID: 13
  Description:
Graphics Exception: ESR 0x404490

Event[3]:
  Source: Microsoft-Windows-WHEA-Logger
  Event ID: 17
  Description:
A corrected hardware error has occurred. Component: PCI Express Root Port
"""


def test_a_reset_a_lost_link_and_a_driver_error_are_told_apart():
    events = parse_events(EVENTS)
    assert [kind for kind, _ in events] == ["tdr", "link-lost", "driver-error", "hardware-error"]
    found = {one.code: one for one in check_windows(WindowsGraphics(parse_tdr(REGISTRY), tuple(events)))}
    assert found["gpu-removed"].level is Level.FAIL and "not a timeout" in found["gpu-removed"].why
    assert found["tdr-reset"].level is Level.WARN and "10 s" in found["tdr-reset"].why
    assert "neither a timeout nor a lost link" in found["driver-crash"].why
    assert "WHEA" in found["pcie-hardware-error"].what
    assert not any("TdrDelay" in fix for one in found.values() for fix in one.fix)


@pytest.mark.parametrize(
    ("registry", "code", "level"),
    [
        ("", "tdr-settings", Level.OK),
        ("    TdrLevel    REG_DWORD    0x0\n", "tdr-off", Level.WARN),
        (
            "    TdrDelay    REG_DWORD    0x3c\n    TdrDdiDelay    REG_DWORD    0x5\n",
            "tdr-values-inconsistent",
            Level.WARN,
        ),
        (REGISTRY, "tdr-settings", Level.OK),
    ],
)
def test_tdr_settings(registry, code, level):
    (one,) = check_windows(WindowsGraphics(parse_tdr(registry)))
    assert (one.code, one.level) == (code, level)


def test_a_value_that_nothing_reads_is_named(tmp_path, capsys):
    kinds = {
        "nvidia-smi": WDDM.format(used=" 1745", processes=UNITY),
        "reg query HKLM": "    TccTimeout    REG_DWORD    0x8\n",
    }
    section = probe(machine(tmp_path / "m", kinds=kinds), capsys)
    one = finding(section, "tcc-timeout-value")
    assert one["level"] == "warn" and "TccTimeout" in one["what"] and "driver model" in one["why"]
    assert section["observed"]["tdr_delay_s"] == 2


def test_a_redacted_recording_of_the_xml_log_is_still_read(tmp_path, capsys):
    from preflight.redact import redact

    text = """<?xml version="1.0" ?><nvidia_smi_log><driver_version>580.95.05</driver_version>
<attached_gpus>1</attached_gpus>
<gpu id="00000000:01:00.0"><product_name>NVIDIA L40S</product_name><serial>1323456789012</serial>
<uuid>GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77</uuid><fb_memory_usage><total>46068 MiB</total><used>3 MiB</used>
<free>45500 MiB</free></fb_memory_usage><processes><process_info><pid>7</pid><type>C</type>
<process_name>/home/somebody/env/bin/python</process_name><used_memory>900 MiB</used_memory></process_info></processes>
</gpu></nvidia_smi_log>"""
    assert "5d5ba0d6" not in redact(text) and "somebody" not in redact(text)
    section = probe(machine(tmp_path / "m", kinds={"nvidia-smi -q -x": redact(text)}), capsys)
    assert "tool-output-truncated" not in {one["code"] for one in section["findings"]}
    assert section["observed"]["gpus"][0]["memory_free_bytes"] == 45500 << 20
    assert section["observed"]["processes"][0]["memory_bytes"] == 900 << 20


# --- video engines

ENCODER = """
==============NVSMI LOG==============

Attached GPUs                             : 1
GPU 00000000:01:00.0
    Utilization
        Gpu                               : 0 %
        Memory                            : 0 %
        Encoder                           : 0 %
        Decoder                           : 12 %
    Encoder Stats
        Active Sessions                   : 0
        Average FPS                       : 0
        Average Latency                   : 0
"""


def row(name):
    return f"name, driver_version, memory.total [MiB]\n{name}, 580.95.05, 24576 MiB\n"


@pytest.mark.parametrize(
    ("card", "encodes", "decodes_av1"),
    [
        ("NVIDIA GeForce RTX 4090", "AV1", True),
        ("NVIDIA GeForce RTX 3090", "HEVC (NVENC)", True),
        ("NVIDIA GeForce RTX 2060", "HEVC (NVENC)", False),
        ("NVIDIA A100-SXM4-80GB", None, False),
        ("NVIDIA H100 80GB HBM3", None, True),
        ("GeForce MX450", None, False),
    ],
)
def test_idle_is_never_called_absent(card, encodes, decodes_av1, tmp_path, capsys):
    kinds = {"nvidia-smi --query-gpu=x --format=csv": row(card), "nvidia-smi -q -d ENCODER_STATS,UTILIZATION": ENCODER}
    section = probe(machine(tmp_path / "m", kinds=kinds), capsys, "--full")
    one = finding(section, "video-engines")
    (video,) = section["observed"]["video"]
    assert video["encoder_present"] is (encodes is not None)
    assert (encodes in one["what"]) if encodes else "has no video encoder" in one["what"]
    assert ("AV1" in (video["decode"] or [])) is decodes_av1
    assert video["encoder_sessions"] == 0 and "0 means idle, not absent" in one["why"] and "decoder 12 %" in one["why"]


def test_the_cards_own_answer_wins_over_the_matrix(tmp_path, capsys):
    line = {"device": 0, "encoder_capacity": {"H.264": 100, "HEVC": 100, "AV1": None}}
    kinds = {
        "nvidia-smi --query-gpu=x --format=csv": row("NVIDIA Graphics Device"),
        "child ask_nvml": json.dumps(line) + "\n",
    }
    (video,) = probe(machine(tmp_path / "m", kinds=kinds), capsys, "--full")["observed"]["video"]
    assert video["encoder_present"] is True and video["decode"] is None


# --- memory before and after


def test_closing_a_game_engine_is_told_as_memory_gained(tmp_path, capsys):
    before = machine(tmp_path / "before", kinds={"nvidia-smi": WDDM.format(used=" 4745", processes=UNITY + DESKTOP)})
    after = machine(tmp_path / "after", kinds={"nvidia-smi": WDDM.format(used="  649", processes=DESKTOP)})
    file = tmp_path / "baseline.json"
    probe(before, capsys, "--baseline", str(file))
    one = finding(probe(after, capsys, "--compare", str(file)), "memory-difference")
    # 4745 - 649 = 4096 MiB
    assert "4.00 GiB more is free" in one["what"] and "Unity.exe (game engine)" in one["why"]
    assert "explorer" not in one["why"]


def test_another_card_or_unknown_memory_is_no_difference():
    before = {"gpus": [{"index": 0, "name": "A", "free_bytes": GIB}], "holders": []}
    now = {"gpus": [{"index": 0, "name": "B", "free_bytes": 2 * GIB}], "holders": []}
    (one,) = check_difference(difference(before, now))
    assert one.level is Level.UNKNOWN and one.code == "memory-difference-unknown"
    (none,) = check_difference(difference(before, {"gpus": [], "holders": []}))
    assert none.code == "memory-difference-unknown"


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"kind": "gpu memory", "gpus": 3}'])
def test_a_file_that_is_no_baseline_is_refused_in_one_line(text, tmp_path, capsys):
    (tmp_path / "b.json").write_text(text)
    folder = machine(tmp_path / "m", kinds={"nvidia-smi": WDDM.format(used=" 1745", processes=UNITY)})
    assert run_main(gpu_probe.main, ["--replay", str(folder), "--json", "--compare", str(tmp_path / "b.json")]) == 2
    assert "--compare" in capsys.readouterr().err
