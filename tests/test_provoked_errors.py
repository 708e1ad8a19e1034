"""Errors provoked for real, here and now, are matched to the right known error."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from preflight.software.explain import explained

SCRIPT = Path(__file__).with_name("provoke_errors.py")


def names() -> list[str]:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]


@cache
def provoked() -> dict[str, str]:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=500)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["text"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_freshly_provoked_error_is_recognised(name: str) -> None:
    pytest.importorskip("torch")
    if name == "disk_full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    text = provoked()[name]
    assert text, f"{name} raised nothing with the installed versions"
    observed, findings = explained(text)
    assert [match["signature"] for match in observed["matches"]][:1] == [name], text[-1500:]
    assert findings[0].fix and findings[0].why and findings[0].source


def test_at_least_fifteen_errors_are_provoked() -> None:
    assert len(names()) >= 15
