"""What the interpreter under test and its machine are: markers, wheel tags, accelerator, driver, kind of place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from preflight.console import UsageError
from preflight.findings import quote
from preflight.machine import Interpreter, Machine
from preflight.software.requirements import packaging

# Run in the interpreter under test: what markers and wheel tags are compared with.
_ABOUT = """
import json, os, platform, sys, sysconfig
v = sys.implementation.version
print(json.dumps({
 "markers": {
  "implementation_name": sys.implementation.name,
  "implementation_version": "%d.%d.%d" % v[:3],
  "os_name": os.name, "platform_machine": platform.machine(), "platform_release": platform.release(),
  "platform_system": platform.system(), "platform_version": platform.version(),
  "python_full_version": platform.python_version(),
  "platform_python_implementation": platform.python_implementation(),
  "python_version": ".".join(platform.python_version_tuple()[:2]), "sys_platform": sys.platform},
 "libc": list(platform.libc_ver()), "mac": platform.mac_ver()[0],
 "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")), "bits": 64 if sys.maxsize > 2**32 else 32}))
"""


def read_python(machine: Machine, chosen: Interpreter) -> dict[str, Any]:
    """What the interpreter is: markers, libc, bits. Raises UsageError when it cannot run at all."""
    # Starting an interpreter can write bytecode into its environment (virtualenv's start-up hook): it is the user's.
    answer = machine.run([chosen.path, "-c", _ABOUT], timeout_s=30, env={"PYTHONDONTWRITEBYTECODE": "1"})
    found = answer.lines_of_json()
    if not found:
        if machine.replayed:
            return {}
        raise UsageError(f"--python {chosen.path}: does not run ({quote(answer.errors or answer.trouble, 200)})")
    return found[0]


def accepted_tags(about: Mapping[str, Any]) -> frozenset[str] | None:
    """The wheel tags that the interpreter accepts, or None when they cannot be told from here."""
    markers = about.get("markers") or {}
    if markers.get("implementation_name") != "cpython" or markers.get("sys_platform") != sys.platform:
        return None
    tags = packaging("tags")
    version = tuple(int(part) for part in str(markers["python_version"]).split("."))
    flavour = f"cp{version[0]}{version[1]}{'t' if about.get('free_threaded') else ''}"
    platforms = list(tags.platform_tags())
    made = {str(tag) for tag in tags.cpython_tags(version, abis=[flavour], platforms=platforms)}
    made |= {str(tag) for tag in tags.compatible_tags(version, interpreter=flavour.rstrip("t"), platforms=platforms)}
    return frozenset(made)


def python_tag(about: Mapping[str, Any]) -> str:
    """The interpreter's name in wheel tags ("cp311"), for the reader."""
    return "cp" + str((about.get("markers") or {}).get("python_version", "")).replace(".", "")


def read_vendor(machine: Machine) -> str | None:
    """Whose accelerator seems to be here (device files, nvidia-smi -L): nvidia, amd, ascend, apple; None for none."""
    if machine.list("/dev/nvidia[0-9]*"):
        return "nvidia"
    if machine.list("/dev/kfd"):
        return "amd"
    if machine.list("/dev/davinci[0-9]*"):
        return "ascend"
    answer = machine.run(["nvidia-smi", "-L"], timeout_s=15)
    if answer.ok and "GPU 0" in answer.text:
        return "nvidia"
    return "apple" if machine.see("apple silicon", _apple_silicon) else None


def _apple_silicon() -> bool:
    import platform

    return platform.system() == "Darwin" and platform.machine() == "arm64"


def read_driver(machine: Machine) -> str | None:
    """The NVIDIA driver's version, or None."""
    answer = machine.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], timeout_s=15)
    first = answer.text.splitlines()[0].strip() if answer.ok and answer.text.strip() else ""
    return first if first[:1].isdigit() else None


def read_place(machine: Machine) -> str | None:
    """colab, kaggle or container, where a stack comes preinstalled; None elsewhere."""
    if machine.variable("COLAB_RELEASE_TAG") or machine.variable("COLAB_GPU"):
        return "colab"
    if machine.variable("KAGGLE_KERNEL_RUN_TYPE") or machine.variable("KAGGLE_URL_BASE"):
        return "kaggle"
    if machine.list("/.dockerenv") or machine.list("/run/.containerenv"):
        return "container"
    return None
