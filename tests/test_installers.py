"""What pip and uv say is read into facts; pip's settings reach uv; credentials are masked."""

# ruff: noqa: E501 - messages stand as they are printed

from __future__ import annotations

from pathlib import Path

import pytest

from preflight.software.installers import (
    Environment,
    Installer,
    PipSettings,
    conflicting,
    cpu_builds_of_torch,
    cuda_packages,
    failing_build,
    failure_code,
    find_installer,
    flat_requirements,
    mask,
    missing_requirement,
    parse_pip_config,
    parse_pip_report,
    parse_pylock,
    parse_wishes,
)
from preflight.software.requirements import read_requirements
from preflight.software.stack import trouble_of

# As printed by uv 0.13.9 and pip 26, 2026-11-30.
UV_CONFLICT = """error: No solution found when resolving dependencies
  cause: Because transformers==4.57.6 depends on tokenizers>=0.22.0,<=0.23.0 and you require transformers==4.57.6, we can
         conclude that you require tokenizers>=0.22.0,<=0.23.0.
         And because you require tokenizers==0.23.3, we can conclude that your requirements are unsatisfiable.
"""
PIP_CONFLICT = """ERROR: Cannot install -r requirements.txt (line 1) and tokenizers==0.23.3 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested tokenizers==0.23.3
    transformers 4.57.6 depends on tokenizers<=0.23.0 and >=0.22.0

To fix this you could try to:
1. loosen the range of package versions you've specified
2. remove package versions to allow pip to attempt to solve the dependency conflict

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/#dealing-with-dependency-conflicts
"""
UV_VISION = """error: No solution found when resolving dependencies
  cause: Because torchvision==0.21.0 depends on torch==2.6.0 and you require torch==2.13.0, we can conclude that your requirements and torchvision==0.21.0 are incompatible.
         And because you require torchvision==0.21.0, we can conclude that your requirements are unsatisfiable.
"""
UV_NO_VERSION = """error: No solution found when resolving dependencies
  cause: Because there is no version of torch==2.1.0+cu118 and you require torch==2.1.0+cu118, we can conclude that your requirements are unsatisfiable.
"""
UV_NO_PACKAGE = """error: No solution found when resolving dependencies
  cause: Because nosuchpkg-zzz-qq was not found in the package registry and you require nosuchpkg-zzz-qq==1, we can conclude that your requirements are unsatisfiable.
"""
PIP_NO_PACKAGE = """ERROR: Could not find a version that satisfies the requirement nosuchpkg-zzz-qq==1 (from versions: none)
ERROR: No matching distribution found for nosuchpkg-zzz-qq==1
"""
PIP_CAPPED = """ERROR: Cannot install torch==2.1.0+cu118 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.1.0+cu118
    The user requested (constraint) torch<=2.14.1

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/
"""
UV_NETWORK = """error: Request failed after 3 retries in 6.0s
  cause: Failed to fetch: https://index.example.org/whl/cu118/transformers/
  cause: error sending request for url (https://index.example.org/whl/cu118/transformers/)
  cause: client error (Connect)
  cause: dns error
  cause: failed to lookup address information: Name or service not known
"""
PIP_NETWORK = """WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken by 'NewConnectionError('...: Failed to establish a new connection: [Errno -2] Name or service not known')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch (from versions: none)
ERROR: No matching distribution found for torch
"""
UV_BUILD = """error: Failed to build `flash-attn==2.7.4.post1`
  cause: The build backend returned an error
  cause: Call to `setuptools.build_meta:__legacy__.get_requires_for_build_wheel` failed (exit status: 1)
         ModuleNotFoundError: No module named 'torch'
"""
PIP_BUILD = """  error: subprocess-exited-with-error
  × Getting requirements to build wheel did not run successfully.
      ModuleNotFoundError: No module named 'torch'
      [end of output]
ERROR: Failed to build 'flash-attn' when getting requirements to build wheel
"""
UV_PYTHON = """error: No solution found when resolving dependencies
  cause: Because the current Python version (3.11.7) does not satisfy Python>=3.12 and numpy==2.5.0 depends on Python>=3.12, we can conclude that numpy==2.5.0 cannot be used.
         And because you require numpy==2.5.0, we can conclude that your requirements are unsatisfiable.
"""
PIP_HASH = """ERROR: In --require-hashes mode, all requirements must have their versions pinned with ==. These do not:
    pyyaml>=6 from https://files.pythonhosted.org/packages/9d/3e/pyyaml-6.0.4.whl
"""
PIP_WRONG_HASH = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
UV_DISK = "error: failed to write to file `/tmp/x`: No space left on device (os error 28)"
UV_GIT = """error: Git operation failed
  cause: failed to clone into: /root/.cache/uv/git-v0/db/1a2b
  cause: failed to fetch tag `v0.17.1`
  cause: process didn't exit successfully: `git fetch --force origin` (exit status: 128)
         fatal: unable to access 'https://github.com/huggingface/peft.git/': Could not resolve host: github.com
"""
PIP_401 = (
    "ERROR: HTTP error 401 while getting https://i.example/simple/a\nERROR: 401 Client Error: Unauthorized for url"
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (UV_CONFLICT, "resolution-impossible"),
        (PIP_CONFLICT, "resolution-impossible"),
        (UV_VISION, "resolution-impossible"),
        (UV_NO_VERSION, "no-matching-distribution"),
        (UV_NO_PACKAGE, "no-matching-distribution"),
        (PIP_NO_PACKAGE, "no-matching-distribution"),
        (PIP_CAPPED, "no-matching-distribution"),
        (UV_NETWORK, "index-unreachable"),
        (PIP_NETWORK, "index-unreachable"),
        (UV_BUILD, "build-isolation"),
        (PIP_BUILD, "build-isolation"),
        (UV_PYTHON, "python-version-conflict"),
        (PIP_HASH, "hash-mode"),
        (PIP_WRONG_HASH, "hash-mismatch"),
        (UV_DISK, "disk-full"),
        (PIP_401, "index-refused"),
        (UV_GIT, "repository-unreachable"),
        ("thread 'main' panicked at crates/uv/src/lib.rs", "installer-failed"),
        ("", "installer-failed"),
    ],
)
def test_an_installers_words_are_told_apart(text: str, code: str) -> None:
    assert failure_code(text) == code


@pytest.mark.parametrize("text", [UV_CONFLICT, PIP_CONFLICT])
def test_the_conflicting_pair_and_who_asked_is_named(text: str) -> None:
    found = conflicting(parse_wishes(text))
    assert found is not None and found[0] == "tokenizers"
    wishes = {wish.by: wish.wants for wish in found[1]}
    assert wishes["the requirements"] == "tokenizers==0.23.3"
    assert "0.22.0" in wishes["transformers 4.57.6"] and "0.23.0" in wishes["transformers 4.57.6"]


def test_a_conclusion_of_uv_is_not_taken_for_a_wish_of_the_user() -> None:
    wishes = [wish.wants for wish in parse_wishes(UV_CONFLICT) if wish.by == "the requirements"]
    assert wishes == ["transformers==4.57.6", "tokenizers==0.23.3"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (UV_NO_VERSION, "torch==2.1.0+cu118"),
        (UV_NO_PACKAGE, "nosuchpkg-zzz-qq"),
        (PIP_NO_PACKAGE, "nosuchpkg-zzz-qq==1"),
        (PIP_CAPPED, "torch==2.1.0+cu118"),
    ],
)
def test_the_requirement_that_was_not_found_is_named(text: str, name: str) -> None:
    assert missing_requirement(text) == name


def test_the_build_that_failed_and_what_it_wanted_is_named() -> None:
    assert failing_build(UV_BUILD) == "flash-attn==2.7.4.post1" and failing_build(PIP_BUILD) == "flash-attn"
    assert trouble_of(UV_BUILD)["build_wants"] == "torch"


CONFIG = """:env:.cert='/etc/ssl/certs/ca.crt'
:env:.default-timeout='180'
:env:.find-links='/opt/wheels'
global.constraint='/etc/xdg/pip/constraints.txt'
global.extra-index-url='file:///opt/a/simple file:///opt/b/simple'
global.find-links='/other'
global.index-url='https://me:secret@i.example/simple'
install.no-index='true'
install.trusted-host='\\ni.example\\nj.example'
list.format='columns'
"""


def test_pips_settings_are_read_and_variables_win_over_files() -> None:
    found = parse_pip_config(CONFIG)
    assert found.find_links == ("/opt/wheels",)
    assert found.extra_index_urls == ("file:///opt/a/simple", "file:///opt/b/simple")
    assert found.constraints == ("/etc/xdg/pip/constraints.txt",)
    assert found.index_url == "https://me:secret@i.example/simple"
    assert found.trusted_hosts == ("i.example", "j.example")
    assert found.no_index is True and found.cert == "/etc/ssl/certs/ca.crt" and found.timeout_s == 180
    assert parse_pip_config("nonsense\nglobal.pre='maybe'") == PipSettings()


def test_credentials_of_an_index_are_masked() -> None:
    assert mask("https://me:secret@i.example/simple") == "https://<credentials>@i.example/simple"
    assert "secret" not in str(parse_pip_config(CONFIG).as_json())


def options(settings: PipSettings, tmp_path: Path, **more: object) -> list[str]:
    environment = Environment(Installer("uv", "uv", "1", ""), settings, tmp_path, "python", {}, **more)  # type: ignore[arg-type]
    return [*environment._sources("uv"), *environment._constraints("uv", ["own.txt"])]


def test_uv_is_handed_what_pip_would_use(tmp_path: Path) -> None:
    words = " ".join(options(parse_pip_config(CONFIG), tmp_path))
    assert "--find-links /opt/wheels" in words and "--extra-index-url file:///opt/a/simple" in words
    assert "-c /etc/xdg/pip/constraints.txt -c own.txt" in words
    assert "--no-index" in words and "--allow-insecure-host i.example" in words
    assert "--index-strategy unsafe-best-match" in words  # pip takes the best of all indexes


def test_offline_from_a_wheelhouse_asks_no_index(tmp_path: Path) -> None:
    words = options(PipSettings(), tmp_path, offline=True, wheelhouse="/wheels")
    assert "--offline" in words and "--no-index" in words and words[:2] == ["--find-links", "/wheels"]


PYLOCK = """lock-version = "1.0"
[[packages]]
name = "annotated-doc"
version = "0.0.7"
sdist = { url = "https://f.example/annotated_doc-0.0.7.tar.gz", upload-time = 2026-11-18T11:06:55Z, size = 10764 }
wheels = [{ url = "https://f.example/annotated_doc-0.0.7-py3-none-any.whl", upload-time = 2026-11-18T11:06:54Z, size = 5286 }]
[[packages]]
name = "flash-attn"
version = "2.7.4.post1"
sdist = { url = "https://f.example/flash_attn-2.7.4.post1.tar.gz", size = 6022529 }
[[packages]]
name = "nvidia-cublas"
version = "13.1.1.3"
wheels = [{ url = "https://f.example/nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl", size = 600000000 }]
[[packages]]
name = "mine"
directory = { path = "/work/mine" }
[[packages]]
name = "six"
version = "1.17.0"
archive = { url = "https://f.example/six-1.17.0-py2.py3-none-any.whl" }
"""


def test_uvs_lock_is_read_with_sizes_dates_and_what_must_be_built() -> None:
    found = {package.name: package for package in parse_pylock(PYLOCK)}
    assert found["annotated-doc"].size_bytes == 5286 and found["annotated-doc"].uploaded == "2026-11-18"
    assert found["annotated-doc"].from_source is False and found["six"].from_source is False
    assert found["flash-attn"].from_source is True and found["mine"].from_source is True
    assert found["mine"].filename == "" and found["six"].size_bytes is None
    from preflight.software.installers import Resolution

    assert [p.name for p in cuda_packages(Resolution(True, list(found.values()), "", "", 1))] == ["nvidia-cublas"]


def test_pips_report_is_read_and_a_torn_one_is_empty() -> None:
    report = (
        '{"version": "1", "install": [{"download_info": {"url": "https://f.example/a-1-py3-none-any.whl"}, '
        '"metadata": {"name": "a", "version": "1"}}]}'
    )
    (package,) = parse_pip_report(report)
    assert (package.name, package.version, package.from_source) == ("a", "1", False)
    assert parse_pip_report(report[:40]) == []


def test_cpu_wheels_of_torch_in_a_folder_are_found_newest_last(tmp_path: Path) -> None:
    for name in ("torch-2.9.0+cpu-cp311", "torch-2.13.0%2Bcpu-cp311", "torch-2.1.0-cp311", "torchvision-0.1+cpu-cp311"):
        (tmp_path / f"{name}-cp311-linux_x86_64.whl").touch()
    assert cpu_builds_of_torch([str(tmp_path), "https://x.example", "/nowhere"]) == ["2.9.0+cpu", "2.13.0+cpu"]


def test_the_flat_file_has_absolute_paths_and_no_includes(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("datasets\n")
    (tmp_path / "wheels").mkdir()
    hashed = "sha256:" + "ab" * 32
    (tmp_path / "r.txt").write_text(
        f"-r more.txt\n-f wheels\n--pre\n-e ./mine\nb==1 --hash={hashed}\nc ; python_version < '3'\na[x]>=1 # why\n"
    )
    (tmp_path / "mine").mkdir()
    text = flat_requirements(read_requirements(tmp_path / "r.txt"))
    assert text.splitlines() == [
        f"--find-links {tmp_path}/wheels",
        "--pre",
        "datasets",
        f"-e {tmp_path}/mine",
        f"b==1 --hash={hashed}",
        "a[x]>=1",
    ]


def test_uv_is_looked_for_beside_our_python_first() -> None:
    found = find_installer("auto")
    assert found.name in ("uv", "pip") and found.why
    assert find_installer("pip").name == "pip"


def test_a_read_only_home_gives_uv_a_cache_inside_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    environment = Environment(Installer("uv", "uv", "1", ""), PipSettings(), tmp_path, "python", {})
    assert environment._uv_variables()["UV_CACHE_DIR"] == str(tmp_path / "uv-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "UV_CACHE_DIR" not in environment._uv_variables()
