"""Every line form pip knows is understood, or refused with its line and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflight.console import UsageError
from preflight.software import requirements
from preflight.software.requirement_checks import check_lines, check_names
from preflight.software.requirements import (
    TESTED_SET,
    Requirements,
    hash_mode_offenders,
    logical_lines,
    read_requirements,
    unusable_here,
    wheel_mismatch,
    wheel_tags,
)

LINUX = {
    "implementation_name": "cpython",
    "implementation_version": "3.11.7",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_release": "6.1",
    "platform_system": "Linux",
    "platform_version": "1",
    "python_full_version": "3.11.7",
    "platform_python_implementation": "CPython",
    "python_version": "3.11",
    "sys_platform": "linux",
}
HASH = "sha256:" + "ab" * 32


def read(tmp_path: Path, text: str, **files: str) -> Requirements:
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content, encoding="utf-8")
    path = tmp_path / "requirements.txt"
    path.write_text(text, encoding="utf-8")
    return read_requirements(path, LINUX)


# line → (kind, name, specifier, extras)
GOOD = [
    ("torch", ("index", "torch", "", ())),
    ("torch==2.8.0+cu128   # pinned for the cluster", ("index", "torch", "==2.8.0+cu128", ())),
    ("torch == 2.8.0", ("index", "torch", "==2.8.0", ())),
    ("transformers[torch,sentencepiece]>=4.56,<6", ("index", "transformers", ">=4.56,<6", ("sentencepiece", "torch"))),
    ("peft~=0.17.0", ("index", "peft", "~=0.17.0", ())),
    ("a!=1.0,>=0.5", ("index", "a", ">=0.5,!=1.0", ())),
    ("a===1.0-weird", ("index", "a", "===1.0-weird", ())),
    ("numpy (>=1.26)", ("index", "numpy", ">=1.26", ())),
    ("Pillow", ("index", "Pillow", "", ())),
    ("zope.interface", ("index", "zope.interface", "", ())),
    ("peft @ git+https://github.com/huggingface/peft.git@v0.17.1", ("vcs", "peft", "", ())),
    ("git+https://github.com/huggingface/peft.git@main#egg=peft", ("vcs", "peft", "", ())),
    ("git+ssh://git@host.example/org/pack.git", ("vcs", "pack", "", ())),
    ("hg+https://host.example/pack#egg=pack", ("vcs", "pack", "", ())),
    ("https://host.example/a-1.0.tar.gz", ("url", "a", "", ())),
    ("a @ https://host.example/a-1.0-py3-none-any.whl#sha256=aa", ("url", "a", "", ())),
    ("./wheels/a-1.0-py3-none-any.whl", ("wheel", "a", "", ())),
    ("a-1.0-py3-none-any.whl", ("wheel", "a", "", ())),
    ("./src/a-1.0.tar.gz", ("archive", "a", "", ())),
    ("./src/package", ("folder", None, "", ())),
    ("./src/package[extra]", ("folder", None, "", ("extra",))),
    ("-e ./src/mytrainer", ("editable", None, "", ())),
    ("--editable=./src/mytrainer", ("editable", None, "", ())),
    ("-e git+https://host.example/a.git#egg=a", ("editable", "a", "", ())),
    ("file:///tmp/a-1.0-py3-none-any.whl", ("wheel", "a", "", ())),
    ("file:./a-1.0.zip", ("archive", "a", "", ())),
    ("a==1.0 --config-settings=--build-option=x", ("index", "a", "==1.0", ())),
    (f"a==1.0 --hash={HASH}", ("index", "a", "==1.0", ())),
    (f"a==1.0 --hash {HASH} --hash={HASH}", ("index", "a", "==1.0", ())),
]


@pytest.mark.parametrize(("line", "wanted"), GOOD, ids=[line for line, _ in GOOD])
def test_a_line_that_pip_knows_is_understood(tmp_path: Path, line: str, wanted: tuple[object, ...]) -> None:
    found = read(tmp_path, line + "\n")
    assert found.problems == []
    (item,) = found.items
    assert (item.kind, item.name, item.specifier, item.extras) == wanted
    assert item.active is True and item.number == 1


OPTIONS = [
    ("-i https://a.example/simple", "--index-url", "https://a.example/simple"),
    ("--index-url=https://a.example/simple", "--index-url", "https://a.example/simple"),
    ("--extra-index-url https://b.example/simple", "--extra-index-url", "https://b.example/simple"),
    ("-f https://a.example/wheels.html", "--find-links", "https://a.example/wheels.html"),
    ("--find-links ./wheels", "--find-links", "./wheels"),
    ("--no-index", "--no-index", ""),
    ("--pre", "--pre", ""),
    ("--prefer-binary", "--prefer-binary", ""),
    ("--require-hashes", "--require-hashes", ""),
    ("--no-binary :all:", "--no-binary", ":all:"),
    ("--only-binary=torch,numpy", "--only-binary", "torch,numpy"),
    ("--trusted-host a.example", "--trusted-host", "a.example"),
    ("--use-feature fast-deps", "--use-feature", "fast-deps"),
]


@pytest.mark.parametrize(("line", "option", "value"), OPTIONS, ids=[line for line, _, _ in OPTIONS])
def test_an_option_line_is_an_option_and_not_a_requirement(tmp_path: Path, line: str, option: str, value: str) -> None:
    found = read(tmp_path, f"{line}\ntorch\n")
    assert found.problems == [] and [item.name for item in found.items] == ["torch"]
    assert found.values(option) == [value]


# line → a part of the reason
BAD = [
    ("torch=2.1", "one = sign"),
    ("numpy=1.26.4=py311h64a7726_0", "conda's form"),
    ("-extra-index-url https://x.example", "two dashes?"),
    ("--index https://x.example", "not an option that pip allows"),
    ("--hash=" + HASH, "stands behind a requirement"),
    ("torch --pre", "line of its own"),
    ("torch==2.1 --hash=md5:abc", "sha256"),
    ("-r missing.txt", "cannot be read"),
    ("-r https://host.example/requirements.txt", "on the network"),
    ("-c", "needs a value"),
    ("pip install torch", "shell command"),
    ("<<<<<<< HEAD", "merge conflict"),
    ("torch >= ", ""),
    ("torch ; python_versio > '3'", ""),
    ("dependencies:", "conda or TOML"),
    ("a b c", ""),
    ("torch==2.1 'unclosed --hash=x", ""),
    ("[tool.poetry]", "conda or TOML"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[line for line, _ in BAD])
def test_a_line_that_pip_refuses_is_refused_with_its_number_and_a_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    found = read(tmp_path, f"# first\n{line}\nnumpy\n")
    (problem,) = found.problems
    assert problem.number == 2 and problem.reason and reason in problem.reason
    assert [item.name for item in found.items] == ["numpy"]  # the others are still read


def test_markers_decide_what_applies_here(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        'a ; python_version >= "3.10"\n'
        'b ; platform_system == "Windows"\n'
        'c; sys_platform == "linux" and platform_machine == "aarch64"\n'
        'd @ https://h.example/d-1-py3-none-any.whl ; python_version < "3"\n'
        'e ; extra == "test"\n',
    )
    assert [item.name for item in found.active] == ["a"]
    assert [item.name for item in found.skipped] == ["b", "c", "d", "e"]


def test_continuations_comments_and_blank_lines_are_joined_as_pip_joins_them() -> None:
    text = (
        "# head\n\na==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\nb # tail\n  # indented\nc \\\n# ends it\nd\n"
    )
    assert logical_lines(text) == [
        (3, "a==1     --hash=sha256:aa     --hash=sha256:bb"),
        (6, "b"),
        (8, "c"),
        (10, "d"),
    ]


def test_a_hash_sign_inside_a_url_is_no_comment(tmp_path: Path) -> None:
    found = read(tmp_path, "a @ https://h.example/a.zip#egg=a  # why\n")
    assert found.items[0].target == "https://h.example/a.zip#egg=a"


def test_included_files_and_constraints_are_read_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.txt").write_text("-c limits.txt\ndatasets\n")
    (tmp_path / "sub" / "limits.txt").write_text("numpy<2.3\n")
    found = read(tmp_path, "-r sub/more.txt\ntorch\n")
    assert [item.name for item in found.items] == ["datasets", "torch"]
    assert [item.shown() for item in found.constraints] == ["numpy<2.3"]
    assert found.problems == [] and len(found.files) == 3


def test_a_file_that_includes_itself_is_said_and_not_followed_for_ever(tmp_path: Path) -> None:
    found = read(tmp_path, "-r requirements.txt\ntorch\n")
    assert "includes itself" in found.problems[0].reason and [item.name for item in found.items] == ["torch"]
    found = read(tmp_path, "-r b.txt\n", b__txt="-r requirements.txt\n")
    assert "includes itself" in found.problems[0].reason


def test_variables_are_filled_in_and_unknown_ones_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_INDEX", "https://i.example/simple")
    found = read(tmp_path, "--index-url ${MY_INDEX}\n--extra-index-url ${NOT_SET_HERE}\na\n")
    assert found.values("--index-url") == ["https://i.example/simple"]
    assert found.values("--extra-index-url") == ["${NOT_SET_HERE}"]


@pytest.mark.parametrize(
    "data",
    [
        "torch\n".encode("utf-8-sig"),
        "torch\n".encode("utf-16"),
        b"# -*- coding: latin-1 -*-\n# \xe9\ntorch\n",
        b"torch\r\n",
    ],
)
def test_encodings_that_editors_write_are_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes(data)
    assert [item.name for item in read_requirements(path).items] == ["torch"]


def test_a_file_that_is_not_there_or_not_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_requirements(tmp_path / "nothing.txt")
    with pytest.raises(UsageError, match="cannot be read"):
        read_requirements(tmp_path)
    (tmp_path / "x").write_bytes(b"PK\x03\x04\x00\x00")
    with pytest.raises(UsageError, match="not a text file"):
        read_requirements(tmp_path / "x")


def test_hashes_on_some_lines_only_offend_pip(tmp_path: Path) -> None:
    found = read(tmp_path, f"a==1 --hash={HASH}\nb>=2\nc==3\n-e ./x\nd==4 --hash={HASH}\n")
    assert [(item.number, reason) for item, reason in hash_mode_offenders(found)] == [
        (2, "is not pinned with =="),
        (3, "has no --hash"),
        (4, "cannot be hashed: it is not a single file"),
    ]
    assert hash_mode_offenders(read(tmp_path, f"a==1 --hash={HASH}\n")) == []
    assert hash_mode_offenders(read(tmp_path, "a>=1\n")) == []
    assert len(hash_mode_offenders(read(tmp_path, "--require-hashes\na==1\n"))) == 1


CP311 = frozenset(
    {"cp311-cp311-manylinux_2_28_x86_64", "cp311-cp311-linux_x86_64", "cp310-abi3-linux_x86_64", "py3-none-any"}
)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a-1-py3-none-any.whl", None),
        ("a-1-cp311-cp311-linux_x86_64.whl", None),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_28_x86_64.whl", None),
        ("a-1-cp310-abi3-linux_x86_64.whl", None),
        ("a-1-2-py3-none-any.whl", None),
        ("flash_attn-2.8.3+cu12torch2.8-cp312-cp312-linux_x86_64.whl", "for cp312, but the interpreter is cp311"),
        ("a-1-cp311-cp311-win_amd64.whl", "win_amd64"),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", "aarch64"),
        ("a-1.whl", "not named like a wheel"),
    ],
)  # fmt: skip
def test_a_wheel_is_compared_with_the_tags_of_the_interpreter(name: str, part: str | None) -> None:
    reason = wheel_mismatch(name, CP311, "cp311")
    assert reason is None if part is None else reason is not None and part in reason


def test_wheel_tags_are_the_product_of_their_parts() -> None:
    assert wheel_tags("a-1-py2.py3-none-any.whl") == {"py2-none-any", "py3-none-any"}
    assert wheel_tags("a.tar.gz") is None


def test_local_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "pyproject.toml").write_text("")
    found = read(tmp_path, "-e ./good\n./empty\n./nowhere\n./a-1-cp312-cp312-linux_x86_64.whl\ntorch\n")
    bad = unusable_here(found, CP311, "cp311")
    assert [(item.number, reason.split(",")[0]) for item, reason in bad] == [
        (2, "is a folder without pyproject.toml or setup.py"),
        (3, "does not exist here"),
        (4, "is built for cp312"),
    ]


def test_the_tested_set_is_pinned_by_the_constraints() -> None:
    found = requirements.tested_set(Path(__file__).resolve().parent.parent / "constraints.txt", LINUX)
    assert [item.name for item in found.items] == list(TESTED_SET)
    assert all(item.pinned for item in found.items), [item.shown() for item in found.items]
    assert found.named("torch").pinned == "2.13.0"  # type: ignore[union-attr]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
def test_no_text_makes_the_reader_crash(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_text(text, encoding="utf-8")
    try:
        found = read_requirements(path, LINUX)
    except UsageError:
        return
    found.as_json()
    unusable_here(found, CP311, "cp311")


def test_the_reader_agrees_with_pips_own_parser_on_good_lines(tmp_path: Path) -> None:
    """Names and specifiers of the index lines above, as pip's parser splits them."""
    parse = pytest.importorskip("pip._internal.req.req_file")
    session = pytest.importorskip("pip._internal.network.session").PipSession()
    path = tmp_path / "r.txt"
    lines = [line for line, wanted in GOOD if wanted[0] == "index" and "weird" not in line]
    path.write_text("\n".join(lines) + "\n")
    theirs = [item.requirement.split(" ; ")[0].strip() for item in parse.parse_requirements(str(path), session)]
    ours = [item.text for item in read_requirements(path).items]
    assert theirs == ours


@pytest.mark.parametrize(
    ("name", "text", "what", "how"),
    [
        ("environment.yml", "name: x\ndependencies:\n  - python=3.10\n  - pip:\n    - torch\n", "conda", "--current"),
        ("requirements.txt", "numpy=1.24.3=py310h5f9d8c6_1\npytorch=2.1.0=py3.10_cuda12.1\n", "conda", "pip list"),
        (
            "requirements.txt",
            "@EXPLICIT\nhttps://repo.anaconda.com/pkgs/main/linux-64/a-0.1-main.conda\n",
            "conda",
            "pip list",
        ),
        (
            "requirements.txt",
            "Package    Version\n---------- -------\ntorch      2.3.0\n",
            "pip list",
            "--format=freeze",
        ),
        ("poetry.lock", '[[package]]\nname = "torch"\nversion = "2.1.0"\n', "Poetry", "poetry export"),
        ("uv.lock", 'version = 1\n[[package]]\nname = "torch"\n', "uv", "uv export"),
        ("pyproject.toml", '[project]\nname="x"\ndependencies=["torch>=2"]\n', "project", "uv pip compile"),
        ("Pipfile", '[packages]\ntorch = "*"\n', "Pipenv", "pipenv requirements"),
        ("pylock.toml", 'lock-version = "1.0"\n', "PEP 751", "uv pip sync"),
        ("requirements.txt", "<!DOCTYPE html><html>\n<body></body></html>", "web page", "Raw"),
    ],
)
def test_a_file_of_another_tool_is_named_with_the_way_to_one_of_pip(
    tmp_path: Path, name: str, text: str, what: str, how: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    (only,) = check_lines(read_requirements(path))
    assert only.code == "requirement-line-refused" and what in only.what and how in only.fix[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torch~=2", "two parts"),
        ("torch==latest", "no version"),
        ('transformers = "^4.40"', "Poetry"),
        ("!pip install torch", "shell command"),
        ("torch; python_version >= 3.8", "quotes"),
        ("torch\u00a0==\u00a02.1.0", "U+00A0"),
        ("transformers>=\u201c4.40\u201d", "U+201C"),
        ("torch==2.1.0 numpy==1.26", "two requirements"),
        ("torch 2.3.0", "stand apart"),
    ],
)
def test_a_refused_line_says_what_is_wrong_with_it(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(f"peft\n{line}\n", encoding="utf-8")
    (problem,) = read_requirements(path).problems
    assert problem.number == 2 and reason in problem.reason


def test_names_of_conda_and_of_imports_are_told_from_names_of_the_index(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("python>=3.10\nPyTorch==2.1\ntorch\nscikit-learn\nsklearn\n", encoding="utf-8")
    (only,) = check_names(read_requirements(path))
    assert only.code == "other-package-name" and "3 line(s)" in only.what and "called torch" in only.what


def test_a_frozen_list_that_points_to_another_disk_is_told(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    (tmp_path / "here").mkdir()
    path.write_text(
        f"certifi @ file:///croot/certifi_1/work/certifi\npeft @ file://{tmp_path}/here\n", encoding="utf-8"
    )
    bad = unusable_here(read_requirements(path), None, "cp311")
    assert [(item.name, "disk of the machine" in reason) for item, reason in bad] == [("certifi", True)]
