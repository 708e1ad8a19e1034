"""The report in another language: a catalogue of whole texts, each with placeholders, against what was written.

The JSON record stays English; a language is only a way to show it. `templates/words/LANGUAGE/*.json` hold
{English: translated}. `{0}` or `{name}` stands for what the code puts in: names, numbers, commands, or another text of
the catalogue. What no entry fits is shown in English, never lost. docs/translating.md says how entries are found.
"""

from __future__ import annotations

import json
import re
from functools import cache, cached_property
from typing import Any

from preflight.facts import shipped

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
HTML_NAMES = {"en": "en", "zh": "zh-CN"}

_PLACE = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"[A-Za-z]{2,}")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Za-z`(\d\"'*/])")
# An entry made of these alone says so little that its places take single words only.
_LITTLE = frozenset(
    ["of", "to", "in", "on", "is", "and", "or", "with", "for", "at", "by", "an", "the", "than", "not", "more", "from"]
)
_FULL_WIDTH = "。，；：、！？（）「」"
_TIDY = re.compile(rf"(?<=[{_FULL_WIDTH}]) +| +(?=[{_FULL_WIDTH}])")
_CJK = "\u4e00-\u9fff"
_JOINTS = (
    (re.compile(rf"; (?=[{_CJK}])"), "；"),
    (re.compile(rf"(?<=[。，；：]) (?=[{_CJK}])"), ""),
    (re.compile(rf"(?<=[{_CJK}）])\.(?=\n|$)"), "。"),
)
_GLUES = (re.compile(r"(; )"), re.compile(r"(, and |, or |, | and | or | \+ )"))
_LIST_WORDS = {", and ": "和", ", or ": "或", "; ": "；", ", ": "、", " and ": "和", " or ": "或", " + ": " + "}
_PROSE = re.compile(r"(?:[A-Za-z][a-z']*[,;]? ){3,}[a-z']+")
_SAYS_LITTLE = 25  # characters of an entry beside its places
_SENTENCES = 6  # the most that one entry holds
_LONGEST = 6000  # characters; nothing the program writes comes near


class Words:
    """One language. `text` translates what the program wrote, `filled` what a template says."""

    def __init__(self, language: str) -> None:
        self.language = language
        self._known: dict[str, str] = {}

    @cached_property
    def entries(self) -> dict[str, str]:
        """All entries of the language; none for English."""
        found: dict[str, str] = {}
        if self.language != ENGLISH:
            for path in sorted(shipped("templates", "words", self.language).glob("*.json")):
                found |= json.loads(path.read_text(encoding="utf-8"))
        return found

    def text(self, english: str) -> str:
        """The text in this language; as it is where the catalogue has none."""
        if self.language == ENGLISH or not _WORD.search(english) or len(english) > _LONGEST:
            return english
        known = self._known.get(english)
        if known is None:
            core = english.strip()
            start = english.index(core)
            known = english[:start] + self._text(core) + english[start + len(core) :]
            self._known[english] = known
        return known

    def said(self, value: Any) -> Any:
        """The same for data of a record: texts are translated, everything else stays."""
        return self.text(value) if isinstance(value, str) else value

    def template(self, english: str) -> str:
        """The words of a template, with their {places}."""
        return self.entries.get(english, english)

    def tidy(self, markdown: str) -> str:
        """A rendered text whose joints, which templates write once for all languages, fit between Chinese words."""
        if self.language == ENGLISH:
            return markdown
        for pattern, full_width in _JOINTS:
            markdown = pattern.sub(full_width, markdown)
        return markdown

    # --- finding the entry ---

    def _text(self, text: str) -> str:
        return self._whole(text, strict=True) or self._sentences(text) or self._whole(text, strict=False) or text

    def _sentences(self, text: str) -> str | None:
        """The text as a run of entries, the longest at each place; None when none of its sentences has one."""
        parts = _SENTENCE_END.split(text)
        if len(parts) == 1:
            return self._parts(text)
        made: list[str] = []
        hits = position = 0
        while position < len(parts):
            for end in range(min(len(parts), position + _SENTENCES), position, -1):
                if end - position == len(parts):
                    continue
                piece = " ".join(parts[position:end])
                found = self._whole(piece, strict=True) or (self._parts(piece) if end == position + 1 else None)
                if found is not None:
                    made.append(found)
                    hits += 1
                    break
            else:
                end = position + 1
                made.append(parts[position])
            position = end
        if not hits or (hits < len(made) and self._whole(text, strict=False) is not None):
            return None
        return _TIDY.sub("", " ".join(made))

    def _whole(self, text: str, strict: bool) -> str | None:
        """The one entry that fits the whole text. `strict`: no place may hold the end of a sentence."""
        for form, shorten in self._spellings(text):
            found = self.entries.get(form)
            if found is not None:
                return found.removesuffix("。") if shorten else found
        for form, shorten in self._spellings(text):
            for entry in self._candidates(form):
                filled = [self._filled(entry, places, strict) for places in entry.readings(form)]
                made = [one for one in filled if one is not None]
                if made:
                    best = min(made, key=lambda one: len(_WORD.findall(one)))  # the least that stayed English
                    return best.removesuffix("。") if shorten else best
        return None

    def _filled(self, entry: Entry, places: dict[str, str], strict: bool) -> str | None:
        """The entry with what stands in its places; None when it would swallow a text that has no entry."""
        if strict and any(_SENTENCE_END.search(place) for place in places.values()):
            return None
        said = {  # what stands in quotes is a name
            name: place if f"'{{{name[1:]}}}'" in entry.english else self._placed(place)
            for name, place in places.items()
        }
        little = entry.weight < _SAYS_LITTLE and ": {" not in entry.english
        if little and any(_PROSE.search(place) for place in said.values()):
            return None
        made = _PLACE.sub(lambda one: said.get(f"_{one.group(1)}", ""), entry.translated)
        return _TIDY.sub("", made)

    @staticmethod
    def _spellings(text: str) -> list[tuple[str, bool]]:
        """The text, with its first letter the other way, and with a full stop (to be taken off again)."""
        swapped = text[:1].swapcase() + text[1:]
        found = [(text, False), (swapped, False)]
        if text[-1:] not in ".!?":
            found += [(text + ".", True), (swapped + ".", True)]
        else:
            found.append((text[:-1], False))
        return found

    def _placed(self, value: str) -> str:
        """What stands in a place: another text of the catalogue, a list of them, or a name that stays."""
        if not _WORD.search(value) or (value[:1] == "`" and value[-1:] == "`" and value.count("`") == 2):
            return value
        return self.text(value)

    def _parts(self, text: str) -> str | None:
        """One sentence of which only parts have entries: behind a colon, in brackets, or in a list."""
        return self._labelled(text) or self._bracketed(text) or self._listed(text)

    def _labelled(self, text: str) -> str | None:
        """`Label: text`, where the text has an entry; the label is a name where it has none."""
        for colon in re.finditer(r": ", text):
            label, rest = text[: colon.start()], text[colon.end() :]
            said = self._whole(rest, strict=True) or self._listed(rest)
            if said is not None:
                return f"{self._whole(label, strict=True) or label}：{said}"
        return None

    def _bracketed(self, text: str) -> str | None:
        """A text with brackets, of which what stands inside or outside has an entry."""
        parts = _outer_brackets(text)
        if len(parts) == 1:
            return None
        made = [self._whole(part, strict=True) or self._parts(part) if _WORD.search(part) else None for part in parts]
        if not any(made):
            return None
        said = [part if one is None else one for part, one in zip(parts, made, strict=True)]
        return "".join(f"（{part}）" if index % 2 else part for index, part in enumerate(said))

    def _listed(self, text: str) -> str | None:
        """A list whose members have entries; None when none has. The widest glue is tried first."""
        for glue in _GLUES:
            parts = glue.split(text)
            if len(parts) == 1:
                continue
            members = [
                self._whole(part, strict=True) or self._parts(part) if _WORD.search(part) else None
                for part in parts[::2]
            ]
            if not any(members):
                continue
            made = parts[0] if members[0] is None else members[0]
            for word, part, member in zip(parts[1::2], parts[2::2], members[1:], strict=True):
                tail = self._whole(word + part, strict=True)  # some entries bring the comma that they follow with
                made += tail or _LIST_WORDS[word] + (part if member is None else member)
            return made
        return None

    # --- the index ---

    @cached_property
    def _index(self) -> dict[str, list[Entry]]:
        """The rarest word of an entry -> entries."""
        made = [Entry(english, translated) for english, translated in self.entries.items() if "{" in english]
        often: dict[str, int] = {}
        for entry in made:
            for word in entry.words:
                often[word] = often.get(word, 0) + 1
        index: dict[str, list[Entry]] = {}
        for entry in made:
            rarest = min(entry.words, key=lambda word: (often[word], word), default="")
            index.setdefault(rarest, []).append(entry)
        return index

    def _candidates(self, text: str) -> list[Entry]:
        words = {"", *_WORD.findall(text)}
        found = [entry for word in words for entry in self._index.get(word, ())]
        return sorted(found, key=lambda entry: (-entry.weight, entry.english))


def _outer_brackets(text: str) -> list[str]:
    """Outside, inside, outside …, split at the outermost brackets that stand behind a blank."""
    parts, depth, begin = [""], 0, 0
    for place, sign in enumerate(text):
        if sign == "(":
            if depth == 0 and text[max(0, place - 1)] != " ":
                return [text]
            if depth == 0:
                parts[-1] = text[begin : place - 1]
                begin = place + 1
            depth += 1
        elif sign == ")":
            depth -= 1
            if depth < 0:
                return [text]
            if depth == 0:
                parts += [text[begin:place], ""]
                begin = place + 1
    if depth or len(parts) == 1:
        return [text]
    parts[-1] = text[begin:]
    return parts


class Entry:
    """A text with places. Its patterns are made when it is first tried."""

    def __init__(self, english: str, translated: str) -> None:
        self.english = english
        self.translated = translated
        pieces = _PLACE.split(english)
        literal = pieces[::2]
        self.weight = sum(len(piece) for piece in literal)
        # a word that touches a place may be longer in the text
        joined = "\0".join(literal)
        self.words = set(re.findall(r"(?<![A-Za-z\0])[A-Za-z]{2,}(?![A-Za-z\0])", joined))
        self._pieces = pieces

    def readings(self, text: str) -> list[dict[str, str]]:
        """What would stand in the places: the first ones as short as possible, then as long as possible."""
        found: list[dict[str, str]] = []
        for pattern in self._patterns:
            match = pattern.fullmatch(text)
            if match is None:
                break
            if match.groupdict() not in found:
                found.append(match.groupdict())
        return found

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        literal_words = set(_WORD.findall(" ".join(self._pieces[::2])))
        short = literal_words <= _LITTLE or (self.weight < 12 and ":" not in self.english)
        return tuple(self._pattern(place) for place in ([r"\S+?(?: [KMGT]?i?B)?"] if short else [".*?", ".*"]))

    def _pattern(self, place: str) -> re.Pattern[str]:
        made, seen = "", set()
        for index, piece in enumerate(self._pieces):
            if index % 2 == 0:
                made += re.escape(piece)
            elif piece in seen:
                made += f"(?P=_{piece})"
            else:
                seen.add(piece)
                made += f"(?P<_{piece}>{place})"
        return re.compile(made, re.DOTALL)


@cache
def words_of(language: str) -> Words:
    """The words of a language of LANGUAGES."""
    return Words(language)
