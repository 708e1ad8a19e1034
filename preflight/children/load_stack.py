"""Load a fine-tuning stack stage by stage and take one tiny training step. Runs alone, in the interpreter under test.

argv: RESULTS SPEC. RESULTS gets one JSON line per event; SPEC is a JSON object:
`stages` (names, in order), `limits` {stage: seconds}, `device` ("auto" or "cpu"), `config` (path of a config.json or
null), `imports` [[distribution, module], ...], `check` (path of a script or null), `trust_remote_code`, `work` (a
folder that may be written to). A stage whose package is not installed is `absent`.
Events: {"event": "start"|"step"|"stage", "stage", "step", "ok", "seconds", "peak_rss_bytes", "warnings", "error", ...}.
Python 3.8 syntax; only the standard library is imported before the first stage.
"""

import faulthandler
import json
import os
import re
import sys
import time
import traceback
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]

RESULTS, SPEC = sys.argv[1], json.loads(sys.argv[2])
sys.argv = sys.argv[:1]  # a module that parses the command line at import must not see ours
MARK = "\x1e"  # starts a line on stderr that says which step the following lines belong to
seen_warnings = []


def emit(**event):
    with open(RESULTS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(event, default=str) + "\n")
        stream.flush()


def note_warning(message, category, filename, lineno, file=None, line=None):
    if len(seen_warnings) < 40:
        seen_warnings.append({"category": category.__name__, "message": str(message)[:400], "file": short(filename)})


def short(filename):
    """The path below site-packages: the sandbox's own folder says nothing to a reader."""
    name = str(filename).replace("\\", "/")
    for part in ("/site-packages/", "/dist-packages/"):
        if part in name:
            return name.split(part)[-1]
    return name


def chain_of(error):
    """The exception and those it came from, outermost first; `link` says how the next one hangs on this one."""
    chain, met = [], set()
    while error is not None and id(error) not in met and len(chain) < 12:
        met.add(id(error))
        try:
            message = str(error)
        except Exception as problem:
            message = "(its text cannot be made: %r)" % (problem,)
        message = re.sub(r"[^\s'\"()]*[\\/](?:site|dist)-packages[\\/]", "", message)
        frames = []
        for frame in traceback.extract_tb(error.__traceback__):
            if "importlib" not in frame.filename and not frame.filename.endswith("load_stack.py"):
                frames.append([short(frame.filename), frame.lineno, frame.name, (frame.line or "")[:200]])
        following, link = error.__cause__, "cause"
        if following is None and not error.__suppress_context__:
            following, link = error.__context__, "context"
        item = {
            "type": type(error).__name__,
            "message": message[:3000],
            "frames": frames[-6:],
            "frames_total": len(frames),
            "link": link if following is not None else None,
        }
        if isinstance(error, ImportError):
            item["name"], item["path"] = error.name, short(error.path or "")
        chain.append(item)
        error = following
    return chain


def peak_rss_bytes():
    try:
        with open("/proc/self/status") as stream:
            for line in stream:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    except ImportError:
        return None


def reset_peak_rss():
    """Start the kernel's high-water mark anew (Linux), so that each stage has its own peak."""
    try:
        with open("/proc/self/clear_refs", "w") as stream:
            stream.write("5")
    except OSError:
        pass


class StepFailed(Exception):
    pass


class Stage:
    """One stage: its steps are timed, and the first that fails ends it."""

    def __init__(self, name):
        self.name, self.began = name, time.monotonic()
        reset_peak_rss()
        limit_s = SPEC.get("limits", {}).get(name)
        if limit_s:  # a hang is ended from within, with the stack of every thread on stderr
            faulthandler.dump_traceback_later(limit_s, exit=True)

    def step(self, name, action, needed=True):
        """What `action` returns. A failure is reported; it ends the stage unless the step is not `needed`."""
        emit(event="start", stage=self.name, step=name)
        sys.stderr.write("\n%s%s/%s\n" % (MARK, self.name, name))
        sys.stderr.flush()
        del seen_warnings[:]
        began = time.monotonic()
        try:
            value = action()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._done(name, began, ok=False, error=chain_of(error), needed=needed)
            if needed:
                raise StepFailed(name) from None
            return None
        facts = value if isinstance(value, dict) else {}
        self._done(name, began, ok=True, facts=facts)
        return value

    def _done(self, name, began, **more):
        emit(
            event="step",
            stage=self.name,
            step=name,
            seconds=round(time.monotonic() - began, 3),
            warnings=list(seen_warnings),
            **more,
        )

    def end(self, ok):
        faulthandler.cancel_dump_traceback_later()
        emit(
            event="stage",
            stage=self.name,
            ok=ok,
            seconds=round(time.monotonic() - self.began, 3),
            peak_rss_bytes=peak_rss_bytes(),
        )


# --- what is installed ---------------------------------------------------------------------------------------------


def installed_packages():
    try:
        from importlib import metadata
    except ImportError:
        return []
    found = []
    for dist in metadata.distributions():
        name = dist.metadata["Name"]
        if not name:
            continue
        wheel, record = dist.read_text("WHEEL") or "", dist.read_text("RECORD") or ""
        top = set((dist.read_text("top_level.txt") or "").split())
        size, native, names = 0, 0, set()
        for line in record.splitlines():
            path, _, count = line.rpartition(",")
            if count.isdigit():
                size += int(count)
            path = path.rpartition(",")[0].strip('"')
            if path.endswith((".so", ".pyd", ".dylib")):
                native += 1
            first = path.split("/")[0]
            inside = not first.endswith((".dist-info", ".data", ".pth", "__pycache__", ".."))
            if not top and first and inside and ("/" in path or path.endswith((".py", ".so", ".pyd"))):
                module = first.split(".")[0]
                if module.isidentifier():
                    names.add(module)
        root = str(getattr(dist, "_path", ""))
        found.append(
            {
                "name": name,
                "version": dist.version,
                "requires": list(dist.requires or [])[:200],
                "requires_python": dist.metadata["Requires-Python"],
                "top_level": sorted(top or names)[:40],
                "tags": [line[5:].strip() for line in wheel.splitlines() if line.startswith("Tag: ")],
                "size_bytes": size or None,
                "native_files": native,
                "installer": (dist.read_text("INSTALLER") or "").strip() or None,
                "editable": '"editable": true' in (dist.read_text("direct_url.json") or ""),
                "where": os.path.dirname(root),
            }
        )
    return found


def about_python():
    import platform
    import sysconfig

    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "platform": sysconfig.get_platform(),
        "system": platform.system(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "soabi": sysconfig.get_config_var("SOABI"),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "bits": 64 if sys.maxsize > 2**32 else 32,
        "conda": os.path.isdir(os.path.join(sys.prefix, "conda-meta")),
        "conda_packages": conda_packages(),
    }


def conda_packages():
    folder = os.path.join(sys.prefix, "conda-meta")
    try:
        return sorted(name[: -len(".json")] for name in os.listdir(folder) if name.endswith(".json"))[:2000]
    except OSError:
        return []


# --- stages --------------------------------------------------------------------------------------------------------

shared = {}


def stage_torch(stage):
    def numpy_import():
        import numpy

        return {"version": numpy.__version__}

    def torch_import():
        import torch

        return {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": getattr(torch.version, "hip", None),
            "cxx11_abi": bool(torch._C._GLIBCXX_USE_CXX11_ABI) if hasattr(torch._C, "_GLIBCXX_USE_CXX11_ABI") else None,
        }

    def device():
        import torch

        kind, name = "cpu", None
        if SPEC.get("device", "auto") != "cpu":
            if torch.cuda.is_available():
                kind, name = "cuda", torch.cuda.get_device_name(0)
            elif getattr(torch, "xpu", None) is not None and torch.xpu.is_available():
                kind = "xpu"
            elif getattr(getattr(torch, "backends", None), "mps", None) and torch.backends.mps.is_available():
                kind = "mps"
        shared["device"] = kind
        return {"device": kind, "device_name": name}

    def kernel():
        import torch

        on = shared["device"]
        left = torch.ones(64, 64, device=on)
        value = float((left @ left).sum().item())
        if value != 64.0 * 64 * 64:
            raise RuntimeError("a matrix product of ones gave %r, not %r" % (value, 64.0**3))
        return {"device": on, "dtype": "float32"}

    def bridge():
        import numpy
        import torch

        array = torch.arange(4).numpy()
        back = torch.from_numpy(numpy.arange(4))
        if int(array.sum()) != 6 or int(back.sum()) != 6:
            raise RuntimeError("numbers changed between torch and numpy")

    numpy_there = importable("numpy")
    if numpy_there:
        stage.step("import numpy", numpy_import)
    stage.step("import torch", torch_import)
    stage.step("find a device", device)
    stage.step("run a kernel", kernel)
    if numpy_there:
        stage.step("exchange an array with numpy", bridge)


def importable(name):
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def stage_transformers(stage):
    def transformers_import():
        import transformers

        return {"version": transformers.__version__}

    def model_class():
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401

    stage.step("import transformers", transformers_import)
    stage.step("from transformers import AutoModelForCausalLM", model_class)
    if not importable("torch"):
        return
    stage.step("build a two-layer model", build_model)
    stage.step("forward", forward)


def vision_class():
    import transformers

    name = next(
        (n for n in ("LlavaForConditionalGeneration", "CLIPVisionModel") if n in getattr(transformers, "__all__", ())),
        "CLIPVisionModel",
    )
    getattr(transformers, name)
    return {"class": name}


def build_model():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made_from, problem, config = "the example's shape", None, None
    if SPEC.get("config"):
        try:
            folder = SPEC["config"]
            config = AutoConfig.from_pretrained(folder, trust_remote_code=bool(SPEC.get("trust_remote_code")))
            changed = shrink(config)
            model = from_config(AutoModelForCausalLM, config)
            made_from = "the given config.json, %d settings made smaller" % len(changed)
        except Exception as error:
            problem, config = chain_of(error), None
            if SPEC.get("config_must_load") or unknown_architecture(error):
                raise
    if config is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=512,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config)
    model.to(torch.float32)
    shared["model"], shared["config"] = model, config
    return {
        "class": type(model).__name__,
        "made_from": made_from,
        "parameters": sum(p.numel() for p in model.parameters()),
        "could_not_use_config": problem,
    }


def unknown_architecture(error):
    """The stack itself cannot know this model: a finding about the stack, not about our shrinking."""
    text = "%s: %s" % (type(error).__name__, error)
    return "does not recognize this architecture" in text or text.startswith("KeyError")


def from_config(auto, config):
    trust = bool(SPEC.get("trust_remote_code"))
    return auto.from_config(config, trust_remote_code=trust)


PER_LAYER = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
TOKEN_IDS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "image_token_id",
    "video_token_id",
    "boi_token_index",
    "eoi_token_index",
)


def shrink(config, layers=2, width=64, vocabulary=512):
    """Make a config small enough to train in 0.1 s, keeping one layer of each kind. Returns the changed names."""
    changed = set()

    def put(target, name, value):
        if getattr(target, name, None) is not None and getattr(target, name) != value:
            setattr(target, name, value)
            changed.add(name)

    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    depth = next((getattr(text, n) for n in PER_LAYER if isinstance(getattr(text, n, None), int)), None)
    # `layer_types` may be a read-only property (jamba, mamba): only one that is stored may be cut.
    kinds = list(getattr(text, "layer_types", None) or ()) if "layer_types" in vars(text) else []
    keep = []
    for kind in kinds:
        if kind not in keep:
            keep.append(kind)
    if kinds:
        keep = (keep + kinds)[: max(layers, len(keep))] if len(keep) > 1 else kinds[:layers]
        layers = len(keep)
    for name in PER_LAYER:
        if isinstance(getattr(text, name, None), int):
            put(text, name, layers)
    if kinds:
        text.layer_types = keep
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and depth and len(value) == depth and name != "layer_types":
            setattr(text, name, value[:layers])
            changed.add(name)
    if getattr(text, "first_k_dense_replace", 0):
        put(text, "first_k_dense_replace", 1)
    if getattr(text, "max_window_layers", None):
        put(text, "max_window_layers", min(text.max_window_layers, layers))
    if getattr(text, "attn_layer_period", None):
        put(text, "attn_layer_period", 2)
        put(text, "attn_layer_offset", 1)
    if getattr(text, "expert_layer_period", None):
        put(text, "expert_layer_period", 2)
        put(text, "expert_layer_offset", 1)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
        changed.add("quantization_config")
    heads = 4
    old_heads = getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None)
    old_kv = getattr(text, "num_key_value_heads", None)
    for name in ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"):
        put(text, name, width)
    for name in (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
        "moe_intermediate_size",
        "d_ff",
        "shared_expert_intermediate_size",
    ):
        if isinstance(getattr(text, name, None), int):
            put(text, name, 2 * width)
    if getattr(text, "expand", None) and getattr(text, "state_size", None):
        put(text, "intermediate_size", int(text.expand * width))
    for name in ("num_attention_heads", "n_head"):
        if isinstance(getattr(text, name, None), int):
            put(text, name, heads)
    if isinstance(old_kv, int) and isinstance(old_heads, int) and old_kv:
        put(text, "num_key_value_heads", max(1, heads // max(1, old_heads // old_kv)))
    if "head_dim" in vars(text) and getattr(text, "head_dim", None) and getattr(text, "state_size", None) is None:
        put(text, "head_dim", width // heads)
    for name, value in (
        ("num_experts", 4),
        ("num_local_experts", 4),
        ("n_routed_experts", 8),
        ("n_group", 2),
        ("topk_group", 1),
        ("q_lora_rank", 16),
        ("kv_lora_rank", 16),
        ("qk_nope_head_dim", 16),
        ("qk_rope_head_dim", 8),
        ("v_head_dim", 16),
        ("kv_channels", width // heads),
        ("rotary_dim", 8),
        ("mamba_dt_rank", 8),
        ("time_step_rank", 8),
        ("query_pre_attn_scalar", width // heads),
        ("d_kv", width // heads),
    ):
        if getattr(text, name, None) and not isinstance(getattr(text, name), str):
            put(text, name, value)
    if getattr(text, "num_experts_per_tok", None):
        put(text, "num_experts_per_tok", min(text.num_experts_per_tok, 2))
    if getattr(text, "qk_rope_head_dim", None) and "head_dim" in vars(text):
        put(text, "head_dim", text.qk_rope_head_dim)
    if getattr(text, "num_heads", None) and getattr(text, "state_size", None):
        put(text, "head_dim", 16)
        put(text, "num_heads", int(text.expand * width) // 16)
    for holder in (getattr(text, "rope_parameters", None), getattr(text, "rope_scaling", None)):
        if isinstance(holder, dict):
            for inner in [holder] + [value for value in holder.values() if isinstance(value, dict)]:
                for name in ("long_factor", "short_factor"):
                    if isinstance(inner.get(name), list):
                        inner[name] = inner[name][: width // heads // 2]
    vision = getattr(config, "vision_config", None)
    if vision is not None and not isinstance(vision, dict):
        for name, value in (
            ("hidden_size", 64),
            ("intermediate_size", 128),
            ("num_hidden_layers", 2),
            ("num_attention_heads", 4),
        ):
            put(vision, name, value)
    if isinstance(getattr(text, "vocab_size", None), int) and text.vocab_size > vocabulary:
        for name in ("vocab_size", "padded_vocab_size"):
            put(text, name, vocabulary)
        for target in (config, text):
            for name in TOKEN_IDS:
                value = getattr(target, name, None)
                if isinstance(value, int) and value >= vocabulary:
                    setattr(target, name, 0 if name == "pad_token_id" else vocabulary - 1)
                elif isinstance(value, list):
                    setattr(target, name, [min(item, vocabulary - 1) for item in value])
            if isinstance(getattr(target, "image_token_index", None), int):
                put(target, "image_token_index", min(target.image_token_index, vocabulary - 2))
    return sorted(changed)


def batch():
    import torch

    config = shared["config"]
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = torch.randint(3, max(4, min(int(text.vocab_size), 512) - 3), (1, 16))
    on = shared.get("device", "cpu")
    return {"input_ids": ids.to(on), "attention_mask": torch.ones_like(ids).to(on), "labels": ids.clone().to(on)}


def forward():
    import torch

    model = shared["model"].to(shared.get("device", "cpu"))
    with torch.no_grad():
        loss = float(model(**batch()).loss.item())
    if loss != loss:
        raise RuntimeError("the loss of a fresh model is NaN")
    return {"loss": round(loss, 3)}


def stage_peft(stage):
    def peft_import():
        import peft

        return {"version": getattr(peft, "__version__", None)}

    def wrap():
        from peft import LoraConfig, get_peft_model

        model = shared["model"]
        targets, last = "all-linear", None
        for targets in ("all-linear", linear_names(model), ["in_proj", "x_proj"]):
            try:
                wrapped = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets))
                break
            except ValueError as error:  # old peft knows no "all-linear"; mamba refuses some modules
                last = error
        else:
            raise last
        shared["peft"] = wrapped
        trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        return {"target_modules": targets, "trainable_parameters": trainable}

    def train():
        import torch

        model = shared["peft"].to(shared.get("device", "cpu"))
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        loss = model(**batch()).loss
        loss.backward()
        with_gradient = sum(
            1 for p in model.parameters() if p.requires_grad and p.grad is not None and bool(p.grad.abs().sum() > 0)
        )
        if not with_gradient:
            raise RuntimeError("no adapter parameter received a gradient")
        optimizer.step()
        return {"loss": round(float(loss.item()), 3), "parameters_with_gradient": with_gradient}

    def arguments():
        from transformers import Trainer, TrainingArguments  # noqa: F401

        TrainingArguments(output_dir=os.path.join(SPEC.get("work") or ".", "out"), report_to=[])

    stage.step("import peft", peft_import)
    if "model" not in shared:
        return
    stage.step("get_peft_model", wrap)
    stage.step("forward, backward, optimizer step", train)
    stage.step("import Trainer, make TrainingArguments", arguments)


def linear_names(model):
    import torch

    names = set()
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if module is not output and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"):
            names.add(name.rsplit(".", 1)[-1])
    return sorted(names)


def stage_bitsandbytes(stage):
    def bnb_import():
        import bitsandbytes

        devices = sorted(str(d) for d in getattr(bitsandbytes, "supported_torch_devices", ()) or ())
        shared["bnb_devices"] = devices
        return {"version": getattr(bitsandbytes, "__version__", None), "supported_devices": devices}

    def four_bit():
        import bitsandbytes
        import torch

        on = shared.get("device", "cpu")
        torch.manual_seed(0)
        layer = bitsandbytes.nn.Linear4bit(256, 512, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        weight = layer.weight.data.clone()
        layer = layer.to(on)
        value = torch.randn(4, 256)
        exact = value @ weight.T
        error = float((layer(value.to(on)).float().cpu() - exact).abs().mean() / exact.abs().mean())
        if layer.weight.dtype != torch.uint8:
            raise RuntimeError("the 4-bit layer kept its weights as %s" % layer.weight.dtype)
        if not error < 0.3:  # NF4 of random weights: about 9 %, measured with 0.50.2
            raise RuntimeError("the 4-bit layer is off by %.0f %%" % (100 * error))
        return {"device": on, "mean_relative_error": round(error, 4)}

    def eight_bit():
        import bitsandbytes
        import torch

        weight = torch.nn.Parameter(torch.randn(128, 128, device=shared.get("device", "cpu")))
        before = weight.detach().clone()
        optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=1e-2, min_8bit_size=1)
        (weight**2).sum().backward()
        optimizer.step()
        state = optimizer.state[weight]
        if not float((weight - before).abs().mean()) > 0:
            raise RuntimeError("the 8-bit optimizer did not move the weight")
        return {"state_dtype": str(getattr(state.get("state1"), "dtype", None))}

    stage.step("import bitsandbytes", bnb_import)
    if shared.get("device", "cpu") == "cpu" and "cpu" not in shared["bnb_devices"]:
        emit(event="not-tried", stage="bitsandbytes", why="this release has no kernels for the CPU, and no GPU is here")
        return
    stage.step("quantise a layer to 4 bits", four_bit)
    stage.step("8-bit optimizer step", eight_bit)


# Packages that import lazily say nothing at `import`: the class that people use is asked for too.
ENTRY = {"trl": "SFTTrainer", "sentence_transformers": "SentenceTransformer", "lightning": "Trainer"}


def stage_imports(stage):
    """The other packages that were asked for, each imported by the names it installs."""
    import importlib

    worst = None
    for _distribution, module in SPEC.get("imports", ()):

        def load(name=module):
            if name == "a vision model class":
                return vision_class()
            loaded = importlib.import_module(name)
            entry = ENTRY.get(name)
            if entry and entry in getattr(loaded, "__all__", [entry]):
                getattr(loaded, entry)
            return {"version": str(getattr(loaded, "__version__", None))}

        label = "from %s import %s" % (module, ENTRY[module]) if module in ENTRY else "import %s" % module
        if stage.step(label, load, needed=False) is None:
            worst = worst or module
    if worst:
        raise StepFailed(worst)


def stage_check(stage):
    """The user's own script."""
    import runpy

    path = SPEC["check"]

    def run():
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise RuntimeError("%s ended with %r" % (os.path.basename(path), ended.code)) from None

    stage.step("run %s" % os.path.basename(path), run)


STAGES = {
    "torch": stage_torch,
    "transformers": stage_transformers,
    "peft": stage_peft,
    "bitsandbytes": stage_bitsandbytes,
    "imports": stage_imports,
    "check": stage_check,
}


def main():
    faulthandler.enable()
    warnings.simplefilter("default")
    warnings.showwarning = note_warning
    emit(event="python", **about_python())
    emit(event="packages", packages=installed_packages())
    for name in SPEC["stages"]:
        if name not in ("imports", "check") and not importable(name):
            emit(event="absent", stage=name)
            continue
        stage = Stage(name)
        try:
            STAGES[name](stage)
        except StepFailed:
            stage.end(ok=False)
            break
        stage.end(ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # tearing torch down takes a second and can crash; everything is written


if __name__ == "__main__":
    main()
