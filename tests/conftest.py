"""What all tests share: real-GPU tests are off unless asked for, and children of tests start like a user's."""

from __future__ import annotations

import os
import signal

import pytest

# A shell's background job ignores Ctrl-C and hands that on; the programs under test must start like a user's.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without .pyc files every import of peft in a child costs twice as long.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that spin while they wait make every torch test several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="also run the tests that need a real GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--gpu"):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a real GPU: run with --gpu"))
