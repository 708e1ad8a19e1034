"""A model by its hub id, from a server on this machine that speaks the hub's file routes."""

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import model_analyzer
from preflight.model import hub

pytest.importorskip("huggingface_hub")
COMMIT = "a" * 40
SOURCE = Path(__file__).parent / "configs" / "HuggingFaceTB__SmolLM2-135M" / "config.json"
FILES = {
    "config.json": SOURCE.read_bytes(),
    "tokenizer_config.json": json.dumps(
        {"eos_token": "</s>", "chat_template": "{{ messages[0]['content'] }}"}
    ).encode(),
    "README.md": b"# not fetched",
    "modeling_evil.py": b"raise SystemExit('must not run')\n",
}
BIG = {"model.safetensors": 269_060_552}


class Hub(BaseHTTPRequestHandler):
    """Routes: /api/models/OWNER/NAME and /OWNER/NAME/resolve/REVISION/FILE."""

    asked: list[str] = []  # noqa: RUF012 (shared on purpose: what was asked of the server)

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append(path)
        if "slow/" in path:
            time.sleep(30)
        if "missing/" in path:
            return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        if "gated/" in path and self.headers.get("Authorization") != "Bearer hf_right":
            return self.answer(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            names = [{"rfilename": n, "size": len(d)} for n, d in FILES.items()]
            names += [{"rfilename": n, "size": size} for n, size in BIG.items()]
            body = json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": names, "tags": []}).encode()
            return self.answer(200, body, Content_Type="application/json")
        data = FILES.get(path.rsplit("/", 1)[-1])
        if data is None:
            return self.answer(404, b"", X_Error_Code="EntryNotFound")
        return self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    Hub.asked.clear()
    with serving() as address:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield address


def analyse(name, capsys):
    code = model_analyzer.main([name, "--json"])
    section = json.loads(capsys.readouterr().out)
    return code, section, {one["code"]: one for one in section["findings"]}


def test_only_the_small_files_of_a_model_are_fetched(endpoint, capsys):
    code, section, found = analyse("someone/small-model", capsys)
    assert code == 0
    assert section["observed"]["params"] == 134_515_008
    assert section["observed"]["model_name"] == "someone/small-model"
    assert section["observed"]["weight_bytes"] == 269_060_552
    assert found["weights-on-hub"]["level"] == "ok"
    asked = [path for path in Hub.asked if "resolve" in path]
    assert not any(path.endswith((".safetensors", ".md")) for path in asked)
    assert any(path.endswith("config.json") for path in asked)


def test_the_cache_answers_when_the_hub_is_switched_off(endpoint, capsys, monkeypatch):
    analyse("someone/small-model", capsys)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Hub.asked.clear()
    _, section, _ = analyse("someone/small-model", capsys)
    assert section["observed"]["params"] == 134_515_008
    assert Hub.asked == []


def test_offline_without_a_cache_is_answered_at_once(endpoint, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    code, _, found = analyse("someone/other-model", capsys)
    assert code == 3 and found["hub-offline"]["fix"]
    assert time.monotonic() - began < 20


def test_a_gated_model_says_how_to_get_access(endpoint, capsys):
    code, _, found = analyse("gated/model", capsys)
    assert code == 1
    assert "hf auth login" in found["hub-model-gated"]["fix"][0]


def test_a_gated_model_opens_with_the_right_token(endpoint, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    code, section, _ = analyse("gated/model", capsys)
    assert code == 0 and section["observed"]["params"] == 134_515_008


def test_a_model_that_does_not_exist(endpoint, capsys):
    code, _, found = analyse("missing/model", capsys)
    assert code == 1 and found["hub-model-missing"]["fix"]


@pytest.mark.slow
def test_a_slow_hub_is_given_up(endpoint, capsys, monkeypatch):
    monkeypatch.setattr(hub, "LIMIT_S", 6.0)
    began = time.monotonic()
    code, _, found = analyse("slow/model", capsys)
    assert code == 3 and found["hub-timeout"]["why"]
    assert time.monotonic() - began < 40


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert hub.is_hub_id("owner/name-1.5")
    assert not hub.is_hub_id("a/b")  # a directory here
    for name in ("/abs/path", "./x", "one", "a/b/c", "../up", "a b/c"):
        assert not hub.is_hub_id(name)
