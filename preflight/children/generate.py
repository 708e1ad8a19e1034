"""Generates one answer per sample with transformers, one at a time, and times every token.

Arguments: results file, job file (JSON). The job: model, samples [{key, messages | prompt, tools, max_new_tokens}],
device, dtype, load_in_4bit, trust_remote_code, temperature, seed, sample_timeout_s, debug.
"""

import importlib.util
import json
import os
import sys
import threading
import time

BEGAN = time.time()
NEXT_QUESTION = "\nQuestion:"


def step(name, **facts):
    facts["step"] = name
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


class Watchdog:
    """Ends the process when one sample hangs inside a library, where no Python code can stop it."""

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


def available_bytes():
    """What this process may still allocate (RAM), or None."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def allowed_threads():
    """CPUs that this process may use, a container's quota included; None when it could not be told."""
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as stream:
            quota, period = stream.read().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def weights_bytes(folder):
    try:
        names = [n for n in os.listdir(folder) if n.endswith((".safetensors", ".bin"))]
        return sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    except OSError:
        return None


def pick_device(torch, wanted):
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    mps = getattr(torch.backends, "mps", None)
    return "mps" if mps is not None and mps.is_available() else "cpu"


def pick_dtype(torch, wanted, device, folder):
    """On a CPU float32 is several times faster than bfloat16 without native support, where it fits into memory."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device == "cpu":
        stored, free = weights_bytes(folder), available_bytes()
        fits = stored is None or free is None or 2.2 * stored < free
        return torch.float32 if fits else "auto"
    return "auto"


def as_text_turns(messages, tools, merge_system):
    """The same conversation for a template that knows no tools (or no system role): told in words."""
    turns, system = [], []
    if tools:
        system.append(
            "You can call these functions. To call one, reply with one JSON object "
            '{"name": ..., "arguments": {...}} and nothing else.\n' + "\n".join(json.dumps(tool) for tool in tools)
        )
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
        if role in ("system", "developer"):
            system.insert(0, content)
            continue
        if role == "tool":
            role, content = "user", "Result of the function %s:\n%s" % (message.get("name") or "", content)
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            called = {"name": function.get("name"), "arguments": function.get("arguments")}
            content = (content + "\n" + json.dumps(called)).strip()
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += "\n\n" + content
        else:
            turns.append({"role": role, "content": content})
    text = "\n\n".join(part for part in system if part)
    if text and merge_system and turns and turns[0]["role"] == "user":
        turns[0]["content"] = text + "\n\n" + turns[0]["content"]
    elif text:
        turns.insert(0, {"role": "system", "content": text})
    return turns


def plain_prompt(messages):
    """For a base model without chat template: question-and-answer text, the form such models continue best."""
    names = {"user": "Question", "assistant": "Answer"}
    lines = []
    for turn in as_text_turns(messages, None, False):
        name = names.get(turn["role"])
        lines.append(turn["content"] if name is None else "%s: %s" % (name, turn["content"]))
    return "\n\n".join(lines) + "\n\nAnswer:"


def render(tokenizer, sample, no_thinking):
    """(prompt text, how it was rendered, whether special tokens are in it already)"""
    if sample.get("prompt") is not None:
        return sample["prompt"], "as given", False
    messages, tools = sample["messages"], sample.get("tools") or None
    if not getattr(tokenizer, "chat_template", None):
        return plain_prompt(messages), "plain text", False
    plain = all(m.get("role") in ("system", "user", "assistant") and m.get("content") for m in messages)
    plain = plain and not any(m.get("tool_calls") for m in messages)
    attempts = []
    if tools or not plain:
        attempts.append(("chat template with tools", messages, tools))
    attempts.append(("chat template", as_text_turns(messages, tools, False), None))
    attempts.append(("chat template, system text in the user turn", as_text_turns(messages, tools, True), None))
    problem = None
    for how, turns, given in attempts:
        try:
            extra = {"tools": given} if given else {}
            if no_thinking:  # the name that Qwen3 and others agreed on; other templates ignore it
                extra["enable_thinking"] = False
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **extra)
        except Exception as error:  # templates raise whatever they like for roles they do not know
            problem = error
            continue
        # A template may ignore what it does not know without a word.
        told = [tool.get("function", tool) for tool in given or []]
        parts = [tool.get(key) for tool in told for key in ("name", "description")]
        parts += [m.get("content") for m in turns if m.get("role") == "tool"]
        parts += [c.get("function", c).get("name") for m in turns for c in m.get("tool_calls") or []]
        expected = [str(part)[:40] for part in parts if part]
        if all(part in text for part in expected):
            return text, how, True
    raise problem or ValueError("the chat template leaves out parts of the conversation")


def make_watch(torch, transformers):
    class Watch(transformers.StoppingCriteria):
        """Notes when each new token is there; stops at the deadline, or where a base model asks itself the next one."""

        def __init__(self, deadline, tokenizer=None):
            self.deadline, self.times, self.late, self.tokenizer = deadline, [], False, tokenizer

        def __call__(self, input_ids, scores, **kwargs):
            # The token is computed when it can be read: on an accelerator this waits for it, as a streaming user would.
            input_ids[0, -1].item()
            now = time.perf_counter()
            self.times.append(now)
            self.late = now > self.deadline
            done = self.late
            if self.tokenizer is not None:
                tail = input_ids[0, -min(16, len(self.times)) :]
                done = done or NEXT_QUESTION in self.tokenizer.decode(tail)
            return input_ids.new_full((input_ids.shape[0],), done, dtype=torch.bool)

    return Watch


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        job = json.load(stream)
    try:
        import torch

        step("import torch", version=torch.__version__, seconds=round(time.time() - BEGAN, 2))
        import transformers

        transformers.utils.logging.set_verbosity_error()
        disable = getattr(transformers.utils.logging, "disable_progress_bar", None)
        if disable is not None:
            disable()
        auto_model, auto_tokenizer = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        step("import transformers", version=transformers.__version__, seconds=round(time.time() - BEGAN, 2))
    except Exception as error:
        step("failed", during="import", error=type(error).__name__, message=str(error)[:2000])
        return 1
    try:
        tokenizer, model, facts = load(torch, transformers, auto_model, auto_tokenizer, job)
    except Exception as error:
        step("failed", during="load", error=type(error).__name__, message=str(error)[:2000])
        return 1
    step("load", **facts)
    watch_class = make_watch(torch, transformers)
    watchdog = Watchdog(job.get("grace_s", 30))
    for number, sample in enumerate(job["samples"]):
        if number == 0:  # the first call is slower (kernels are chosen, caches filled): one that is not counted
            try:
                began = time.perf_counter()
                answer(torch, tokenizer, model, dict(sample, max_new_tokens=2), job, watch_class)
                step("warm-up", seconds=round(time.perf_counter() - began, 4))
            except Exception as error:
                step("warm-up", error=type(error).__name__, message=str(error)[:500])
        watchdog.begin(sample["key"], job.get("sample_timeout_s", 120))
        try:
            facts = answer(torch, tokenizer, model, sample, job, watch_class)
        except Exception as error:
            facts = {"error": type(error).__name__, "message": str(error)[:2000]}
            if "out of memory" in str(error).lower() and torch.cuda.is_available():
                torch.cuda.empty_cache()
        watchdog.end()
        step("sample", key=sample["key"], **facts)
    facts = {}
    if model.device.type == "cuda":
        facts["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    step("done", seconds=round(time.time() - BEGAN, 2), **facts)
    return 0


def load(torch, transformers, auto_model, auto_tokenizer, job):
    began = time.time()
    threads = allowed_threads()
    if threads and threads < torch.get_num_threads() and not os.environ.get("OMP_NUM_THREADS"):
        # More threads than the container may run wait for each other, spinning.
        torch.set_num_threads(threads)
    device = pick_device(torch, job.get("device", "auto"))
    dtype = pick_dtype(torch, job.get("dtype", "auto"), device, job["model"])
    trust = {"trust_remote_code": bool(job.get("trust_remote_code"))}
    tokenizer = auto_tokenizer.from_pretrained(job["model"], **trust)
    options = {}
    if job.get("load_in_4bit"):
        compute = torch.bfloat16 if device == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    if job.get("load_in_4bit") or (device != "cpu" and importlib.util.find_spec("accelerate")):
        # Straight to the device: a model that fits there need not fit into main memory first.
        options["device_map"] = {"": 0 if device == "cuda" else device}
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    options["dtype" if version >= (4, 56) else "torch_dtype"] = dtype
    model = auto_model.from_pretrained(job["model"], **options, **trust)
    if "device_map" not in options:
        model = model.to(device)
    model.eval()
    if getattr(model.generation_config, "pad_token_id", None) is None:
        eos = model.generation_config.eos_token_id
        model.generation_config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    facts = {
        "seconds": round(time.time() - began, 2),
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "device": str(model.device),
        "dtype": str(model.dtype).replace("torch.", ""),
        "quantised": "nf4" if job.get("load_in_4bit") else None,
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
        "threads": torch.get_num_threads(),
        "weights_bytes": model.get_memory_footprint() if hasattr(model, "get_memory_footprint") else None,
        "context_tokens": getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if hasattr(model.config, "get_text_config")
        else getattr(model.config, "max_position_embeddings", None),
        "adapter": os.path.exists(os.path.join(job["model"], "adapter_config.json")),
    }
    return tokenizer, model, facts


def answer(torch, tokenizer, model, sample, job, watch_class):
    text, how, has_special = render(tokenizer, sample, bool(job.get("no_thinking")))
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not has_special)
    ids = inputs["input_ids"].to(model.device)
    prompt_tokens = ids.shape[1]
    settings = {"max_new_tokens": sample["max_new_tokens"], "do_sample": False}
    if job.get("temperature"):
        settings.update(do_sample=True, temperature=job["temperature"])
    else:  # some models ship sampling settings, which greedy decoding warns about
        settings.update(temperature=None, top_p=None, top_k=None)
    torch.manual_seed(job.get("seed", 0))
    began = time.perf_counter()
    watch = watch_class(began + job.get("sample_timeout_s", 120), tokenizer if how == "plain text" else None)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=inputs["attention_mask"].to(model.device),
            stopping_criteria=[watch],
            **settings,
        )
    seconds = time.perf_counter() - began
    new = out[0, prompt_tokens:].tolist()
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    finish = "time-out" if watch.late else "stop" if new and new[-1] in stops else "length"
    output = tokenizer.decode(new, skip_special_tokens=True)
    if how == "plain text" and NEXT_QUESTION in output:
        output, finish = output.split(NEXT_QUESTION)[0], "stop"
    times = [round(moment - began, 4) for moment in watch.times]
    facts = {
        "output": output,
        "finish": finish,
        "rendered": how,
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(new),
        "seconds": round(seconds, 4),
        "first_token_s": times[0] if times else None,
        "per_token_s": round((times[-1] - times[0]) / (len(times) - 1), 5) if len(times) > 1 else None,
    }
    if job.get("debug"):
        facts.update(
            prompt=text,
            prompt_ids=ids[0].tolist(),
            output_ids=new,
            raw_output=tokenizer.decode(new, skip_special_tokens=False),
        )
    return facts


if __name__ == "__main__":
    sys.exit(main())
