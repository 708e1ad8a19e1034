"""What follows from what the preprocessor saw? Plain functions of plain data, one question each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from preflight.findings import Finding, Level, quote

_CHAT = "TRL dataset formats, https://huggingface.co/docs/trl/dataset_formats"
_JSON = "RFC 8259, The JSON Data Interchange Format; https://jsonlines.org"
_OURS = "facts/FACTS.md, sections 15 to 18"

# Notes about a file that change nothing for the user: slug -> (what, why).
_FILE_NOTES = {
    "bom": ("The file begins with a byte order mark.", "It was taken off; it is not written into the output."),
    "json-array-in-jsonl": (
        "The file is called .jsonl but holds one JSON array.",
        "It was read as an array. Programs that read it line by line fail on every line.",
    ),
    "cr-line-ends": ("Lines end with CR alone (old Macintosh).", "It was read so; most programs see one single line."),
    "comment-lines": ("Comment lines stand between the records.", "They were passed over; JSON has no comments."),
    "trailing-comma": ("Commas stand behind the last or behind each record.", "They were passed over."),
    "concatenated-objects": ("Several records stand on one line.", "They were read apart."),
    "wrapped-rows": ("The records are wrapped in an outer object.", "They were taken out of it."),
    "lists-to-rows": ("Lines hold lists of records.", "They were read apart."),
    "columns-to-rows": ("The file holds columns instead of rows.", "They were turned into rows."),
    "raw-control-characters": (
        "Strings hold raw tabs or control characters.",
        "JSON wants them escaped; strict readers fail.",
    ),
    "compressed": ("The file is compressed.", "It was read as it is."),
}
_REASONS = {
    "truncated": "the record is cut",
    "not-json": "not JSON",
    "undecodable": "bytes that are not text in the file's encoding",
    "record-too-long": "longer than one record can be",
    "nul-bytes": "NUL bytes",
    "wrong-columns": "another number of fields than the header",
    "nested-too-deep": "nested too deep",
    "compressed-data-damaged": "the compressed data is damaged",
    "not-csv": "not CSV",
    "unreadable": "unreadable",
}
CHANGES = {
    "parts-joined": "content parts joined into text",
    "blocks-to-tool-turns": "tool-result blocks made tool turns",
    "function-call-to-tool-calls": "function calls written as tool_calls",
    "functions-to-tools": "`functions` written as `tools`",
    "tools-text-opened": "`tools` given as text opened",
    "turns-text-opened": "a list of turns given as text opened",
    "calls-text-opened": "`tool_calls` given as text opened",
    "turns-renamed": "the list of turns called `messages`",
    "analysis-to-thinking": "messages of the analysis channel put into `thinking`",
    "tool-result-to-text": "tool results written as text",
    "transcript-to-messages": "transcripts taken apart into turns",
    "context-joined": "context put before the question",
    "prompt-taken-from-pair": "the prompt taken from what both answers begin with",
    "developer-to-system": "role developer written as system",
    "line-ends": "line ends made LF",
    "control-characters": "control characters taken out",
    "lone-surrogates": "broken letters (half surrogate pairs) replaced",
    "white-space-at-end": "white space at the end of turns taken off",
    "instruction-added": "the strict output instruction added",
    "target-rewritten-as-json": "answers rewritten as strict JSON",
    "arguments-to-objects": "tool arguments written as objects",
    "arguments-to-text": "tool arguments written as text",
    "duplicate-keys-last-kept": "of keys that stand twice in an object the last was kept",
}


_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")


def _lines(entries: list[Any], limit: int = 8) -> str:
    shown = ", ".join(str(entry) for entry in entries[:limit])
    return shown + (", ..." if len(entries) > limit else "")


def check_format(seen: dict[str, Any]) -> Iterator[Finding]:
    """What is it?"""
    kind = {"json-array": "one JSON array", "jsonl": "JSON Lines", "json-values": "JSON values one after another"}
    held = f"{seen['rows']} records of shape {seen['format']} in {kind.get(seen['container'], seen['container'])}"
    if not seen["usable_rows"]:
        yield Finding(
            "no-usable-rows",
            Level.FAIL,
            f"None of the {seen['rows'] + seen['bad_count']} records can be used as it is.",
            f"Most common: {quote(next(iter(seen['problem_counts'] or seen['bad_reasons']), 'nothing was read'))}.",
            ("see the findings below; name unknown roles with `--role-map NAME=ROLE`",),
            _CHAT,
        )
    else:
        usable = f"{seen['usable_rows']} can be used"
        yield Finding("converted", Level.OK, f"{held}, {seen['encoding'] or 'binary'}; {usable}.")
    if len(seen["shapes"]) > 1 and seen["rows"]:
        listed = ", ".join(f"{shape} ({count})" for shape, count in seen["shapes"].items())
        other = seen.get("other_shape_rows") or 0
        yield Finding(
            "mixed-shapes",
            Level.WARN if other or "unknown" in seen["shapes"] else Level.OK,
            f"The file mixes shapes: {listed}.",
            f"One training file holds one kind of record; {other} of another kind are set aside."
            if other
            else "All that can be used become messages.",
            ("keep each kind in a file of its own",) if other or "unknown" in seen["shapes"] else (),
            _CHAT,
        )


def check_file(seen: dict[str, Any]) -> Iterator[Finding]:
    """Is the file itself as it should be?"""
    notes = seen["notes"]
    for note, (what, why) in _FILE_NOTES.items():
        if notes.get(note):
            yield Finding(note, Level.OK, what, why)
    if notes.get("encoding-guessed"):
        yield Finding(
            "encoding-guessed",
            Level.WARN,
            f"The file is not UTF-8; it was read as {seen['encoding']}, which is a guess.",
            "Most loaders (json, datasets, TRL) read UTF-8 and fail or garble this file; the output is UTF-8.",
            ("look at some records; if letters are wrong, name the encoding with `--encoding NAME`",),
            _JSON,
        )
    for note, words in (("python-literals", "Python spellings (True, None)"), ("single-quotes", "single quotes")):
        if notes.get(note):
            yield Finding(
                note,
                Level.WARN,
                f"{notes[note]} records are not JSON but {words}; they were read, without running anything.",
                "It was written with str() or repr() instead of json.dumps; other loaders fail.",
                ("write the file with `json.dumps`, or use the output of this program",),
                _JSON,
            )
    if notes.get("non-finite-number"):
        yield Finding(
            "non-finite-number",
            Level.WARN,
            f"{notes['non-finite-number']} records hold NaN or Infinity, which JSON does not have.",
            "pandas writes empty cells so. They are never taken for text, and null is written for them.",
            ("write the file with `df.where(df.notna(), None)` before `to_json`",),
            _JSON,
        )
    if notes.get("duplicate-keys"):
        yield Finding(
            "duplicate-keys",
            Level.WARN,
            f"{notes['duplicate-keys']} records name a key twice in one object; the last one counts.",
            "Parsers differ in which one they take.",
            ("correct the program that writes the file",),
            "RFC 8259 section 4",
        )
    if notes.get("array-not-closed"):
        yield Finding(
            "truncated",
            Level.WARN,
            f"The file ends before its list does; {seen['rows']} records were read.",
            "A download or a writer was cut.",
            ("compare its size with the source before training",),
            _JSON,
        )
    left = [note.partition(":")[2] for note in notes if note.startswith("left-out:")]
    if left:
        yield Finding(
            "other-lists-left-out",
            Level.WARN,
            f"The object holds another list, `{quote(left[0], 60)}`, which was not read.",
            "It is often another split; mixing it in would put test data into training.",
            (f"save the list `{quote(left[0], 60)}` to a file of its own",),
            _OURS,
        )
    if notes.get("text-after-array"):
        yield Finding(
            "text-after-array",
            Level.WARN,
            "Something stands behind the end of the list.",
            "Several exports may have been put into one file; further lists were read, other text was not.",
            ("look at the end of the file",),
            _JSON,
        )


def check_bad_records(seen: dict[str, Any]) -> Iterator[Finding]:
    """Could every record be read?"""
    reasons = seen["bad_reasons"]
    for reason, count in reasons.items():
        places = [entry for entry in seen["bad_records"] if entry["reason"] == reason]
        lines = _lines([entry["line"] or f"record {entry['row']}" for entry in places])
        example = f" ({quote(places[0]['detail'], 160)})" if places else ""
        if reason == "truncated":
            good = seen["rows"]
            what = f"{count} record(s) end in the middle, on line {lines}{example}."
            why = f"{good} records are readable; the file is probably incomplete. What came next is not made up."
            fix = "compare the file's size with the source before training, and download it again"
        else:
            what = f"{count} record(s) cannot be read, on line {lines}: {_REASONS.get(reason, reason)}{example}."
            why = "They are set aside by line and reason; the rest was read."
            fix = "correct these lines, or leave them out knowingly"
        yield Finding(reason if reason != "unreadable" else "records-unreadable", Level.WARN, what, why, (fix,), _JSON)


def check_conversations(seen: dict[str, Any]) -> Iterator[Finding]:
    """Can every conversation be trained on as it stands?"""
    tool_codes = {code: n for code, n in seen["problem_counts"].items() if code.startswith("tool")}
    target_codes = {code: n for code, n in seen["problem_counts"].items() if code.startswith("target")}
    apart = {*tool_codes, *target_codes, "unknown-shape", "already-tokenised"}
    others = [code for code in seen["problem_counts"] if code not in apart]
    yield from _shape_findings(seen)
    if others:
        total = seen["rows"]
        listed = []
        for code in others[:6]:
            places = seen["problem_places"].get(code, [])
            rows = _lines([place["row"] for place in places])
            listed.append(f"{quote(places[0]['what'], 90) if places else code} (row {rows})")
        fixes = [
            "correct these records, or leave them out knowingly: they are written to the set-aside file with reasons"
        ]
        if "unknown-role" in others:
            fixes.insert(0, "say what an unknown role means with `--role-map NAME=ROLE`; it is never guessed")
        yield Finding(
            "needs-review",
            Level.WARN,
            f"{seen['problem_rows']} of {total} records need a person: {'; '.join(listed)}.",
            "Trained as they are they would teach the wrong speaker, an empty answer or nothing; dropping or repairing "
            "them silently would change the data unseen.",
            tuple(fixes),
            _CHAT,
        )
    yield from _tool_findings(seen, tool_codes)
    if seen["changes"].get("ends-with-user"):
        lines = _lines(seen["change_lines"]["ends-with-user"])
        yield Finding(
            "ends-with-user",
            Level.WARN,
            f"{seen['changes']['ends-with-user']} conversations end with a user turn (line {lines}).",
            "Nothing is trained on that turn, and it costs tokens.",
            ("add the answers, or cut the last turn",),
            _CHAT,
        )
    if seen["changes"].get("looks-misdecoded"):
        lines = _lines(seen["change_lines"]["looks-misdecoded"])
        yield Finding(
            "looks-misdecoded",
            Level.WARN,
            f"{seen['changes']['looks-misdecoded']} records look like UTF-8 once read as Latin-1 (line {lines}).",
            "Pairs such as \u00c3 and a sign stand where accents belong; a model learns to write them.",
            ("export the data again as UTF-8, or repair it with ftfy",),
            _JSON,
        )
    if seen["weighted_rows"]:
        yield Finding(
            "per-message-weight",
            Level.OK,
            f"{seen['weighted_rows']} records carry OpenAI's per-message weight; it is kept.",
            "TRL does not know it: turns of weight 0 would be trained on. Split such conversations before these turns.",
        )
    if seen["changes"].get("media-kept"):
        yield Finding(
            "media-kept",
            Level.OK,
            f"{seen['changes']['media-kept']} records hold images, audio or files; their parts are kept as they are.",
            "Only a model with such an encoder can be trained on them; their tokens are not counted.",
        )


def _shape_findings(seen: dict[str, Any]) -> Iterator[Finding]:
    counts = seen["problem_counts"]
    level = Level.WARN if seen["usable_rows"] else Level.FAIL
    if counts.get("unknown-shape"):
        places = seen["problem_places"]["unknown-shape"]
        rows = _lines([place["row"] for place in places])
        yield Finding(
            "unknown-shape",
            level,
            f"{counts['unknown-shape']} records have no known shape (row {rows}): {quote(places[0]['what'], 160)}.",
            "Known are: messages (role, content), conversations (from, value), instruction and output, prompt and "
            "completion, question and answer, chosen and rejected, text. Which column is the question is not guessed.",
            ("rename the columns to `prompt` and `completion`, or put the turns into `messages`",),
            _CHAT,
        )
    if counts.get("already-tokenised"):
        yield Finding(
            "already-tokenised",
            level,
            f"{counts['already-tokenised']} records hold token ids instead of text.",
            "They fit one tokenizer only, and neither their text nor their template can be looked at.",
            ("go back to the text they were made from", "or train on them as they are: TRL takes `input_ids`"),
            _CHAT,
        )


def _tool_findings(seen: dict[str, Any], codes: dict[str, int]) -> Iterator[Finding]:
    if not seen["tool_rows"]:
        return
    kinds = seen["tool_arguments"]
    listed = []
    for code in list(codes)[:5]:
        places = seen["problem_places"].get(code, [])
        rows = _lines([place["row"] for place in places])
        listed.append(f"{quote(places[0]['what'], 90) if places else code} (row {rows})")
    notes = []
    fixes = []
    if codes:
        fixes.append("correct these records: a call and its result must name the same id, arguments must be JSON")
    if "text" in kinds:
        notes.append(
            "Arguments are JSON text, as OpenAI writes them; many chat templates put them into quotes once more."
        )
        fixes.append("write them as objects with `--tool-arguments object`")
    if len(kinds) > 1:
        notes.append("Some arguments are text and some objects: one table column cannot hold both.")
    level = Level.WARN if codes or notes else Level.OK
    if level is Level.OK:
        notes.append("Calls and results fit together.")
    else:
        notes.append("Null content beside a call is no empty answer.")
    what = f"{seen['tool_rows']} of {seen['rows']} records use tools"
    what += f"; broken: {'; '.join(listed)}." if listed else "."
    yield Finding(
        "tool-data",
        level,
        what,
        " ".join(notes),
        tuple(fixes) if level is not Level.OK else (),
        "https://huggingface.co/docs/transformers/chat_extras; huggingface/transformers#45419",
    )


def check_targets(seen: dict[str, Any]) -> Iterator[Finding]:
    """Do the answers fit the schema?"""
    if not seen["schema_given"]:
        return
    codes = {code: n for code, n in seen["problem_counts"].items() if code.startswith("target")}
    rewritten = seen["changes"].get("target-rewritten-as-json", 0)
    if not codes:
        note = (
            f"{rewritten} were rewritten as strict JSON (fences, prose or Python spellings taken off)."
            if rewritten
            else ""
        )
        yield Finding("targets-fit", Level.OK, "All answers that were compared fit the schema.", note)
        return
    listed = []
    for code, count in list(codes.items())[:5]:
        places = seen["problem_places"].get(code, [])
        listed.append(
            f"{count}x {quote(places[0]['what'], 140) if places else code} (row {_lines([p['row'] for p in places])})"
        )
    yield Finding(
        "targets-do-not-fit",
        Level.WARN,
        f"Answers that do not fit the schema: {'; '.join(listed)}.",
        "Training on them teaches the model to break the instruction that stands in the prompt. They are set aside.",
        ("correct these answers", "or, when only the last answer must be JSON, use `--targets last`"),
        "JSON Schema 2020-12",
    )


def check_duplicates(seen: dict[str, Any]) -> Iterator[Finding]:
    """How much is said twice?"""
    found = seen["duplicates"]
    rows = max(1, seen["usable_rows"])
    near = found["same_words"] + found["near"]
    for code, count, action, words in (
        ("duplicates", found["exact"], found["exact_action"], "repeat an earlier one exactly"),
        ("near-duplicates", near, found["near_action"], "nearly repeat an earlier one"),
    ):
        if not count:
            continue
        kinds = ("exact",) if code == "duplicates" else ("same_words", "near")
        pairs = [pair for pair in found["pairs"] if pair["kind"] in kinds]
        listed = ", ".join(f"{pair['line']} = {pair['same_as_line']}" for pair in pairs[:6])
        dropped = action == "drop"
        heavy = count / rows >= 0.05
        yield Finding(
            code,
            Level.WARN if heavy or not dropped else Level.OK,
            f"{count} of {seen['usable_rows']} records {words} (lines {listed}); "
            + ("they are left out." if dropped else "they are only reported."),
            "Repeated records are learnt by heart, and a copy on the test side makes the test worthless.",
            ("look at the pairs; keep them with `--duplicates report` or `--near-duplicates report`",)
            if dropped and heavy
            else ("leave them out with `--duplicates drop` and `--near-duplicates drop`",)
            if not dropped
            else (),
            "Lee et al. 2022, Deduplicating Training Data Makes Language Models Better",
        )
    if found["near_not_looked"]:
        yield Finding(
            "near-duplicates-not-looked-for",
            Level.UNKNOWN if found["near_asked_for"] else Level.OK,
            f"Near duplicates were not looked for: {found['near_not_looked']}.",
            "Exact ones, and those that differ only in case and spacing, were.",
            ("`pip install numpy`",) if found["near_asked_for"] else (),
            "preflight/data/duplicates.py",
        )
    if seen["same_prompt_other_answer"]:
        listed = ", ".join(f"{line} / {earlier}" for line, earlier in seen["same_prompt_lines"][:6])
        yield Finding(
            "same-prompt-other-answer",
            Level.WARN if seen["main_family"] == "chat" else Level.OK,
            f"{seen['same_prompt_other_answer']} records ask the same as an earlier one and answer differently "
            f"(lines {listed}).",
            "Either answer may be right; where only one is, the other teaches the wrong one. All are kept, on one side "
            "of the split.",
            ("look at these pairs",) if seen["main_family"] == "chat" else (),
            _OURS,
        )


def check_personal_data(seen: dict[str, Any]) -> Iterator[Finding]:
    """Does it hold what looks like personal data or secrets?"""
    found = seen["personal_data"]
    if not found:
        return
    listed = ", ".join(
        f"{kind.replace('_', ' ')} in {count} records (line {_lines(seen['personal_data_lines'][kind], 5)})"
        for kind, count in found.items()
    )
    yield Finding(
        "personal-data",
        Level.WARN,
        f"Looks like personal data or secrets: {listed}.",
        "A fine-tuned model can repeat its training data word for word. Found by form only: names and addresses are "
        "not seen, and examples may be invented.",
        ("look at these lines; replace what is real before training", "revoke secrets that stand in the data"),
        "OWASP Top 10 for LLM Applications 2025, LLM02 sensitive information disclosure",
    )


def check_tokens(seen: dict[str, Any]) -> Iterator[Finding]:
    """How long are the samples, and what is trained on?"""
    tokens = seen.get("tokens")
    if tokens is None:
        what = "Token lengths were not counted."
        why = "Name a model directory with `--tokenizer DIR`: lengths in characters or words say little about tokens."
        yield Finding("tokens-not-counted", Level.OK, what, why)
        return
    if tokens.get("trouble"):
        yield Finding(
            "tokens-not-counted",
            Level.UNKNOWN,
            f"Could not count tokens: {quote(tokens['trouble'], 240)}",
            "Over-long samples were therefore not looked for.",
            (
                "`pip install transformers`, or name a Python that has it with `--python`",
                "name a whole model directory",
            ),
            "preflight/children/count_tokens.py",
        )
        return
    share = tokens["trained_share"]
    trained = f"{share:.1%} of them trained on" if share is not None else "the trained share could not be told"
    yield Finding(
        "token-lengths",
        Level.OK,
        f"Tokens a sample: P50 {tokens['p50']}, P95 {tokens['p95']}, most {tokens['max']}; {tokens['tokens']} in all, "
        f"{trained}.",
        "Counted with the model's own tokenizer and chat template.",
    )
    if tokens["over_long_rows"]:
        done = f"{tokens['truncated_rows']} of them had old exchanges left out; the others are set aside"
        yield Finding(
            "over-long",
            Level.WARN,
            f"{tokens['over_long_rows']} samples have more than {tokens['max_tokens']} tokens; {done}.",
            "A trainer cuts them at the end, which takes the answer away and trains on half sentences.",
            ("raise the length (see `model_analyzer.py` for what fits), or use `--over-long truncate`",),
            _CHAT,
        )
    packed = tokens.get("packing")
    if packed and packed["gain"]:
        yield Finding(
            "packing",
            Level.OK,
            f"Packing to {packed['limit_tokens']} tokens: {packed['samples']} samples make {packed['sequences']} "
            f"sequences ({packed['gain']:.2f}x fewer), {packed['filled']:.0%} filled instead of "
            f"{packed['filled_unpacked']:.0%}.",
            'Best-fit-decreasing, as TRL\'s `packing_strategy="bfd"`; unpacked means padded to the limit.',
        )
    yield from _template_findings(tokens)


def _template_findings(tokens: dict[str, Any]) -> Iterator[Finding]:
    tokenizer = tokens.get("tokenizer") or {}
    source = "https://huggingface.co/docs/trl/sft_trainer#train-on-assistant-messages-only"
    if not tokenizer.get("chat_template"):
        yield Finding(
            "no-chat-template",
            Level.FAIL,
            "The tokenizer has no chat template: conversations cannot be rendered for this model.",
            "It is probably a base model. Token counts are for the bare text.",
            ("use the instruct version's tokenizer, or set a template before training",),
            "https://huggingface.co/docs/transformers/chat_templating",
        )
        return
    if tokens.get("render_errors"):
        yield Finding(
            "not-rendered",
            Level.WARN,
            f"The chat template refuses {tokens['render_errors']} conversations: "
            f"{quote((tokens.get('render_error_examples') or ['?'])[0], 160)}",
            "They are set aside: training would stop at them.",
            ("see `python model_analyzer.py` for what the template accepts",),
            "https://huggingface.co/docs/transformers/chat_templating",
        )
    mask = tokens.get("assistant_mask") or {}
    if not tokenizer.get("generation_block"):
        yield Finding(
            "no-assistant-mask",
            Level.WARN,
            "The chat template marks no answers ({% generation %} is missing): it gives no assistant-only mask.",
            "With assistant_only_loss=True TRL would train on nothing or refuse, unless it brings a template of its "
            "own for this model; without it the prompts are trained on, too.",
            (
                "train on prompt and completion: `--format prompt-completion` (TRL masks the prompt by itself)",
                "or put {% generation %} and {% endgeneration %} around the answer in the template",
            ),
            source,
        )
    elif mask.get("error") or not mask.get("mask_tokens"):
        yield Finding(
            "assistant-mask-empty",
            Level.FAIL,
            f"The template's assistant-only mask is empty on the first sample. {quote(mask.get('error', ''), 160)}",
            "Nothing would be trained on.",
            ("correct the {% generation %} block of the template",),
            source,
        )
    else:
        same = abs(mask["mask_tokens"] - mask["answer_tokens"]) <= max(2, mask["answer_tokens"] // 20)
        yield Finding(
            "assistant-mask",
            Level.OK if same else Level.WARN,
            f"The template's assistant-only mask covers {mask['mask_tokens']} of {mask['tokens']} tokens of the first "
            f"sample; its answers have {mask['answer_tokens']}.",
            "Compared with the answers found by rendering each turn. See `--verbose` for the text.",
            () if same else ("look at the mask with `--verbose`, and at the template's {% generation %} block",),
            source,
        )
    if tokens.get("answers_not_found_in_rendered"):
        yield Finding(
            "template-rewrites-history",
            Level.OK,
            f"The template writes {tokens['answers_not_found_in_rendered']} earlier answers otherwise than the last.",
            "Templates of reasoning models leave the reasoning of earlier turns out. These turns are trained on in a "
            "form that the model never writes; `--format prompt-completion` trains on the last answer only.",
        )


def check_changes(seen: dict[str, Any]) -> Iterator[Finding]:
    """What was changed?"""
    listed = [f"{words}: {seen['changes'][slug]}" for slug, words in CHANGES.items() if seen["changes"].get(slug)]
    if listed:
        yield Finding(
            "changes", Level.OK, f"Changed on the way (records): {'; '.join(listed)}.", "The input is untouched."
        )
    if seen["columns_left_out"]:
        columns = ", ".join(f"`{quote(name, 40)}`" for name in list(seen["columns_left_out"])[:12])
        yield Finding(
            "columns-left-out",
            Level.OK,
            f"Columns that training does not need are not written: {columns}.",
            "Keep them with `--keep-columns A,B`; they must then hold the same type in every record.",
        )
        media = [name for name in seen["columns_left_out"] if name in _MEDIA_COLUMNS]
        if media:
            yield Finding(
                "media-columns-left-out",
                Level.WARN,
                f"The records have images, video or sound in columns that are not written: {', '.join(media)}.",
                "The turns then speak of pictures that are not there (`<image>`), and a model for text learns to make "
                "things up.",
                (f"keep them with `--keep-columns {','.join(media)}`, for a model with such an encoder",),
                "TRL documentation, dataset formats, vision",
            )
    written = seen.get("written")
    if written is not None:
        files = ", ".join(f"{quote(name, 80)} ({count})" for name, count in written.items())
        yield Finding("written", Level.OK, f"Written (records): {files}.")
    if seen.get("test_rows") == 0:
        yield Finding(
            "test-side-empty",
            Level.WARN,
            "No record could be put on the test side without taking one that the training side repeats.",
            "All records ask the same, or there are too few groups.",
            ("raise `--test-share`, or name the column that tells independent records apart with `--group-by`",),
            _OURS,
        )


CHECKS = (
    check_format,
    check_file,
    check_bad_records,
    check_conversations,
    check_targets,
    check_duplicates,
    check_personal_data,
    check_tokens,
    check_changes,
)
