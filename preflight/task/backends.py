"""Where the answers come from: transformers, llama.cpp or a server. Each runs in a child that times every token."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.findings import say
from preflight.machine import Answer, Machine

CHILD = {"transformers": "generate", "llama.cpp": "generate_gguf", "server": "ask_server"}
NEEDS = {"transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp",), "server": ()}
# Loading a large model from a slow disk takes minutes.
LOAD_LIMIT_S = 1800


@dataclass(frozen=True)
class Request:
    """One prompt. `key` is unique within a run; `messages` in OpenAI's form, or `prompt` as ready text."""

    key: str
    max_new_tokens: int
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None

    def as_json(self) -> dict[str, Any]:
        """As the children read it."""
        made: dict[str, Any] = {"key": self.key, "max_new_tokens": self.max_new_tokens}
        for name in ("messages", "prompt", "tools"):
            if getattr(self, name) is not None:
                made[name] = getattr(self, name)
        return made


@dataclass(frozen=True)
class Reply:
    """What came back for one request. Times in seconds, None when they could not be taken.

    `finish`: stop, length (the limit of new tokens was reached), time-out or error; `error` says what happened then.
    """

    key: str
    output: str = ""
    finish: str = "stop"
    error: str = ""
    seconds: float | None = None
    first_token_s: float | None = None
    per_token_s: float | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    rendered: str = ""
    debug: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One run of a child: its replies by key, what it said about the model, and how it ended.

    `trouble`: "" or one of failed (the child said why), died, timeout, interrupted (Ctrl-C), terminated (SIGTERM, by
    a container or job system), not-recorded, absent.
    """

    replies: dict[str, Reply] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    exit_code: int | None = None
    errors: str = ""


def generate(
    machine: Machine,
    backend: str,
    python: str,
    job: Mapping[str, Any],
    requests: Sequence[Request],
    on_reply: Callable[[Reply], None] | None = None,
) -> Run:
    """Let the child answer all requests. Ctrl-C and SIGTERM end it and keep what is there.

    `job`: model, base_url, device, dtype, load_in_4bit, trust_remote_code, temperature, seed, sample_timeout_s, debug,
    key_variable: what the child's docstring names.
    """
    lines: list[dict[str, Any]] = []

    def take(line: dict[str, Any]) -> None:
        lines.append(line)
        if line.get("step") == "load":
            say(f"model loaded in {line.get('seconds')} s ({line.get('device')}); answering {len(requests)} prompts")
        elif line.get("step") == "sample" and on_reply is not None:
            on_reply(read_reply(line))

    limit_s = LOAD_LIMIT_S + len(requests) * (float(job.get("sample_timeout_s", 120)) + 1)
    environment = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if job.get("model") and Path(str(job["model"])).exists():
        environment["HF_HUB_OFFLINE"] = "1"  # a local model needs nothing from the hub; asking it can hang
    with tempfile.TemporaryDirectory(prefix="preflight-exam-") as folder:
        path = os.path.join(folder, "job.json")
        document = {**job, "samples": [request.as_json() for request in requests]}
        # A lone surrogate in the data would be no valid UTF-8; ASCII escapes carry it through.
        Path(path).write_text(json.dumps(document), encoding="ascii")
        answer: Answer | None = None
        ended_by = ""
        try:
            answer = machine.ask(
                CHILD[backend],
                from_anywhere(python),
                [path],
                timeout_s=limit_s,
                env=environment,
                on_line=take,
                cwd=folder,
            )
        except KeyboardInterrupt:
            ended_by = "interrupted"
        except SystemExit:  # what SIGTERM becomes, see console.py
            ended_by = "terminated"
    run = read_run(lines if answer is None else answer.lines_of_json())
    if answer is not None:
        run.exit_code, run.errors = answer.exit_code, answer.errors[-4000:]
    if ended_by:
        run.trouble = ended_by
    elif run.failure:
        run.trouble = "failed"
    elif answer is not None and answer.trouble:
        run.trouble = answer.trouble
    elif "done" not in run.steps:
        run.trouble = "died"
    return run


def read_run(lines: Sequence[Mapping[str, Any]]) -> Run:
    """The run that a child's lines tell of."""
    run = Run()
    for line in lines:
        name = str(line.get("step"))
        if name == "sample":
            reply = read_reply(line)
            run.replies[reply.key] = reply
            continue
        run.steps.append(name)
        facts = {key: value for key, value in line.items() if key != "step"}
        if name == "load":
            run.load = facts
        elif name == "failed":
            run.failure = facts
        elif name.startswith("import ") and facts.get("version"):
            run.versions[name.removeprefix("import ")] = str(facts["version"])
    return run


_DEBUG = ("prompt", "prompt_ids", "output_ids", "raw_output")


def read_reply(line: Mapping[str, Any]) -> Reply:
    """One sample's line."""
    error = str(line.get("error") or "")
    if error:
        message = str(line.get("message") or "")
        finish = "time-out" if error == "time-out" else "error"
        return Reply(str(line.get("key")), finish=finish, error=f"{error}: {message}" if message else error)
    return Reply(
        key=str(line.get("key")),
        output=str(line.get("output") or ""),
        finish=str(line.get("finish") or "stop"),
        error="",
        seconds=_number(line.get("seconds")),
        first_token_s=_number(line.get("first_token_s")),
        per_token_s=_number(line.get("per_token_s")),
        prompt_tokens=_whole(line.get("prompt_tokens")),
        new_tokens=_whole(line.get("new_tokens")),
        rendered=str(line.get("rendered") or ""),
        debug={name: line[name] for name in _DEBUG if name in line},
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def backend_for(model: str, base_url: str | None) -> str:
    """The backend that a model's form asks for: an address, a GGUF file, else transformers."""
    if base_url:
        return "server"
    return "llama.cpp" if model.lower().endswith(".gguf") else "transformers"


def from_anywhere(python: str) -> str:
    """The interpreter's path as it can be started from another folder; links are kept (a venv's python is one)."""
    return os.path.abspath(python) if os.path.dirname(python) else python
