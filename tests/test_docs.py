"""The pages of docs/: every example is run, every flag and file that they name exists, generated parts are current."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from preflight.findings import Finding, Level

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("README*.md"))]
SHARED = ("tests", "examples", "facts", "training_config.yaml")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def examples() -> list[object]:
    """(command, expected exit code, lines that must appear), for every `$` line of the console blocks of docs/.

    The README's console blocks show work of minutes; its commands are only looked at for their flags.
    """
    found: list[object] = []
    for page in PAGES:
        if page.name.startswith("README"):
            continue
        for block in blocks(page, "console"):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                first, *lines = part.splitlines()
                command, _, note = first.partition("#")
                code = re.search(r"exit (\d+)", note)
                wanted = [line.strip() for line in lines if line.strip()]
                name = f"{page.stem}: {command.strip()}"
                found.append(pytest.param(command.strip(), int(code.group(1)) if code else 0, wanted, id=name))
    return found


def in_root(command: str) -> list[str]:
    """The words of a command, with our Python and our scripts."""
    words = shlex.split(command)
    assert words[0] == "python", command
    if words[1].endswith(".py"):
        words[1] = str(ROOT / words[1])
    return [sys.executable, *words[1:]]


@pytest.mark.parametrize(("command", "code", "wanted"), examples())
def test_the_example_does_what_the_page_says(command: str, code: int, wanted: list[str], tmp_path: Path) -> None:
    for name in SHARED:
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        in_root(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    for line in wanted:
        assert line in said, (line, said)


def test_there_are_examples_on_every_page_about_a_stage() -> None:
    stems = {str(getattr(example, "id", "")).partition(":")[0] for example in examples()}
    assert {"hardware", "software", "model", "task", "memory-prediction", "recording-a-machine"} <= stems


@functools.cache
def flags_of(script: str) -> frozenset[str]:
    words = ["-m", "preflight"] if script == "preflight" else [str(ROOT / script)]
    done = subprocess.run(
        [sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))


def commands(page: Path) -> list[str]:
    """Every command line of a page that calls one of our scripts."""
    text = page.read_text(encoding="utf-8")
    text = text.replace("python -m preflight explain", "python -m explain")
    return [
        line.partition("#")[0].strip("` |$")
        for line in re.findall(r"(?:^\$? ?|`)(python (?:-m preflight|\w+\.py)[^`\n]*)", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_on_the_page_exists(page: Path) -> None:
    for command in commands(page):
        script = "preflight" if "-m preflight" in command else command.split()[1]
        if not (script == "preflight" or (ROOT / script).exists()) or "/" in script:
            continue
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", command):
            assert flag in flags_of(script), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_link_on_the_page_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:preflight|facts|templates|tests|benchmarks|docs|examples)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name


def test_both_readmes_say_the_same_commands_flags_codes_and_links() -> None:
    english, chinese = (ROOT / name for name in ("README.md", "README.zh-CN.md"))
    said = []
    for page in (english, chinese):
        text = page.read_text(encoding="utf-8")
        shell = [line.partition(" # ")[0].strip() for line in re.findall(r"^\$ .*", text, re.MULTILINE)]
        first_cells = [
            row.partition("（")[0].partition(" (")[0] for row in re.findall(r"^\| (`-.*?|\d+) \|", text, re.MULTILINE)
        ]
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("README")]
        said.append((shell, first_cells, sorted(set(links)), text.count("\n## ")))
    assert said[0] == said[1]


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "where-is-what.md").read_text(encoding="utf-8")
    modules = [*ROOT.glob("*.py"), *ROOT.glob("preflight/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    missing = sorted(
        name
        for path in modules
        if path.stat().st_size and f"`{(name := path.relative_to(ROOT).as_posix())}`" not in text
    )
    assert not missing, "run `python docs/generate.py`"


def test_the_generated_parts_are_as_the_benchmark_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_on_the_page_about_checks_works() -> None:
    (block,) = blocks(ROOT / "docs" / "adding-a-check.md", "python")
    space: dict[str, object] = {}
    exec(re.sub(r"(?m)^   ", "", block), space)
    check = space["check_shared_memory"]
    assert callable(check)
    small, enough, unknown = check(64 << 20), check(8 << 30), check(None)
    assert (small.level, small.what) == (Level.WARN, "/dev/shm holds 64 MiB.")
    assert (enough.level, enough.what) == (Level.OK, "/dev/shm holds 8.00 GiB.")
    assert unknown.level is Level.UNKNOWN and unknown.why
    assert isinstance(small, Finding) and small.why and small.fix and small.source
