"""Asks a server that speaks OpenAI's chat-completions protocol, one sample at a time, and times every piece.

Arguments: results file, job file (JSON). The job: base_url, model, samples [{key, messages, tools, max_new_tokens}],
temperature, seed, sample_timeout_s, debug, key_variable (the environment variable that holds the key; never written).
Standard library only.
"""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

BEGAN = time.time()


def step(name, **facts):
    facts["step"] = name
    text = json.dumps(facts)
    key = secret()
    if key:
        text = text.replace(json.dumps(key)[1:-1], "<token>")
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(text + "\n")


def load_job():
    with open(sys.argv[2], encoding="utf-8") as stream:
        return json.load(stream)


JOB = {}


def secret():
    return os.environ.get(JOB.get("key_variable") or "", "").strip()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return None


class Refused(Exception):
    def __init__(self, status, body, retry_after=None):
        super().__init__("HTTP %s: %s" % (status, " ".join(body.split())[:600]))
        self.status, self.body, self.retry_after = status, body, retry_after


def opener(url):
    host = urllib.parse.urlsplit(url).hostname or ""
    handlers = [NoRedirect()]
    if host in ("localhost", "::1") or host.startswith("127."):
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def open_url(path, body, timeout_s):
    url = JOB["base_url"].rstrip("/") + path
    headers = {"Accept": "application/json", "User-Agent": "finetune-preflight"}
    if secret():
        headers["Authorization"] = "Bearer " + secret()
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        return opener(url).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        retry = error.headers.get("Retry-After") if error.headers else None
        raise Refused(error.code, error.read(4000).decode("utf-8", "replace"), retry) from None


def pieces(response, deadline):
    """The events of a streamed answer, or the one document of an answer that is not streamed."""
    if "event-stream" not in (response.headers.get("Content-Type") or ""):
        document = json.loads(response.read(32 << 20).decode("utf-8", "replace"))
        yield document, False
        return
    for raw in response:
        if time.perf_counter() > deadline:
            raise socket.timeout("the answer is not finished after its time limit")
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue
        line = line[5:].strip()
        if line == "[DONE]":
            return
        yield json.loads(line), True


def add_tool_calls(calls, delta):
    for part in delta.get("tool_calls") or []:
        slot = calls.setdefault(part.get("index", len(calls)), {"name": "", "arguments": ""})
        function = part.get("function") or {}
        slot["name"] += function.get("name") or ""
        arguments = function.get("arguments")
        slot["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments) if arguments else ""


def as_text(text, calls):
    for index in sorted(calls):
        call = calls[index]
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            arguments = call["arguments"]
        text = (text + "\n" + json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False)).strip()
    return text


# Old and new servers know different parameters: what one complains about is left out or renamed, once for all samples.
LEFT_OUT = set()


def request_body(sample):
    body = {"model": JOB["model"], "messages": sample["messages"], "stream": True}
    limit = "max_completion_tokens" if "max_tokens" in LEFT_OUT else "max_tokens"
    body[limit] = sample["max_new_tokens"]
    body["temperature"] = JOB.get("temperature") or 0
    body["seed"] = JOB.get("seed", 0)
    body["stream_options"] = {"include_usage": True}
    if JOB.get("no_thinking"):  # vLLM, SGLang and llama.cpp's server hand this to the chat template
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if sample.get("tools"):
        body["tools"] = sample["tools"]
    for name in LEFT_OUT:
        if name != "max_tokens":
            body.pop(name, None)
    return body


def send(sample, deadline):
    for attempt in range(6):
        left = deadline - time.perf_counter()
        if left <= 0:
            raise socket.timeout("no answer within the time limit")
        began = time.perf_counter()
        try:
            return open_url("/chat/completions", request_body(sample), left), began
        except Refused as error:
            names = ("stream_options", "seed", "temperature", "max_tokens", "tools", "chat_template_kwargs")
            blamed = [n for n in names if error.status in (400, 422) and n in error.body and n not in LEFT_OUT]
            if blamed:
                LEFT_OUT.add(blamed[0])
                continue
            if error.status in (429, 503) and attempt < 5:
                try:
                    pause = float(error.retry_after or 2**attempt)
                except ValueError:
                    pause = 2.0**attempt
                if time.perf_counter() + pause < deadline:
                    time.sleep(pause)
                    continue
            raise
    raise Refused(0, "the server kept refusing parameters: %s" % sorted(LEFT_OUT))


def answer(sample):
    limit_s = JOB.get("sample_timeout_s", 120)
    deadline = time.perf_counter() + limit_s
    text, calls, times, usage, finish, streamed = "", {}, [], {}, None, False
    response, began = send(sample, deadline)
    with response:
        for document, streamed in pieces(response, deadline):
            if document.get("error"):
                raise Refused(200, json.dumps(document["error"]))
            usage = document.get("usage") or usage
            for choice in (document.get("choices") or [])[:1]:
                delta = choice.get("delta") if streamed else choice.get("message")
                delta = delta or {}
                if delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"):
                    times.append(time.perf_counter())
                text += delta.get("content") or ""
                add_tool_calls(calls, delta)
                finish = choice.get("finish_reason") or finish
    seconds = time.perf_counter() - began
    counted = usage.get("completion_tokens")
    tokens = counted if isinstance(counted, int) else (len(times) if streamed else None)
    span = times[-1] - times[0] if len(times) > 1 else None
    facts = {
        "output": as_text(text, calls),
        "finish": {"length": "length", "max_tokens": "length"}.get(finish, "stop"),
        "rendered": "by the server",
        "prompt_tokens": usage.get("prompt_tokens"),
        "new_tokens": tokens,
        "tokens_counted_by": "server" if isinstance(counted, int) else "pieces of the stream",
        "seconds": round(seconds, 4),
        "first_token_s": round(times[0] - began, 4) if times and streamed else None,
        "per_token_s": round(span / (tokens - 1), 5) if span is not None and tokens and tokens > 1 else None,
    }
    if JOB.get("debug"):
        facts["prompt"] = json.dumps(sample["messages"], ensure_ascii=False)
        facts["raw_output"] = text
    return facts


def first_model():
    with open_url("/models", None, 20) as response:
        listed = json.loads(response.read(4 << 20).decode("utf-8", "replace"))
    names = [item.get("id") for item in listed.get("data") or [] if item.get("id")]
    if len(names) != 1:
        raise ValueError("the server has %d models (%s): name one with --model" % (len(names), ", ".join(names[:5])))
    return names[0]


def main():
    JOB.update(load_job())
    began = time.time()
    try:
        if not JOB.get("model"):
            JOB["model"] = first_model()
    except Exception as error:
        step("failed", during="connect", error=type(error).__name__, message=str(error)[:2000])
        return 1
    loaded = False
    for sample in JOB["samples"]:
        if not loaded:  # the first request may load the model: it is asked for two tokens and not counted
            try:
                answer(dict(sample, max_new_tokens=2))
            except Refused as error:
                if error.status in (401, 403, 404, 301, 302, 307, 308):
                    step("failed", during="connect", error="HTTP %s" % error.status, message=str(error)[:2000])
                    return 1
            except (OSError, ValueError) as error:
                if not isinstance(error, socket.timeout):
                    step("failed", during="connect", error=type(error).__name__, message=str(error)[:2000])
                    return 1
            step("load", seconds=round(time.time() - began, 2), model=JOB["model"], device="server")
            loaded = True
        try:
            step("sample", key=sample["key"], **answer(sample))
        except socket.timeout as error:
            limit_s = JOB.get("sample_timeout_s", 120)
            step("sample", key=sample["key"], error="time-out", message="%s (%g s)" % (error, limit_s))
        except Exception as error:
            step("sample", key=sample["key"], error=type(error).__name__, message=str(error)[:2000])
    step("done", seconds=round(time.time() - BEGAN, 2), left_out=sorted(LEFT_OUT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
