"""Load llama.cpp's Python binding and a GGUF file, list what is compiled in, generate one token. Runs alone in a child.

argv: RESULTS SPEC. SPEC is a JSON object: `model` (path of a GGUF file), `gpu_layers` (layers to offload, -1 all).
Events on RESULTS: {"event": "step", "step", "ok", "seconds", "facts" | "error"}, one line each; a crash loses the rest.
Python 3.8 syntax; only the standard library is imported before the first step.
"""

import ctypes
import faulthandler
import json
import os
import re
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
RESULTS, SPEC = sys.argv[1], json.loads(sys.argv[2])
KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}  # enum ggml_backend_dev_type


def emit(**event):
    with open(RESULTS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(event, default=str) + "\n")


def step(name, action):
    emit(event="start", step=name)
    began = time.monotonic()
    try:
        value = action()
    except Exception as error:
        chain = []
        while error is not None and len(chain) < 8:
            message = re.sub(r"[^\s'\"()]*[\\/](?:site|dist)-packages[\\/]", "", str(error))
            chain.append({"type": type(error).__name__, "message": message[:2000]})
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        emit(event="step", step=name, ok=False, seconds=round(time.monotonic() - began, 3), error=chain)
        sys.stdout.flush()
        os._exit(0)
    emit(event="step", step=name, ok=True, seconds=round(time.monotonic() - began, 3), facts=value or {})
    return value


def import_binding():
    import llama_cpp

    return {"version": llama_cpp.__version__, "folder": os.path.basename(os.path.dirname(llama_cpp.__file__))}


def what_is_compiled_in():
    import llama_cpp

    info = llama_cpp.llama_print_system_info()
    info = info.decode("utf-8", "replace") if isinstance(info, bytes) else str(info)
    return {
        "gpu_offload_compiled_in": bool(llama_cpp.llama_supports_gpu_offload()),
        "system_info": " ".join(info.split()),
        "backends_in_system_info": sorted(set(re.findall(r"(?:^|\| )\s*([A-Za-z][\w ]*?) : ", info))),
    }


def libraries():
    """The two ggml libraries of the binding, opened with ctypes: the binding itself has no call for backends."""
    import llama_cpp

    folder = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
    names = os.listdir(folder)

    def opened(stem):
        for name in sorted(names):
            if re.match(r"(?:lib)?%s\.(?:so|dylib|dll)" % re.escape(stem), name):
                return ctypes.CDLL(os.path.join(folder, name))
        raise OSError("no library %s in %s: %s" % (stem, os.path.basename(folder), sorted(names)[:20]))

    return opened("ggml"), opened("ggml-base")


def devices():
    ggml, base = libraries()
    size, handle, text = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("ggml_backend_reg_count", size, []),
        ("ggml_backend_reg_get", handle, [size]),
        ("ggml_backend_dev_count", size, []),
        ("ggml_backend_dev_get", handle, [size]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    for name, result in (
        ("ggml_backend_reg_name", text),
        ("ggml_backend_dev_name", text),
        ("ggml_backend_dev_description", text),
        ("ggml_backend_dev_type", ctypes.c_int),
    ):
        function = getattr(base, name)
        function.restype, function.argtypes = result, [handle]
    base.ggml_backend_dev_memory.restype = None
    base.ggml_backend_dev_memory.argtypes = [handle, ctypes.POINTER(size), ctypes.POINTER(size)]
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        free, total = size(), size()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        found.append(
            {
                "name": base.ggml_backend_dev_name(device).decode("utf-8", "replace"),
                "description": base.ggml_backend_dev_description(device).decode("utf-8", "replace"),
                "kind": KINDS.get(kind, str(kind)),
                "free_bytes": free.value,
                "total_bytes": total.value,
            }
        )
    names = [
        base.ggml_backend_reg_name(ggml.ggml_backend_reg_get(index)).decode("utf-8", "replace")
        for index in range(ggml.ggml_backend_reg_count())
    ]
    return {"backends": names, "devices": found}


held = {}


def load():
    import llama_cpp

    held["model"] = llama_cpp.Llama(
        model_path=SPEC["model"],
        n_ctx=64,
        n_threads=min(2, os.cpu_count() or 1),
        n_gpu_layers=int(SPEC.get("gpu_layers", -1)),
        verbose=True,  # the log on stderr says how many layers were really offloaded
    )
    return {"architecture": held["model"].metadata.get("general.architecture")}


def generate():
    import llama_cpp

    model = held["model"]
    if model.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        model.eval([1, 2, 3])
        token = int(model.sample(temp=0.0))
    else:
        token = next(iter(model.generate(model.tokenize(b"hello") or [1], temp=0.0)))
    return {
        "token": int(token),
        "vocabulary": llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model.model)),
    }


def main():
    faulthandler.enable()
    step("import llama_cpp", import_binding)
    step("read what is compiled in", what_is_compiled_in)
    step("list backends and devices", devices)
    if SPEC.get("model"):
        step("load the GGUF file", load)
        step("generate a token", generate)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
