"""Generates one answer per sample with llama-cpp-python from a GGUF file, one at a time, and times every token.

Arguments: results file, job file (JSON): model (path of the GGUF file), samples [{key, messages | prompt, tools,
max_new_tokens}], temperature, seed, sample_timeout_s, debug.
"""

import json
import os
import sys
import threading
import time

BEGAN = time.time()


def step(name, **facts):
    facts["step"] = name
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


class Watchdog:
    """Ends the process when one sample hangs inside the library, where no Python code can stop it."""

    def __init__(self, grace_s):
        self.grace_s, self.timer = grace_s, None

    def begin(self, key, limit_s):
        self.timer = threading.Timer(limit_s + self.grace_s, self.give_up, [key, limit_s])
        self.timer.daemon = True
        self.timer.start()

    def end(self):
        self.timer.cancel()

    @staticmethod
    def give_up(key, limit_s):
        step("sample", key=key, error="time-out", message="no token within %g s; generation hangs" % limit_s)
        os._exit(4)


def needed_context(samples):
    """Tokens that the longest sample can take: no tokenizer makes more tokens than there are bytes."""
    longest = 0
    for sample in samples:
        text = sample.get("prompt") or json.dumps([sample.get("messages"), sample.get("tools")], ensure_ascii=False)
        longest = max(longest, len(text.encode()) // 2 + sample["max_new_tokens"] + 256)
    return max(2048, longest)


def message_for(messages):
    """llama-cpp-python's template code expects text in every turn."""
    turns = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
        turns.append(dict(message, content=content or ""))
    return turns


def answer(llm, sample, job):
    began = time.perf_counter()
    limit_s = job.get("sample_timeout_s", 120)
    settings = {
        "max_tokens": sample["max_new_tokens"],
        "temperature": job.get("temperature") or 0.0,
        "seed": job.get("seed", 0),
        "stream": True,
    }
    llm.reset()  # without it the shared beginning of two prompts is not computed again, which flatters the latency
    if sample.get("prompt") is not None:
        stream = llm.create_completion(sample["prompt"], **settings)
    else:
        if sample.get("tools"):
            settings["tools"] = sample["tools"]
        stream = llm.create_chat_completion(message_for(sample["messages"]), **settings)
    text, times, finish = "", [], "stop"
    for chunk in stream:
        choice = chunk["choices"][0]
        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if piece:
            times.append(time.perf_counter())
            text += piece
        finish = choice.get("finish_reason") or finish
        if time.perf_counter() - began > limit_s:
            finish = "time-out"
            break
    seconds = time.perf_counter() - began
    tokens = len(llm.tokenize(text.encode(), add_bos=False, special=False)) if text else 0
    span = times[-1] - times[0] if len(times) > 1 else None
    facts = {
        "output": text,
        "finish": finish if finish in ("length", "time-out") else "stop",
        "rendered": "as given" if sample.get("prompt") is not None else "chat template of the GGUF file",
        # The last token that the limit allows is sampled but no longer put into the context.
        "prompt_tokens": max(0, llm.n_tokens - tokens + (1 if finish == "length" else 0)),
        "new_tokens": tokens,
        "seconds": round(seconds, 4),
        "first_token_s": round(times[0] - began, 4) if times else None,
        "per_token_s": round(span / (len(times) - 1), 5) if span is not None else None,
    }
    if job.get("debug"):
        facts["prompt_ids"] = [int(token) for token in llm.input_ids[: facts["prompt_tokens"]]]
        facts["prompt"] = llm.detokenize(facts["prompt_ids"], special=True).decode("utf-8", "replace")
        facts["output_ids"] = [int(token) for token in llm.input_ids[facts["prompt_tokens"] : llm.n_tokens]]
        facts["raw_output"] = text
    return facts


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        job = json.load(stream)
    try:
        import llama_cpp

        step("import llama_cpp", version=llama_cpp.__version__, seconds=round(time.time() - BEGAN, 2))
    except Exception as error:
        step("failed", during="import", error=type(error).__name__, message=str(error)[:2000])
        return 1
    began = time.time()
    try:
        llm = llama_cpp.Llama(
            job["model"],
            n_ctx=needed_context(job["samples"]),
            n_gpu_layers=-1,
            n_threads=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
            seed=job.get("seed", 0),
            verbose=False,
        )
    except Exception as error:
        step("failed", during="load", error=type(error).__name__, message=str(error)[:2000])
        return 1
    metadata = llm.metadata or {}
    step(
        "load",
        seconds=round(time.time() - began, 2),
        architecture=metadata.get("general.architecture"),
        parameters=None,
        device="gpu" if llama_cpp.llama_supports_gpu_offload() else "cpu",
        dtype=None,
        quantised="GGUF file type %s" % metadata.get("general.file_type"),
        chat_template="tokenizer.chat_template" in metadata,
        context_tokens=llm.n_ctx(),
        weights_bytes=os.path.getsize(job["model"]),
    )
    watchdog = Watchdog(job.get("grace_s", 30))
    for number, sample in enumerate(job["samples"]):
        if number == 0:
            try:
                answer(llm, dict(sample, max_new_tokens=2), job)
            except Exception as error:
                step("warm-up", error=type(error).__name__, message=str(error)[:500])
        watchdog.begin(sample["key"], job.get("sample_timeout_s", 120))
        try:
            facts = answer(llm, sample, job)
        except Exception as error:
            facts = {"error": type(error).__name__, "message": str(error)[:2000]}
        watchdog.end()
        step("sample", key=sample["key"], **facts)
    step("done", seconds=round(time.time() - BEGAN, 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
