"""How fast does the preprocessor go through a big file, and with how much memory?

Generates chat data (unlike every other record, with some exact and near duplicates), runs `data_preprocessor.py` on it
with its defaults, and prints one JSON line: MiB/s of wall time and the peak memory of all its processes together.
Goals: at least 20 MiB/s and less than 500 MiB for 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent


def generate(path: Path, mebibytes: int, seed: int = 0) -> int:
    """Write about that much JSON Lines; returns the number of records."""
    random_ = random.Random(seed)
    words = ["".join(random_.choices("etaoinshrdlucmfwyp", k=random_.randint(2, 9))) for _ in range(30_000)]
    wanted, size, count = mebibytes << 20, 0, 0
    recent: list[dict[str, object]] = []
    with open(path, "wb") as stream:
        while size < wanted:
            messages = [{"role": "system", "content": "You are a helpful assistant."}] if count % 3 == 0 else []
            for _ in range(random_.randint(1, 3)):
                question = " ".join(random_.choices(words, k=random_.randint(10, 60)))
                answer = " ".join(random_.choices(words, k=random_.randint(20, 120)))
                messages += [
                    {"role": "user", "content": f"{question}?"},
                    {"role": "assistant", "content": f"{answer}."},
                ]
            record: dict[str, object] = {"messages": messages, "id": count}
            if recent and count % 100 == 7:
                record = {**random_.choice(recent), "id": count}  # an exact duplicate but for its id
            recent = [*recent[-50:], record]
            line = json.dumps(record).encode() + b"\n"
            stream.write(line)
            size += len(line)
            count += 1
    return count


def measure(command: list[str]) -> tuple[float, int, int]:
    """(seconds, peak bytes of the process and all below it together, exit code)"""
    began = time.monotonic()
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        total = 0
        try:
            for one in [process, *process.children(recursive=True)]:
                try:
                    total += one.memory_info().rss
                except psutil.Error:
                    continue
        except psutil.Error:
            pass
        peak = max(peak, total)
        time.sleep(0.05)
    return time.monotonic() - began, peak, process.returncode


def main() -> int:
    """Generate, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the input (default: 1024)")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--data", help="use this file; it is generated there when it does not exist")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        data, out = Path(args.data or Path(folder, "data.jsonl")), Path(folder, "clean.jsonl")
        if not data.exists():
            generate(data, args.mib)
        with open(data, "rb") as stream:
            records = sum(1 for _ in stream)
        script = str(ROOT / "data_preprocessor.py")
        seconds, peak, code = measure([sys.executable, script, str(data), "--out", str(out), "--json", *more])
        result = {
            "input_mib": round(data.stat().st_size / 2**20, 1),
            "records": records,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), 1) if resource else None,
            "mib_per_s": round(data.stat().st_size / 2**20 / seconds, 1),
            "peak_rss_mib": round(peak / 2**20),
            "cores": os.cpu_count(),
            "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "exit_code": code,
            "output_lines": out.read_bytes().count(b"\n") if out.exists() and args.mib <= 256 else None,
        }
        print(json.dumps(result))
        return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
