"""Records of every container and encoding that was seen in the wild, with the values written by hand."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflight.data import records as records_module
from preflight.data.encodings import detect_encoding
from preflight.data.records import BadRecord, Record, Unreadable, read_records

CHINESE = '{"text": "\u4f60\u597d\uff0c\u8bf7\u95ee\u4eca\u5929\u7684\u5929\u6c14\u600e\u4e48\u6837\uff1f"}\n'
FRENCH = '{"text": "O\u00f9 est l\'h\u00f4tel \u00e0 Gen\u00e8ve ? Le caf\u00e9"}\n'
RUSSIAN = '{"text": "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430?"}\n'
JAPANESE = '{"text": "\u3053\u308c\u306f\u30c6\u30b9\u30c8\u3067\u3059\u3002\u65e5\u672c\u8a9e"}\n'
KOREAN = '{"text": "\uc548\ub155\ud558\uc138\uc694 \uc624\ub298 \ub0a0\uc528"}\n'


def read(tmp_path: Path, name: str, data: bytes | str, **options: Any) -> tuple[Any, list[Any], list[tuple[Any, str]]]:
    """(the Records, the good values, (line, reason) of the bad ones)"""
    file = tmp_path / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    found = read_records(file, **options)
    items = list(found)
    good = [item.value for item in items if isinstance(item, Record)]
    bad = [(item.line, item.reason) for item in items if isinstance(item, BadRecord)]
    assert [item.number for item in items] == list(range(1, len(items) + 1))
    return found, good, bad


TURN = {"role": "user", "content": None}
A, B, C, D = {"text": "a"}, {"text": "b"}, {"text": "c"}, {"text": "d"}


@pytest.mark.parametrize(
    ("name", "data", "container", "values"),
    [
        ("x.jsonl", '{"text":"a"}\n{"text":"b"}\n', "jsonl", [A, B]),
        ("x.jsonl", '{"text":"a"}\n\n  \n{"text":"b"}', "jsonl", [A, B]),
        ("x.jsonl", b'{"text":"a"}\r{"text":"b"}\r', "jsonl", [A, B]),
        ("x.jsonl", b'{"text":"a"}\r\n{"text":"b"}\r\n', "jsonl", [A, B]),
        ("x.jsonl", '{"text":"a\u2028\u0085b"}\n{"text":"b"}\n', "jsonl", [{"text": "a\u2028\u0085b"}, B]),
        ("x.jsonl", '{"text":"a"},\n{"text":"b"},\n', "jsonl", [A, B]),
        ("x.jsonl", '{"text":"a"}{"text":"b"} {"text":"c"}\n', "jsonl", [A, B, C]),
        ("x.jsonl", '\x1e{"text":"a"}\n\x1e{"text":"b"}\n', "jsonl", [A, B]),
        ("x.jsonl", '// two\n{"text":"a"}\n# more\n{"text":"b"}\n', "jsonl", [A, B]),
        ("x.jsonl", "{'text': 'a', 'x': None}\n", "jsonl", [{"text": "a", "x": None}]),
        ("x.jsonl", '[\n{"text":"a"},\n{"text":"b"}\n]\n', "json-array", [A, B]),
        ("x.json", '[{"text":"a"},{"text":"b"},]', "json-array", [A, B]),
        ("x.json", '[{"text":"a"}]\n[{"text":"b"}]', "jsonl", [A, B]),
        ("x.json", '{\n "text": "a"\n}\n{\n "text": "b"\n}\n', "json-values", [A, B]),
        ("x.json", '{\n "text": "a"\n}\n', "json-values", [A]),
        ("x.json", '{"version": 1, "data": [{"text":"a"},\n {"text":"b"}]}', "json-array", [A, B]),
        ("x.json", '{"features":[{"name":"t"}],"rows":[{"row_idx":0,"row":{"text":"a"}}]}', "json-array", [A]),
        ("x.json", '{"prompt":["a","b"],"text":["c","d"]}', "jsonl", [{"prompt": "a", **C}, {"prompt": "b", **D}]),
        ("x.json", '{"instruction":{"0":"a"},"output":{"0":"c"}}', "jsonl", [{"instruction": "a", "output": "c"}]),
        ("x.jsonl", '[{"role":"user","content":"q"}]\n', "jsonl", [[{"role": "user", "content": "q"}]]),
        ("x.csv", 'prompt,completion\n"a\nb, c","d ""x"""\n', "csv", [{"prompt": "a\nb, c", "completion": 'd "x"'}]),
        ("x.csv", "\ufeffprompt;completion\n\u00e4;b\n", "csv", [{"prompt": "\u00e4", "completion": "b"}]),
        ("x.tsv", "question\tanswer\na\tb\n", "tsv", [{"question": "a", "answer": "b"}]),
        ("x.data", "question,answer\na,b\n", "csv", [{"question": "a", "answer": "b"}]),
        ("x.csv", "id,messages\n1,\"[{'role': 'user', 'content': None}]\"\n", "csv", [{"id": "1", "messages": [TURN]}]),
        ("x.txt", "a\n\nb\n", "text-lines", [A, B]),
        ("x.jsonl.gz", gzip.compress(b'{"text":"a"}\n{"text":"b"}\n'), "jsonl", [A, B]),
        ("x.json.xz", lzma.compress(b'[{"text":"a"}]'), "json-array", [A]),
    ],
)  # fmt: skip
def test_every_container_is_detected_and_read(
    tmp_path: Path, name: str, data: Any, container: str, values: Any
) -> None:
    found, good, bad = read(tmp_path, name, data)
    assert (found.container, good, bad) == (container, values, [])


@pytest.mark.parametrize(
    ("text", "encoding", "named"),
    [
        (CHINESE, "utf-8", "utf-8"),
        (CHINESE, "utf-8-sig", "utf-8-sig"),
        (CHINESE, "gbk", "gb18030"),
        (CHINESE, "utf-16", "utf-16"),
        (CHINESE, "utf-16-le", "utf-16-le"),
        (CHINESE, "utf-16-be", "utf-16-be"),
        (CHINESE, "utf-32", "utf-32"),
        (FRENCH, "latin-1", "windows-1252"),
        (RUSSIAN, "cp1251", "windows-1251"),
        (RUSSIAN, "koi8-r", "koi8-r"),
        (JAPANESE, "shift_jis", "shift_jis"),
        (JAPANESE, "euc_jp", "euc_jp"),
        (KOREAN, "euc_kr", "euc_kr"),
    ],
)
def test_every_encoding_is_detected(tmp_path: Path, text: str, encoding: str, named: str) -> None:
    found, good, bad = read(tmp_path, "x.jsonl", (text * 2).encode(encoding))
    assert (found.encoding, good, bad) == (named, [json.loads(text)] * 2, [])
    whole, values, _ = read(tmp_path, "x.json", f"[{text},{text}]".encode(encoding))
    assert whole.container == "json-array" and (values == good or encoding not in ("utf-8", "utf-16", "utf-8-sig"))


def test_an_encoding_that_shows_late_is_taken_and_said(tmp_path: Path) -> None:
    found, good, bad = read(tmp_path, "x.jsonl", b'{"text":"a"}\n' * 90_000 + CHINESE.encode("gbk"))
    assert good[-1] == json.loads(CHINESE) and bad == []
    assert found.encoding == "gb18030" and found.notes["encoding-guessed"] == 1


def test_one_foreign_line_in_a_healthy_file_is_a_bad_line(tmp_path: Path) -> None:
    found, good, bad = read(tmp_path, "x.jsonl", CHINESE.encode() + CHINESE.encode("gbk") + CHINESE.encode())
    assert len(good) == 2 and bad == [(2, "undecodable")]
    assert found.encoding == "utf-8" and found.notes["mixed-encodings"] == 1


def test_the_encoding_can_be_named(tmp_path: Path) -> None:
    _, good, _ = read(tmp_path, "x.jsonl", '{"text":"\u0142"}\n'.encode("iso8859-2"), encoding="iso8859-2")
    assert good == [{"text": "\u0142"}]
    with pytest.raises(Unreadable, match="no encoding is called"):
        read(tmp_path, "x.jsonl", "{}", encoding="nonsense")


@pytest.mark.parametrize(
    ("name", "data", "values", "bad"),
    [
        ("x.jsonl", '{"text":"a"}\n{"text":"b\n{"text":"c"}\n', [A, C], [(2, "truncated")]),
        ("x.jsonl", '{"text":"a"}\n{"text":"b', [A], [(2, "truncated")]),
        ("x.jsonl", '{"text":"a"}\n{"text":"he said "b""}\n{"text":"c"}\n', [A, C], [(2, "not-json")]),
        ("x.jsonl", '{"text":"a"}\nhello\n{"text":"c"}\n', [A, C], [(2, "not-json")]),
        ("x.jsonl", '{"text":"a"}\n\n{"x":' + "9" * 5000 + "}\n", [A], [(3, "not-json")]),
        ("x.jsonl", '{"text":"a"}\n' + "[" * 100_000 + "\n", [A], [(2, "nested-too-deep")]),
        ("x.jsonl", b'{"text":"a"}\n\0\0\n{"text":"b"}\n' + bytes(99), [A, B], [(2, "nul-bytes"), (4, "nul-bytes")]),
        ("x.jsonl", b'{"text":"a"}\n{"text":"\xff"}\n{"text":"b"}\n', [A, B], [(2, "undecodable")]),
        ("x.json", '[\n  {"text":"a"},\n  {"text":"b "c" d"},\n  {"text":"c"}\n]', [A, C], [(3, "not-json")]),
        ("x.json", '[{"text":"a"},{"text":b},{"text":"c"}]', [A, C], [(1, "not-json")]),
        ("x.json", '[{"text":"a"},\n{"te', [A], [(2, "truncated")]),
        ("x.csv", "text,n\na,1\nb,2,3\nc,4\n", [{**A, "n": "1"}, {**C, "n": "4"}], [(3, "wrong-columns")]),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_and_stops_nothing(tmp_path: Path, name: str, data: Any, values: Any, bad: Any) -> None:
    _, good, found = read(tmp_path, name, data)
    assert (good, found) == (values, bad)


def test_an_array_that_is_not_closed_is_noted(tmp_path: Path) -> None:
    found, good, bad = read(tmp_path, "x.json", '[{"text":"a"},{"text":"b"}')
    assert (good, bad, found.notes["array-not-closed"]) == ([A, B], [], 1)


def test_a_second_list_in_the_object_is_named_and_not_mixed_in(tmp_path: Path) -> None:
    found, good, _ = read(tmp_path, "x.json", '{"train": [{"text":"a"}], "test": [{"text":"b"}]}')
    assert good == [A] and found.notes["left-out:test"] == 1


def test_a_cut_archive_gives_what_came_before_the_cut(tmp_path: Path) -> None:
    data = gzip.compress("".join(f'{{"text":"{index * 7919}"}}\n' for index in range(5000)).encode())[:6000]
    _, good, bad = read(tmp_path, "x.jsonl.gz", data)
    assert len(good) > 500 and good[1] == {"text": "7919"}
    assert [reason for _, reason in bad] == ["compressed-data-damaged"]


def test_nan_and_keys_that_stand_twice_are_noted(tmp_path: Path) -> None:
    found, good, _ = read(tmp_path, "x.jsonl", '{"a":NaN}\n{"a":1,"a":2}\n')
    assert good[0]["a"] != good[0]["a"] and good[1] == {"a": 2}
    assert found.notes["non-finite-number"] == 1 and found.notes["duplicate-keys"] == 1


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("x.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs-pointer"),
        ("x.jsonl", "<!DOCTYPE html><html>", "html-page"),
        ("x.jsonl", "", "empty-file"),
        ("x.jsonl", "\n \n", "empty-file"),
        ("x.xlsx", b"PK\x03\x04xl/workbook", "zip-archive"),
        ("x.parquet", b"PAR1" + bytes(100), "parquet-damaged"),
        ("x.db", b"SQLite format 3\x00", "foreign-file"),
        ("x.bin", bytes(range(256)) * 40, "binary-file"),
        ("x.pkl", b"\x80\x04\x95abc", "pickle"),
        ("x.gz", b"\x1f\x8b\x08\x00garbage", "compressed-data-damaged"),
    ],
)
def test_what_is_no_data_file_is_said(tmp_path: Path, name: str, data: Any, code: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read(tmp_path, name, data)
    assert caught.value.code == code
    assert caught.value.why and caught.value.fix


def zipped(*files: tuple[str, bytes], **how: Any) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, **how) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return made.getvalue()


LINES = b'{"text":"a"}\n{"text":"b"}\n'


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ([("train.jsonl", LINES)], "jsonl"),
        (
            [("set/train.json", b'[{"text":"a"},{"text":"b"}]'), ("set/README.md", b"# me"), ("LICENSE", b"MIT")],
            "json-array",
        ),
        ([("train.csv", b"text,input\na,\nb,\n")], "csv"),
        ([("train.jsonl", LINES), ("__MACOSX/._train.jsonl", b"\x00\x05"), (".DS_Store", b"\x00")], "jsonl"),
        ([("export", LINES)], "jsonl"),
        ([("train.jsonl", '{"text":"a"}\n{"text":"b"}\n'.encode("utf-16"))], "jsonl"),
    ],
)
def test_a_zip_with_one_data_file_is_read(tmp_path: Path, files: Any, container: str) -> None:
    found, good, bad = read(tmp_path, "x.zip", zipped(*files))
    assert (found.container, [value["text"] for value in good], bad) == (container, ["a", "b"], [])
    assert found.notes["compressed"] == 1
    assert not found.can_be_cut


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (zipped(("a.jsonl", LINES), ("b.jsonl", LINES)), "zip-archive", "2 data files: a.jsonl, b.jsonl"),
        (zipped(*((f"{n}", b"") for n in range(9))), "zip-archive", "0 data files: 0, 1, 2, 3, 4 and 4 more"),
        (zipped(("a.png", b"x"), ("b.png", b"x")), "zip-archive", "0 data files: a.png, b.png"),
        (zipped(), "zip-archive", "0 data files"),
        (zipped(("xl/workbook.xml", b"x"), ("[Content_Types].xml", b"x")), "zip-archive", "Excel"),
        (zipped(("a.jsonl", LINES))[:60], "zip-damaged", "cannot be opened"),
        (zipped(("in.zip", zipped(("a.jsonl", LINES)))), "zip-archive", "another archive"),
        (zipped(("a.parquet", b"PAR1" + bytes(99))), "zip-archive", "Parquet"),
        (zipped(("a.jsonl", b"")), "empty-file", "white space"),
        (zipped(("a.jsonl", b"<!doctype html><html>")), "html-page", "web page"),
    ],
)  # fmt: skip
def test_an_archive_that_is_not_one_data_file_is_refused(tmp_path: Path, data: bytes, code: str, says: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read(tmp_path, "x.zip", data)
    assert caught.value.code == code and says in caught.value.what
    assert caught.value.why and caught.value.fix


def test_an_encrypted_archive_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped(("a.jsonl", LINES)))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag in both headers
        data[data.index(signature) + offset] |= 1
    with pytest.raises(Unreadable) as caught:
        read(tmp_path, "x.zip", bytes(data))
    assert caught.value.code == "zip-encrypted"


def test_a_bomb_is_refused_without_unpacking_it(tmp_path: Path) -> None:
    file = tmp_path / "x.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.jsonl", "w") as member:
        for _ in range(300):
            member.write(b" " * (1 << 20))
    began = time.monotonic()
    with pytest.raises(Unreadable) as caught:
        read_records(file)
    assert caught.value.code == "zip-bomb" and time.monotonic() - began < 1


def test_an_archive_that_lies_about_its_size_is_damaged(tmp_path: Path) -> None:
    """The central directory states fewer bytes than the data unpacks to: no more is read, and the checksum fails."""
    data = bytearray(zipped(("a.jsonl", LINES * 5000)))
    at = data.index(b"PK\x01\x02") + 24
    data[at : at + 4] = (1300).to_bytes(4, "little")
    with pytest.raises(Unreadable) as caught:
        read(tmp_path, "x.zip", bytes(data))
    assert caught.value.code == "compressed-data-damaged"


def test_damage_inside_an_archive_keeps_what_came_before(tmp_path: Path) -> None:
    text = "".join(f'{{"text":"{n * 7919}"}}\n' for n in range(50000)).encode()
    data = bytearray(zipped(("a.jsonl", text)))
    for at in range(len(data) // 2, len(data) // 2 + 40):
        data[at] ^= 0xFF
    _, good, bad = read(tmp_path, "x.zip", bytes(data))
    assert 100 < len(good) < 50000 and bad[-1][1] == "compressed-data-damaged"


def test_parquet_and_arrow_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.ipc")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"messages": [[{"role": "user", "content": "a"}]], "score": [None]})
    pyarrow.parquet.write_table(table, tmp_path / "p")
    with pyarrow.ipc.new_stream(str(tmp_path / "s"), table.schema) as stream:
        stream.write_table(table)
    value = {"messages": [{"role": "user", "content": "a"}], "score": None}
    for name, container in (("p", "parquet"), ("s", "arrow")):
        found, good, bad = read(tmp_path, "x", (tmp_path / name).read_bytes())
        assert (found.container, good, bad) == (container, [value], [])


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(Unreadable) as caught:
        read(tmp_path, "x.parquet", b"PAR1" + bytes(100))
    assert caught.value.code == "pyarrow-missing" and "pip install pyarrow" in caught.value.fix[0]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "RECORD_LIMIT_BYTES", 1000)
    _, good, bad = read(tmp_path, "x.jsonl", '{"text":"' + "x" * 5000 + '"}\n{"text":"b"}\n')
    assert (good, bad) == ([B], [(1, "record-too-long")])


def test_utf8_cut_in_a_letter_is_still_utf8() -> None:
    assert detect_encoding("\u4f60\u597d".encode()[:-1], complete=False) == "utf-8"


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers() | st.booleans(), max_size=3),
        min_size=1,
        max_size=8,
    ),
    indent=st.sampled_from([None, 1, 2]),
    ascii_only=st.booleans(),
)
def test_what_json_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("r")
    wanted = [{"k": value} for value in values]
    lines = "".join(json.dumps(value, ensure_ascii=ascii_only) + "\n" for value in wanted)
    assert read(folder, "x.jsonl", lines)[1] == wanted
    assert read(folder, "x.json", json.dumps(wanted, indent=indent, ensure_ascii=ascii_only))[1] == wanted
    values_after_another = "\n".join(json.dumps(value, indent=2, ensure_ascii=ascii_only) for value in wanted)
    assert read(folder, "y.json", values_after_another)[1] == wanted
