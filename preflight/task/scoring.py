"""Is one output right?  A scorer judges an answer by one rule and tells a wrong form from a wrong answer.

A scorer is plain data: `{"type": "contains", "all": ["Paris"]}`. `read_scorer` checks it, `score` applies it.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflight.findings import quote
from preflight.outputs.schemas import Validator
from preflight.task.regexes import TooSlow, search_bounded

# Heuristic: below it two short texts share little more than common words. `--rouge-threshold` changes it.
ROUGE_THRESHOLD = 0.5
# A reference up to this length is looked for in the output; a longer one is compared as a text.
SHORT_REFERENCE = 60


@dataclass(frozen=True)
class Scored:
    """One judged output. `value` is the share of the rule that is met, 0 to 1.

    `wrong_form`: the output could not be judged at all (no JSON, no number, no choice, empty), which is another trouble
    than a wrong answer. `recovered`: how a JSON value was got out of text that is not strictly JSON.
    """

    passed: bool
    reason: str
    wrong_form: bool = False
    value: float = 0.0
    extracted: Any = None
    recovered: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scorer:
    """One rule, checked: `kind` is a key of KINDS or "all_of"; `rule` holds its parameters."""

    kind: str
    rule: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.kind == "all_of":
            return " + ".join(part.name for part in self.rule["scorers"])
        return NAMES[self.kind]


NAMES = {
    "exact": "exact match",
    "contains": "keyword",
    "regex": "regular expression",
    "numeric": "number",
    "choice": "multiple choice",
    "json_schema": "JSON Schema",
    "json_equal": "JSON equality",
    "rouge_l": "ROUGE-L",
    "function": "own function",
}


class BadScorer(ValueError):
    """A scorer in the data that cannot be applied; one line says why."""


def read_scorer(value: Any, load_schema: Callable[[str], Any]) -> Scorer:
    """The scorer that plain data describes. A list means: all of them. Raises BadScorer when it cannot be applied.

    `load_schema` turns the name of a schema file into the schema.
    """
    if isinstance(value, list):
        if not value:
            raise BadScorer("an empty list of scorers would accept everything")
        return Scorer("all_of", {"scorers": [read_scorer(item, load_schema) for item in value]})
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        raise BadScorer("a scorer is an object with `type`, or a list of such objects")
    rule = {key: item for key, item in value.items() if key != "type"}
    kind = str(value.get("type", "")).replace("-", "_").lower()
    kind, extra = _ALIASES.get(kind, (kind, {}))
    if kind not in NAMES or kind == "function":
        raise BadScorer(f"unknown scorer {quote(value.get('type'), 60)!r}; known: {', '.join(known_types())}")
    rule = {**extra, **rule}
    _CHECKS[kind](rule, load_schema)
    return Scorer(kind, rule)


_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "contains_all": ("contains", {"mode": "all"}),
    "contains_any": ("contains", {"mode": "any"}),
    "keyword": ("contains", {}),
    "keywords": ("contains", {}),
    "exact_match": ("exact", {}),
    "multiple_choice": ("choice", {}),
    "schema": ("json_schema", {}),
    "rouge": ("rouge_l", {}),
    "rougel": ("rouge_l", {}),
    "number": ("numeric", {}),
}


def known_types() -> list[str]:
    """The scorer types that data may name."""
    return [name for name in NAMES if name != "function"] + ["contains_all", "contains_any"]


def scorer_for_reference(kind: str | None, reference: str, load_schema: Callable[[str], Any]) -> Scorer:
    """The scorer that compares with a reference answer; `kind` None picks by the reference's own form.

    Raises BadScorer for an empty reference: an empty keyword would be found in everything.
    """
    if is_blank(reference):
        raise BadScorer("the reference answer is empty; an empty keyword would match everything")
    if kind is None:
        kind = "contains" if len(reference.strip()) <= SHORT_REFERENCE else "rouge_l"
        if reference.strip()[:1] in "{[":
            try:
                json.loads(reference)
                kind = "json_equal"
            except ValueError:
                pass
    return read_scorer({"type": kind, "answer": reference.strip()}, load_schema)


def is_blank(text: str) -> bool:
    """Whether nothing in the text can be seen: white space, control characters, zero-width marks."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


# ---------------------------------------------------------------------------------------------------------------------
# Checking the rules


def _texts(rule: dict[str, Any], *names: str) -> list[str]:
    found: list[str] = []
    for name in names:
        value = rule.pop(name, None)
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool) or not isinstance(item, (str, int, float)):
                raise BadScorer(f"`{name}` must hold text, not {type(item).__name__}")
            if isinstance(item, float) and not math.isfinite(item):
                raise BadScorer(f"`{name}` is not a finite number")
            if is_blank(str(item)):
                raise BadScorer(f"`{name}` holds an empty text, which would match everything")
            found.append(str(item))
    if not found:
        raise BadScorer(f"nothing to compare with: {' or '.join(f'`{name}`' for name in names)} is missing")
    return found


def _only(rule: Mapping[str, Any], *names: str) -> None:
    unknown = [name for name in rule if name not in names]
    if unknown:
        raise BadScorer(f"unknown key {quote(unknown[0], 40)!r} in the scorer; known: {', '.join(names) or 'none'}")


def _check_exact(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    rule["answers"] = _texts(rule, "answer", "answers")
    _only(rule, "answers", "ignore_case", "ignore_punctuation")


def _check_contains(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    if "any" in rule:
        rule["mode"], rule["keywords"] = "any", rule.pop("any")
    if "all" in rule:
        rule["mode"], rule["keywords"] = "all", rule.pop("all")
    rule["keywords"] = _texts(rule, "keywords", "answer")
    rule.setdefault("mode", "all")
    if rule["mode"] not in ("all", "any"):
        raise BadScorer(f"`mode` of contains is {quote(rule['mode'], 40)!r}; allowed: all, any")
    _only(rule, "keywords", "mode", "case_sensitive", "none")
    if "none" in rule:
        rule["none"] = _texts({"none": rule["none"]}, "none")


def _check_regex(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    rule["pattern"] = _texts(rule, "pattern", "answer")[0]
    _only(rule, "pattern", "ignore_case", "full")
    try:
        re.compile(rule["pattern"])
    except (re.error, RecursionError, OverflowError) as error:
        raise BadScorer(f"the pattern {quote(rule['pattern'], 80)!r} is no regular expression ({error})") from error


def _check_numeric(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    answer = rule.get("answer")
    if isinstance(answer, str):
        numbers = numbers_in(answer)
        if len(numbers) != 1:
            raise BadScorer(f"`answer` {quote(answer, 60)!r} is not one number")
        rule["answer"] = numbers[0]
    elif isinstance(answer, bool) or not isinstance(answer, (int, float)) or not math.isfinite(answer):
        raise BadScorer("`answer` of a numeric scorer must be a finite number")
    for name in ("tolerance", "relative_tolerance"):
        value = rule.setdefault(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise BadScorer(f"`{name}` must be a number, 0 or more")
    _only(rule, "answer", "tolerance", "relative_tolerance")


def _check_choice(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    choices = rule.get("choices")
    if isinstance(choices, list):
        choices = {chr(ord("A") + index): str(text) for index, text in enumerate(choices[:26])}
    elif isinstance(choices, Mapping):
        choices = {str(label): str(text) for label, text in choices.items()}
    elif choices is None:
        choices = dict.fromkeys("ABCDE", "")
    else:
        raise BadScorer("`choices` must be a list of texts or an object of label and text")
    answer = rule.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and isinstance(rule.get("choices"), list):
        answer = list(choices)[answer] if 0 <= answer < len(choices) else None
    label = next((name for name in choices if str(answer).strip().casefold() == name.casefold()), None)
    label = label or next((name for name, text in choices.items() if text and text == str(answer).strip()), None)
    if label is None:
        raise BadScorer(f"`answer` {quote(answer, 40)!r} is none of the choices {', '.join(choices)}")
    rule["choices"], rule["answer"] = choices, label
    _only(rule, "choices", "answer")


def _check_json_schema(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    schema = rule.get("schema")
    if isinstance(schema, str):
        schema = load_schema(schema)
    if not isinstance(schema, (dict, bool)):
        raise BadScorer("`schema` must be a JSON Schema or the name of a file that holds one")
    _only(rule, "schema", "expected", "strict")
    validator = Validator(schema)
    if validator.problem:
        raise BadScorer(f"the schema is not valid: {quote(validator.problem, 160)}")
    if validator.open_refs:
        raise BadScorer(f"the schema refers to {quote(validator.open_refs[0], 100)}, which is not in it")
    rule["schema"], rule["validator"] = schema, validator
    if "expected" in rule and not isinstance(rule["expected"], dict):
        raise BadScorer("`expected` must be an object of field and value")


def _check_json_equal(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    answer = rule.get("answer")
    if isinstance(answer, str):
        try:
            rule["answer"] = json.loads(answer)
        except ValueError as error:
            raise BadScorer("`answer` of json_equal is not JSON") from error
    elif answer is None:
        raise BadScorer("`answer` of json_equal is missing")
    _only(rule, "answer", "strict")


def _check_rouge(rule: dict[str, Any], load_schema: Callable[[str], Any]) -> None:
    rule["answers"] = _texts(rule, "answer", "answers")
    threshold = rule.setdefault("threshold", ROUGE_THRESHOLD)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise BadScorer("`threshold` of ROUGE-L must lie above 0 and be at most 1")
    if not any(rouge_tokens(text) for text in rule["answers"]):
        raise BadScorer("the reference holds no words")
    _only(rule, "answers", "threshold")


_CHECKS: dict[str, Callable[[dict[str, Any], Callable[[str], Any]], None]] = {
    "exact": _check_exact,
    "contains": _check_contains,
    "regex": _check_regex,
    "numeric": _check_numeric,
    "choice": _check_choice,
    "json_schema": _check_json_schema,
    "json_equal": _check_json_equal,
    "rouge_l": _check_rouge,
}

# ---------------------------------------------------------------------------------------------------------------------
# Applying the rules


def score(scorer: Scorer, output: str) -> Scored:
    """Judge one output. Never raises for what a model may write."""
    text = visible(output)
    if not text.strip():
        reason = "the output ends inside its reasoning" if output.strip() else "the output is empty"
        return Scored(False, reason, wrong_form=True)
    if scorer.kind == "all_of":
        parts = [score(part, output) for part in scorer.rule["scorers"]]
        worst = next((part for part in parts if not part.passed), parts[-1])
        return Scored(
            all(part.passed for part in parts),
            worst.reason,
            any(part.wrong_form for part in parts),
            min(part.value for part in parts),
            worst.extracted,
            tuple(dict.fromkeys(how for part in parts for how in part.recovered)),
        )
    return _APPLY[scorer.kind](scorer.rule, text)


_THINKING = re.compile(r"\A\s*(?:<think(?:ing)?>.*?)?</think(?:ing)?>", re.DOTALL)


def visible(output: str) -> str:
    """The answer without a reasoning block before it; an unclosed block has no answer yet."""
    text = _THINKING.sub("", output, count=1)
    return "" if re.match(r"\s*<think(?:ing)?>", text) else text


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def has_keyword(text: str, keyword: str, case_sensitive: bool = False) -> bool:
    """Whether the keyword stands in the text as a word of its own: "Au" is not in "August", "7" not in "17".

    Letters that stand alone without spaces (Chinese, Japanese, Thai …) are looked for as they are.
    """
    if not case_sensitive:
        text, keyword = _folded(text), _folded(keyword)
    keyword = " ".join(keyword.split())
    text = " ".join(text.split())
    start = text.find(keyword)
    while start >= 0:
        end = start + len(keyword)
        alone = not _joined(text[start - 1 : start], keyword[0]) and not _joined(keyword[-1], text[end : end + 1])
        if alone and not _inside_number(text, start, end):
            return True
        start = text.find(keyword, start + 1)
    return False


def _joined(left: str, right: str) -> bool:
    return bool(left and right) and _is_word(left) and _is_word(right)


def _is_word(character: str) -> bool:
    # Scripts written without spaces have no word ends to look for.
    return (character.isalnum() or character == "_") and not _SPACELESS.match(character)


_SPACELESS = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
)


def _inside_number(text: str, start: int, end: int) -> bool:
    """The keyword is a number that goes on: 7 in 7.5 or in 1,007 or in -7."""
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    negative = before.endswith(("-", "\u2212")) and not before[:-1].strip("( =")
    begins = text[start].isdigit() and (negative or bool(re.search(r"\d[.,]\Z", before)))
    return begins or (text[end - 1].isdigit() and bool(re.match(r"[.,]\d", after)))


def _contains(rule: Mapping[str, Any], text: str) -> Scored:
    sensitive = bool(rule.get("case_sensitive"))
    found = [word for word in rule["keywords"] if has_keyword(text, word, sensitive)]
    missing = [word for word in rule["keywords"] if word not in found]
    forbidden = [word for word in rule.get("none", ()) if has_keyword(text, word, sensitive)]
    passed = (bool(found) if rule["mode"] == "any" else not missing) and not forbidden
    if forbidden:
        reason = f"holds {_list(forbidden)}, which it must not"
    elif passed:
        reason = f"holds {_list(found)}"
    else:
        reason = f"{'none of' if rule['mode'] == 'any' else 'lacks'} {_list(missing)}"
    value = 1.0 if passed else 0.0 if forbidden else len(found) / len(rule["keywords"])
    return Scored(passed, reason, value=value, extracted=found)


def _list(words: Sequence[str]) -> str:
    return ", ".join(repr(quote(word, 40)) for word in words[:4]) + (" …" if len(words) > 4 else "")


def _exact(rule: Mapping[str, Any], text: str) -> Scored:
    def plain(value: str) -> str:
        value = unicodedata.normalize("NFC", " ".join(value.split()))
        if rule.get("ignore_punctuation"):
            value = "".join(c for c in value if not unicodedata.category(c).startswith("P")).strip()
        return _folded(value) if rule.get("ignore_case") else value

    passed = any(plain(text) == plain(answer) for answer in rule["answers"])
    reason = "equal" if passed else f"{quote(text, 60)!r} is not {_list(rule['answers'])}"
    return Scored(passed, reason, value=float(passed), extracted=text.strip())


def _regex(rule: Mapping[str, Any], text: str) -> Scored:
    flags = re.IGNORECASE if rule.get("ignore_case") else 0
    try:
        found = search_bounded(rule["pattern"], text.strip(), flags, full=bool(rule.get("full")))
    except TooSlow as error:
        return Scored(False, f"could not be judged: {error}", wrong_form=True)
    reason = f"{'matches' if found else 'does not match'} {quote(rule['pattern'], 60)!r}"
    return Scored(found, reason, value=float(found))


_NUMBER = re.compile(
    r"(?<![\w.,])[-+\u2212]?(?:[$€£¥]\s?)?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\d])",
)
_FINAL = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"####\s*(.+)"),
    re.compile(r"(?i)\b(?:final\s+)?answer\s*(?:is|:|=)\s*(?:\*\*)?\s*([^\n]+)"),
)


def numbers_in(text: str) -> list[float]:
    """The numbers in a text, in order; 1,234.5 is one number, a percentage counts as its figure."""
    found = []
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"[,$€£¥\s+]", "", match.group().replace("\u2212", "-"))
        if not any(character.isdigit() for character in digits):
            continue
        try:
            value = float(digits)
        except ValueError:
            continue
        if math.isfinite(value):
            found.append(value)
    return found


def _numeric(rule: Mapping[str, Any], text: str) -> Scored:
    value = None
    for pattern in _FINAL:  # what is announced as the answer counts before what stands last
        numbers = [number for match in pattern.findall(text) for number in numbers_in(match)[:1]]
        if numbers:
            value = numbers[-1]
            break
    if value is None:
        numbers = numbers_in(text)
        if not numbers:
            return Scored(False, "no number in the output", wrong_form=True)
        value = numbers[-1]
    answer = float(rule["answer"])
    allowed = max(float(rule["tolerance"]), float(rule["relative_tolerance"]) * abs(answer), 1e-12 * abs(answer))
    passed = abs(value - answer) <= allowed
    tolerance = f" ± {allowed:g}" if rule["tolerance"] or rule["relative_tolerance"] else ""
    reason = f"{value:g} {'is' if passed else 'is not'} {answer:g}{tolerance}"
    return Scored(passed, reason, value=float(passed), extracted=value)


def _choice(rule: Mapping[str, Any], text: str) -> Scored:
    chosen = chosen_label(rule["choices"], text)
    if chosen is None:
        return Scored(False, f"none of the choices {', '.join(rule['choices'])} is named", wrong_form=True)
    passed = chosen == rule["answer"]
    return Scored(
        passed, f"chose {chosen}{'' if passed else ', right is ' + rule['answer']}", False, float(passed), chosen
    )


def chosen_label(choices: Mapping[str, str], text: str) -> str | None:
    """The label that an answer chooses; None when it names none, or several without saying which."""
    labels = "|".join(sorted((re.escape(label) for label in choices), key=len, reverse=True))
    by_fold = {label.casefold(): label for label in choices}
    patterns = (
        rf"(?i)\banswer\s*(?:is|:|=)?\s*(?:\*\*)?\s*[(\[]?({labels})(?![\w'])",
        rf"\A\W*({labels})(?=[).:\]*,]|\s*\Z|\s*\n|\s+-)",
        rf"(?i)\A\W*({labels})(?=[).:\]*])",
        rf"(?i)[(\[]({labels})[)\]]",
    )
    for pattern in patterns:
        found = {by_fold.get(label.casefold()) for label in re.findall(pattern, text)}
        if len(found) == 1:
            return found.pop()
    # "A" and "I" are also words; alone in a sentence they choose nothing.
    alone = set(re.findall(rf"(?<![\w'])({labels})(?![\w'])", text))
    if len(alone) == 1 and not alone & {"A", "I"}:
        return by_fold[alone.pop().casefold()]
    texts = [label for label, words in choices.items() if words and has_keyword(text, words)]
    return texts[0] if len(texts) == 1 else None


def _json_value(rule: Mapping[str, Any], text: str) -> tuple[Any, Scored | None, tuple[str, ...]]:
    from preflight.outputs.json_outputs import recover

    recovered = recover(text)
    if not recovered.found:
        detail = recovered.detail or recovered.problem
        return None, Scored(False, f"{recovered.problem}: {quote(detail, 120)}", wrong_form=True), recovered.how
    how = recovered.how if not recovered.strict else ()
    if how and rule.get("strict"):
        reason = f"not strictly JSON ({', '.join(how)})"
        return None, Scored(False, reason, wrong_form=True, recovered=how), how
    return recovered.value, None, how


def _json_schema(rule: Mapping[str, Any], text: str) -> Scored:
    value, failed, how = _json_value(rule, text)
    if failed is not None:
        return failed
    fit = rule["validator"].check(value, limit=1)
    if fit.unknown:
        return Scored(False, f"could not be judged: {quote(fit.unknown, 120)}", True, extracted=value, recovered=how)
    if fit.errors:
        first = fit.errors[0]
        said = f"{first.pointer or 'the value'}: expected {first.expected}, got {first.got}"
        return Scored(False, quote(said, 160), True, extracted=value, recovered=how)
    expected: Mapping[str, Any] = rule.get("expected") or {}
    wrong = [name for name in expected if not same_json(_field(value, name), expected[name])]
    if wrong:
        said = quote(json.dumps(_field(value, wrong[0]), ensure_ascii=False, default=str), 60)
        right = quote(json.dumps(expected[wrong[0]], ensure_ascii=False), 60)
        reason = f"`{quote(wrong[0], 40)}` is {said}, expected {right}"
        return Scored(False, reason, value=1 - len(wrong) / len(expected), extracted=value, recovered=how)
    return Scored(True, "valid" + (", fields equal" if expected else ""), False, 1.0, value, how)


def _field(value: Any, name: str) -> Any:
    """The field `name`; a JSON pointer ("/items/0/id") when it starts with a slash."""
    if not name.startswith("/"):
        return value.get(name) if isinstance(value, dict) else None
    for part in name[1:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def same_json(left: Any, right: Any) -> bool:
    """JSON equality: 1 equals 1.0, but not true; the order of keys does not matter."""
    from preflight.outputs.lenient_json import fingerprint

    try:
        return fingerprint(left) == fingerprint(right)
    except (TypeError, ValueError, RecursionError):
        return False


def _json_equal(rule: Mapping[str, Any], text: str) -> Scored:
    value, failed, how = _json_value(rule, text)
    if failed is not None:
        return failed
    answer = rule["answer"]
    if same_json(value, answer):
        return Scored(True, "equal", False, 1.0, value, how)
    if isinstance(value, dict) and isinstance(answer, dict):
        wrong = [name for name in {**answer, **value} if not same_json(value.get(name), answer.get(name))]
        share = 1 - len([name for name in answer if name in wrong]) / max(1, len(answer))
        return Scored(False, f"differs in {_list(wrong)}", False, min(share, 0.999), value, how)
    return Scored(False, "another value", False, 0.0, value, how)


def rouge_tokens(text: str) -> list[str]:
    """Lower-case words and numbers; in scripts without spaces, each letter."""
    return re.findall(rf"{_SPACELESS.pattern}|[^\W_]+?(?={_SPACELESS.pattern})|[^\W_]+", _folded(text))


def rouge_l(output: str, reference: str) -> float:
    """ROUGE-L: the F1 of the longest common subsequence of words, 0 to 1, without stemming.

    Source: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004 (§2.1, beta = 1).
    """
    said, right = rouge_tokens(output)[:4000], rouge_tokens(reference)[:4000]
    if not said or not right:
        return 0.0
    row = [0] * (len(right) + 1)
    for word in said:
        diagonal = 0
        for index, other in enumerate(right, 1):
            diagonal, row[index] = row[index], diagonal + 1 if word == other else max(row[index], row[index - 1])
    common = row[-1]
    return 2 * common / (len(said) + len(right))


def _rouge(rule: Mapping[str, Any], text: str) -> Scored:
    best = max(rouge_l(text, answer) for answer in rule["answers"])
    passed = best >= rule["threshold"]
    return Scored(passed, f"ROUGE-L {best:.2f}, passes at {rule['threshold']:g}", value=best, extracted=round(best, 4))


_APPLY: dict[str, Callable[[Mapping[str, Any], str], Scored]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "numeric": _numeric,
    "choice": _choice,
    "json_schema": _json_schema,
    "json_equal": _json_equal,
    "rouge_l": _rouge,
}
