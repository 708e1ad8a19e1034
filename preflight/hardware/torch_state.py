"""What torch in the interpreter under test said, step by step, and how that is judged against the cards here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from preflight.findings import Finding, Level, quote
from preflight.hardware.readings import whole
from preflight.machine import Answer, Interpreter, Machine
from preflight.wheels import covers

SOURCE = "preflight/children/ask_torch.py, run in the interpreter under test"


@dataclass(frozen=True)
class TorchState:
    """What is known of the installed torch. None means that the child did not get that far or was not asked.

    `died` is (step, how) when the child ended inside a step: killed by a signal, out of time, or an exit.
    `failed` is (step, type, message) of the first step that raised. `architectures` are the compiled ones (sm_86, …).
    """

    asked: bool = False
    found: bool | None = None
    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    available: bool | None = None
    device_count: int | None = None
    devices: tuple[Mapping[str, Any], ...] = ()
    architectures: tuple[str, ...] | None = None
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: tuple[tuple[str, str, str], ...] = ()
    died: tuple[str, str] | None = None
    warnings: tuple[str, ...] = ()
    said: str = ""
    python: str | None = None
    bits: int | None = None
    distributions: Mapping[str, str] = field(default_factory=dict)
    numpy: bool | None = None
    npu_version: str | None = None
    npu_available: bool | None = None
    mps: bool | None = None
    xpu: bool | None = None
    import_seconds: float | None = None
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The facts that the report keeps."""
        return {
            "found": self.found,
            "version": self.version,
            "cuda": self.cuda,
            "hip": self.hip,
            "cuda_available": self.available,
            "device_count": self.device_count,
            "devices": [dict(device) for device in self.devices],
            "architectures": None if self.architectures is None else list(self.architectures),
            "kernels": {name: dict(kernel) for name, kernel in self.kernels.items()},
            "died_in_step": self.died[0] if self.died else None,
            "died_how": self.died[1] if self.died else None,
            "failed_steps": [{"step": s, "type": t, "message": quote(m)} for s, t, m in self.failed],
            "python": self.python,
            "distributions": dict(self.distributions),
            "mps_available": self.mps,
            "xpu_available": self.xpu,
            "torch_npu": self.npu_version,
            "npu_available": self.npu_available,
            "import_seconds": self.import_seconds,
        }


def ask(machine: Machine, interpreter: Interpreter, timeout_s: float = 60.0) -> TorchState:
    """Ask torch in that interpreter; never imports it here."""
    answer = machine.ask("ask_torch", interpreter.path, timeout_s=timeout_s)
    if answer.trouble == "not-recorded":
        for kind, other in machine.recorded(r"(?i)torch"):
            if not kind.endswith("stderr") and not re.search(r"(?i)pip|wheel|install", kind):
                answer = other
                break
    return read_state(answer, timeout_s)


def read_state(answer: Answer, timeout_s: float = 60.0) -> TorchState:
    """The state out of the child's lines, out of a probe recorded by hand as one JSON object, or out of a traceback."""
    if answer.trouble == "not-recorded":
        return TorchState()
    lines = answer.lines_of_json()
    if any("step" in line or "begin" in line for line in lines):
        return _from_steps(lines, answer, timeout_s)
    if lines:
        return _from_probe(lines[0], answer.errors)
    if answer.trouble in ("absent", "not-executable"):
        return TorchState(asked=True, died=("start", "the interpreter could not be started"), said=answer.errors)
    text = answer.text + "\n" + answer.errors
    error = re.findall(r"^(\w*(?:Error|Exception|Warning)):? ?(.*(?:\n(?!\s|\w+Error).*)?)", text, re.MULTILINE)
    how = how_it_ended(answer, timeout_s)
    failed = [("import torch", kind, " ".join(message.split())) for kind, message in error if "Warning" not in kind]
    missing = [entry for entry in failed if entry[1] == "ModuleNotFoundError" and re.search(r"'torch'", entry[2])]
    return TorchState(
        asked=True,
        found=False if missing else None,
        failed=tuple(failed[-1:]),
        died=("import torch", how) if how and not failed else None,
        said=text.strip(),
    )


def how_it_ended(answer: Answer, timeout_s: float) -> str | None:
    """How a child ended when not with exit code 0: by which signal, code or limit; None when it ended well."""
    if answer.trouble == "timeout":
        return f"gave no sign for {timeout_s:.0f} s and was ended"
    code = answer.exit_code
    if code is None or code == 0:
        return None
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        if code > 0x80000000:  # Windows NTSTATUS
            known = {
                0xC0000005: "access violation",
                0xC000001D: "illegal instruction",
                0xC0000135: "a DLL was not found",
            }
            return f"ended with {known.get(code, 'status')} ({code:#010x})"
        names = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
        return f"was ended by {names.get(number, 'signal')} (signal {number})"
    return f"ended with exit code {code}"


def _from_steps(lines: Sequence[Mapping[str, Any]], answer: Answer, timeout_s: float) -> TorchState:
    done = {str(line["step"]): line for line in lines if "step" in line}
    begun = [str(line["begin"]) for line in lines if "begin" in line]
    open_steps = [name for name in begun if name not in done]
    how = how_it_ended(answer, timeout_s)
    died = None
    if "end" not in done and (open_steps or how):
        died = (open_steps[-1] if open_steps else (begun[-1] if begun else "start"), how or "stopped without a word")
    failed = [
        (name, str(line["error"].get("type")), str(line["error"].get("message")))
        for name, line in done.items()
        if isinstance(line.get("error"), dict)
    ]
    devices = [
        {key: value for key, value in line.items() if key not in ("step", "ok", "seconds", "warnings", "error")}
        for name, line in done.items()
        if re.fullmatch(r"device \d+ properties", name) and line.get("ok")
    ]
    version, start = done.get("version", {}), done.get("start", {})
    npu, other = done.get("import torch_npu"), done.get("other devices", {})
    numpy = done.get("numpy")
    found = done.get("find torch", {})
    imported = done.get("import torch")
    python = str(start.get("python") or "")
    return TorchState(
        asked=True,
        found=found.get("found"),
        version=version.get("version") or found.get("distributions", {}).get("torch"),
        cuda=version.get("cuda"),
        hip=version.get("hip"),
        available=done.get("is_available", {}).get("available"),
        device_count=done.get("is_available", {}).get("device_count"),
        devices=tuple(devices),
        architectures=_architectures(done.get("compiled architectures")),
        kernels={
            str(line.get("device_name", name.removeprefix("kernel on "))): {
                "right": line.get("right"),
                "formats": line.get("formats", {}),
                "error": (line.get("error") or {}).get("message"),
            }
            for name, line in done.items()
            if name.startswith("kernel on ")
        },
        failed=tuple(failed),
        died=died,
        warnings=tuple(str(text) for line in done.values() for text in line.get("warnings", ())),
        said=answer.errors.strip(),
        python=(".".join(python.split(".")[:2]) + ("t" if start.get("free_threaded") else "")) if python else None,
        bits=start.get("bits"),
        distributions=found.get("distributions", {}),
        numpy=bool(numpy.get("ok")) if numpy else None,
        npu_version=npu.get("version") if npu else None,
        npu_available=npu.get("available") if npu else None,
        mps=other.get("mps"),
        xpu=other.get("xpu"),
        import_seconds=imported.get("seconds") if imported else None,
        seconds=answer.seconds,
    )


def _architectures(line: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    return None if line is None or "architectures" not in line else tuple(map(str, line["architectures"]))


def _from_probe(probe: Mapping[str, Any], errors: str) -> TorchState:
    """A probe written by hand: {"torch.__version__": …, "torch.cuda.is_available()": …, "get_arch_list()": …}."""
    plain = {re.sub(r"[^a-z0-9]+", "_", str(key).lower()).strip("_"): value for key, value in probe.items()}

    def find(*patterns: str) -> Any:
        return next((v for p in patterns for k, v in plain.items() if re.search(p, k) and v is not None), None)

    version = find(r"(?:^|torch_+)version$", r"^torch$", r"torch_version$")
    capability, names = find(r"capability"), find(r"device_name")
    devices = []
    if capability is not None or names is not None:
        words = capability if isinstance(capability, list) else re.findall(r"\d+", str(capability or ""))
        if len(words) == 1 and len(words[0]) >= 2:  # sm_120
            words = [words[0][:-1], words[0][-1]]
        devices.append(
            {
                "device": 0,
                "name": str(names) if names is not None else None,
                "capability": f"{words[0]}.{words[1]}" if len(words) >= 2 else None,
                "total_memory": whole(find(r"total_memory")),
            }
        )
    error = find(r"error|exception|traceback")
    kind, _, message = str(error or "").partition(":")
    arches = find(r"arch_list")
    missing = bool(error and re.search(r"No module named '?torch'?$", str(error).strip()))
    available = find(r"cuda_(?:is_)?available", r"^(?:is_)?available$")
    return TorchState(
        asked=True,
        found=not missing if version or error else None,
        version=str(version) if version else None,
        cuda=_text(find(r"version_cuda|cuda_version")),
        hip=_text(find(r"version_hip|hip_version")),
        available=available if isinstance(available, bool) else None,
        device_count=whole(find(r"device_count")),
        devices=tuple(devices),
        architectures=tuple(map(str, arches)) if isinstance(arches, list) else None,
        failed=(("import torch" if not version else "use torch", kind.strip(), (message or kind).strip()),)
        if error
        else (),
        warnings=tuple(line for line in errors.splitlines() if line.strip())[:8],
        said=errors.strip(),
        mps=find(r"mps.*available"),
        xpu=find(r"xpu.*available"),
        npu_version=_text(find(r"torch_npu_version|^torch_npu$")),
        npu_available=find(r"npu_(?:is_)?available"),
        python=_text(find(r"^python(?:_version)?$")),
    )


def _text(value: Any) -> str | None:
    return None if value in (None, "", False) else str(value)


# --- judging. Each reason: code, what it means, what to do. First match wins. Sources: facts/error_signatures.json.


@dataclass(frozen=True)
class _Reason:
    code: str
    pattern: str
    why: str
    fix: tuple[str, ...]


_IMPORT_REASONS = (
    _Reason(
        "torch-glibc-too-old",
        r"GLIBC_\d|version `GLIBC",
        "The wheel was built for a newer C library than this system has (torch 2.7 and newer need glibc 2.28).",
        ("run `sh install_pytorch.sh --dry-run` to see the newest release for this C library",),
    ),
    _Reason(
        "torch-libstdcxx-too-old",
        r"GLIBCXX_\d|CXXABI_\d",
        "A library wants a newer C++ runtime than the one that was loaded first, often an old one on "
        "LD_LIBRARY_PATH or in conda.",
        ("unset LD_LIBRARY_PATH and try again", "in conda: `conda install -c conda-forge libstdcxx-ng`"),
    ),
    _Reason(
        "torch-windows-dll",
        r"WinError (?:126|127|1114)|DLL load failed|Error loading .*\.dll",
        "A DLL that torch needs is missing: most often the Microsoft Visual C++ runtime, or a second OpenMP library.",
        (
            "install the Visual C++ redistributable (vc_redist.x64.exe) and start a new terminal",
            "reinstall torch into a fresh virtual environment",
        ),
    ),
    _Reason(
        "torch-library-conflict",
        r"undefined symbol|symbol lookup error|cannot allocate memory in static TLS",
        "A CUDA library of another version was found first: libraries of the system's CUDA (LD_LIBRARY_PATH) and "
        "the nvidia-* "
        "packages that torch brings do not mix.",
        (
            "`unset LD_LIBRARY_PATH` and import torch again",
            "reinstall torch and its nvidia-* packages into a fresh virtual environment",
        ),
    ),
    _Reason(
        "torch-library-missing",
        r"cannot open shared object file|\.so[.\d]*: .*(?:not found|no such file)|Library not loaded|image not found",
        "A shared library that this torch build was linked with is not installed; pip brings it with the "
        "nvidia-* packages, so the "
        "installation is incomplete or belongs to another build.",
        (
            "reinstall torch with its dependencies into a fresh virtual environment: `sh install_pytorch.sh "
            "--dry-run` prints how",
        ),
    ),
    _Reason(
        "torch-incomplete",
        r"partially initialized module|No module named 'torch\.|cannot import name|has no attribute "
        r"'(?:__version__|version|cuda|Tensor)'",
        "What Python finds under the name torch is not a whole PyTorch: a file or folder named torch in the way, "
        "or a broken installation.",
        (
            "look where it comes from: `python -c 'import torch; print(torch)'`, and rename a file of yours that "
            "is called torch",
        ),
    ),
    _Reason(
        "torch-dependency-missing",
        r"No module named",
        "torch is here but something that it imports is not.",
        ("reinstall torch with its dependencies: `python -m pip install --force-reinstall torch`",),
    ),
)

_CUDA_REASONS = (
    _Reason(
        "torch-driver-too-old",
        r"driver on your system is too old|driver version is insufficient|CUDA driver version is|\berror 35\b",
        "This build of torch is for a newer CUDA major version than the driver knows. A CUDA 12 build needs "
        "driver 525.60.13, "
        "a CUDA 13 build 580.65.06 or newer.",
        (
            "run `sh install_pytorch.sh --dry-run`: it prints the build that fits this driver",
            "or update the NVIDIA driver",
        ),
    ),
    _Reason(
        "torch-no-kernel-image",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "This build of torch holds no code for this card's compute capability.",
        ("run `sh install_pytorch.sh --dry-run`: it prints the build that holds kernels for this card",),
    ),
    _Reason(
        "cuda-system-not-ready",
        r"system not yet initialized|error 802|SystemNotReady",
        "On machines with NVSwitch (HGX, DGX) CUDA starts only after the fabric manager runs, in the driver's "
        "own version.",
        ("start it: `sudo systemctl start nvidia-fabricmanager`, then look at `nvidia-smi -q | grep -A3 Fabric`",),
    ),
    _Reason(
        "cuda-driver-mismatch",
        r"system driver mismatch|error 803|forward compatibility was attempted|error 804|CompatNotSupported",
        "The user-space CUDA library (often a cuda-compat package on LD_LIBRARY_PATH) does not fit the driver's "
        "kernel module.",
        (
            "remove /usr/local/cuda/compat from LD_LIBRARY_PATH",
            "in a container: use an image for a CUDA version the driver knows",
        ),
    ),
    _Reason(
        "cuda-stub-library",
        r"stub library|error 34\b",
        "The toolkit's stub of libcuda was found before the driver's real one.",
        ("remove the folder lib64/stubs from LD_LIBRARY_PATH",),
    ),
    _Reason(
        "cuda-no-device",
        r"no CUDA-capable device|No CUDA GPUs are available|error 100\b",
        "CUDA sees no card: CUDA_VISIBLE_DEVICES hides it, the container was started without it, or the driver "
        "does not run.",
        ("look at CUDA_VISIBLE_DEVICES", "run `python gpu_probe.py` outside the container too"),
    ),
    _Reason(
        "cuda-out-of-memory",
        r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC",
        "Even a small test did not fit: other programs hold the memory of the card.",
        ("see who holds it: `nvidia-smi`", "end those programs or choose another card with CUDA_VISIBLE_DEVICES"),
    ),
    _Reason(
        "cuda-unknown-error",
        r"unknown error|error 999|CUDA initialization|unspecified launch|illegal memory|device-side|misaligned"
        r"|launch failure|ECC",
        "The CUDA driver gave up while starting or running a kernel: a suspended laptop, a module that lost its "
        "state, or a failing card.",
        ("reboot (or `sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm`), then run `python gpu_probe.py` again",),
    ),
)


def arch_of(name: str) -> str | None:
    """ "sm_86" and "compute_120" as "8.6" and "12.0"; None for architecture-specific ones (sm_90a) and gfx names."""
    found = re.fullmatch(r"(?:sm|compute)_(\d{1,2})(\d)", name)
    return f"{found.group(1)}.{found.group(2)}" if found else None


def wheel_covers(architectures: Sequence[str], capability: str) -> bool:
    """Whether a build with these architectures runs on a card of this compute capability."""
    sm = [arch for name in architectures if name.startswith("sm_") and (arch := arch_of(name))]
    ptx = [arch for name in architectures if name.startswith("compute_") and (arch := arch_of(name))]
    return covers(sm, None, capability) or any(covers((), arch, capability) for arch in ptx)


def first_reason(reasons: Sequence[_Reason], text: str) -> _Reason | None:
    """The first known reason whose pattern is in the text."""
    return next((reason for reason in reasons if re.search(reason.pattern, text, re.IGNORECASE)), None)


_CRASH = (
    "A crash in native code at import comes from a damaged or mixed installation: two CUDA or OpenMP libraries, "
    "another "
    "processor architecture, a torch built for other CPU instructions. The program itself did not import torch."
)
_HANG = (
    "An import that never ends waits for something: a network file system, a lock, a driver that does not "
    "answer, or a scan "
    "by an antivirus program. The first import after an installation may take a minute."
)
# Troubles that another build of torch cures.
_BUILD_CURES = ("torch-driver-too-old", "torch-no-kernel-image")


def import_finding(state: TorchState, install: str | None) -> Finding | None:
    """Why torch cannot be imported in this interpreter; None when it can. `install` is the command that fits here."""
    command = (f"`{install}`",) if install else ("run `sh install_pytorch.sh --dry-run` to see which build fits",)
    if state.found is False:
        return Finding(
            "torch-missing",
            Level.WARN,
            "PyTorch is not installed in the interpreter under test.",
            "Without it nothing can be trained; the card itself was judged without it.",
            command,
            SOURCE,
        )
    if state.python is None and re.search(r"ask_torch\.py[\s\S]*SyntaxError", state.said):
        return Finding(
            "python-too-old",
            Level.FAIL,
            "The interpreter under test is too old to be asked: it cannot read Python 3.7 syntax.",
            "PyTorch's releases since 1.13 need Python 3.7 or newer, the current one 3.11.",
            ("make an environment with a newer Python and name it with `--python PATH`",),
            SOURCE,
        )
    early = ("start", "find torch", "import torch", "version")
    if state.died and state.died[0] in early:
        step, how = state.died
        hang = "gave no sign" in how
        detail = crash_detail(state.said)
        return Finding(
            "torch-hangs" if hang else "torch-crashed",
            Level.FAIL,
            f"PyTorch {'hangs' if hang else 'crashes'} in the step `{step}`: the interpreter {how}.",
            (detail + " " if detail else "") + (_HANG if hang else _CRASH),
            (
                "reinstall torch into a fresh virtual environment" + (f": `{install}`" if install else ""),
                "see where it stops: `python -X faulthandler -c 'import torch'`",
            ),
            SOURCE,
        )
    failure = next(((s, t, m) for s, t, m in state.failed if s in early), None)
    if failure is None:
        return None
    step, kind, message = failure
    text = f"{kind}: {message}"
    reason = first_reason(_IMPORT_REASONS, text)
    return Finding(
        reason.code if reason else "torch-import-failed",
        Level.FAIL,
        f"PyTorch cannot be imported (step `{step}`): {quote(text)}",
        reason.why if reason else "The import raised an error that is not in the list of known ones.",
        reason.fix if reason else ("reinstall torch into a fresh virtual environment", *command)[:3],
        SOURCE,
    )


def crash_detail(said: str) -> str:
    """The innermost line of faulthandler's trace, which says which module was loading."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in (\S+)', said, re.MULTILINE)
    inner = next(((f, n, w) for f, n, w in frames if "importlib" not in f and "ask_torch" not in f), None)
    if inner is None:
        return ""
    return f"It stopped in {quote(inner[2])} ({quote('/'.join(inner[0].split('/')[-3:]))}, line {inner[1]})."


def numpy_finding(state: TorchState) -> Finding | None:
    """A torch that works without numpy; None when numpy is fine or was not reached."""
    failure = next(((t, m) for s, t, m in state.failed if s == "numpy"), None)
    text = " ".join([*(failure or ()), *state.warnings, state.said])
    compiled = "compiled using NumPy 1" in text or "_ARRAY_API not found" in text
    if failure is None and not compiled:
        return None
    have = state.distributions.get("numpy")
    return Finding(
        "numpy-mismatch" if compiled or have else "numpy-missing",
        Level.WARN,
        f"torch cannot hand tensors to numpy{f' {quote(have)}' if have else ''}: "
        f"{quote(' '.join(failure) if failure else text, 160)}",
        "This torch was compiled for NumPy 1 and NumPy 2 is installed."
        if compiled
        else "transformers, datasets and most training scripts need it.",
        ("`python -m pip install 'numpy<2'`" if compiled else "`python -m pip install numpy`",),
        SOURCE,
    )


def cuda_finding(state: TorchState, gpu_here: bool | None, visible: str | None, install: str | None) -> Finding | None:
    """Whether torch's CUDA (or ROCm) side can use the card that is here; None when torch was not reached.

    `gpu_here` says whether a tool saw a usable NVIDIA or AMD card, `visible` is CUDA_VISIBLE_DEVICES.
    """
    if state.version is None or any(s in ("import torch", "version") for s, _, _ in state.failed):
        return None
    again = (f"install the build that fits: `{install}`",) if install else ()
    text = " ".join([*state.warnings, *(f"{t}: {m}" for _, t, m in state.failed), state.said])
    if state.died and state.died[0] not in ("start", "find torch", "import torch", "version"):
        step, how = state.died
        return Finding(
            "torch-hangs" if "gave no sign" in how else "torch-crashed",
            Level.FAIL,
            f"PyTorch {quote(state.version)} imports, then fails in the step `{step}`: the interpreter {how}.",
            (
                crash_detail(state.said)
                + " The step touches the driver or the card, so it is one of these or the CUDA libraries."
            ).strip(),
            ("reboot and run `python gpu_probe.py` again", *again, "look for Xid lines: `sudo dmesg | grep -i xid`")[
                :3
            ],
            SOURCE,
        )
    missing = _missing_architecture(state)
    if missing:
        return missing if not install else _with_install(missing, install)
    if state.available is False and (state.cuda or state.hip):
        reason = first_reason(_CUDA_REASONS, text)
        hidden = visible is not None and visible.strip() in ("", "-1")
        if hidden:
            return Finding(
                "cuda-hidden",
                Level.FAIL if gpu_here else Level.WARN,
                f"torch sees no card because CUDA_VISIBLE_DEVICES is set to {visible!r}.",
                "That value hides every card from CUDA programs started here.",
                ("`unset CUDA_VISIBLE_DEVICES`, or set it to the number of the card",),
                SOURCE,
            )
        if not gpu_here and (reason is None or reason.code in ("cuda-no-device", "cuda-unknown-error")):
            return _works_on_cpu(state)
        return Finding(
            reason.code if reason else "torch-no-cuda",
            Level.FAIL,
            f"torch {quote(state.version)} (CUDA {quote(state.cuda or state.hip)}) cannot use the card: "
            f"{quote(_last_words(text)) or 'is_available() is False and gives no reason'}",
            reason.why
            if reason
            else "The card is there, this build of torch does not reach it, and it does not say why.",
            _fixes(reason, again),
            SOURCE,
        )
    if state.available is False and gpu_here:
        return Finding(
            "torch-cpu-build",
            Level.FAIL,
            f"torch {quote(state.version)} is a CPU build, although a GPU is here.",
            "Training would run on the CPU without a warning. On Windows plain `pip install torch` always brings "
            "this build.",
            again or ("run `sh install_pytorch.sh --dry-run` to see which build fits",),
            SOURCE,
        )
    for device, kernel in state.kernels.items():
        bad = _kernel_finding(state, device, kernel, again)
        if bad:
            return bad
    if state.available:
        names = ", ".join(dict.fromkeys(quote(d.get("name")) for d in state.devices if d.get("name")))
        checked = ", ".join(sorted({d for d in state.kernels if d != "cpu"}))
        return Finding(
            "torch-works",
            Level.OK,
            f"torch {quote(state.version)} (CUDA {quote(state.cuda or state.hip or 'unknown')}) "
            + (
                f"computes right on {checked}{f' ({names})' if names else ''}."
                if checked
                else f"sees {names or 'a card'}."
            ),
            "" if checked else "No kernel was run on it in this recording, so that is not proof that it works.",
            (),
            SOURCE,
        )
    return _works_on_cpu(state)


def _with_install(finding: Finding, install: str) -> Finding:
    return Finding(
        finding.code, finding.level, finding.what, finding.why, (f"`{install}`", *finding.fix)[:3], finding.source
    )


def _works_on_cpu(state: TorchState) -> Finding | None:
    others = [name for name in state.kernels if name != "cpu"]
    if not state.kernels and (state.mps or state.xpu):
        which = "Apple's GPU (MPS)" if state.mps else "Intel's GPU (XPU)"
        return Finding(
            "torch-works",
            Level.OK,
            f"torch {quote(state.version)} sees {which}.",
            "No kernel was run on it in this recording, so that is not proof that it works.",
            (),
            SOURCE,
        )
    kernel = state.kernels.get("cpu") or (state.kernels[others[0]] if others else None)
    if kernel is None:
        return None
    if kernel.get("right") is not True:
        return _kernel_finding(state, others[0] if others else "cpu", kernel, ())
    where = ", ".join(others) or "the CPU"
    return Finding("torch-works", Level.OK, f"torch {quote(state.version)} computes right on {where}.", "", (), SOURCE)


def _missing_architecture(state: TorchState) -> Finding | None:
    arches = state.architectures or ()
    if not any(name.startswith("sm_") for name in arches):
        return None
    for device in state.devices:
        capability = device.get("capability")
        if capability and not wheel_covers(arches, str(capability)):
            ptx = [name for name in arches if name.startswith("compute_")]
            return Finding(
                "torch-arch-missing",
                Level.FAIL,
                f"torch {quote(state.version)} has no kernels for {quote(device.get('name') or 'this card')} "
                f"(compute capability {capability}): it was compiled for {', '.join(map(quote, arches))}.",
                "The driver works and torch.cuda.is_available() is True, but the first kernel fails with 'no "
                "kernel image'. "
                + (
                    "Its PTX is too new for this card."
                    if ptx
                    else "There is no PTX that the driver could compile for it either."
                ),
                (
                    _arch_fix(str(capability)),
                    "then rebuild or upgrade what holds CUDA code of its own (flash-attn, bitsandbytes, xformers)",
                ),
                "facts/torch_wheels.json support_rule",
            )
    return None


def _arch_fix(capability: str) -> str:
    major = int(capability.split(".")[0])
    if major >= 10:
        return "install a torch wheel built for CUDA 12.8 or newer (torch 2.7 or newer)"
    if major < 7:
        return "install torch 2.14 or older from the cu126 index: the last build with kernels for Maxwell and Pascal"
    if capability == "7.0":
        return "install torch 2.14 or older from the cu126 index: the last build with kernels for Volta"
    return "install the build that `sh install_pytorch.sh --dry-run` prints"


def _kernel_finding(
    state: TorchState, device: str, kernel: Mapping[str, Any], again: tuple[str, ...]
) -> Finding | None:
    if kernel.get("error"):
        text = str(kernel["error"])
        reason = first_reason(_CUDA_REASONS, text)
        return Finding(
            reason.code if reason else "torch-kernel-failed",
            Level.FAIL,
            f"torch {quote(state.version)} sees {quote(device)} but the first kernel on it fails: "
            f"{quote(_last_words(text))}",
            reason.why if reason else "is_available() being True does not mean that kernels run.",
            _fixes(reason, again),
            SOURCE,
        )
    wrong = {name: said for name, said in kernel.get("formats", {}).items() if "wrong" in str(said)}
    if kernel.get("right") is False or wrong:
        said = "; ".join(f"{name}: {quote(text)}" for name, text in wrong.items())
        return Finding(
            "torch-wrong-result",
            Level.FAIL,
            f"A small matrix product on {quote(device)} gives wrong numbers ({said}).",
            "The product was of small whole numbers, whose result is exact in every format: this is a fault of "
            "the card, its "
            "memory, its clocks or the build.",
            (
                "remove overclocking and run `python gpu_probe.py --stress-test`",
                "do not train on this device until it computes right",
            ),
            SOURCE,
        )
    return None


def _fixes(reason: _Reason | None, again: tuple[str, ...]) -> tuple[str, ...]:
    if reason is None:
        return (*again, "reboot and run `python gpu_probe.py` again")[:3]
    return ((*again, *reason.fix) if reason.code in _BUILD_CURES else reason.fix)[:3]


def _last_words(text: str) -> str:
    """The part of a warning or error that names the trouble."""
    for line in re.split(r"\n|(?<=\.) ", text):
        if first_reason(_CUDA_REASONS, line):
            return line.strip()[:220]
    return text.strip().splitlines()[-1][:220] if text.strip() else ""
