"""The Windows GPU timeout: values are read and written as Windows writes them, and nothing is applied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import env_sandbox
from preflight.findings import Level
from preflight.hardware.tdr import DEFAULTS_S, check_timeouts, parse_reg_query, read_timeouts, reg_file, write_pair
from preflight.machine import RecordedMachine

REG = """
HKEY_LOCAL_MACHINE\\SYSTEM\\CurrentControlSet\\Control\\GraphicsDrivers
    DxgKrnlVersion    REG_DWORD    0xf003
    TdrDelay    REG_DWORD    0x8
    TdrLevel    REG_DWORD    0x3
"""


def windows(tmp_path: Path, models: str, reg: str = REG) -> RecordedMachine:
    inputs = [
        {"file": "system.json", "kind": "platform system", "exit_code": 0},
        {
            "file": "reg.txt",
            "kind": "reg query 'HKLM\\SYSTEM\\CurrentControlSet\\Control\\GraphicsDrivers'",
            "exit_code": 0,
        },
        {
            "file": "smi.txt",
            "kind": "nvidia-smi --query-gpu=index,name,driver_model.current,driver_model.pending --format=csv,noheader",
            "exit_code": 0,
        },
    ]
    (tmp_path / "system.json").write_text('"Windows"')
    (tmp_path / "reg.txt").write_text(reg)
    (tmp_path / "smi.txt").write_text(models)
    (tmp_path / "case.json").write_text(json.dumps({"inputs": inputs}))
    return RecordedMachine(tmp_path)


def test_values_of_reg_query_are_numbers_and_absent_ones_unknown() -> None:
    assert parse_reg_query(REG) == {"TdrDelay": 8, "TdrDdiDelay": None, "TdrLevel": 3}
    assert parse_reg_query("") == {"TdrDelay": None, "TdrDdiDelay": None, "TdrLevel": None}
    assert DEFAULTS_S == {"TdrDelay": 2, "TdrDdiDelay": 5}  # Microsoft Learn


def test_the_files_raise_and_restore_exactly_what_was_there(tmp_path: Path) -> None:
    found = read_timeouts(windows(tmp_path, "0, NVIDIA GeForce RTX 4090, WDDM, WDDM\n"))
    assert write_pair(tmp_path, found) == ["tdr_raise.reg", "tdr_undo.reg"]
    up = (tmp_path / "tdr_raise.reg").read_bytes().decode("utf-16")
    back = (tmp_path / "tdr_undo.reg").read_bytes().decode("utf-16")
    key = "[HKEY_LOCAL_MACHINE\\SYSTEM\\CurrentControlSet\\Control\\GraphicsDrivers]"
    assert up.splitlines()[:3] == ["Windows Registry Editor Version 5.00", "", key]
    assert '"TdrDelay"=dword:0000003c' in up and '"TdrDdiDelay"=dword:0000003c' in up
    assert '"TdrDelay"=dword:00000008' in back and '"TdrDdiDelay"=-' in back
    assert "TccTimeout" not in up + back and "TdrLevel" not in up + back  # an invented value; a dangerous one


def test_on_wddm_the_finding_warns_and_says_what_the_values_are_meant_for(tmp_path: Path) -> None:
    found = read_timeouts(windows(tmp_path, "0, NVIDIA GeForce RTX 4090, WDDM, WDDM\n"))
    finding = check_timeouts(found, ["tdr_raise.reg", "tdr_undo.reg"])
    assert finding.level is Level.WARN and finding.code == "tdr-values"
    assert "TdrDelay 8 s" in finding.what and "WDDM" in finding.what
    assert "development and testing only" in finding.why and "administrator" in finding.fix[0]


def test_under_tcc_leaving_it_would_bring_the_timeout_in(tmp_path: Path) -> None:
    found = read_timeouts(windows(tmp_path, "0, Tesla V100, TCC, TCC\n"))
    finding = check_timeouts(found, [])
    assert finding.level is Level.OK and "would bring it in" in finding.why


def test_elsewhere_it_says_why_it_does_not_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert env_sandbox.main(["--disable-tcc", "--json"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert check_timeouts({"system": None, "values": None, "driver_models": None}, []).level is Level.UNKNOWN


def test_a_reg_file_ends_its_lines_as_windows_does() -> None:
    assert reg_file({"TdrDelay": 60}).count("\r\n") == reg_file({"TdrDelay": 60}).count("\n")
