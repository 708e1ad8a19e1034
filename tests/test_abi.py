"""Compiled parts that do not fit each other, the interpreter, the system or the driver are named; what fits is not."""

from __future__ import annotations

from typing import Any

import pytest

from preflight.findings import Level
from preflight.software.abi import Stack, check_abi, cuda_of, why_not

CP311 = frozenset(
    [f"cp311-cp311-manylinux_2_{n}_x86_64" for n in range(5, 37)]
    + [f"cp3{n}-abi3-manylinux_2_{m}_x86_64" for n in range(2, 12) for m in (17, 28)]
    + ["cp311-cp311-manylinux2014_x86_64", "cp311-cp311-linux_x86_64", "py3-none-any", "py2-none-any"]
    + ["py3-none-manylinux_2_24_x86_64"]
)
PYTHON = {"libc": "glibc 2.36", "bits": 64, "free_threaded": False, "conda_packages": []}


def package(name: str, version: str, tag: str = "py3-none-any", **more: Any) -> dict[str, Any]:
    native = 0 if tag.endswith("-none-any") else 3
    return {
        "name": name,
        "version": version,
        "tags": [tag],
        "requires": [],
        "native_files": native,
        "where": "/s",
    } | more


def stack(*packages: dict[str, Any], driver: str | None = None, system: str = "Linux", **more: Any) -> Stack:
    return Stack(packages, {**PYTHON, **more.pop("python", {})}, more.pop("tags", CP311), driver, system=system, **more)


def codes(one: Stack) -> list[str]:
    return [finding.code for finding in check_abi(one)]


TESTED = (
    package("torch", "2.13.0+cpu", "cp311-cp311-manylinux_2_28_x86_64"),
    package("numpy", "2.4.6", "cp311-cp311-manylinux_2_28_x86_64"),
    package("transformers", "5.24.0"),
    package("bitsandbytes", "0.50.2", "py3-none-manylinux_2_24_x86_64"),
)


def test_a_stack_that_fits_has_one_ok_finding() -> None:
    (finding,) = check_abi(stack(*TESTED))
    assert (finding.code, finding.level) == ("abi-fits", Level.OK)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("cp310-cp310-manylinux_2_28_x86_64", "another Python"),
        ("cp312-cp312-manylinux_2_28_x86_64", "another Python"),
        ("cp311-cp311-manylinux_2_28_aarch64", "another operating system or machine"),
        ("cp311-cp311-win_amd64", "another operating system or machine"),
        ("cp311-cp311-macosx_11_0_arm64", "another operating system or machine"),
        ("cp311-cp311-musllinux_1_2_x86_64", "musl"),
        ("cp311-cp311-manylinux_2_39_x86_64", "needs glibc 2.39, here is 2.36"),
    ],
)
def test_a_wheel_for_another_place_says_which_part_does_not_fit(tag: str, words: str) -> None:
    (finding,) = check_abi(stack(package("torch", "2.8.0", tag)))
    assert finding.code == "wheel-tag-mismatch" and finding.level is Level.FAIL
    assert words in finding.what


def test_a_glibc_wheel_on_a_musl_system_is_told() -> None:
    musl = Stack((), {**PYTHON, "libc": ""}, frozenset({"cp311-cp311-musllinux_1_2_x86_64"}), None)
    assert "musl" in why_not(["cp311-cp311-manylinux_2_28_x86_64"], musl)


def test_unknown_tags_are_not_judged() -> None:
    assert codes(stack(package("torch", "2.8.0", "cp310-cp310-win_amd64"), tags=None)) == ["abi-fits"]


# The driver floors are NVIDIA's, per CUDA major: 11 450.80.02, 12 525.60.13, 13 580.65.06 on Linux.
@pytest.mark.parametrize(
    ("torch", "driver", "bad"),
    [
        ("2.8.0+cu128", "525.60.13", False),  # any driver of the major's floor runs it, whatever its native CUDA
        ("2.8.0+cu128", "525.85.12", False),
        ("2.8.0+cu128", "470.82.01", True),
        ("2.7.1+cu118", "470.82.01", False),
        ("2.7.1+cu118", "450.80.01", True),
        ("2.11.0+cu130", "575.57.08", True),
        ("2.11.0+cu130", "580.65.06", False),
        ("2.11.0+cu130", "610.10.01", False),
        ("2.13.0+cpu", "390.10", False),
        ("2.13.0", "390.10", False),  # no nvidia packages beside it: a CPU build
    ],
)
def test_the_driver_floor_of_the_cuda_major_decides_and_nothing_else(torch: str, driver: str, bad: bool) -> None:
    found = codes(stack(package("torch", torch, "cp311-cp311-manylinux_2_28_x86_64"), driver=driver))
    assert ("driver-too-old-for-build" in found) is bad


def test_the_cuda_of_a_pypi_build_is_read_from_the_packages_it_brings() -> None:
    torch = package("torch", "2.6.0", "cp311-cp311-manylinux_2_28_x86_64")
    old = stack(torch, package("nvidia-cuda-runtime-cu12", "12.4.127", "py3-none-manylinux2014_x86_64"))
    assert cuda_of(old) == "12"
    assert cuda_of(stack(torch, package("nvidia-cuda-runtime", "13.0.96"))) == "13"
    assert cuda_of(stack(torch)) is None
    assert cuda_of(stack(torch, cuda="12.6")) == "12.6"


def test_no_driver_seen_is_not_an_old_driver() -> None:
    assert codes(stack(package("torch", "2.11.0+cu130", "cp311-cp311-manylinux_2_28_x86_64"))) == ["abi-fits"]


def test_torchvision_must_be_made_for_the_installed_torch() -> None:
    vision = package("torchvision", "0.21.0", "cp311-cp311-manylinux_2_28_x86_64", requires=["numpy", "torch==2.6.0"])
    found = check_abi(stack(TESTED[0], vision))
    assert found[0].code == "torchvision-mismatch" and "torch==2.6.0" in found[0].what
    fits = package("torchvision", "0.28.0+cpu", "cp311-cp311-manylinux_2_28_x86_64", requires=["torch==2.13.0"])
    assert codes(stack(TESTED[0], fits)) == ["abi-fits"]


def test_a_cuda_torchvision_beside_a_cpu_torch_is_told_unless_it_was_imported() -> None:
    vision = package("torchvision", "0.28.0+cu130", "cp311-cp311-manylinux_2_28_x86_64", requires=["torch==2.13.0"])
    assert codes(stack(TESTED[0], vision)) == ["torchvision-variant"]
    assert codes(stack(TESTED[0], vision, imported=frozenset({"torchvision"}))) == ["abi-fits"]


def test_a_requirement_behind_an_extra_or_a_bracketed_old_form_is_read_rightly() -> None:
    vision = package("torchvision", "0.1", requires=["torch (==2.6.0)"])
    assert codes(stack(TESTED[0], vision)) == ["torchvision-mismatch"]
    optional = package("torchaudio", "2.0", requires=["torch==1.0 ; extra == 'old'"])
    assert codes(stack(TESTED[0], optional)) == ["abi-fits"]


def test_triton_must_be_the_one_torch_was_released_with() -> None:
    torch = package(
        "torch", "2.14.1", "cp311-cp311-manylinux_2_28_x86_64", requires=["triton==3.8.0; platform_system == 'Linux'"]
    )
    assert codes(stack(torch, package("triton", "3.8.0"))) == ["abi-fits"]
    assert codes(stack(torch, package("triton", "3.2.0"))) == ["triton-mismatch"]


def test_a_package_built_for_numpy_1_is_suspect_beside_numpy_2_only_if_nothing_imported_it() -> None:
    pandas = package("pandas", "1.5.3", "cp311-cp311-manylinux_2_17_x86_64")
    assert codes(stack(TESTED[1], pandas)) == ["numpy-abi-suspect"]
    assert codes(stack(TESTED[1], pandas, imported=frozenset({"pandas"}))) == ["abi-fits"]
    assert codes(stack(package("numpy", "1.26.4"), pandas)) == ["abi-fits"]
    assert codes(stack(TESTED[1], package("pandas", "2.2.2"))) == ["abi-fits"]


def test_a_free_threaded_python_needs_wheels_of_its_own() -> None:
    free = {"python": {"free_threaded": True}, "tags": None}
    assert codes(stack(package("numpy", "2.4.6", "cp313-cp313-manylinux_2_28_x86_64"), **free)) == [
        "free-threaded-python"
    ]
    assert codes(stack(package("numpy", "2.4.6", "cp313-cp313t-manylinux_2_28_x86_64"), **free)) == ["abi-fits"]
    assert codes(stack(package("tqdm", "4.66.4"), **free)) == ["abi-fits"]


def test_a_32_bit_python_is_named_as_the_reason() -> None:
    assert "python-32-bit" in codes(stack(package("tqdm", "4"), python={"bits": 32}))


def test_the_same_library_from_conda_and_pip_is_a_mixture() -> None:
    conda = {"conda_packages": ["numpy-1.26.4-py311h64a7726_0", "pytorch-2.5.1-py3.11_cuda12.4", "pyyaml-6.0-py311"]}
    numpy = package("numpy", "2.1.0", "cp311-cp311-manylinux_2_28_x86_64", installer="pip")
    torch = package("torch", "2.6.0", "cp311-cp311-manylinux_2_28_x86_64", installer="pip")
    found = check_abi(stack(numpy, torch, python=conda))
    assert found[0].code == "conda-and-pip-mixed" and "torch (2.5.1 from conda, 2.6.0 from pip)" in found[0].what
    own = package("numpy", "1.26.4", "cp311-cp311-manylinux_2_28_x86_64", installer="conda")
    assert codes(stack(own, python=conda)) == ["abi-fits"]


def test_a_distribution_that_is_there_twice_is_told() -> None:
    assert codes(stack(package("peft", "0.17.1"), package("peft", "0.21.2"))) == ["installed-twice"]


def test_every_warning_and_failure_has_a_why_a_fix_and_a_source() -> None:
    everything = stack(
        package("torch", "2.11.0+cu130", "cp311-cp311-manylinux_2_28_x86_64", requires=["triton==3.8.0"]),
        package("triton", "1.0"),
        package("torchvision", "0.21.0", requires=["torch==2.6.0"]),
        package("torchaudio", "2.11.0+cpu"),
        package("numpy", "2.4.6", "cp310-cp310-win_amd64", installer="pip"),
        package("pandas", "1.5.3"),
        package("pandas", "1.5.2"),
        driver="470.82.01",
        python={"bits": 32, "free_threaded": True, "conda_packages": ["numpy-1.26.4-x_0"]},
    )
    found = check_abi(everything)
    assert len(found) == 10
    for finding in found:
        assert finding.why and finding.fix and finding.source, finding.code
