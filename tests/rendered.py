"""Renders a report as trackers do, with GitHub's own cmark-gfm and GitLab's comrak, and checks what a reader gets."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

VOID = frozenset({"br", "hr", "input", "img"})
TAGS = frozenset({"h1", "h2", "h3", "p", "strong", "em", "ul", "ol", "li", "code", "pre", "a", "blockquote"})
TAGS |= {"details", "summary", "table", "thead", "tbody", "tr", "th", "td"}
# What trackers turn into links, people and pictures in the text that they show (not in code).
# GitHub: mentions, issues, GH-1, emoji. GitLab: also merge requests, labels, milestones, snippets, epics.
REFERENCES = (
    r"(?<![\w.])@[A-Za-z0-9]",
    r"#\d",
    r"!\d",
    r"\bGH-\d",
    r":[\w+-]+:",
    r"(?<!\w)~[\w\"]",
    r"(?<![\w%])%[A-Za-z]",
    r"\$\d",
    r"&\d",
)


def github(text: str) -> str:
    """HTML as GitHub's fork of cmark makes it. Raw HTML is let through, so that what leaks is seen."""
    cmarkgfm = pytest.importorskip("cmarkgfm")
    from cmarkgfm.cmark import Options

    html: str = cmarkgfm.github_flavored_markdown_to_html(text, Options.CMARK_OPT_UNSAFE)
    return html


def gitlab(text: str) -> str:
    """HTML as comrak makes it with the extensions that GitLab's renderer switches on."""
    comrak = pytest.importorskip("comrak")
    extensions = comrak.ExtensionOptions()
    for name in (
        *("autolink", "strikethrough", "table", "tasklist", "math_dollars", "math_code", "footnotes", "alerts"),
        *(
            "multiline_block_quotes",
            "description_lists",
            "inline_footnotes",
            "shortcodes",
            "wikilinks_title_before_pipe",
        ),
    ):
        setattr(extensions, name, True)
    options = comrak.RenderOptions()
    options.unsafe_ = True
    html: str = comrak.render_markdown(text, extensions, comrak.ParseOptions(), options)
    return html


RENDERERS = {"github": github, "gitlab": gitlab}


class Seen(HTMLParser):
    """What a reader sees: tables with their cells, what is folded, links, code, and text that is not code."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.tables: list[list[list[str]]] = []
        self.folded: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.code: list[str] = []
        self.paragraphs: list[str] = []
        self.plain = ""
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "details":
            self.folded.append("")
        elif tag == "a":
            self.links.append((dict(attrs).get("href") or "", ""))
        elif tag == "code":
            self.code.append("")
        elif tag == "p":
            self.paragraphs.append("")
        if tag in ("h1", "h2"):
            assert "details" not in self.open, "a part of the report is folded into another"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        if "details" in self.open and "summary" not in self.open:
            self.folded[-1] += data
        if "a" in self.open:
            self.links[-1] = (self.links[-1][0], self.links[-1][1] + data)
        if "code" in self.open:
            self.code[-1] += data
        elif "a" not in self.open:
            self.plain += data
        if "p" in self.open:
            self.paragraphs[-1] += data


def check_rendered(text: str, renderer: str) -> Seen:
    """Every table is a table, everything folds, nothing leaks or links to somebody. Returns what was seen."""
    seen = Seen(RENDERERS[renderer](text))
    assert seen.tags <= TAGS, seen.tags - TAGS
    rulers = re.findall(r"^\|(?:\s*:?-+:?\s*\|)+$", text, re.MULTILINE)
    assert [len(table[0]) for table in seen.tables] == [ruler.count("|") - 1 for ruler in rulers]
    for table in seen.tables:
        assert len({len(row) for row in table}) == 1, table
    # a row with too many cells loses some, and a row that is none becomes a paragraph
    assert len(re.findall(r"^\|", text, re.MULTILINE)) - len(rulers) == sum(len(table) for table in seen.tables)
    assert len(seen.folded) == text.count("<details>")
    assert all(folded.strip() for folded in seen.folded)
    for address, shown in seen.links:
        assert re.sub(r"^(mailto:|http://(?=www))", "", address) in (shown, shown.replace("\u200b", "%E2%80%8B")), shown
    for pattern in REFERENCES:
        found = re.search(pattern, seen.plain)
        assert found is None, (pattern, seen.plain[max(0, found.start() - 40) : found.end() + 40])
    return seen
