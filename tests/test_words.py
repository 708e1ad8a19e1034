"""The report in another language: how texts are found in the catalogue, and whether the catalogue is whole."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import texts
from test_invariants import everything, section_of

from preflight import console
from preflight.__main__ import main
from preflight.console import print_section, run_main
from preflight.findings import Finding, Level, Section, section_from_json
from preflight.html_report import render_html
from preflight.report import render, write_section
from preflight.verdict import judge
from preflight.words import LANGUAGES, Words, words_of

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
TEMPLATES = sorted(ROOT.glob("templates/*.j2")) + sorted(ROOT.glob("templates/html/*.j2"))
# Messages of other programs, which stay as they are so that they can be searched for.
OUTSIDE = re.compile(
    r"jinja2\.\w+: .*|ValueError: Module .*|It looks like the config file is not a valid JSON file"
    r"|tokenizer\.chat_template is not set|Asking to pad but the tokenizer does not have a padding token"
    r"|NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
)
# English words in a row that no name has.
PROSE = re.compile(r"(?:[A-Za-z][a-z']*[,;]? ){3,}[A-Za-z][a-z']+")


def words(**entries: str) -> Words:
    made = Words("zh")
    made.__dict__["entries"] = entries
    return made


def of(entries: dict[str, str]) -> Words:
    return words(**entries)


# --- how a text is found -------------------------------------------------------------------------------------------


def test_a_text_is_found_whole_and_its_places_keep_what_the_code_put_in() -> None:
    made = of({"{0} is too old for {1}.": "{0} 太旧，不支持 {1}。", "Reboot.": "重启。"})
    assert made.text("Reboot.") == "重启。"
    assert made.text("Driver 470.82 is too old for CUDA 12.4.") == "Driver 470.82 太旧，不支持 CUDA 12.4。"


def test_what_no_entry_fits_stays_english() -> None:
    assert of({"Reboot.": "重启。"}).text("Some other thing happened.") == "Some other thing happened."
    assert Words("en").text("Reboot.") == "Reboot."


def test_places_may_change_their_order_and_come_twice() -> None:
    made = of({"raise {0} to {1} or newer": "把 {0} 升级到 {1} 或更新（现在的 {0} 太旧）"})
    assert made.text("raise torch to 2.6 or newer") == "把 torch 升级到 2.6 或更新（现在的 torch 太旧）"


def test_what_stands_in_a_place_is_translated_when_it_has_an_entry() -> None:
    made = of({"Could not tell: {0}.": "无法判断：{0}。", "the driver does not answer": "驱动没有应答"})
    assert made.text("Could not tell: the driver does not answer.") == "无法判断：驱动没有应答。"
    assert made.text("Could not tell: Xyz 12.") == "无法判断：Xyz 12。"


def test_sentences_that_the_code_glues_together_are_found_one_by_one() -> None:
    made = of(
        {
            "{0} is free.": "{0} 空闲。",
            "The card is split.": "该卡已切分。",
            "Interval: {0} to {1}.": "区间：{0} 至 {1}。",
        }
    )
    text = "Interval: 1.00 GiB to 2.50 GiB. The card is split. 3.00 GiB is free."
    assert made.text(text) == "区间：1.00 GiB 至 2.50 GiB。该卡已切分。3.00 GiB 空闲。"
    assert made.text("The card is split. Nobody knows this one.") == "该卡已切分。Nobody knows this one."


def test_an_entry_of_two_sentences_wins_over_its_parts() -> None:
    made = of({"It broke. Nothing helps.": "它坏了，没有办法。", "It broke.": "它坏了。", "All is lost.": "全没了。"})
    assert made.text("It broke. Nothing helps. All is lost.") == "它坏了，没有办法。全没了。"


def test_lists_are_translated_member_by_member() -> None:
    made = of({"Held by: {0}.": "占用者：{0}。", "a game": "游戏", "a browser": "浏览器"})
    assert made.text("Held by: a game, blender and a browser.") == "占用者：游戏、blender和浏览器。"


def test_a_text_in_a_place_may_lack_the_full_stop_or_the_capital_of_its_entry() -> None:
    made = of(
        {"Not run yet: {0} ({1})": "尚未运行：{0}（{1}）", "Is it usable?": "能用吗？", "It ended.": "它结束了。"}
    )
    assert made.text("Not run yet: `x` (is it usable?)") == "尚未运行：`x`（能用吗？）"
    assert made.text("Not run yet: `x` (it ended)") == "尚未运行：`x`（它结束了）"


def test_the_entry_with_most_words_wins() -> None:
    made = of({"{0} fails.": "{0} 失败。", "{0} on card {1} fails.": "卡 {1} 上的 {0} 失败。"})
    assert made.text("The test on card 3 fails.") == "卡 3 上的 The test 失败。"


def test_an_entry_of_small_words_alone_does_not_swallow_sentences() -> None:
    made = of({"{0} of {1}": "{1} 中的 {0}"})
    assert made.text("3 of 7") == "7 中的 3"
    assert made.text("the end of the whole long story") == "the end of the whole long story"


def test_code_is_never_touched() -> None:
    made = of({"run {0} again": "再次运行 {0}", "nothing": "无"})
    assert made.text("run `nothing` again") == "再次运行 `nothing`"


def test_a_long_hostile_text_takes_no_time() -> None:
    made = words_of("zh")
    began = time.monotonic()
    for text in ("a, b and c. " * 400, "torch " * 900, "(" * 3000 + "memory", "The driver " * 500 + "."):
        made.text(text)
    assert time.monotonic() - began < 10


# --- the catalogue -------------------------------------------------------------------------------------------------


def test_the_sources_are_read() -> None:
    found = texts.texts()
    assert all(len(found[area]) > 20 for area in texts.AREAS), {area: len(found[area]) for area in found}
    assert "No accelerator in {0}: only the CPU can train here." in found["hardware"]
    assert "{0} fits: {1}; {2}." in found["memory"]
    assert "What stands out" in found["templates"]


@pytest.mark.parametrize("area", texts.AREAS)
def test_every_text_has_an_entry(area: str) -> None:
    missing = texts.missing(area)
    assert not missing, f"python tests/texts.py missing {area}: {list(missing.items())[:5]}"


def test_no_entry_is_of_a_text_that_is_gone_and_none_is_twice() -> None:
    assert not texts.dead()
    often = Counter(text for area in texts.AREAS for text in texts.catalogue(area))
    assert not [text for text, count in often.items() if count > 1]
    files = {path.stem for path in (ROOT / "templates" / "words" / "zh").glob("*.json")}
    assert files <= set(texts.AREAS)


def places(text: str) -> list[str]:
    return sorted(set(re.findall(r"\{\w*\}", text)))


@pytest.mark.parametrize("area", texts.AREAS)
def test_an_entry_keeps_places_code_markup_and_addresses(area: str) -> None:
    for english, translated in texts.catalogue(area).items():
        assert translated.strip(), english
        assert places(english) == places(translated), english
        for kept in (r"`[^`]+`", r"</?\w+>", r"https?://[^\s)]+", r"(?<![\w-])--[a-z][\w-]+"):
            assert sorted(re.findall(kept, english)) == sorted(re.findall(kept, translated)), (english, translated)
        assert translated.count("`") % 2 == 0, english
        assert english.count("**") == translated.count("**"), english
        if english.startswith("|"):
            assert english.count("|") == translated.count("|"), english
        else:
            assert "|" not in re.sub(r"`[^`]*`", "", translated) or "|" in english, english


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("templates/*.j2")) + sorted(ROOT.glob("templates/html/*.j2")), ids=str
)
def test_templates_give_all_their_words_to_the_catalogue(path: Path) -> None:
    assert not texts.unmarked(path)


def test_words_that_are_not_marked_are_seen(tmp_path: Path) -> None:
    template = tmp_path / "x.j2"
    template.write_text("<p class=\"a b\">{{ t('Seen') }} not seen {% if x %}nor this{% endif %} {{ 'or this' }}</p>")
    assert texts.unmarked(template) == ["not seen nor this", "or this"]
    assert texts.template_texts(template) == [(1, "Seen")]


# --- reports -------------------------------------------------------------------------------------------------------


def records() -> list[Any]:
    whole = [pytest.param("", (str(GOLDEN / f"{name}.json"),), id=name) for name in ("example", "too-old-torch")]
    return [*everything(), *whole]


def record_of(script: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    if script:
        return {"schema": 1, "sections": {script: json.loads(section_of(script, *arguments))}}
    loaded: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize(("script", "arguments"), records())
def test_both_views_can_be_written_in_every_language(script: str, arguments: tuple[str, ...]) -> None:
    record = record_of(script, arguments)
    before = json.dumps(record)
    english = render(record, strict=True)
    for language in LANGUAGES:
        made = render(record, strict=True, language=language)
        assert made.keys() == english.keys()
        page = render_html(record, strict=True, language=language)
        assert f'<html lang="{ {"en": "en", "zh": "zh-CN"}[language] }">' in page
        for region, text in made.items():
            codes = re.compile(r"\(`[a-z0-9-]+`\)")
            assert codes.findall(text) == codes.findall(english[region])
            assert [line.count("|") for line in text.split("\n")] == [
                line.count("|") for line in english[region].split("\n")
            ]
    assert json.dumps(record) == before


def left_english(text: str) -> list[str]:
    """What a translated text still says in English, outside code, quotes and the words of other programs."""
    shown = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", " ", OUTSIDE.sub(" ", words_of("zh").text(text)))
    return PROSE.findall(shown)


def test_english_prose_is_seen() -> None:
    assert left_english("Nobody has ever translated this sentence.")
    assert not left_english("run `some command that is long enough` 'and a quoted name of it'")


@pytest.mark.parametrize(("script", "arguments"), records())
def test_no_finding_and_no_verdict_stays_english(script: str, arguments: tuple[str, ...]) -> None:
    record = record_of(script, arguments)
    said = judge(record)
    shown = [said["sentence"], said["next_why"] or "", *said["notes"], *(row["question"] for row in said["stages"])]
    for section in record["sections"].values():
        for finding in section["findings"]:
            shown += [finding["what"], finding["why"], *finding["fix"]]
    left = {text: english for text in shown if (english := left_english(text))}
    assert not left


def test_a_report_changes_its_language_and_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    section = Section("gpu_probe", {"gpus": []}, (Finding("no-gpu", Level.WARN, "Text.", "Why.", ("Fix.",), "s"),))
    view = tmp_path / "r.md"
    assert write_section(view, section) == ""
    english = view.read_text(encoding="utf-8")
    record = view.with_suffix(".json").read_bytes()
    view.write_text(english + "\nMy own line.\n", encoding="utf-8")
    assert write_section(view, section, language="zh") == ""
    chinese = view.read_text(encoding="utf-8")
    assert "My own line." in chinese
    assert view.with_suffix(".json").read_bytes() == record
    assert 'lang="zh-CN"' in view.with_suffix(".html").read_text(encoding="utf-8")
    assert write_section(view, section) == ""
    assert view.read_text(encoding="utf-8") == english + "\nMy own line.\n"


def test_render_writes_another_language_from_the_record_alone(tmp_path: Path) -> None:
    record = tmp_path / "compatibility_report.json"
    shutil.copy(GOLDEN / "example.json", record)
    before = record.read_bytes()
    assert main(["render", str(record), "--lang", "zh"]) == 0
    view = tmp_path / "compatibility_report.zh.md"
    assert view.is_file() and 'lang="zh-CN"' in view.with_suffix(".html").read_text(encoding="utf-8")
    assert main(["render", str(record), "--output", str(tmp_path / "english.md")]) == 0
    summary = (GOLDEN / "example.summary.md").read_text(encoding="utf-8").strip()
    assert summary in (tmp_path / "english.md").read_text(encoding="utf-8")
    assert record.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("[]", "is not a record"), ('{"schema": 9, "sections": {}}', "has schema 9")],
)
def test_render_refuses_what_is_no_record_in_one_line(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "r.json"
    if content is not None:
        record.write_text(content)
    assert run_main(main, ["render", str(record), "--lang", "zh"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_locale_of_the_system_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LANG", "LC_ALL", "LANGUAGE"):
        monkeypatch.setenv(name, "zh_CN.UTF-8")
    arguments = console.parser("?", "x").parse_args([])
    assert arguments.lang == "en"


def test_the_terminal_follows_the_language_and_json_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    section = Section("s", {}, (Finding("c", Level.FAIL, "No, not like this.", "", (), ""),))
    print_section(section, "never", language="en")
    assert capsys.readouterr().out == "s: fail\n[fail] No, not like this.\n"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        console.run_stage(
            "gpu_probe", console.parser("?", "x").parse_args(["--json", "--lang", "zh"]), lambda machine, _: section
        )
    assert section_from_json(json.loads(out.getvalue())) == section
