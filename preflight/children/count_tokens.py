"""Counts the real tokens of prepared records: argv = results, job (JSON file).

The job: {"model", "pieces": [lines files], "skip": file (one byte a record, not 0 = leave out), "out": file,
"max_tokens", "turn_sample"}. `out` gets three 32-bit integers a record: tokens, trained tokens, first kept message
(-1: too long and nothing can be left out; 0: whole). Steps are appended to the results as JSON lines.
Source for the mask: transformers `apply_chat_template(return_assistant_tokens_mask=True)`.
"""

import json
import struct
import sys
import warnings

BATCH = 64


def step(name, **facts):
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(dict(facts, step=name)) + "\n")
        stream.flush()


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        job = json.load(stream)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    step("transformers", version=transformers.__version__)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False, local_files_only=True)
    template = getattr(tokenizer, "chat_template", None)
    step(
        "tokenizer",
        kind=type(tokenizer).__name__,
        fast=bool(getattr(tokenizer, "is_fast", False)),
        chat_template=bool(template),
        generation_block="generation" in str(template or "") and "endgeneration" in str(template or ""),
        vocabulary=len(tokenizer),
        model_max_length=tokenizer.model_max_length if tokenizer.model_max_length < 10**9 else None,
    )
    counter = Counter(tokenizer, bool(template), job)
    with open(job["skip"], "rb") as stream:
        skip = stream.read()
    done = 0
    with open(job["out"], "wb") as out:
        batch = []
        for path in job["pieces"]:
            with open(path, "rb") as lines:
                for line in lines:
                    batch.append(None if skip[done] else line)
                    done += 1
                    if len(batch) >= BATCH:
                        counter.write(batch, out)
                        batch = []
                        if done % 6400 == 0:
                            step("progress", records=done)
        counter.write(batch, out)
    step("counted", **counter.summary())


class Counter:
    """Renders, encodes and counts."""

    def __init__(self, tokenizer, has_template, job):
        self.tokenizer, self.has_template = tokenizer, has_template
        self.limit, self.turn_sample = job.get("max_tokens"), job.get("turn_sample", 0)
        self.fast = bool(getattr(tokenizer, "is_fast", False))
        self.errors, self.error_count, self.not_prefix = [], 0, 0
        self.turns, self.sample, self.records = {}, None, 0
        self.mask = None

    def summary(self):
        return {
            "records": self.records,
            "render_errors": self.error_count,
            "render_error_examples": self.errors,
            "answers_not_found_in_rendered": self.not_prefix,
            "turn_tokens": self.turns,
            "label_mask": self.sample,
            "assistant_mask": self.mask,
        }

    def write(self, batch, out):
        rendered = []
        for line in batch:
            rendered.append(None if line is None else self.render(json.loads(line)))
        texts = [item[0] for item in rendered if item is not None and item[0] is not None]
        encoded = iter(self.encode(texts))
        for item in rendered:
            if item is None:
                out.write(struct.pack("<iii", 0, 0, 0))
                continue
            self.records += 1
            if item[0] is None:
                out.write(struct.pack("<iii", -1, 0, 0))
                continue
            text, spans, messages, tools = item
            ids, offsets = next(encoded)
            trained = self.trained(offsets, spans)
            first = 0
            if self.limit and len(ids) > self.limit:
                first, ids, trained = self.shorten(messages, tools, ids, trained)
            if self.sample is None and spans and offsets is not None and first == 0:
                self.show(text, ids, offsets, spans, messages, tools)
            out.write(struct.pack("<iii", len(ids), trained, first))

    def render(self, record):
        """(text, spans of characters that are trained on, messages, tools)"""
        if "text" in record:
            return record["text"], [(0, len(record["text"]))], None, None
        messages = record.get("messages")
        if messages is None:
            messages = record.get("prompt", []) + record.get("completion", record.get("chosen", []))
        tools = record.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if self.records < self.turn_sample:
            self.count_turns(messages)
        return self.render_messages(messages, tools)

    def render_messages(self, messages, tools):
        if not self.has_template:
            text, spans = "", []
            for message in messages:
                content = message.get("content") or ""
                if message["role"] == "assistant":
                    spans.append((len(text), len(text) + len(content)))
                text += content + "\n"
            return text, spans, messages, tools
        try:
            text = self.apply(messages, tools, False)
            spans = []
            for index, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                before = self.apply(messages[:index], tools, True)
                after = text if index == len(messages) - 1 else self.apply(messages[: index + 1], tools, False)
                if text.startswith(before) and text.startswith(after) and len(after) > len(before):
                    # The line end behind the mark of the answer's end is written by the template, not the model.
                    spans.append((len(before), max(len(before) + 1, len(after.rstrip("\n")))))
                else:
                    self.not_prefix += 1  # the template writes earlier answers otherwise than the last one
                    content = message.get("content") or ""
                    at = text.find(content) if content else -1
                    if at >= 0:
                        spans.append((at, at + len(content)))
        except Exception as error:
            self.error_count += 1
            if len(self.errors) < 5:
                self.errors.append("%s: %s" % (type(error).__name__, str(error)[:200]))
            return None, [], messages, tools
        return text, spans, messages, tools

    def apply(self, messages, tools, prompt):
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

    def encode(self, texts):
        if not texts:
            return []
        special = not self.has_template
        if not self.fast:
            return [(self.tokenizer.encode(text, add_special_tokens=special), None) for text in texts]
        made = self.tokenizer(
            texts, add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False
        )
        return list(zip(made["input_ids"], made["offset_mapping"]))

    def trained(self, offsets, spans):
        if offsets is None:
            return -1
        count, at = 0, 0
        for start, end in offsets:
            while at < len(spans) and start >= spans[at][1]:
                at += 1
            if at < len(spans) and start >= spans[at][0] and end > start:
                count += 1
        return count

    def shorten(self, messages, tools, ids, trained):
        """Leave out the oldest exchanges until it fits; the system turn and the last exchange stay."""
        if messages is None:
            return -1, ids, trained
        lead = 1 if messages and messages[0]["role"] == "system" else 0
        starts = [index for index in range(lead + 1, len(messages)) if messages[index]["role"] == "user"]
        for start in starts:
            cut = messages[:lead] + messages[start:]
            if not any(message["role"] == "assistant" for message in cut):
                break
            text, spans, _, _ = self.render_messages(cut, tools)
            if text is None:
                break
            ((new_ids, offsets),) = self.encode([text])
            if len(new_ids) <= self.limit:
                return start, new_ids, self.trained(offsets, spans)
        return -1, ids, trained

    def count_turns(self, messages):
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                sizes = self.turns.setdefault(message["role"], [])
                sizes.append(len(self.tokenizer.encode(content, add_special_tokens=False)))

    def show(self, text, ids, offsets, spans, messages, tools):
        """The label mask of one record as runs of text, and whether the template's own mask agrees."""
        runs = []
        at = 0
        for start, end in offsets:
            while at < len(spans) and start >= spans[at][1]:
                at += 1
            trained = at < len(spans) and start >= spans[at][0] and end > start
            if runs and runs[-1][0] == trained:
                runs[-1][1] += 1
                runs[-1][3] = end
            else:
                runs.append([trained, 1, start, end])
        self.sample = [
            {"trained": trained, "tokens": count, "text": text[start:end]} for trained, count, start, end in runs
        ]
        if not self.has_template or messages is None:
            return
        try:
            made = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            mask = made["assistant_masks"]
            mask = mask[0] if mask and isinstance(mask[0], list) else mask
            total = sum(int(value) for value in mask)
            expected = sum(run["tokens"] for run in self.sample if run["trained"])
            self.mask = {"mask_tokens": total, "answer_tokens": expected, "tokens": len(mask)}
        except Exception as error:
            self.mask = {"error": "%s: %s" % (type(error).__name__, str(error)[:200])}


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        step("failed", error="%s: %s" % (type(error).__name__, str(error)[:400]))
        sys.exit(1)
