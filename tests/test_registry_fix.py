"""registry_fix.bat: run for real by Wine's cmd.exe and reg.exe where Wine is, and read strictly everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "registry_fix.bat"
KEY = r"HKLM\SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
WINE = shutil.which("wine")


@pytest.fixture(scope="session")
def windows(tmp_path_factory):
    """A fresh Windows registry and drive, made once; None of its state is shared with the user's own."""
    if WINE is None:
        pytest.skip("Wine is not installed (Debian: apt-get install --no-install-recommends wine)")
    folder = tmp_path_factory.mktemp("windows")
    machine = Windows(folder)
    # A server that stays: without it every start boots the whole of Windows again.
    machine.start(["wineserver", "-p"])
    made = machine.start(["wineboot", "-i"], timeout=180)
    if made.returncode != 0 or "admin" not in machine.cmd("@echo admin").stdout:
        pytest.skip(f"Wine does not start here: {made.stdout.strip()[-200:]}")
    yield machine
    machine.start(["wineserver", "-k"])


class Windows:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(SCRIPT, folder / SCRIPT.name)
        self.environment = {
            **os.environ,
            "WINEPREFIX": str(folder / "prefix"),
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": "mscoree,mshtml=",
            "DISPLAY": "",
        }

    def start(self, command: list[str], stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
        # Through files: Wine's services keep a pipe open long after the program has ended.
        with tempfile.TemporaryFile("w+") as into, tempfile.TemporaryFile("w+", errors="replace") as out:
            into.write(stdin)
            into.seek(0)
            ended = subprocess.run(
                command, stdin=into, stdout=out, stderr=out, env=self.environment, cwd=self.folder, timeout=timeout
            )
            out.seek(0)
            return subprocess.CompletedProcess(command, ended.returncode, out.read())

    def cmd(self, batch: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        (self.folder / "run.bat").write_bytes(batch.replace("\n", "\r\n").encode())
        return self.start([str(WINE), "cmd", "/c", "run.bat"], stdin)

    def run(self, arguments: str, stdin: str = "", admin: bool = True) -> tuple[int, str]:
        """The script's exit code and output. What only an administrator may read is there, or it is not."""
        rights = 'reg add "HKU\\S-1-5-19" /f >nul' if admin else 'reg delete "HKU\\S-1-5-19" /f >nul 2>nul'
        ended = self.cmd(f"@echo off\n{rights}\ncmd /c {SCRIPT.name} {arguments}\nexit /b %errorlevel%\n", stdin)
        return ended.returncode, ended.stdout.replace("\r\n", "\n")

    def values(self) -> dict[str, str]:
        answer = self.cmd(f'@reg query "{KEY}" 2>nul').stdout
        return dict(re.findall(r"(\w+)\s+REG_\w+\s+(\S+)", answer))

    def set(self, **values: str) -> None:
        """These values and no others."""
        lines = [f'reg delete "{KEY}" /f >nul 2>nul', f'reg add "{KEY}" /f >nul']
        for name, value in values.items():
            kind, _, number = value.rpartition(":")
            lines.append(f'reg add "{KEY}" /v {name} /t {kind or "REG_DWORD"} /d {number} /f >nul')
        self.cmd("@echo off\n" + "\n".join(lines) + "\n")
        shutil.rmtree(self.undo.parent, ignore_errors=True)
        assert set(self.values()) == set(values)

    @property
    def undo(self) -> Path:
        return self.folder / "prefix/drive_c/ProgramData/finetune-preflight/tdr-undo.reg"


def event(provider: str, ident: int, *data: str) -> str:
    """One event in one line, as `wevtutil qe System /f:xml` prints it."""
    body = "".join(f"<Data>{item}</Data>" for item in data)
    return (
        "<Event xmlns='http://schemas.microsoft.com/win/2004/08/events/event'><System>"
        f"<Provider Name='{provider}'/><EventID Qualifiers='0'>{ident}</EventID><Level>3</Level></System>"
        f"<EventData>{body}</EventData></Event>"
    )


RESET = event("Display", 4101, "nvlddmkm")
LIVE_141 = event("Windows Error Reporting", 1001, "LiveKernelEvent", "Not available", "0", "141", "ffff8001")
STOP_116 = event("Microsoft-Windows-WER-SystemErrorReporting", 1001, "0x00000116 (0xffff, 0x0, 0x0, 0xd)")
WHEA_17 = event("Microsoft-Windows-WHEA-Logger", 17, "PCI Express Root Port")
WHEA_18 = event("Microsoft-Windows-WHEA-Logger", 18)
NV_14 = event("nvlddmkm", 14, r"\Device\Video3", "Xid 79")
NV_153 = event("nvlddmkm", 153, r"\Device\Video3", "Reset TDR occurred on GPUID:100")
OTHER = event("Service Control Manager", 7036, "running", "141", "14")


@pytest.mark.parametrize(
    ("events", "expected", "counted"),
    [
        (
            [RESET, RESET, LIVE_141, STOP_116, OTHER],
            "timeout resets. Windows reset a GPU",
            "Display 4101: 2   LiveKernelEvent 141: 1   117: 0   stop code 0x116: 1",
        ),
        (
            [WHEA_17, WHEA_18, NV_14, OTHER],
            "link loss. The hardware reported errors",
            "nvlddmkm 14: 1   153: 0   WHEA-Logger 17: 1   18: 1",
        ),
        ([NV_153], "the NVIDIA driver reported errors", "nvlddmkm 14: 0   153: 1   WHEA-Logger 17: 0   18: 0"),
        ([RESET, WHEA_17], "link errors (WHEA 17 or 18) and resets", "Display 4101: 1 "),
        ([OTHER], "none seen", "Display 4101: 0   LiveKernelEvent 141: 0   117: 0   stop code 0x116: 0"),
    ],
)
def test_the_trouble_is_told_from_the_events(windows, events, expected, counted):
    (windows.folder / "saved events.xml").write_text("\n".join(events) + "\n")
    code, text = windows.run('/show /events "saved events.xml"')
    assert code == 0
    assert expected in text and counted in text
    assert ("a longer timeout hides it" in text) == (STOP_116 in events)
    if "link" in expected or "driver reported" in expected:
        assert "Raising the timeout does not help" in text


def test_show_needs_no_administrator_and_changes_nothing(windows):
    windows.set(TdrDelay="8")
    code, text = windows.run("/show", admin=False)
    assert code == 0
    assert "TdrDelay     8 s" in text and "TdrDdiDelay  not set: Windows uses 5 s" in text
    assert windows.values() == {"TdrDelay": "0x8"} and not windows.undo.exists()


def test_without_rights_it_says_so_and_changes_nothing(windows):
    windows.set()
    code, text = windows.run("/yes", admin=False)
    assert code == 5 and "needs an administrator" in text
    assert windows.values() == {} and not windows.undo.exists()


@pytest.mark.parametrize("answer", ["no\n", "", "y\n"])
def test_only_the_whole_word_yes_writes(windows, answer):
    windows.set()
    code, text = windows.run("", stdin=answer)
    assert code == 3 and "Nothing was changed." in text
    assert windows.values() == {} and not windows.undo.exists()


def test_yes_writes_both_values_and_undo_takes_away_what_was_not_there(windows):
    windows.set()
    code, text = windows.run("", stdin="yes\n")
    assert code == 0 and "Reboot" in text
    assert windows.values() == {"TdrDelay": "0x3c", "TdrDdiDelay": "0x3c"}
    saved = windows.undo.read_bytes().decode("ascii").splitlines()
    assert saved[0] == "Windows Registry Editor Version 5.00" and saved[1] == ""
    assert saved[2] == r"[HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\GraphicsDrivers]"
    assert saved[3:] == ['"TdrDelay"=-', '"TdrDdiDelay"=-']
    code, text = windows.run("/undo")
    assert code == 0 and "Reboot" in text
    assert windows.values() == {}
    assert windows.run("/undo")[0] == 0  # nothing left to undo is no error


def test_undo_goes_back_to_before_the_first_change(windows):
    windows.set(TdrDelay="8", TdrDdiDelay="0xabcdef12", TdrLevel="3")
    assert windows.run("/yes /delay 3")[0] == 0
    assert windows.values() == {"TdrDelay": "0x3", "TdrDdiDelay": "0x5", "TdrLevel": "0x3"}  # never below 5
    assert windows.run("/delay 300 /yes")[0] == 0
    assert windows.values()["TdrDelay"] == "0x12c"
    assert '"TdrDelay"=dword:00000008\r\n"TdrDdiDelay"=dword:abcdef12\r\n' in windows.undo.read_bytes().decode()
    assert windows.run("/undo")[0] == 0
    assert windows.values() == {"TdrDelay": "0x8", "TdrDdiDelay": "0xabcdef12", "TdrLevel": "0x3"}


def test_the_undo_file_is_a_reg_file_that_windows_imports_as_well(windows):
    windows.set(TdrDelay="8")
    windows.run("/yes")
    windows.cmd("@reg import C:\\ProgramData\\finetune-preflight\\tdr-undo.reg")
    assert windows.values() == {"TdrDelay": "0x8"}


def test_a_planted_undo_file_can_set_nothing_but_the_two_values(windows):
    windows.set(TdrDelay="60")
    windows.undo.parent.mkdir(parents=True, exist_ok=True)
    windows.undo.write_bytes(
        b"Windows Registry Editor Version 5.00\r\n\r\n[HKEY_LOCAL_MACHINE\\SOFTWARE\\Planted]\r\n"
        b'"Run"="evil"\r\n"TdrLevel"=dword:00000000\r\n"TdrDelay"=dword:0000000a\r\n"TdrDdiDelay"=dword:zz\r\n'
    )
    assert windows.run("/undo")[0] == 0
    assert windows.values() == {"TdrDelay": "0xa"}
    assert "Planted" not in windows.cmd("@reg query HKLM\\SOFTWARE").stdout


def test_an_undo_file_without_values_is_an_error_and_is_kept(windows):
    windows.set(TdrDelay="60")
    windows.undo.parent.mkdir(parents=True, exist_ok=True)
    windows.undo.write_bytes(b"Windows Registry Editor Version 5.00\r\n")
    code, text = windows.run("/undo")
    assert code == 1 and "could not be put back" in text and windows.undo.exists()


def test_a_value_of_a_foreign_type_is_not_overwritten(windows):
    windows.set(TdrDelay="REG_SZ:sixty")
    code, text = windows.run("/yes")
    assert code == 1 and "REG_SZ instead of REG_DWORD" in text and "nothing was changed" in text
    assert windows.values() == {"TdrDelay": "sixty"} and not windows.undo.exists()


def test_nothing_is_written_when_the_old_values_cannot_be_saved(windows):
    windows.set()
    windows.undo.parent.parent.mkdir(parents=True, exist_ok=True)
    windows.undo.parent.write_bytes(b"a file where the folder should be")
    try:
        code, text = windows.run("/yes")
        assert code == 1 and "nothing was changed" in text
        assert windows.values() == {}
    finally:
        windows.undo.parent.unlink()


def test_values_that_harm_or_do_nothing_are_named(windows):
    windows.set(TdrLevel="0", TccTimeout="8")
    _, text = windows.run("/show")
    assert "TdrLevel 0 switches the detection off" in text
    assert "TccTimeout is set, but nothing reads it" in text
    windows.run("/yes")
    assert windows.values() == {"TdrLevel": "0x0", "TccTimeout": "0x8", "TdrDelay": "0x3c", "TdrDdiDelay": "0x3c"}


def test_delays_out_of_bounds_and_wrong_usage_are_refused(windows):
    windows.set()
    delays = ["1", "0", "301", "010", "0x10", "-5", '"6 0"', "ten", "99999999999", '""', '"60;"', '"60&echo x"', ""]
    wrong = [*(f"/yes /delay {value}" for value in delays), "/bogus", "60", "/yes /remove", "/events missing.xml"]
    lines = [f"cmd /c {SCRIPT.name} {arguments} >nul\necho %errorlevel%" for arguments in wrong]
    ended = windows.cmd('@echo off\nreg add "HKU\\S-1-5-19" /f >nul\n' + "\n".join(lines) + "\n")
    assert ended.stdout.split() == ["2"] * len(wrong)
    assert windows.values() == {}
    assert "a whole number of seconds from 2 to 300" in windows.run("/delay 010")[1]


# --- read strictly, on every machine --------------------------------------------------------------------------------

BUILT_IN = {
    "call",
    "del",
    "echo",
    "echo.",
    "exit",
    "for",
    "goto",
    "if",
    "mkdir",
    "move",
    "rem",
    "set",
    "setlocal",
    "shift",
}


def source_lines() -> list[str]:
    """The lines of the script without remarks, empty lines and labels."""
    lines = SCRIPT.read_bytes().decode("ascii").split("\r\n")
    return [line.strip() for line in lines if line.strip() and not re.match(r"\s*(rem\b|:)", line)]


def commands() -> list[str]:
    """Each command that a line starts, also behind if, for and redirections; texts of echo are left out."""
    found = []
    for line in source_lines():
        line = re.sub(r"^@", "", line)
        while True:
            shorter = re.sub(r'^(>>?"[^"]*"|\)|\()\s*', "", line)
            shorter = re.sub(r"^else\s+", "", shorter)
            test = r'(?:errorlevel \d+|exist "[^"]*"|defined \S+|\S+ (?:LSS|GTR) \S+|"[^"]*"=="[^"]*")'
            shorter = re.sub(rf"^if (?:/i )?(?:not )?{test}\s*", "", shorter)
            inner = re.match(r'^for (?:/[fl] )?(?:"[^"]*" )?%%\w in \((?P<source>.*?)\) do (?P<body>.*)$', shorter)
            if inner:
                found += (
                    [part.strip() for part in re.split(r"\^\|", inner["source"].strip("'"))]
                    if "'" in inner["source"]
                    else []
                )
                shorter = inner["body"]
            if shorter == line:
                break
            line = shorter
        if line:
            found += line.split(" & ") if line.startswith("set ") else [line]
    return found


def test_the_file_has_windows_line_ends_and_plain_characters():
    data = SCRIPT.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") > 100
    assert max(data) < 127
    assert re.search(rb"(?m)^\*\.bat text eol=crlf", (SCRIPT.parent / ".gitattributes").read_bytes())


def test_every_command_is_built_in_or_called_by_its_full_path():
    for command in commands():
        word = command.split()[0].strip('"').lower()
        whole = command.lstrip('"').lower()
        known = word in BUILT_IN or word == "type"
        assert known or whole.startswith((r"%sys%\reg.exe", r"%sys%\wevtutil.exe", r"%sys%\find.exe", "%smi%")), command


def test_every_label_exists_once_and_is_used():
    text = SCRIPT.read_bytes().decode("ascii")
    labels = re.findall(r"(?m)^:(\w+)", text)
    assert len(labels) == len(set(labels))
    used = set(re.findall(r"\bgoto (\w+)\b(?!%)", text)) | set(re.findall(r"\bcall :(\w+)", text))
    troubles = {f"trouble_{name}" for name in re.findall(r'set "TROUBLE=(\w+)"', text)}
    assert "goto trouble_%TROUBLE%" in text
    assert set(labels) == (used - {"trouble_"}) | troubles


def test_the_registry_is_only_changed_in_two_values_of_one_key():
    text = SCRIPT.read_bytes().decode("ascii")
    assert f'set "KEY={KEY}"' in text
    changes = [c for c in commands() if re.match(r'"?%SYS%\\reg\.exe"? (?!query)', c)]
    assert sorted(changes) == sorted(
        [
            r'"%SYS%\reg.exe" add "%KEY%" /v TdrDelay /t REG_DWORD /d %DELAY% /f >nul',
            r'"%SYS%\reg.exe" add "%KEY%" /v TdrDdiDelay /t REG_DWORD /d %DDI% /f >nul',
            r'"%SYS%\reg.exe" add "%KEY%" /v %NAME% /t REG_DWORD /d 0x%NUMBER% /f >nul',
            r'"%SYS%\reg.exe" delete "%KEY%" /v %NAME% /f >nul',
        ]
    )
    # %NAME% is one of the two: everything else leaves :put_back before.
    assert 'if /i not "%NAME%"=="TdrDelay" if /i not "%NAME%"=="TdrDdiDelay" exit /b 0' in text
    reads = {c.split()[2].strip('"') for c in commands() if re.match(r'"?%SYS%\\reg\.exe"? query', c)}
    assert reads == {"%KEY%", r"HKU\S-1-5-19"}


def test_the_old_values_are_saved_before_the_first_is_written():
    lines = source_lines()
    save, first = lines.index("call :save_undo"), next(i for i, line in enumerate(lines) if " add " in line)
    assert save < first and lines[save + 1] == "if errorlevel 1 exit /b 1"


def test_the_defaults_and_bounds_are_the_documented_ones():
    text = SCRIPT.read_bytes().decode("ascii")
    found = dict(re.findall(r'(?m)^set "(DELAY|LOWEST|HIGHEST)=(\d+)"', text))
    assert found == {"DELAY": "60", "LOWEST": "2", "HIGHEST": "300"}
    for word in ("/show", "/yes", "/undo", "/delay N", "/events FILE", "reboot"):
        assert word in text
