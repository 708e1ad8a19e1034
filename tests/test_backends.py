"""The children that get answers: a real HTTP server with every bad habit, real broken interpreters, killed children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from preflight.machine import Machine, RecordedMachine, RecordingMachine
from preflight.task import backends
from preflight.task.backends import Request

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-test-0123456789abcdef"


class Handler(BaseHTTPRequestHandler):
    """Answers `/HABIT/v1/chat/completions`; the habit says what is odd about this server."""

    seen: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    busy: ClassVar[dict[str, int]] = {}

    def log_message(self, *arguments: Any) -> None:
        pass

    def send(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        names = ["one"] if "single" in self.path else ["one", "two"]
        self.send(200, {"data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen.append(body)
        Handler.keys.append(self.headers.get("Authorization"))
        habit = self.path.split("/")[1]
        text = "The answer is " + body["messages"][-1]["content"].upper()
        message = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        if habit == "key" and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.send(401, {"error": {"message": f"bad key {self.headers.get('Authorization')}"}})
        elif habit == "echo-key":
            self.send(500, {"error": f"internal: your header was {self.headers.get('Authorization')}"})
        elif habit == "redirect":
            self.send(307, b"", Location="http://127.0.0.1:1/elsewhere")
        elif habit == "missing":
            self.send(404, {"error": "no such model"})
        elif habit == "page":
            self.send(200, b"<html>a login page</html>", "text/html")
        elif habit == "busy" and Handler.busy.setdefault("count", 0) < 2:
            Handler.busy["count"] += 1
            self.send(429, {"error": "slow down"}, Retry_After="0.05")
        elif habit == "old" and {"stream_options", "seed"} & body.keys():
            self.send(400, {"error": "unknown field stream_options" if "stream_options" in body else "unknown: seed"})
        elif habit == "new" and "max_tokens" in body:
            self.send(400, {"error": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."})
        elif habit == "slow" and body["messages"][-1]["content"] == "late":
            time.sleep(5)
        elif habit == "plain":
            self.send(200, {**message, "usage": {"completion_tokens": 4, "prompt_tokens": 7}})
        elif habit == "tools":
            call = {"function": {"name": "f", "arguments": '{"a": 1}'}, "id": "1", "type": "function"}
            self.send(200, {"choices": [{"message": {"content": None, "tool_calls": [call]}}]})
        else:
            self.stream(text, "stream_options" in body)

    def stream(self, text: str, usage: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in text.split(" "):
            piece = {"choices": [{"delta": {"content": word + " "}}]}
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.01)
        last: list[dict[str, Any]] = [{"choices": [{"delta": {}, "finish_reason": "length"}]}]
        if usage:
            last.append({"choices": [], "usage": {"completion_tokens": 11, "prompt_tokens": 5}})
        for piece in last:
            self.wfile.write(b": a comment\n\ndata: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(
    address: str,
    habit: str,
    *questions: str,
    model: str | None = "m",
    key: str = "",
    machine: Machine | None = None,
    **job: Any,
) -> backends.Run:
    requests = [
        Request(f"k{number}", 16, [{"role": "user", "content": question}])
        for number, question in enumerate(questions or ("x",))
    ]
    given = {"model": model, "base_url": f"{address}/{habit}/v1", "key_variable": "EXAM_KEY", "sample_timeout_s": 10}
    os.environ["EXAM_KEY"] = key
    Handler.seen.clear()
    Handler.keys.clear()
    try:
        return backends.generate(machine or Machine(), "server", sys.executable, {**given, **job}, requests)
    finally:
        del os.environ["EXAM_KEY"]


def test_a_streaming_server_is_timed_and_its_tokens_are_counted(address: str) -> None:
    run = ask(address, "stream", "a", "b", temperature=0.5, seed=7)
    assert run.trouble == "" and list(run.replies) == ["k0", "k1"]
    reply = run.replies["k0"]
    assert (reply.output.strip(), reply.finish) == ("The answer is A", "length")
    assert (reply.new_tokens, reply.prompt_tokens) == (11, 5)
    assert reply.seconds is not None and reply.first_token_s is not None and reply.per_token_s is not None
    assert 0 < reply.first_token_s <= reply.seconds
    body = Handler.seen[1]
    assert (body["temperature"], body["seed"], body["max_tokens"], body["model"]) == (0.5, 7, 16, "m")
    assert Handler.seen[0]["max_tokens"] == 2  # the warm-up, which is not counted


def test_a_server_that_does_not_stream_has_no_time_to_first_token(address: str) -> None:
    reply = ask(address, "plain").replies["k0"]
    assert reply.output == "The answer is X" and reply.new_tokens == 4
    assert reply.first_token_s is None and reply.per_token_s is None and reply.seconds is not None


def test_parameters_that_a_server_does_not_know_are_left_out(address: str) -> None:
    assert ask(address, "old").replies["k0"].output.strip() == "The answer is X"
    assert "max_completion_tokens" not in Handler.seen[-1]
    assert ask(address, "new").replies["k0"].output.strip() == "The answer is X"
    assert Handler.seen[-1]["max_completion_tokens"] == 16


def test_a_busy_server_is_asked_again(address: str) -> None:
    Handler.busy.clear()
    assert ask(address, "busy").replies["k0"].finish == "length"
    assert Handler.busy["count"] == 2


def test_tool_calls_become_text_that_can_be_judged(address: str) -> None:
    assert json.loads(ask(address, "tools").replies["k0"].output) == {"name": "f", "arguments": {"a": 1}}


def test_the_only_model_of_a_server_needs_no_name(address: str) -> None:
    run = ask(address, "single", model=None)
    assert run.load["model"] == "one"
    several = ask(address, "many", model=None)
    assert several.trouble == "failed" and "one, two" in several.failure["message"]


def test_a_key_is_sent_and_never_written(address: str, tmp_path: Path) -> None:
    assert ask(address, "key", key=KEY).trouble == ""
    assert set(Handler.keys) == {f"Bearer {KEY}"}
    refused = ask(address, "key", key="sk-wrong-0123456789abcdef")
    assert refused.trouble == "failed" and "401" in refused.failure["message"]
    assert "sk-wrong" not in json.dumps(refused.failure) and "<token>" in refused.failure["message"]
    recording = RecordingMachine(tmp_path / "machine", "task_evaluator")
    shown = ask(address, "echo-key", key=KEY, machine=recording)
    assert KEY not in json.dumps([shown.failure, [reply.error for reply in shown.replies.values()]])
    assert all(KEY not in path.read_text() for path in (tmp_path / "machine").iterdir())


@pytest.mark.parametrize("habit", ["redirect", "missing"])
def test_a_server_that_refuses_is_a_failed_connection(address: str, habit: str) -> None:
    run = ask(address, habit, key=KEY)
    assert run.trouble == "failed" and run.failure["during"] == "connect" and "HTTP" in run.failure["message"]


def test_a_web_page_is_no_answer(address: str) -> None:
    run = ask(address, "page")
    assert run.trouble == "failed" and run.failure["during"] == "connect"


def test_no_server_at_all_is_a_failed_connection() -> None:
    run = ask("http://127.0.0.1:9", "x")
    assert run.trouble == "failed" and run.failure["during"] == "connect"


def test_one_late_answer_does_not_stop_the_others(address: str) -> None:
    run = ask(address, "slow", "a", "late", "b", sample_timeout_s=1)
    assert [reply.finish for reply in run.replies.values()] == ["length", "time-out", "length"]


def test_a_recorded_run_answers_again_without_the_server(address: str, tmp_path: Path) -> None:
    live = ask(address, "stream", "a", "b", machine=RecordingMachine(tmp_path / "machine", "task_evaluator"))
    again = ask("http://127.0.0.1:9", "gone", "a", "b", machine=RecordedMachine(tmp_path / "machine"))
    assert again.replies == live.replies and again.trouble == ""


# ---------------------------------------------------------------------------------------------------------------------


def generate(folder: Path, modules: dict[str, str], backend: str = "transformers") -> backends.Run:
    """Run a child with stand-in modules first on its path; three prompts."""
    folder = Path(tempfile.mkdtemp(dir=folder))  # a stale .pyc of an earlier stand-in would be taken for the new one
    for name, code in modules.items():
        (folder / name).write_text(code)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(folder)
    try:
        job = {"model": str(folder / "config.json"), "sample_timeout_s": 0.5, "grace_s": 0.5}
        if backend == "transformers":
            job["model"] = str(folder)
        requests = [Request(f"k{number}", 4, [{"role": "user", "content": f"q{number}"}]) for number in range(3)]
        return backends.generate(Machine(), backend, sys.executable, job, requests)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


LIBRARY = """
import time
__version__ = "0"
def llama_supports_gpu_offload(): return False
class Llama:
    metadata, n_tokens, input_ids = {}, 0, []
    def __init__(self, path, **settings): pass
    def reset(self): pass
    def n_ctx(self): return 2048
    def tokenize(self, text, **settings): return text.split()
    def create_chat_completion(self, messages, **settings):
        question = messages[-1]["content"]
        for piece in ("It ", "is ", question):
            if question == "q1" and HANGS: time.sleep(60)
            if question == "q1" and CRAWLS: time.sleep(0.4)
            if question == "q1" and FAILS: raise RuntimeError("boom")
            yield {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
"""


def library(hangs: bool = False, crawls: bool = False, fails: bool = False) -> dict[str, str]:
    code = f"HANGS, CRAWLS, FAILS = {hangs}, {crawls}, {fails}\n" + LIBRARY
    return {"llama_cpp.py": code, "config.json": "{}"}


def test_an_answer_that_hangs_inside_a_library_ends_the_run_and_keeps_the_rest(tmp_path: Path) -> None:
    run = generate(tmp_path, library(hangs=True), "llama.cpp")
    assert run.trouble == "died" and run.exit_code == 4
    assert run.replies["k0"].output == "It is q0"
    assert run.replies["k1"].finish == "time-out" and "k2" not in run.replies


def test_a_slow_or_failing_answer_does_not_stop_the_others(tmp_path: Path) -> None:
    slow = generate(tmp_path, library(crawls=True), "llama.cpp")
    assert [reply.finish for reply in slow.replies.values()] == ["stop", "time-out", "stop"]
    assert slow.trouble == ""
    failing = generate(tmp_path, library(fails=True), "llama.cpp")
    assert failing.replies["k1"].error == "RuntimeError: boom" and failing.replies["k2"].output == "It is q2"


@pytest.mark.parametrize(
    ("code", "trouble", "word"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "failed", "libcudart"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died", ""),
        ("raise SystemExit('no torch for you')", "died", ""),
    ],
)
def test_a_torch_that_breaks_is_named(tmp_path: Path, code: str, trouble: str, word: str) -> None:
    run = generate(tmp_path, {"torch.py": code})
    assert run.trouble == trouble and word in str(run.failure.get("message", ""))
    assert not run.replies


@pytest.mark.slow
def test_a_directory_without_a_model_is_a_failed_load(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = generate(tmp_path, {"config.json": "{}"})
    assert run.trouble == "failed" and run.failure["during"] == "load"


@pytest.mark.skipif(os.name == "nt", reason="a link to the interpreter")
def test_an_interpreter_may_be_named_relative_to_here(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    job = {"model": "m", "base_url": f"{address}/plain/v1", "sample_timeout_s": 10}
    request = Request("k", 4, [{"role": "user", "content": "x"}])
    assert backends.generate(Machine(), "server", "./python", job, [request]).replies["k"].output == "The answer is X"


def test_an_interpreter_that_is_not_there_is_an_answer() -> None:
    run = backends.generate(Machine(), "transformers", "/no/such/python", {"model": "m"}, [Request("k", 1, prompt="p")])
    assert run.trouble == "absent"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_exam_that_is_ended_keeps_what_it_has(
    address: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    Handler.seen.clear()
    data = tmp_path / "data.jsonl"
    records = [{"id": str(n), "question": "late" if n == 2 else f"q{n}", "keywords": [f"Q{n}"]} for n in range(4)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [
        sys.executable, str(ROOT / "task_evaluator.py"), "--base-url", f"{address}/slow/v1", "--model", "m",
        "--data", str(data), "--report", str(tmp_path / "r.md"), "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not any(body["messages"][-1]["content"] == "late" for body in Handler.seen) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    section = json.loads(out)
    assert (section["observed"]["tasks"][0]["k"], section["observed"]["tasks"][0]["n"]) == (2, 2)
    assert section["observed"]["tasks"][0]["not_run"] == 2
    assert "exam-interrupted" in [item["code"] for item in section["findings"]]
    assert "2 of 2" in (tmp_path / "r.md").read_text()
