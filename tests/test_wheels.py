# ruff: noqa: E501 (one machine a line)
"""The table of torch builds against machines worked out by hand from facts/FACTS.md sections 2 and 3."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preflight.facts import table
from preflight.hardware.capability import capability_from_name, capability_of
from preflight.wheels import (
    Target,
    choose,
    covers,
    cuda_majors,
    driver_drives,
    driver_floor,
    native_cuda,
    refusals,
    rows,
)

ROOT = Path(__file__).resolve().parent.parent
RELEASES = [entry["release"] for entry in table("torch_wheels")["releases"]]

CUDA11 = "cu116 1.13; cu117 1.13-2.0; cu118 2.0-2.7"
CUDA12_OLD = "cu121 2.1-2.5; cu124 2.4-2.6; cu126 2.6-2.14"
CUDA12_NEW = "cu128 2.7-2.11; cu129 2.8-2.11"
CUDA13 = "cu130 2.9-2.15; cu132 2.12-2.15"

# name, the machine, every build that runs on it (index and releases), the build to install (None: impossible), and
# words that the reason or the change must hold.
MACHINES = [
    # Ampere and newer on Linux, by driver branch
    ("RTX 3090, 450.80", ("8.6", "450.80.02", "3.10", "2.31"), "", None, "455"),
    ("RTX 3090, 470", ("8.6", "470.82.01", "3.10", "2.31"), CUDA11, "2.7.1 cu118", "525.60.13"),
    ("RTX 3090, 520", ("8.6", "520.61.05", "3.10", "2.31"), CUDA11, "2.7.1 cu118", "525.60.13"),
    ("RTX 3090, 525.60.12", ("8.6", "525.60.12", "3.10", "2.31"), CUDA11, "2.7.1 cu118", "525.60.13"),
    ("RTX 3090, 525.85.12", ("8.6", "525.85.12", "3.10", "2.31"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580"),
    ("RTX 3090, 535.104.05", ("8.6", "535.104.05", "3.10", "2.35"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580"),
    ("RTX 3090, 545.23.06", ("8.6", "545.23.06", "3.12", "2.35"),
     "cu118 2.2-2.7; cu121 2.2-2.5; cu124 2.4-2.6; cu126 2.6-2.14; cu128 2.7-2.11; cu129 2.8-2.11", "2.14.1 cu126", "580"),
    ("RTX 3090, 580.65.05", ("8.6", "580.65.05", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580.65.06"),
    ("RTX 3090, 580.95.05", ("8.6", "580.95.05", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}; {CUDA13}", "2.15.0 cu132", ""),
    ("A100, 610", ("8.0", "610.43.02", "3.13", "2.39"),
     "cu118 2.5-2.7; cu121 2.5; cu124 2.5-2.6; cu126 2.6-2.14; cu128 2.7-2.11; cu129 2.8-2.11; cu130 2.9-2.15; "
     "cu132 2.12-2.15",
     "2.15.0 cu132", ""),
    ("RTX 4090, 515", ("8.9", "515.48.07", "3.10", "2.35"), "", None, "520"),
    ("RTX 4090, 550", ("8.9", "550.54.15", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580"),
    ("H100, 535", ("9.0", "535.183.01", "3.11", "2.35"), f"cu118 2.0-2.7; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580"),
    ("H200, 570", ("9.0", "570.124.06", "3.11", "2.35"), f"cu118 2.0-2.7; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580"),
    # Blackwell
    ("RTX 5090, 550", ("12.0", "550.54.14", "3.11", "2.35"), "", None, "570"),
    ("RTX 5090, 570", ("12.0", "570.124.06", "3.11", "2.35"), CUDA12_NEW, "2.11.0 cu128", "580"),
    ("RTX 5090, 575", ("12.0", "575.57.08", "3.11", "2.35"), CUDA12_NEW, "2.11.0 cu129", "580"),
    ("RTX 5090, 590", ("12.0", "590.44.01", "3.11", "2.35"), f"{CUDA12_NEW}; {CUDA13}", "2.15.0 cu132", ""),
    ("RTX 5090, 570, Python 3.8", ("12.0", "570.124.06", "3.8", "2.31"), "", None, "Python 3.14"),
    ("B200, 580", ("10.0", "580.95.05", "3.12", "2.39"), f"{CUDA12_NEW}; {CUDA13}", "2.15.0 cu132", ""),
    ("B300, 580", ("10.3", "580.95.05", "3.12", "2.39"), f"{CUDA12_NEW}; {CUDA13}", "2.15.0 cu132", ""),
    # Turing, Volta, Pascal, Maxwell, Kepler
    ("T4, 418", ("7.5", "418.39", "3.10", "2.31"), "", None, "450.80.02"),
    ("T4, 535", ("7.5", "535.104.05", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}", "2.14.1 cu126", "580"),
    ("T4, 580", ("7.5", "580.95.05", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; {CUDA12_NEW}; {CUDA13}", "2.15.0 cu132", ""),
    ("V100, 550", ("7.0", "550.54.15", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; cu128 2.8-2.10; cu129 2.8", "2.14.1 cu126", "no kernels"),
    ("V100, 580", ("7.0", "580.95.05", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}; cu128 2.8-2.10; cu129 2.8", "2.14.1 cu126", "no kernels"),
    ("V100, 590", ("7.0", "590.44.01", "3.11", "2.35"), "", None, "580"),
    ("P100 on Kaggle, 560", ("6.0", "560.35.03", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}", "2.14.1 cu126", "no kernels"),
    ("GTX 1080, 470", ("6.1", "470.82.01", "3.10", "2.31"), CUDA11, "2.7.1 cu118", "525.60.13"),
    ("GTX 1080, 580, Python 3.15", ("6.1", "580.95.05", "3.15", "2.39"), "", None, "3.14"),
    ("MX150, 535", ("6.1", "535.54.03", "3.12", "2.39"), "cu118 2.2-2.7; cu121 2.2-2.5; cu124 2.4-2.6; cu126 2.6-2.14", "2.14.1 cu126", "no kernels"),
    ("GTX 750 Ti, 580", ("5.0", "580.95.05", "3.11", "2.35"), f"{CUDA11}; {CUDA12_OLD}", "2.14.1 cu126", "no kernels"),
    ("K80, 470", ("3.7", "470.256.02", "3.10", "2.31"), CUDA11, "2.7.1 cu118", "no kernels"),
    ("K80, 535", ("3.7", "535.54.03", "3.10", "2.31"), "", None, "470"),
    ("K40, 470", ("3.5", "470.256.02", "3.10", "2.31"), "", None, "3.5"),
    # C library and Python
    ("CentOS 7, A100", ("8.0", "550.54.15", "3.11", "2.17"), "cu116 1.13; cu117 1.13-2.0; cu118 2.0-2.6; cu121 2.1-2.5; cu124 2.4-2.6",
     "2.6.0 cu124", "2.28"),
    ("CentOS 7, RTX 5090", ("12.0", "570.124.06", "3.11", "2.17"), "", None, "2.28"),
    ("Alpine", ("8.6", "580.95.05", "3.12", "musl"), "", None, "musl"),
    ("Python 3.16", ("8.6", "580.95.05", "3.16", "2.39"), "", None, "3.15"),
    ("Python 3.6", ("8.6", "580.95.05", "3.6", "2.31"), "", None, "3.7"),
    ("Python 3.7", ("8.6", "580.95.05", "3.7", "2.31"), "cu116 1.13; cu117 1.13", "1.13.1 cu117", "3.7"),
    ("Python 3.9", ("8.6", "580.95.05", "3.9", "2.31"),
     "cu116 1.13; cu117 1.13-2.0; cu118 2.0-2.7; cu121 2.1-2.5; cu124 2.4-2.6; cu126 2.6-2.8; cu128 2.7-2.8; cu129 2.8", "2.8.0 cu128", "3.9"),
    ("free-threaded 3.13", ("8.6", "580.95.05", "3.13t", "2.39"),
     "cu118 2.7; cu126 2.7-2.11; cu128 2.7-2.11; cu129 2.8-2.11; cu130 2.9-2.11", "2.11.0 cu130", "3.13t"),
    # two cards
    ("GTX 1080 and RTX 5090", ("6.1 12.0", "580.95.05", "3.11", "2.35"), "", None, "CUDA_VISIBLE_DEVICES"),
    ("V100 and RTX 5090, torch 2.8 to 2.10", ("7.0 12.0", "580.95.05", "3.11", "2.35"), "cu128 2.8-2.10; cu129 2.8", "2.10.0 cu128", "no kernels"),
]  # fmt: skip

OTHERS = [
    # Windows: PyPI has CPU builds only; CUDA 13 needs R580 there too
    ("Windows, RTX 3080, 560.94", Target("cuda", ("8.6",), "560.94", "3.11", None, "Windows"),
     "cu117 2.0; cu118 2.0-2.7; cu121 2.1-2.5; cu124 2.4-2.6; cu126 2.6-2.14; cu128 2.7-2.11; cu129 2.8-2.11", "2.14.1 cu126", "CPU build"),
    ("Windows, RTX 4070, 581", Target("cuda", ("8.9",), "581.29", "3.13", None, "Windows"),
     "cu118 2.6-2.7; cu124 2.6; cu126 2.6-2.14; cu128 2.7-2.11; cu129 2.8-2.11; cu130 2.9-2.15; cu132 2.12-2.15", "2.15.0 cu130", "CPU build"),
    ("Windows, GTX 1060, 522.06", Target("cuda", ("6.1",), "522.06", "3.10", None, "Windows"),
     "cu116 1.13; cu117 1.13-2.0; cu118 2.0-2.7", "2.7.1 cu118", "527.41"),
    ("Windows, no GPU", Target("cpu", python="3.14", system="Windows"), "cpu 2.9-2.15", "2.15.0 cpu", ""),
    ("Windows, Radeon", Target("rocm", python="3.12", system="Windows", gfx=("gfx1100",)), "", None, "Linux"),
    # aarch64
    ("GB10, 580", Target("cuda", ("12.1",), "580.126.09", "3.12", "2.39", machine="aarch64"),
     "cu128 2.7-2.11; cu129 2.8; cu130 2.9-2.15; cu132 2.12-2.15", "2.15.0 cu132", ""),
    ("Thor, 580", Target("cuda", ("11.0",), "580.95.05", "3.12", "2.39", machine="aarch64"), "cu130 2.9-2.15; cu132 2.12-2.15",
     "2.15.0 cu132", ""),
    ("GH200, 550", Target("cuda", ("9.0",), "550.54.15", "3.11", "2.35", machine="aarch64"),
     "cu126 2.9-2.14; cu128 2.7-2.11; cu129 2.8", "2.14.1 cu126", "580"),
    ("Graviton with T4G", Target("cuda", ("7.5",), "580.95.05", "3.11", "2.35", machine="aarch64"), "", None, "7.5"),
    ("Raspberry Pi", Target("cpu", python="3.11", glibc="2.36", machine="aarch64"), "cpu 2.0-2.15", "2.15.0 cpu", ""),
    # AMD, Intel, Apple, CPU
    ("RX 6800", Target("rocm", python="3.11", glibc="2.35", gfx=("gfx1030",)),
     "rocm5.2 1.13; rocm5.4.2 2.0; rocm5.6 2.1; rocm5.7 2.2; rocm6.0 2.3; rocm6.1 2.4-2.6; rocm6.2 2.5; "
     "rocm6.2.4 2.6-2.7; "
     "rocm6.3 2.7-2.9; rocm6.4 2.8-2.9; rocm7.0 2.10; rocm7.1 2.10-2.13; rocm7.2 2.11-2.14; rocm7.14 2.14", "2.14.1 rocm7.2", "2.14"),
    ("RX 6700 XT", Target("rocm", python="3.12", glibc="2.39", gfx=("gfx1031",)), "rocm7.14 2.14", "2.14.1 rocm7.14", "2.14"),
    ("MI300X, Python 3.15", Target("rocm", python="3.15", glibc="2.39", gfx=("gfx942",)), "", None, "3.14"),
    ("Arc A770", Target("xpu", python="3.12", glibc="2.39"), "xpu 2.6-2.15", "2.15.0 xpu", ""),
    ("Arc B580 on Windows", Target("xpu", python="3.12", system="Windows"), "xpu 2.6-2.15", "2.15.0 xpu", ""),
    ("M2", Target("mps", python="3.12", system="Darwin", machine="arm64"), "cpu 2.2-2.15", "2.15.0 pypi", ""),
    ("M1 on macOS 13", Target("mps", python="3.12", system="Darwin", machine="arm64", macos="13.6"), "cpu 2.2-2.11", "2.11.0 pypi", ""),
    ("Intel Mac", Target("cpu", python="3.11", system="Darwin", machine="x86_64"), "cpu 2.0-2.2", "2.2.2 pypi", ""),
    ("Intel Mac, Python 3.13", Target("cpu", python="3.13", system="Darwin", machine="x86_64"), "", None, "3.12"),
    ("CPU server", Target("cpu", python="3.11", glibc="2.36"), "cpu 1.13-2.15", "2.15.0 cpu", ""),
]  # fmt: skip


def nvidia(card):
    capabilities, driver, python, glibc = card
    return Target("cuda", tuple(capabilities.split()), driver, python, glibc)


ALL = [(name, nvidia(card), fits, chosen, says) for name, card, fits, chosen, says in MACHINES] + OTHERS


def spelled_out(fits, target):
    """ "cu118 2.0-2.7; cu129 2.8 2.11" as the set of (release, index) among the builds that exist."""
    exist = {(row.release, row.variant) for row in rows(target)}
    found = set()
    for part in filter(None, (one.strip() for one in fits.split(";"))):
        variant, *spans = part.split()
        for span in spans:
            first, _, last = span.partition("-")
            for release in RELEASES[RELEASES.index(first) : RELEASES.index(last or first) + 1]:
                if (release, variant) in exist:
                    found.add((release, variant))
    return found


def test_the_list_of_machines_is_long_enough():
    assert len(ALL) >= 60 and len({name for name, *_ in ALL}) == len(ALL)


@pytest.mark.parametrize(("name", "target", "fits", "chosen", "says"), ALL, ids=[one[0] for one in ALL])
def test_every_build_is_taken_or_refused_as_worked_out_by_hand(name, target, fits, chosen, says):
    found = {(row.release, row.variant) for row in rows(target) if not refusals(row, target)}
    assert found == spelled_out(fits, target)


@pytest.mark.parametrize(("name", "target", "fits", "chosen", "says"), ALL, ids=[one[0] for one in ALL])
def test_the_build_to_install(name, target, fits, chosen, says):
    choice = choose(target)
    said = " ".join([*choice.decided_by, *choice.change])
    assert (f"{choice.version} {choice.variant}" if choice.version else None) == chosen, said
    assert says in said
    if chosen is None:
        assert choice.command() is None and choice.change and choice.decided_by


def test_commands_name_an_index_only_where_pypi_has_another_build():
    def command(**machine):
        return choose(Target(**machine)).command()

    modern = {"python": "3.12", "glibc": "2.35"}
    assert (
        command(accelerator="cuda", capabilities=("8.6",), driver="580.95.05", **modern)
        == "python -m pip install torch==2.15.0"
    )
    assert command(accelerator="cuda", capabilities=("8.6",), driver="550.54.15", **modern) == (
        "python -m pip install torch==2.14.1 --index-url https://download.pytorch.org/whl/cu126"
    )
    assert command(accelerator="cpu", **modern).endswith("--index-url https://download.pytorch.org/whl/cpu")
    assert command(accelerator="cpu", python="3.12", system="Windows") == "python -m pip install torch==2.15.0"


def test_another_build_of_the_same_version_is_replaced_by_force():
    choice = choose(Target("cuda", ("8.6",), "550.54.15", "3.12", "2.35"))
    assert (choice.version, choice.variant) == ("2.14.1", "cu126")
    assert "--force-reinstall" in choice.command(installed="2.14.1+cpu")
    assert "--force-reinstall" in choice.command(installed="2.14.1")  # PyPI's own build is for CUDA 13
    assert "--force-reinstall" not in choice.command(installed="2.13.0+cpu")
    assert choice.is_installed("2.14.1+cu126") and not choice.is_installed("2.14.1") and not choice.is_installed(None)
    default = choose(Target("cuda", ("8.6",), "590.44.01", "3.12", "2.35"))
    assert default.is_installed("2.15.0") and "--force-reinstall" in default.command(installed="2.15.0+cpu")


def test_drivers_run_every_build_of_the_majors_whose_floor_they_reach():
    assert cuda_majors("470.82.01") == (11,)
    assert cuda_majors("525.85.12") == (11, 12)
    assert cuda_majors("580.65.06") == (11, 12, 13)
    assert cuda_majors("440.33") == ()
    assert (driver_floor(12, "Linux"), driver_floor(13, "Linux")) == ("525.60.13", "580.65.06")
    assert [native_cuda(d) for d in ("525.85.12", "535.104.05", "545.23.06", "570.1", "610.43.02")] == [
        "12.0", "12.2", "12.3", "12.8", "13.3",
    ]  # fmt: skip
    for example in table("cuda_driver")["examples"]:
        driver = example["driver"].replace(".x", ".99.99").replace("+", ".44")
        majors = cuda_majors(driver)
        assert all(int(name[2:4]) in majors for name in example["wheels_ok"])
        assert not any(int(name[2:4]) in majors for name in example["wheels_not"])


def test_cubins_serve_their_own_major_forward_and_ptx_everything_newer():
    assert covers(["8.6"], None, "8.9") and not covers(["8.9"], None, "8.6")
    assert covers(["12.0"], None, "12.1") and not covers(["9.0"], None, "12.0")
    assert covers(["9.0"], "9.0", "12.0") and not covers(["9.0"], "12.0?", "12.1")
    assert covers(["6.0"], None, "6.1") and covers(["5.0"], None, "5.2") and not covers(["7.5"], None, "7.0")


def test_driver_branches_and_cards():
    assert driver_drives("570.124.06", "12.0") is None and driver_drives("565.77", "12.0")
    assert driver_drives("580.95.05", "6.1") is None and driver_drives("590.44.01", "6.1")
    assert driver_drives("470.256.02", "3.7") is None and driver_drives("535.54.03", "3.7")


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA GeForce RTX 3090", "8.6"), ("GA102 [GeForce RTX 3090]", "8.6"), ("NVIDIA GeForce RTX 4090", "8.9"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "12.0"), ("NVIDIA RTX 4000 Ada Generation", "8.9"), ("Quadro RTX 4000", "7.5"),
        ("NVIDIA RTX A4000", "8.6"), ("Tesla T4", "7.5"), ("Tesla V100-SXM2-16GB", "7.0"), ("Tesla P100-PCIE-16GB", "6.0"),
        ("NVIDIA GeForce GTX 1080 Ti", "6.1"), ("NVIDIA GeForce GTX 1660 SUPER", "7.5"), ("GeForce GTX 750 Ti", "5.0"),
        ("Tesla K80", "3.7"), ("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA A10G", "8.6"), ("NVIDIA L40S", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA H200", "9.0"), ("NVIDIA GH200 480GB", "9.0"), ("NVIDIA B200", "10.0"),
        ("NVIDIA GB300", "10.3"), ("NVIDIA GB10", "12.1"), ("GeForce MX150", "6.1"), ("NVIDIA GeForce MX450", "7.5"),
        ("GRID T4-16Q", "7.5"), ("NVIDIA L4-12Q", "8.9"), ("sm_86", "8.6"), ("12.0", "12.0"), ("rtx3060", "8.6"),
        ("TU117M [GeForce GTX 1650 Mobile]", "7.5"), ("AD107M [GeForce RTX 4060 Max-Q]", "8.9"),
        ("NVIDIA Graphics Device", None), ("Radeon RX 7900 XTX", None), ("", None),
    ],
)  # fmt: skip
def test_compute_capability_by_name(name, capability):
    assert capability_from_name(name) == capability


def test_what_each_generation_can_do():
    turing, ampere, hopper, pascal = (capability_of(cc) for cc in ("7.5", "8.6", "9.0", "6.1"))
    assert (turing.bf16_native, turing.flash_attention_2, turing.fused_attention_with_gqa, turing.llm_int8) == (
        False,
        False,
        False,
        True,
    )
    assert (ampere.bf16_native, ampere.flash_attention_2, ampere.fp8_native) == (True, True, False)
    assert hopper.flash_attention_3 and hopper.fp8_native and hopper.sdpa[0] == "cudnn"
    assert (pascal.fp16_fast, pascal.nf4, pascal.llm_int8) == (False, True, False)
    assert capability_of("5.2").nf4 is False and capability_of(None) is None and capability_of("8.9").fp8_native


# --- install_pytorch.sh


def script(*arguments, env=None, python=None):
    environment = {**os.environ, **(env or {})}
    environment.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        ["sh", str(ROOT / "install_pytorch.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_script_prints_the_command_for_another_machine_and_installs_nothing():
    ended = script("--gpu", "GTX 1080", "--driver", "470.82.01", "--python", "3.10", "--glibc", "2.31")
    assert ended.returncode == 0
    assert (
        "command: python -m pip install torch==2.7.1 --index-url https://download.pytorch.org/whl/cu118" in ended.stdout
    )
    assert "Nothing is installed" in ended.stderr


def test_the_script_says_why_nothing_fits_and_what_to_change():
    ended = script("--dry-run", "--gpu", "RTX 5090", "--driver", "550.54")
    assert ended.returncode == 1
    assert "570" in ended.stdout and "to change: install NVIDIA driver branch 570 or newer" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "Voodoo 2"], "--gpu Voodoo 2"),
        (["--driver", "latest"], "--driver latest"),
        (["--os", "beos"], "linux, windows, macos"),
        (["--glibc", "new"], "--glibc new"),
        (["--python"], "--python needs"),
        (["--python", "/no/such/python"], "no such program"),
        (["--gpu"], "--gpu needs a value"),
    ],
)
def test_the_script_refuses_what_it_cannot_understand_in_one_line(arguments, says):
    ended = script("--dry-run", *arguments)
    assert ended.returncode == 2 and says in ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.strip().splitlines()) <= 2


def test_the_script_installs_with_pip_only_without_dry_run(tmp_path):
    """A stand-in for pip writes down what it was called with; the rest is the script itself."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("")
    log = tmp_path / "called"
    (tmp_path / "pip" / "__main__.py").write_text(
        f"import sys\nif '--version' not in sys.argv: open({str(log)!r}, 'w').write(' '.join(sys.argv[1:]))\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    dry = script("--dry-run", "--python", sys.executable, "--accelerator", "cpu", env=env)
    assert dry.returncode == 0 and not log.exists()
    done = script("--python", sys.executable, "--accelerator", "cpu", env=env)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"install torch==2\.\d+\.\d+( --index-url https://download\.pytorch\.org/whl/cpu)?( --force-reinstall)?",
        log.read_text(),
    )


def test_the_script_without_any_python_says_so(tmp_path):
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    ended = subprocess.run(
        [shutil.which("sh"), str(ROOT / "install_pytorch.sh"), "--dry-run"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ended.returncode == 3 and "no Python was found" in ended.stderr


def test_the_script_gives_json():
    ended = script("--json", "--os", "windows", "--gpu", "RTX 4070", "--driver", "566.36", "--python", "3.12")
    answer = json.loads(ended.stdout)
    assert (answer["variant"], answer["release"], answer["schema"]) == ("cu126", "2.14.1", 1)


def test_the_script_is_plain_posix_shell():
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    ended = subprocess.run([checker, str(ROOT / "install_pytorch.sh")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
