#!/usr/bin/env python3
"""Every text that a report can show, read out of the source: what a language's catalogue must hold.

`python tests/texts.py` counts what is missing by area; `python tests/texts.py missing AREA` prints the missing texts
of one area as JSON to be filled in; `python tests/texts.py dead` lists entries that no source has any more.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LANGUAGE = "zh"
# Area -> the sources whose texts it holds. A text that several areas use belongs to the first of them.
AREAS = {
    "core": ("preflight/*.py",),
    "templates": ("templates/*.j2", "templates/html/*.j2"),
    "memory": (
        "preflight/memory/*.py",
        "preflight/children/rehearse.py",
        "preflight/children/rehearsal/*.py",
        "preflight/children/measure.py",
    ),
    "hardware": ("gpu_probe.py", "preflight/hardware/*.py"),
    "model": ("model_analyzer.py", "preflight/model/*.py", "preflight/model/families/*.py"),
    "task": ("task_evaluator.py", "preflight/task/*.py"),
    "data": ("data_preprocessor.py", "preflight/data/*.py"),
    "outputs": ("validate_output_schema.py", "preflight/outputs/*.py"),
    "software": ("env_sandbox.py", "preflight/software/*.py", "preflight/children/*.py"),
    "xid": ("facts/xid.json",),
    "schema_rules": ("facts/schema_lint.json",),
    "tables": ("facts/*.json",),
    "error_signatures": ("facts/error_signatures.json",),
}
# Modules whose texts never reach a report: generated projects stay English, like usage errors.
NOT_SHOWN = {
    "preflight/recipe.py",
    "preflight/launch.py",
    "preflight/training_config.py",
    "preflight/redact.py",
    "preflight/facts.py",
}
# Where facts say something to a reader: table -> the keys whose texts are shown.
SHOWN_FACTS = {
    "error_signatures": {"cause", "fix"},
    "xid": {"summary", "advice"},
    "schema_lint": {"message", "fix"},
    "quantised_bases": {"merge", "alternative", "lora", "full", "name"},
    "gguf_backends": {"needs", "android"},
}

# Calls whose text is for the terminal, for a program or for a person who develops, never for the report.
_SILENT = {
    "say", "print", "UsageError", "ReportTrouble", "ArgumentTypeError", "add_argument", "add_argument_group",
    "parser", "ArgumentParser", "startswith", "endswith", "split", "rsplit", "partition", "removeprefix",
    "removesuffix", "replace", "compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "getattr",
    "Path", "shipped", "table", "get", "pop", "index", "find", "rfind", "count_of", "import_module", "find_spec",
    "SystemExit", "AssertionError", "TypeVar", "warn", "error", "encode", "decode", "strip", "lstrip", "rstrip",
    "fromisoformat", "strptime", "strftime",
}  # fmt: skip
_MOST_FORMS = 8
# What every language writes the same way.
MARKS = frozenset(
    ["GiB", "MiB", "GB/s", "TFLOP/s", "ms", "PCIe", "CUDA", "llama.cpp", "transformers", "LoRA", "LoRA r", "MIG"]
)
# Words of the record that the views show: levels, answers, states of a step.
WORDS_OF_RECORDS = (
    "ok", "warn", "unknown", "fail", "warning", "FAIL", "not run", "yes", "marginal", "no", "could not tell",
    "YES", "MARGINAL", "NO", "COULD NOT TELL", "rehearsed",
)  # fmt: skip


def prose(text: str) -> bool:
    """Whether a reader sees English words here, besides code and placeholders."""
    bare = re.sub(r"`[^`]*`|\{\w*\}|https?://\S+", " ", text)
    if re.search(r"\\[bdsw.]|\(\?[:P=!<]|\[\^|^\s*--?\w|^\W*$|::|\w\|\w|^import |^/|^<", bare):
        return False
    words = re.findall(r"(?<![\w./_-])[A-Za-z]+(?:'[a-z]+)?(?![\w/_=(]|\.\w)", bare)
    return len([word for word in words if len(word) > 1]) >= 2 and any(word.islower() for word in words)


def word(text: str) -> bool:
    """Whether a reader sees at least one word."""
    return bool(re.search(r"(?<![\w./_-])[A-Za-z]{2,}(?![\w/_=(]|\.\w)", re.sub(r"`[^`]*`|\{\w*\}", " ", text)))


def normal(text: str) -> str:
    """The text as an entry: on one line, placeholders numbered, without whole sentences that the code glues to it."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<=[.!?])(?: ?\{\w*\})+$", "", text)
    text = re.sub(r"^(?:\{\w*\} )+(?=(?:[A-Z][a-z]+|A|I) .*[.!?]$)", "", text).strip()
    number = itertools.count()
    return re.sub(r"\{\}", lambda _: "{" + str(next(number)) + "}", text)


# --- Python --------------------------------------------------------------------------------------------------------


def forms(node: ast.expr) -> list[str] | None:
    """The texts that an expression can be, with {} for what is only known later; None when it is not a text."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        left = forms(node.left)
        return left and [re.sub(r"%[-+ #0]*[\d.]*[sdrfgiex]", "{}", form) for form in left]
    if isinstance(node, ast.JoinedStr):
        return product([part_forms(part) for part in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = forms(node.left), forms(node.right)
        if left is None and right is None:
            return None
        return product([left or ["{}"], right or ["{}"]])
    if isinstance(node, ast.IfExp):
        body, other = forms(node.body), forms(node.orelse)
        if body is None and other is None:
            return None
        return list(dict.fromkeys([*(body or ["{}"]), *(other or ["{}"])]))
    return None


def part_forms(part: ast.expr) -> list[str]:
    """What a part of an f-string can be. A conditional whole sentence counts as a text of its own."""
    if isinstance(part, ast.Constant):
        return [str(part.value)]
    assert isinstance(part, ast.FormattedValue)
    value = part.value
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "count" and len(value.args) == 2:
        noun = value.args[1]
        if isinstance(noun, ast.Constant):
            return [f"{{}} {noun.value}", f"{{}} {noun.value}s"]
    found = forms(value) if isinstance(value, (ast.IfExp, ast.BinOp)) and part.format_spec is None else None
    if found is None or any(own_sentence(form) for form in found):
        return ["{}"]
    return found


def own_sentence(text: str) -> bool:
    return bool(re.match(r"\s*[A-Z].*[.!?]\s*$", text)) and len(text.split()) > 2


def product(parts: list[list[str]]) -> list[str]:
    """All combinations; where they would be too many, the parts with most forms become placeholders."""
    parts = [list(part) for part in parts]
    while len(list(itertools.product(*parts))) > _MOST_FORMS:
        widest = max(parts, key=len)
        widest[:] = ["{}"]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


class Texts(ast.NodeVisitor):
    """Collects (line, text) of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self.sources = source_names(tree)
        self.assigned: list[dict[str, list[ast.expr]]] = [assignments(tree)]
        self.followed: set[int] = set()
        self.in_finding = False  # there one word is a text already
        self.visit(tree)

    def take(self, node: ast.expr, needs_prose: bool = True) -> bool:
        """Collect the node's texts; True when it is one."""
        made = forms(node)
        if made is None:
            return False
        needs_prose = needs_prose and not self.in_finding
        for form in made:
            text = normal(form)
            if prose(text) or (not needs_prose and word(text)):
                self.found.append((node.lineno, text))
        self.inside(node)
        return True

    def inside(self, node: ast.expr) -> None:
        """What stands between the braces: single words count there, because they become part of a sentence."""
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    taken = part_forms(part) != ["{}"]
                    if isinstance(part.value, ast.Name):
                        for value in self.assigned[-1].get(part.value.id, []):
                            if id(value) not in self.followed:
                                self.followed.add(id(value))
                                self.words(value)
                    elif not taken and isinstance(part.value, (ast.IfExp, ast.BoolOp, ast.Subscript)):
                        self.words(part.value)
                    if not taken or isinstance(part.value, ast.BinOp):
                        self.visit(part.value)
                    elif isinstance(part.value, ast.IfExp):
                        self.inside(part.value)
        elif isinstance(node, ast.BinOp):
            for side in (node.left, node.right):
                if forms(side) is None:
                    self.visit(side)
                else:
                    self.inside(side)
        elif isinstance(node, ast.IfExp):
            for side in (node.body, node.orelse):
                if forms(side) is None:
                    self.visit(side)
                else:
                    self.inside(side)

    def words(self, node: ast.expr) -> None:
        """Single words that become part of a sentence."""
        if isinstance(node, (ast.IfExp, ast.Constant, ast.JoinedStr)):
            self.take(node, needs_prose=False)
        elif isinstance(node, (ast.BoolOp, ast.Dict)):
            for value in node.values:
                self.words(value)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            self.words(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            for value in [*node.args[1:], node.func.value]:
                if isinstance(value, (ast.Constant, ast.Dict)):
                    self.words(value)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.take(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.take(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not (isinstance(node.op, (ast.Add, ast.Mod)) and self.take(node)):
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_Compare(self, node: ast.Compare) -> None:
        return

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)

    def visit_Dict(self, node: ast.Dict) -> None:
        for value in node.values:
            self.visit(value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not self.silent(node.target):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self.silent(node.targets[0]):
            self.visit(node.value)

    def silent(self, target: ast.expr) -> bool:
        name = target.id if isinstance(target, ast.Name) else ""
        return name in self.sources or name in ("__all__", "__doc__") or name.upper().endswith("SOURCE")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name == "count" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            noun = node.args[1].value
            self.found += [(node.lineno, f"{{0}} {noun}"), (node.lineno, f"{{0}} {noun}s")]
            return
        if name == "template":  # words of the terminal and of what Python writes into the Markdown
            for argument in node.args:
                self.take(argument, needs_prose=False)
            return
        if name == "Finding":
            shown = [*node.args[2:5], *(k.value for k in node.keywords if k.arg in ("what", "why", "fix"))]
            before, self.in_finding = self.in_finding, True
            for argument in shown:
                self.visit(argument)
            self.in_finding = before
            return
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        if name in _SILENT:
            if name == "get":
                for argument in node.args[1:]:
                    self.visit(argument)
            return
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in ("source", "help", "description", "epilog", "metavar"):
                self.visit(keyword.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.assigned.append({**self.assigned[0], **assignments(node)})
        for default in node.args.defaults:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.assigned.pop()


def assignments(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """The expressions that names are given in a scope."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def source_names(tree: ast.Module) -> set[str]:
    """Names that only ever stand where a finding's source stands."""
    sources: set[str] = set()
    elsewhere: set[str] = set()
    marked: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [k.value for k in node.keywords if k.arg == "source"]
            if getattr(node.func, "id", "") == "Finding":
                given += node.args[5:6]
            for expression in given:
                for name in ast.walk(expression):
                    if isinstance(name, ast.Name):
                        sources.add(name.id)
                        marked.add(id(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in marked:
            elsewhere.add(node.id)
    return sources - elsewhere


def python_texts(path: Path) -> list[tuple[int, str]]:
    """(line, text) of a module."""
    return Texts(ast.parse(path.read_text(encoding="utf-8"))).found


# --- tables and templates ------------------------------------------------------------------------------------------


def table_texts(path: Path) -> list[tuple[int, str]]:
    """(0, text) of a table of facts."""
    keys = SHOWN_FACTS.get(path.stem, set())
    found: list[tuple[int, str]] = []

    def walk(value: Any, shown: bool) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, key in keys)
        elif isinstance(value, list):
            for item in value:
                walk(item, shown)
        elif isinstance(value, str) and shown and re.search(r"[A-Za-z]{2}", re.sub(r"`[^`]*`", "", value)):
            found.append((0, normal(value)))

    walk(json.loads(path.read_text(encoding="utf-8")), False)
    return found


def template_texts(path: Path) -> list[tuple[int, str]]:
    """(line, text) of a template: the first argument of each `t(…)`, and words that a list of heads has."""
    import jinja2
    from jinja2 import nodes

    tree = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(path.read_text(encoding="utf-8"))
    found: list[tuple[int, str]] = []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "t":
            shown = call.args[:1]
        elif isinstance(call.node, nodes.Getattr) and call.node.attr == "table":
            shown = call.args
        else:
            continue
        found += [(call.lineno, text) for argument in shown for text in constants(argument)]
    for one in tree.find_all(nodes.Filter):
        if one.name == "said" and one.node is not None:
            found += [(one.lineno, text) for text in constants(one.node)]
    return [(line, text) for line, text in found if re.search(r"[A-Za-z]{2}", text) and text not in MARKS]


def unmarked(path: Path) -> list[str]:
    """Words of a template that are not given to the catalogue, besides tags, attributes, units and product names."""
    import jinja2
    from jinja2 import nodes

    tree = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(path.read_text(encoding="utf-8"))
    found = []
    # a tag may be cut by an expression inside it, so the text between the tags is read of the whole template
    whole = "".join(
        part.data if isinstance(part, nodes.TemplateData) else "\0"
        for output in tree.find_all(nodes.Output)
        for part in output.nodes
    )
    text = re.sub(r"<!--.*?-->|<[^<>]*>", " ", whole, flags=re.DOTALL)
    for run in re.findall(r"[A-Za-z][A-Za-z'/. -]*[A-Za-z]", text):
        if run not in MARKS:
            found.append(run)
    for one in tree.find_all(nodes.Output):
        found += [part.value for part in one.nodes if isinstance(part, nodes.Const) and part.value not in MARKS]
    return found


def constants(node: Any) -> Iterator[str]:
    """The texts in an expression of a template."""
    from jinja2 import nodes

    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, nodes.CondExpr):
        yield from constants(node.expr1)
        if node.expr2 is not None:
            yield from constants(node.expr2)
    elif isinstance(node, (nodes.List, nodes.Tuple)):
        for item in node.items:
            yield from constants(item)
    elif isinstance(node, nodes.Dict):
        for pair in node.items:
            yield from constants(pair.value)
    elif isinstance(node, nodes.Getitem):
        yield from constants(node.node)
    elif isinstance(node, nodes.Or):
        yield from constants(node.right)
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        yield from constants(node.node.node)


# --- areas ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[tuple[int, str]]:
    if path.suffix == ".py":
        return python_texts(path)
    return table_texts(path) if path.suffix == ".json" else template_texts(path)


@cache
def texts() -> dict[str, dict[str, str]]:
    """Area -> text -> where it stands first."""
    found: dict[str, dict[str, str]] = {area: {} for area in AREAS}
    found["core"] = dict.fromkeys(WORDS_OF_RECORDS, "the record")
    taken: set[Path] = set()
    known: set[str] = set(WORDS_OF_RECORDS)
    # a file belongs to the area that names it most exactly
    exact = {ROOT / pattern for patterns in AREAS.values() for pattern in patterns if "*" not in pattern}
    for area, patterns in AREAS.items():
        paths: Iterable[Path] = itertools.chain.from_iterable(sorted(ROOT.glob(pattern)) for pattern in patterns)
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            if path in taken or name in NOT_SHOWN or (path in exact and name not in patterns):
                continue
            taken.add(path)
            for line, text in read(path):
                if text not in known:
                    known.add(text)
                    found[area][text] = f"{name}:{line}"
    return found


def catalogue(area: str, language: str = LANGUAGE) -> dict[str, str]:
    """The entries of one area."""
    path = ROOT / "templates" / "words" / language / f"{area}.json"
    loaded: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return loaded


def missing(area: str) -> dict[str, str]:
    """Texts of an area without an entry -> where they stand."""
    everything: set[str] = set().union(*(catalogue(other) for other in AREAS))
    return {text: where for text, where in texts()[area].items() if text not in everything}


def dead() -> dict[str, list[str]]:
    """Area -> entries that no source has any more."""
    wanted: set[str] = set().union(*texts().values())
    return {area: left for area in AREAS if (left := [text for text in catalogue(area) if text not in wanted])}


def main(arguments: list[str]) -> int:
    """Counts, `missing AREA [--where]`, `dead`."""
    if arguments[:1] == ["missing"]:
        found = missing(arguments[1])
        shown = found if "--where" in arguments else dict.fromkeys(found, "")
        print(json.dumps(shown, indent=1, ensure_ascii=False))
    elif arguments[:1] == ["dead"]:
        print(json.dumps(dead(), indent=1, ensure_ascii=False))
    else:
        for area in AREAS:
            print(f"{area}: {len(texts()[area])} texts, {len(missing(area))} missing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
