"""What the machine around the accelerator gives: memory and CPUs after container limits, disk, platform."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from preflight.hardware.readings import whole
from preflight.machine import Machine


@dataclass(frozen=True)
class Host:
    """The machine without its accelerators. Sizes in bytes; None means that it could not be told.

    `ram_total_bytes` is what this process may have at most (the container's limit where there is a smaller one),
    `ram_available_bytes` what it can have now without swapping. `cpus` counts what the scheduler lets us use.
    `environments` names the places recognised: colab, kaggle, wsl2, docker, podman, kubernetes, slurm, sagemaker, ….
    """

    system: str | None = None
    release: str | None = None
    machine: str | None = None
    glibc: str | None = None
    cpus: float | None = None
    cpus_installed: int | None = None
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    ram_installed_bytes: int | None = None
    ram_limit_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    environments: tuple[str, ...] = ()
    disks: tuple[Disk, ...] = ()

    @property
    def in_container(self) -> bool:
        """Whether a container was recognised."""
        return bool({"docker", "podman", "kubernetes", "container"} & set(self.environments))

    @property
    def wsl(self) -> bool:
        """Whether this Linux runs under Windows (WSL 1 or 2)."""
        return bool({"wsl1", "wsl2"} & set(self.environments))


@dataclass(frozen=True)
class Disk:
    """Free space where one kind of file will go. `purpose`: wheels, model cache, checkpoints, temporary files."""

    purpose: str
    path: str
    free_bytes: int | None
    total_bytes: int | None


def read_host(machine: Machine, disks: bool = False) -> Host:
    """The host as it is now. With `disks` also the free space where wheels, models and checkpoints go."""
    where = read_platform(machine)
    meminfo = parse_meminfo(machine.read("/proc/meminfo").text)
    if not meminfo:
        meminfo = machine.see("memory", _memory_without_proc) or {}
    installed, available = meminfo.get("MemTotal"), meminfo.get("MemAvailable", meminfo.get("MemFree"))
    limit, used = read_memory_limit(machine)
    total = installed
    if limit is not None and (installed is None or limit < installed):
        total = limit
        if used is not None:
            left = max(0, limit - used)
            available = left if available is None else min(available, left)
    else:
        limit = None
    cpus_seen = machine.see("cpus", _cpus) or {}
    quota = read_cpu_quota(machine)
    usable = cpus_seen.get("usable")
    cpus = min([float(count) for count in (usable, quota) if count], default=None)
    shm = machine.see("disk /dev/shm", lambda: _disk("/dev/shm")) or {}
    return Host(
        system=where.get("system"),
        release=where.get("release"),
        machine=where.get("machine"),
        glibc=read_glibc(machine),
        cpus=cpus,
        cpus_installed=cpus_seen.get("installed"),
        ram_total_bytes=total,
        ram_available_bytes=available,
        ram_installed_bytes=installed,
        ram_limit_bytes=limit,
        swap_total_bytes=meminfo.get("SwapTotal"),
        swap_free_bytes=meminfo.get("SwapFree"),
        shm_total_bytes=shm.get("total"),
        shm_free_bytes=shm.get("free"),
        environments=tuple(read_environments(machine)),
        disks=read_disks(machine) if disks else (),
    )


def read_platform(machine: Machine) -> dict[str, str]:
    """system, release and machine (x86_64, aarch64, arm64, AMD64)."""
    seen = machine.see("platform", _platform)
    return seen if isinstance(seen, dict) else parse_uname(machine.run(["uname", "-a"]).text)


def _platform() -> dict[str, str]:
    found = platform.uname()
    return {"system": found.system, "release": found.release, "machine": found.machine}


def parse_uname(text: str) -> dict[str, str]:
    """The words of `uname -a`; empty when it is no such line."""
    words = text.split()
    if len(words) < 3 or words[0] not in ("Linux", "Darwin", "FreeBSD"):
        return {}
    known = r"^(x86_64|amd64|aarch64|arm64|armv\d\w*|ppc64le|riscv64|i[3-6]86|s390x|loongarch64)$"
    machines = [word for word in words if re.match(known, word)]
    return {"system": words[0], "release": words[2], **({"machine": machines[-1]} if machines else {})}


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes."""
    found = re.findall(r"^([A-Za-z_()]+):\s+(\d+) kB", text, re.MULTILINE)
    return {name: int(count) * 1024 for name, count in found}


def _memory_without_proc() -> dict[str, int]:
    """MemTotal, MemAvailable, SwapTotal, SwapFree in bytes where there is no /proc (macOS, Windows)."""
    try:
        import psutil
    except ImportError:
        return _memory_of_windows() if sys.platform == "win32" else _memory_of_posix()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "MemTotal": memory.total,
        "MemAvailable": memory.available,
        "SwapTotal": swap.total,
        "SwapFree": swap.free,
    }


def _memory_of_posix() -> dict[str, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    found = {"MemTotal": page * os.sysconf("SC_PHYS_PAGES")}
    with contextlib.suppress(ValueError):
        found["MemAvailable"] = page * os.sysconf("SC_AVPHYS_PAGES")
    return found


def _memory_of_windows() -> dict[str, int]:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "free", "commit", "commit_free", "v", "vf", "x")),
        )

    status = Status()
    status.length = ctypes.sizeof(Status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return {"MemTotal": status.total, "MemAvailable": status.free}


def _cpus() -> dict[str, int | None]:
    try:
        usable: int | None = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        usable = os.cpu_count()
    return {"installed": os.cpu_count(), "usable": usable}


def read_glibc(machine: Machine) -> str | None:
    """The C library's version, such as "2.35"; None where it is not glibc (musl, macOS, Windows) or not known."""
    seen = machine.see("glibc", lambda: list(platform.libc_ver()))
    if isinstance(seen, list) and len(seen) == 2:
        return str(seen[1]) if seen[0] == "glibc" and seen[1] else None
    found = re.search(r"(?i)(?:glibc|gnu libc|ldd)\D*?(\d+\.\d+)", machine.run(["ldd", "--version"]).text)
    return found.group(1) if found else None


def _cgroup_folders(machine: Machine, controller: str) -> list[str]:
    """The folders whose limits bind us, ours first, then its parents; cgroup v2 and v1."""
    folders: list[str] = []
    for line in machine.read("/proc/self/cgroup").text.splitlines():
        hierarchy, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if hierarchy == "0" and not names:
            root = "/sys/fs/cgroup"
        elif controller in names.split(","):
            root = f"/sys/fs/cgroup/{controller}"
        else:
            continue
        # Inside a container the path may be the host's and not exist here; its parents end at the root, which does.
        steps = [path.strip("/")] + [str(parent) for parent in PurePosixPath(path.strip("/")).parents]
        folders += [f"{root}/{step}".rstrip("/").removesuffix("/.") for step in steps if ".." not in step]
    return list(dict.fromkeys([*folders, "/sys/fs/cgroup", f"/sys/fs/cgroup/{controller}"]))


def read_memory_limit(machine: Machine) -> tuple[int | None, int | None]:
    """The tightest cgroup memory limit and what is used of it, in bytes, without file cache that can be dropped."""
    tightest: int | None = None
    used: int | None = None
    for folder in _cgroup_folders(machine, "memory"):
        for limit_file, used_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = whole(machine.read(f"{folder}/{limit_file}").text.strip())
            # v1 writes "no limit" as a number near 2**63
            if limit is None or limit > 1 << 60 or (tightest is not None and limit >= tightest):
                continue
            tightest = limit
            used = whole(machine.read(f"{folder}/{used_file}").text.strip())
            dropped = re.search(rf"^{cache} (\d+)", machine.read(f"{folder}/memory.stat").text, re.MULTILINE)
            if used is not None and dropped:
                used = max(0, used - int(dropped.group(1)))
    return tightest, used


def read_cpu_quota(machine: Machine) -> float | None:
    """How many CPUs the tightest cgroup quota allows; None for no quota."""
    quotas: list[float] = []
    for folder in _cgroup_folders(machine, "cpu"):
        words = machine.read(f"{folder}/cpu.max").text.split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
        quota = whole(machine.read(f"{folder}/cpu.cfs_quota_us").text.strip())
        period = whole(machine.read(f"{folder}/cpu.cfs_period_us").text.strip())
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return round(min(quotas), 2) if quotas else None


# Environment variables that name a place. Source: facts/FACTS.md section 13.
_VARIABLES = {
    "colab": ("COLAB_RELEASE_TAG", "COLAB_GPU"),
    "kaggle": ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"),
    "kubernetes": ("KUBERNETES_SERVICE_HOST",),
    "slurm": ("SLURM_JOB_ID",),
    "sagemaker": ("SM_TRAINING_ENV", "SM_HOSTS", "TRAINING_JOB_NAME"),
    "databricks": ("DATABRICKS_RUNTIME_VERSION",),
    "azure-ml": ("AZUREML_RUN_ID",),
    "vertex-ai": ("CLOUD_ML_JOB_ID",),
    "wsl2": ("WSL_DISTRO_NAME",),
}


def read_environments(machine: Machine) -> list[str]:
    """The places recognised, each once, in a fixed order."""
    found = [name for name, variables in _VARIABLES.items() if any(machine.variable(v) for v in variables)]
    version = machine.read("/proc/version").text.lower()
    if "microsoft" in version:
        # WSL 1 has no Linux kernel of its own: its version says Microsoft with a capital and no WSL2.
        old = "wsl2" not in version and "microsoft-standard" not in version
        found = [name for name in found if name != "wsl2"] + ["wsl1" if old else "wsl2"]
    if machine.list("/.dockerenv"):
        found.append("docker")
    if machine.list("/run/.containerenv"):
        found.append("podman")
    groups = machine.read("/proc/1/cgroup").text + machine.read("/proc/self/cgroup").text
    if "kubepods" in groups and "kubernetes" not in found:
        found.append("kubernetes")
    if re.search(r"/(?:docker|containerd|lxc|libpod)[/-]", groups) and not {"docker", "podman"} & set(found):
        found.append("container")
    if machine.list("/kaggle/input") and "kaggle" not in found:
        found.append("kaggle")
    return sorted(dict.fromkeys(found))


def read_disks(machine: Machine) -> tuple[Disk, ...]:
    """Free space where wheels, the model cache, checkpoints and temporary files will go."""
    found = []
    for purpose, path in _places(machine):

        def look(place: str = path) -> dict[str, Any]:
            return _disk(place)

        seen = machine.see(f"disk {purpose}", look) or {}
        found.append(Disk(purpose, path, seen.get("free"), seen.get("total")))
    return tuple(found)


def _places(machine: Machine) -> Sequence[tuple[str, str]]:
    home = Path.home()
    cache = machine.variable("XDG_CACHE_HOME") or str(home / ".cache")
    hub = machine.variable("HF_HUB_CACHE") or str(
        Path(machine.variable("HF_HOME") or str(Path(cache, "huggingface")), "hub")
    )
    temporary = next((value for name in ("TMPDIR", "TEMP", "TMP") if (value := machine.variable(name))), "/tmp")
    pip = machine.variable("PIP_CACHE_DIR") or str(Path(cache, "pip"))
    return (
        ("packages", sys.prefix),
        ("wheel cache", pip),
        ("model cache", hub),
        ("checkpoints", "."),
        ("temporary files", temporary),
    )


def _disk(path: str) -> dict[str, Any]:
    """Free and total bytes of the file system that `path` is, or would be created, on."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    return {"free": usage.free, "total": usage.total}
