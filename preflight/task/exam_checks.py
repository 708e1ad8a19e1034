"""What the exam's observations mean: plain functions of the observed data, each returning findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preflight.findings import Finding, Level, quote

_TIER_SOURCE = "preflight/task/exam.py (thresholds are heuristics; `--tiers` changes them); interval: Wilson 1927"
_DATA_SOURCE = "preflight/task/samples.py"
_RUN_SOURCE = "preflight/task/backends.py"


def check_data(observed: Mapping[str, Any]) -> list[Finding]:
    """Can every record of the data be asked and judged?"""
    return [_data_finding(file) for file in observed["data"]]


_REASONS = (
    ("unreadable", "cannot be read"),
    ("no_messages", "no question"),
    ("non_string_content", "content that is not text"),
    ("empty_reference", "an empty reference answer"),
    ("without_reference", "nothing to judge by"),
    ("bad_scorer", "a scorer that cannot be applied"),
    ("unknown_role", "a turn with an unknown role"),
    ("bad_tools", "tool definitions that cannot be read"),
)


def _data_finding(file: Mapping[str, Any]) -> Finding:
    name, rows = quote(file["file"], 80), file["rows"]
    parts = [f"{words} ({_records(file[key])})" for key, words in _REASONS if file[key]]
    repeated = sum(len(group) - 1 for group in file["duplicates"])
    usable = file["scorable_count"] + file["left_out_by_limit"]
    shapes = ", ".join(name for name in file["shapes"]) or "unknown shape"
    if not usable:
        return Finding(
            "no-scorable-records",
            Level.FAIL,
            f"{name}: none of its {rows} records can be asked and judged: {'; '.join(parts) or 'it holds none'}.",
            "Without a question and a rule for its answer there is no exam.",
            (
                'give each record messages and a rule, e.g. `{"messages": [{"role": "user", "content": "2 + 2?"}], '
                '"keywords": ["4"]}`',
                *_first_problem(file),
            ),
            _DATA_SOURCE,
        )
    read = f"{name}: {rows} records ({file['container']}, {shapes})"
    if not parts and not repeated:
        taken = f"; {file['scorable_count']} drawn by the limit" if file["left_out_by_limit"] else ""
        return Finding("data-read", Level.OK, f"{read}, all can be asked and judged{taken}.", source=_DATA_SOURCE)
    if repeated:
        groups = "; ".join("=".join(map(str, group)) for group in file["duplicates"][:5])
        parts.append(f"repeats of an earlier record ({groups})")
    return Finding(
        "needs-review",
        Level.WARN,
        f"{read}, {usable} can be judged; needs review: {'; '.join(parts)}.",
        "They are left out of the score rather than guessed: an empty reference would match every answer. A repeated "
        "record would count one answer twice, so it is asked once.",
        ("correct or remove the records named here", *_first_problem(file)),
        _DATA_SOURCE,
    )


def _first_problem(file: Mapping[str, Any]) -> tuple[str, ...]:
    if not file["problems"]:
        return ()
    problem = file["problems"][0]
    return (f"begin with {problem['place']}: {quote(problem['detail'], 160)}",)


def _records(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    kind = "record" if len(numbers) == 1 else "records"
    return f"{kind} {shown}{f' and {len(numbers) - 8} more' if len(numbers) > 8 else ''}"


# What a failed load says, and what to do about it; first match wins.
_LOAD_FIXES = (
    (("trust_remote_code",), "read the model's own code, then run again with `--trust-remote-code`"),
    (("out of memory", "can't allocate", "cannot allocate"), "a smaller model, or `--load-in-4bit`"),
    (("does not recognize this architecture", "model type"), "`pip install -U transformers` in that interpreter"),
    (("gated", "401", "403"), "accept the model's terms on the hub and log in there, or name a local directory"),
    (
        ("is not a local folder", "not a valid model identifier", "connect to", "offline", "couldn't find"),
        "name a local model directory, or a hub id with the hub in reach",
    ),
    (("no file named", "error no file", "safetensors"), "fetch the weights completely; `git lfs pull` in a git clone"),
    (("bitsandbytes",), "`pip install bitsandbytes` in that interpreter"),
)


def check_generation(observed: Mapping[str, Any]) -> list[Finding]:
    """Did the model load and answer?"""
    return [_generation_finding(observed["generation"])] if "generation" in observed else []


def _generation_finding(run: Mapping[str, Any]) -> Finding:
    asked, answered, failed = run["asked"], run["answered"], run["failed"]
    where = f"{run['backend']} in {quote(run['python'], 120)}" if run["backend"] != "server" else "the server"
    trouble = run["trouble"]
    failure = run["failure"] or {}
    said = quote(f"{failure.get('error', '')}: {failure.get('message', '')}", 300) if failure else ""
    done = f"{answered} of {asked} prompts were answered before and count." if answered else "Nothing was answered."
    if not trouble and not failed:
        return Finding("answers-complete", Level.OK, f"All {asked} prompts were answered.", source=_RUN_SOURCE)
    if not trouble:
        first = quote(run["first_error"], 250)
        level = Level.FAIL if failed == asked else Level.WARN
        return Finding(
            "answers-failed" if failed == asked else "answers-missing",
            level,
            f"{failed} of {asked} prompts ended in an error instead of an answer: {first}",
            "They are counted neither as right nor as wrong.",
            ("run with `--debug` on the samples that the table names", *_fix_for(first)),
            _RUN_SOURCE,
        )
    if trouble == "failed" and failure.get("during") == "import":
        return Finding(
            "generation-packages",
            Level.UNKNOWN,
            f"Could not tell: {where} does not load: {said}",
            "The exam needs a working backend; nothing of the model was seen.",
            (
                f"install it there (`pip install {' '.join(run['needs'])}`)",
                "or name another interpreter with `--python`",
                "`python env_sandbox.py` says what is broken in the software",
            ),
            _RUN_SOURCE,
        )
    if trouble == "failed" and failure.get("during") == "connect":
        return Finding(
            "server-not-usable",
            Level.FAIL,
            f"The server did not answer as expected: {said}",
            "The exam asks `<base-url>/chat/completions` in OpenAI's form.",
            (
                "check that the server runs and that `--base-url` ends where `/chat/completions` follows (often `/v1`)",
                f"put the key into the environment variable {run['key_variable']} if the server asks for one",
                "name the model as the server does with `--model`",
            ),
            _RUN_SOURCE,
        )
    if trouble == "failed":
        return Finding(
            "model-not-loaded",
            Level.FAIL,
            f"The model did not load with {where}: {said}",
            "A model that cannot be loaded can neither be examined nor fine-tuned there.",
            (*_fix_for(said), "`python model_analyzer.py MODEL` says what the directory holds"),
            _RUN_SOURCE,
        )
    if trouble in ("interrupted", "terminated"):
        return Finding(
            "exam-interrupted",
            Level.UNKNOWN,
            f"The exam was interrupted: {answered} of {asked} prompts were answered and are counted.",
            "What is missing may differ from what is there.",
            ("run the same command again for all samples, or with `--limit` for fewer",),
            _RUN_SOURCE,
        )
    if trouble in ("absent", "not-executable"):
        return Finding(
            "interpreter-missing",
            Level.UNKNOWN,
            f"Could not tell: {quote(run['python'], 120)} does not start.",
            "The exam runs in that interpreter.",
            ("name another with `--python`",),
            _RUN_SOURCE,
        )
    if trouble == "not-recorded":
        return Finding(
            "generation-not-recorded",
            Level.UNKNOWN,
            "Could not tell: this recording holds no answers of the model.",
            "A recorded machine answers only what was asked when it was recorded.",
            ("run without `--replay`, or record again with the same `--model` and `--data`",),
            _RUN_SOURCE,
        )
    after = run["steps"][-1] if run["steps"] else "its start"
    how = "was given up after its time limit" if trouble == "timeout" else _death(run["exit_code"])
    loaded = "load" in run["steps"]
    out_of_memory = run["exit_code"] in (-9, 137)
    return Finding(
        "generation-died",
        Level.FAIL if loaded or out_of_memory else Level.UNKNOWN,
        f"Generation {how}, after the step '{quote(after, 40)}'. {done}",
        "The system ends a process like this when memory runs out."
        if out_of_memory
        else quote(run["errors"], 300)
        # A child that dies without a word leaves only its last step.
        or "It said nothing before it died.",
        (
            "a smaller model, `--load-in-4bit`, or a machine with more memory"
            if out_of_memory
            else "`python env_sandbox.py` loads the software step by step and names the part that dies",
            "run again with `--record FOLDER` and attach the folder to a bug report",
        ),
        _RUN_SOURCE,
    )


def _death(code: int | None) -> str:
    if code is None:
        return "did not start"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _fix_for(text: str) -> tuple[str, ...]:
    lowered = text.lower()
    return next(((fix,) for words, fix in _LOAD_FIXES if any(word in lowered for word in words)), ())


def check_own_function(observed: Mapping[str, Any]) -> list[Finding]:
    """Did the user's scoring function judge every answer?"""
    seen = observed.get("own_function")
    if not seen:
        return []
    if seen["complete"] and not seen["failed"]:
        return [
            Finding("own-function", Level.OK, f"{quote(seen['file'], 80)} judged every answer.", source=_RUN_SOURCE)
        ]
    said = seen["first_error"] or seen["last_words"] or "it said nothing"
    return [
        Finding(
            "own-function-failed",
            Level.UNKNOWN,
            f"Could not tell for some answers: score() of {quote(seen['file'], 80)} failed: {quote(said, 300)}",
            "Answers that the function did not judge count neither as right nor as wrong.",
            ("let `score(output, record)` return true, false, or a number from 0 to 1, for every output",),
            _RUN_SOURCE,
        )
    ]


def check_tasks(observed: Mapping[str, Any]) -> list[Finding]:
    """How well does the untouched model do each task, and what follows?"""
    return [_task_finding(task, observed) for task in observed.get("tasks", ()) if task["n"]]


def _task_finding(task: Mapping[str, Any], observed: Mapping[str, Any]) -> Finding:
    name, k, n = quote(task["task"], 60), task["k"], task["n"]
    share = f"{100 * task['share']:.0f} %, 95 % interval {100 * task['low']:.0f} to {100 * task['high']:.0f} %"
    edges = observed["settings"]["tiers"]
    what = f"Task '{name}': {k} of {n} right ({share}), judged by {task['scorer']}."
    wrong = n - k
    if wrong and task["wrong_form"] > wrong / 2:
        failures = f"{task['wrong_form']} of the {wrong}" if task["wrong_form"] < wrong else f"All {wrong}"
        what += f" {failures} failures have the wrong form rather than a wrong answer."
    if task["cut"]:
        what += f" {task['cut']} of the failures were cut at the limit of new tokens."
    if task["tier"] is None:
        needed = task["samples_needed"]
        more = f"about {needed} would be needed" if needed else "no number would settle a share right at a threshold"
        what += f" Which side of a threshold it is on cannot be told with {n} samples; {more}."
    why, fix = _what_follows(task, edges, observed)
    top = task["tier"] is not None and task["low"] >= edges[-1]
    return Finding("task-result", Level.OK if top else Level.WARN, what, why, fix, _TIER_SOURCE)


def _what_follows(
    task: Mapping[str, Any], edges: list[float], observed: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]]:
    wrong = task["n"] - task["k"]
    lora = observed["lora_advice"]
    heuristic = f"The thresholds ({', '.join(f'{100 * edge:g} %' for edge in edges)}) are heuristics, not laws."
    shots = "`--shots 3` measures beside it what examples in the prompt give"
    if wrong and task["wrong_form"] > wrong / 2 and task["wrong_form"] >= 3:
        return (
            f"The form fails before the answer can be judged: this says little about what the model knows. {heuristic}",
            (
                "constrain the output (JSON Schema or grammar-guided decoding of the server) and run the exam again",
                shots,
                f"if the form still fails, teach it: {lora}",
            ),
        )
    if task["low"] >= edges[-1]:
        return (
            f"The base already does most of this: wording the request is cheaper than training. {heuristic}",
            (f"prompt engineering first (clear instructions, examples: {shots})",) if wrong else (),
        )
    if task["tier"] is not None and task["high"] < edges[0]:
        return (
            "A base that gets almost nothing right lacks knowledge or skill; adapters mostly change form and style. "
            + heuristic,
            (
                "give it the knowledge (retrieval), or examine another or a larger base with the same command",
                shots,
                f"then, with some thousand good examples: {lora}",
            ),
        )
    if task["tier"] is not None:
        return (
            f"The base does a part of this: the range in which adapters usually pay. {heuristic}",
            (f"fine-tune: {lora}", shots),
        )
    needed = task["samples_needed"]
    more = f"add samples (about {needed} in all)" if needed else "add samples"
    bound = "below" if task["high"] < edges[-1] else "around"
    return (
        f"The share is {bound} {100 * edges[-1]:g} %, but the interval crosses a threshold. {heuristic}",
        (f"{more} and run the exam again", shots, f"if it stays below {100 * edges[-1]:g} %: {lora}"),
    )


def check_prompt(observed: Mapping[str, Any]) -> list[Finding]:
    """Were the prompts put the way the model was trained on?"""
    if "generation" not in observed:
        return []
    rendered = observed["generation"]["rendered"]
    findings = []
    too_long = observed["generation"].get("prompts_over_context") or []
    if too_long:
        findings.append(
            Finding(
                "prompts-over-context",
                Level.WARN,
                f"{len(too_long)} prompts with their new tokens are longer than the model's context of "
                f"{observed['generation']['load']['context_tokens']} tokens: {quote(', '.join(too_long[:5]), 120)}.",
                "Beyond its context a model fails or answers nonsense; these samples say nothing about the task.",
                ("shorten them, lower `--max-new-tokens`, or take a model with a longer context",),
                "config.json, max_position_embeddings",
            )
        )
    if rendered.get("plain text"):
        findings.append(
            Finding(
                "no-chat-template",
                Level.WARN,
                "The model has no chat template; the questions were put as plain 'Question: … Answer:' text.",
                "A base model that was not trained on turns scores low for reasons of form.",
                (
                    "examine the instruct variant of the same model beside it",
                    "`--shots 3` shows it the form that is wanted",
                ),
                "https://huggingface.co/docs/transformers/chat_templating",
            )
        )
    merged = rendered.get("chat template, system text in the user turn")
    if merged:
        findings.append(
            Finding(
                "system-turn-merged",
                Level.OK,
                f"The chat template takes no system turn; its text was put before the user's in {merged} prompts.",
                "Train with the same form, or the instructions are worded differently there.",
                source="https://huggingface.co/docs/transformers/chat_templating",
            )
        )
    return findings


def check_latency(observed: Mapping[str, Any]) -> list[Finding]:
    """How fast are the answers, one at a time?"""
    return [_latency_finding(observed["latency"])] if observed.get("tasks") else []


def _latency_finding(seen: Mapping[str, Any]) -> Finding:
    if not seen["n"]:
        return Finding(
            "latency-unknown",
            Level.UNKNOWN,
            "Latency: could not tell, no answer was timed.",
            "There is nothing to measure without answers.",
            ("see the finding about generation",),
            "preflight/task/exam.py",
        )
    first = f", first token {_ms(seen['first_token_p50_s'])}" if seen["first_token_p50_s"] is not None else ""
    each = f", then {_ms(seen['per_token_p50_s'])} per token" if seen["per_token_p50_s"] is not None else ""
    p95 = f"P95 {_ms(seen['p95_s'])}"
    if seen["p95_upper_s"] is None:
        chance = seen["chance_that_maximum_reaches_p95"]
        kind = "just the largest" if seen["p95_is_the_maximum"] else "a point estimate"
        kind = "just the largest" if seen["p95_is_the_maximum"] else "a point estimate"
        note = (
            f"The P95 of {seen['n']} answers is {kind} (the largest reaches the true P95 with probability "
            f"{chance:.2f}); an upper bound needs {seen['answers_for_a_p95_bound']} answers."
        )
    else:
        note = f"The true P95 is at most {_ms(seen['p95_upper_s'])} with 95 % confidence."
    return Finding(
        "latency",
        Level.OK,
        f"Latency of {seen['n']} answers, one at a time: P50 {_ms(seen['p50_s'])}, {p95}{first}{each} (medians).",
        note,
        source="preflight/task/exam.py; order statistics",
    )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "could not tell"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def check_target(observed: Mapping[str, Any]) -> list[Finding]:
    """Is the wished latency met, and what would meet it?"""
    seen = observed.get("target")
    if seen is None:
        return []
    limit = _ms(seen["target_s"])
    counted = f"{seen['slower']} of {seen['n']} answers are slower than {limit}"
    if seen["verdict"] == "met":
        return [Finding("latency-target-met", Level.OK, f"P95 target met: {counted}.", source="preflight/task/exam.py")]
    fixes = []
    if seen["new_tokens_that_fit"] is not None:
        tokens = seen["new_tokens_that_fit"]
        fixes.append(
            f"at most {tokens} new tokens fit into {limit} (measured times of first token and per token, P95)"
            if tokens > 0
            else f"no number of new tokens helps: the first token alone takes longer than {limit}; shorten the prompt"
        )
    if seen["speed_up_needed"]:
        factor = seen["speed_up_needed"]
        fixes.append(
            f"{factor:g}x faster is needed: a model with about 1/{factor:g} of the weights"
            + (
                ", or quantised ones: 8-bit instead of 16-bit weights can give up to 2x per token, 4-bit up to 4x"
                if factor <= 4
                else "; quantising alone (up to 4x per token) is not enough"
            )
        )
    if seen["verdict"] == "not met":
        return [
            Finding(
                "latency-target-not-met",
                Level.WARN,
                f"P95 target not met: {counted}; P95 is {_ms(seen['p95_s'])}.",
                "More than 5 % are slower even at the lower end of the exact 95 % bound.",
                tuple(fixes) or ("a faster machine",),
                "preflight/task/exam.py; Clopper-Pearson 1934",
            )
        ]
    return [
        Finding(
            "latency-target-unknown",
            Level.UNKNOWN,
            f"P95 target: cannot tell, {counted}.",
            f"Even with none slower, {seen['answers_needed_if_none_is_slower']} answers are needed to say that 95 % "
            "are fast enough (with 95 % confidence).",
            (f"examine at least {seen['answers_needed_if_none_is_slower']} samples", *fixes),
            "preflight/task/exam.py; Clopper-Pearson 1934",
        )
    ]


def check_few_shot(observed: Mapping[str, Any]) -> list[Finding]:
    """Do examples in the prompt help?"""
    return [
        comparison_finding(
            "few-shot",
            f"Task '{quote(row['task'], 60)}', {row['shots']} examples in the prompt against none",
            row,
            "examples in the prompt cost tokens per request and no training: take this as the bar for fine-tuning",
        )
        for row in observed.get("few_shot") or []
    ]


def comparison_finding(code: str, about: str, row: Mapping[str, Any], gain: str) -> Finding:
    """A paired comparison in words. Worse or unclear is a warning with what would settle it."""
    source = "McNemar 1947, exact form (preflight/task/statistics.py)"
    if not row["n"]:
        return Finding(
            f"{code}-not-comparable",
            Level.UNKNOWN,
            f"{about}: no sample is in both runs.",
            "Only the same questions can be compared.",
            ("run both with the same `--data`",),
            source,
        )
    counts = (
        f"{row['first_right']} → {row['second_right']} of {row['n']} right "
        f"({row['only_second_right']} gained, {row['only_first_right']} lost; p = {row['p_value']:.3g})"
    )
    if row["significant"] and row["difference"] > 0:
        return Finding(f"{code}-better", Level.OK, f"{about}: better, {counts}.", gain, source=source)
    if row["significant"]:
        return Finding(
            f"{code}-worse",
            Level.WARN,
            f"{about}: worse, {counts}.",
            "The loss is larger than chance explains.",
            ("look at the samples that were lost in the table",),
            source,
        )
    differing = row["only_first_right"] + row["only_second_right"]
    return Finding(
        f"{code}-unclear",
        Level.WARN,
        f"{about}: no difference can be told, {counts}.",
        f"The runs differ on {differing} samples; below {row['fewest_differing_samples']} nothing can be significant.",
        ("examine more samples",),
        source,
    )
