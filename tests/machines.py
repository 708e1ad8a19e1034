"""Recorded machines made by hand in a test: {kind: text} or {kind: (text, exit code)}."""

import json


def machine(folder, variables=None, **answers):
    """Write a recording into `folder` and return its path. Keyword `kinds` is a dict of kind → text or (text, code)."""
    kinds = answers.pop("kinds", {})
    folder.mkdir(parents=True, exist_ok=True)
    inputs = []
    for number, (kind, answer) in enumerate(kinds.items()):
        text, code = answer if isinstance(answer, tuple) else (answer, 0)
        name = f"{number:02d}.txt"
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        inputs.append({"file": name, "kind": kind, "exit_code": code})
    case = {"schema": 1, "inputs": inputs, "variables": variables or {}}
    (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
    return folder
