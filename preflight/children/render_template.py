"""Compile and render chat templates in a sandbox like transformers'. argv: results file, job file. Needs jinja2.

The job is {"templates": {name: text}, "tokens": {bos_token: ...}}. Each finished step is one JSON line: a template is
somebody else's program, so the caller sets a time limit and reads what was finished before it.
"""

import datetime
import json
import sys

MOST_OUTPUT = 200000
SYSTEM, USER, ASSISTANT = "Answer in JSON.", "Hi", "{}"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def say(**line):
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def message(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = (
    # name, messages, add_generation_prompt, tools
    ("user", [message("user", USER)], False, None),
    ("user+generation_prompt", [message("user", USER)], True, None),
    ("user+assistant", [message("user", USER), message("assistant", ASSISTANT)], False, None),
    ("system+user", [message("system", SYSTEM), message("user", USER)], False, None),
    (
        "system+user+assistant",
        [message("system", SYSTEM), message("user", USER), message("assistant", ASSISTANT)],
        False,
        None,
    ),
    (
        "system+user+assistant+generation_prompt",
        [message("system", SYSTEM), message("user", USER), message("assistant", ASSISTANT)],
        True,
        None,
    ),
    (
        "multi-turn",
        [message("user", USER), message("assistant", ASSISTANT), message("user", "More"), message("assistant", "[]")],
        False,
        None,
    ),
    ("user+user", [message("user", USER), message("user", "Again")], False, None),
    ("tools", [message("user", USER)], True, [TOOL]),
    (
        "tool-call",
        [
            message("user", USER),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call00001",
                        "type": "function",
                        "function": {"name": "look_up", "arguments": {"word": "hi"}},
                    }
                ],
            },
            {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": "a greeting"},
        ],
        True,
        [TOOL],
    ),
    ("content-parts", [{"role": "user", "content": [{"type": "text", "text": USER}]}], False, None),
)


def limit():
    """At most 1 GiB of memory and 20 s of processor time, where the system can say so."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    except (ImportError, ValueError, OSError):
        pass


def environment():
    """The Jinja environment of transformers' apply_chat_template (utils/chat_template_utils.py, 5.24)."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %} marks what the assistant wrote; here its text is kept as it is."""

        tags = frozenset(["generation"])

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller):
            return caller()

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(text):
        raise jinja2.exceptions.TemplateError(text)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    # A fixed day, so that the same template always gives the same text.
    made.globals["strftime_now"] = lambda form: datetime.datetime(2026, 1, 31).strftime(form)
    return made


def named(error):
    kind = type(error)
    module = kind.__module__.split(".")[0]
    return (module + "." if module == "jinja2" else "") + kind.__name__ + ": " + str(error)[:500]


def render(template, messages, generation_prompt, tools, tokens):
    size, pieces = 0, []
    for piece in template.generate(
        messages=messages, tools=tools, documents=None, add_generation_prompt=generation_prompt, **tokens
    ):
        size += len(piece)
        if size > MOST_OUTPUT:
            raise OverflowError("more than %d characters for a conversation of a few words" % MOST_OUTPUT)
        pieces.append(piece)
    return "".join(pieces)


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        job = json.load(stream)
    limit()
    try:
        import jinja2
    except ImportError as error:
        say(step="import", error=str(error))
        return
    say(step="import", version=jinja2.__version__)
    sandbox = environment()
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    for name, text in job["templates"].items():
        say(step="begin", template=name)
        try:
            template = sandbox.from_string(text)
        except (jinja2.exceptions.TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            say(step="compile", template=name, error=named(error), line=getattr(error, "lineno", None))
            continue
        try:
            plain.from_string(text)
            plain_error = None
        except Exception as error:
            plain_error = type(error).__name__ + ": " + str(error)[:300]
        say(step="compile", template=name, plain_error=plain_error)
        for conversation, messages, generation_prompt, tools in CONVERSATIONS:
            say(step="begin", template=name, conversation=conversation)
            try:
                shown = render(template, messages, generation_prompt, tools, job["tokens"])
            except Exception as error:
                say(step="render", template=name, conversation=conversation, error=named(error))
            else:
                say(step="render", template=name, conversation=conversation, text=shown)
    say(step="end")


if __name__ == "__main__":
    main()
