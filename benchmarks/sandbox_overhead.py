"""What does a trial in a sandbox cost, compared with the same installs and imports done by hand?

Side by side, with a warm cache: by hand (virtualenv, install, one Python process that runs the same steps),
`env_sandbox.py --mode full` with uv, and with pip. Prints seconds and ratios; exit code 1 when one is out of bounds.
By hand, Python compiles what it imports; the sandbox brings the bytecode of an earlier one
(preflight/software/bytecode.py).

    python benchmarks/sandbox_overhead.py [--repeat 3] [--without-pip]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from preflight.machine import Machine  # noqa: E402
from preflight.software.installers import find_installer, read_pip_settings  # noqa: E402
from preflight.software.requirements import tested_set  # noqa: E402

LIMIT_OVERHEAD = 1.2
LIMIT_PIP = 2.0


def by_hand(uv: str, options: list[str], folder: Path) -> float:
    """Seconds of the bare steps: virtualenv, install, the stages' own child run once, removal."""
    wanted = [item.shown() for item in tested_set(ROOT / "constraints.txt").items]
    spec = json.dumps({"stages": ["torch", "transformers", "peft", "bitsandbytes"], "work": str(folder)})
    began = time.monotonic()
    place = folder / "env"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    subprocess.run([uv, "venv", "-q", "--no-project", "--python", sys.executable, str(place)], **quiet)
    command = [uv, "pip", "install", "-q", "--python", str(python), *wanted, *options]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt")], **quiet)
    child = ROOT / "preflight" / "children" / "load_stack.py"
    results = folder / "results.jsonl"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([str(python), str(child), str(results), spec], **quiet, env=environment)
    shutil.rmtree(place)
    seconds = time.monotonic() - began
    ends = [json.loads(line) for line in results.read_text().splitlines() if '"event": "stage"' in line]
    assert len(ends) == 4 and all(end["ok"] for end in ends), ends
    results.unlink()
    return seconds


def with_tool(installer: str, folder: Path) -> float:
    """Seconds of the same through env_sandbox.py."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "env_sandbox.py"), "--json", "--installer", installer, "--python", sys.executable],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    seconds = time.monotonic() - began
    section = json.loads(done.stdout)
    assert section["level"] == "ok", section["findings"]
    return seconds


def main() -> int:
    """Measure and judge. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--without-pip", action="store_true", help="leave the slow comparison out")
    args = parser.parse_args()
    uv = find_installer("uv").path
    settings = read_pip_settings(Machine(), sys.executable)
    options = ["--index-strategy", "unsafe-best-match"]
    options += ["--index-url", settings.index_url] if settings.index_url else []
    for url in settings.extra_index_urls:
        options += ["--extra-index-url", url]
    for place in settings.find_links:
        options += ["--find-links", place]
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        with_tool("uv", folder)  # warms uv's cache, as the runs to compare have it
        hand, tool, pip = [], [], []
        for _ in range(args.repeat):  # in turns, so that a busy moment of the machine does not favour one side
            hand.append(by_hand(uv, options, folder))
            tool.append(with_tool("uv", folder))
        if not args.without_pip:
            pip.append(with_tool("pip", folder))
    bare, full = statistics.median(hand), statistics.median(tool)
    print(f"by hand, uv         {bare:6.1f} s   ({', '.join(f'{s:.1f}' for s in hand)})")
    print(f"env_sandbox, uv     {full:6.1f} s   ({', '.join(f'{s:.1f}' for s in tool)})")
    print(f"ratio               {full / bare:6.2f}     (at most {LIMIT_OVERHEAD})")
    good = full <= LIMIT_OVERHEAD * bare
    if pip:
        print(f"env_sandbox, pip    {pip[0]:6.1f} s")
        print(f"pip / uv            {pip[0] / full:6.2f}     (at least {LIMIT_PIP})")
        good = good and pip[0] >= LIMIT_PIP * full
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
