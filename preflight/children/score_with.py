"""Judges outputs with the user's own function `score(output, record)`.

Arguments: results file, Python file with the function, job file (JSON): {"items": [{"key", "output", "record"}],
"limit_s"}. The function returns true or false, or a number from 0 to 1 (0.5 passes), or such a value and a reason.
"""

import importlib.util
import json
import os
import sys
import threading


def step(name, **facts):
    facts["step"] = name
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


def load_function(path):
    spec = importlib.util.spec_from_file_location("own_scorer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def read_result(result):
    reason = ""
    if isinstance(result, tuple):
        result, reason = result
    if isinstance(result, bool) or result in (0, 1):
        return bool(result), float(result), str(reason)
    value = float(result)
    if not 0 <= value <= 1:
        raise ValueError("score() returned %r; allowed: true, false, or a number from 0 to 1" % (result,))
    return value >= 0.5, value, str(reason)


def give_up(key, limit_s):
    step("score", key=key, error="time-out", message="score() took longer than %g s" % limit_s)
    os._exit(4)


def main():
    with open(sys.argv[3], encoding="utf-8") as stream:
        job = json.load(stream)
    try:
        function = load_function(sys.argv[2])
    except Exception as error:
        step("failed", error=type(error).__name__, message=str(error)[:1000])
        return 1
    for item in job["items"]:
        timer = threading.Timer(job["limit_s"], give_up, [item["key"], job["limit_s"]])
        timer.daemon = True
        timer.start()
        try:
            passed, value, reason = read_result(function(item["output"], item["record"]))
            step("score", key=item["key"], passed=passed, value=value, reason=reason[:500])
        except Exception as error:
            step("score", key=item["key"], error=type(error).__name__, message=str(error)[:500])
        finally:
            timer.cancel()
    step("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
