"""Can this directory be loaded as a model? Judges what `model_directory` saw: configuration, weights, links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from preflight.findings import Finding, Level, quote
from preflight.model.model_directory import JsonFile, ModelDirectory, stored_bytes
from preflight.model_shape import ModelShape

_CONFIG_SOURCE = "transformers 5.24, configuration_utils.py, PreTrainedConfig.get_config_dict"
_WEIGHTS_SOURCE = "safetensors format; huggingface/transformers#27923 (HeaderTooLarge)"

_TROUBLES = {
    "unreadable": "cannot be read",
    "too-large": "is too large to be a configuration",
    "not-utf8": "is not UTF-8 text",
    "not-json": "is not valid JSON",
    "too-nested": "is nested too deeply to be a configuration",
    "not-an-object": "holds no JSON object",
    "link-outside": "is a link that leads out of the directory, and was not followed",
    "lfs-pointer": "is a Git LFS pointer, not the file itself",
    "empty": "is empty",
}


def check_config(directory: ModelDirectory, shape_trouble: str) -> list[Finding]:
    """Whether config.json is there and transformers can read it."""
    config = directory.config
    if config.trouble == "absent":
        return [_no_config(directory)]
    if config.trouble:
        detail = f" ({quote(config.detail, 160)})" if config.detail else ""
        fixes = {
            "lfs-pointer": ("`git lfs install && git lfs pull`",),
            "link-outside": ("copy the file into the directory, or give `--follow-links`",),
        }
        return [
            Finding(
                "config-not-loadable",
                Level.FAIL,
                f"config.json {_TROUBLES.get(config.trouble, config.trouble)}{detail}.",
                "transformers stops with: It looks like the config file is not a valid JSON file.",
                fixes.get(config.trouble, ("download config.json again from the model's own repository",)),
                _CONFIG_SOURCE,
            )
        ]
    findings: list[Finding] = []
    if config.bom:
        mark = "a UTF-8 byte-order mark" if config.encoding == "utf-8" else "a UTF-16 byte-order mark"
        findings.append(
            Finding(
                "config-not-loadable",
                Level.FAIL,
                f"config.json begins with {mark} (Windows Notepad writes one): transformers cannot load it.",
                "It stops with OSError: It looks like the config file is not a valid JSON file. Everything below was "
                "read from the decoded text.",
                ("save config.json again as UTF-8 without a byte-order mark",),
                _CONFIG_SOURCE,
            )
        )
    if shape_trouble:
        findings.append(
            Finding(
                "config-value-invalid",
                Level.FAIL,
                f"config.json cannot be a model: {quote(shape_trouble)}.",
                "No model can be built from such a value.",
                ("compare config.json with the one in the model's own repository",),
                "config.json",
            )
        )
    if not findings:
        note = "It holds NaN or Infinity, which JSON does not know and Python reads." if config.constants else ""
        findings.append(Finding("config-read", Level.OK, "config.json can be read.", note, source=_CONFIG_SOURCE))
    return findings


def _no_config(directory: ModelDirectory) -> Finding:
    """What a directory without config.json is instead."""
    adapter = directory.adapter_config
    if adapter.trouble != "absent":
        base = adapter.object.get("base_model_name_or_path")
        kind, r = adapter.object.get("peft_type"), adapter.object.get("r")
        rank = f" (r = {r})" if isinstance(r, int) else ""
        there = isinstance(base, str) and Path(base).is_dir()
        where = f" Its base is {quote(base_name(base), 120)}" if isinstance(base, str) else " It names no base"
        gone = "" if there else ", whose path is not on this machine" if _is_path(base) else ""
        return Finding(
            "adapter-not-model",
            Level.FAIL,
            f"This directory is a {quote(kind or 'PEFT', 40)} adapter{rank}, not a model.{where}{gone}.",
            "transformers stops with: Unrecognized model. Memory and modules are those of the base model, not of this "
            "file.",
            (
                "name the base model's directory instead, and continue from this adapter with "
                "`PeftModel.from_pretrained(base, ADAPTER, is_trainable=True)`",
                "or merge it first: `model.merge_and_unload()`",
            ),
            "PEFT documentation, checkpoint format; huggingface/transformers#25215",
        )
    weights = directory.weights
    if weights.ggufs and not weights.safetensors:
        return Finding(
            "gguf-only",
            Level.FAIL,
            f"This directory holds GGUF files only ({quote(weights.ggufs[0], 80)}): they are for llama.cpp.",
            "A GGUF cannot be trained. transformers can only turn some of them back into full-size weights, with what "
            "the quantisation has lost.",
            ("download the original safetensors checkpoint of the same model",),
            "transformers documentation, GGUF; quantizers/quantizer_gguf.py (is_trainable False)",
        )
    if directory.has("params.json") and (weights.pickles or directory.has("consolidated.safetensors")):
        return Finding(
            "original-format",
            Level.FAIL,
            "This is the vendor's original format (params.json and consolidated weights), not one for transformers.",
            "There is no config.json, so from_pretrained cannot load it.",
            ("download the version of the model that is made for transformers (often with -hf in its name)",),
            _CONFIG_SOURCE,
        )
    if directory.has("model_index.json"):
        return Finding(
            "diffusers-pipeline",
            Level.FAIL,
            "This is a diffusers pipeline (model_index.json), not a language model.",
            "This program judges language models; image pipelines are trained with other tools.",
            ("name a language model's directory",),
            "diffusers documentation, model_index.json",
        )
    if not weights.present and any("token" in name or name.endswith(".jinja") for name in directory.files):
        return Finding(
            "tokenizer-only",
            Level.OK,
            "This directory holds a tokenizer and no model: only the tokenizer was looked at.",
            "There is no config.json and there are no weights, so shape and memory were not looked at.",
            source=_CONFIG_SOURCE,
        )
    empty = not directory.files
    return Finding(
        "config-missing",
        Level.FAIL,
        "The directory is empty." if empty else "There is no config.json in this directory.",
        "transformers cannot tell which model this is.",
        (
            "name the directory that holds config.json (in a hub cache: snapshots/REVISION)",
            "or download the model again: `hf download OWNER/NAME --local-dir DIR`",
        ),
        _CONFIG_SOURCE,
    )


def base_name(base: Any) -> str:
    """The last part of a base model's path, or its hub id."""
    text = str(base).rstrip("/\\")
    return text.replace("\\", "/").split("/")[-1] if _is_path(base) else text


def _is_path(base: Any) -> bool:
    text = str(base)
    return text.startswith(("/", ".", "~")) or "\\" in text or text.count("/") > 1 or text[1:3] == ":/"


def adapter_facts(directory: ModelDirectory) -> dict[str, Any]:
    """What adapter_config.json says; {} when there is none."""
    adapter: JsonFile = directory.adapter_config
    if adapter.trouble == "absent":
        return {}
    base = adapter.object.get("base_model_name_or_path")
    targets = adapter.object.get("target_modules")
    return {
        "peft_type": adapter.object.get("peft_type"),
        "r": adapter.object.get("r"),
        "lora_alpha": adapter.object.get("lora_alpha"),
        "target_modules": sorted(str(t) for t in targets) if isinstance(targets, list) else targets,
        "base_model": base_name(base) if isinstance(base, str) else None,
        "base_path_exists": Path(base).is_dir() if isinstance(base, str) else None,
    }


def check_adapter_beside(directory: ModelDirectory) -> list[Finding]:
    """An adapter beside a whole model: from_pretrained loads the adapter on top of it."""
    if directory.config.trouble == "absent" or directory.adapter_config.trouble == "absent":
        return []
    return [
        Finding(
            "adapter-beside-model",
            Level.WARN,
            "The directory holds a model and an adapter (adapter_config.json).",
            "from_pretrained loads the adapter on top when PEFT is installed; training would start from both.",
            ("move adapter_config.json and adapter_model.safetensors away if the plain model is meant",),
            "transformers 5.24, modeling_utils.py, from_pretrained (find_adapter_config_file)",
        )
    ]


def check_weights(directory: ModelDirectory, shape: ModelShape | None) -> list[Finding]:
    """Whether all weight files are here, whole, and what they say about the size of the model."""
    weights = directory.weights
    if directory.config.trouble == "absent":
        return []
    if not weights.present:
        return [
            Finding(
                "weights-not-here",
                Level.OK,
                "There are no weight files here: everything is read from the configuration.",
                "Nothing can be said about the weights themselves.",
                source="the directory's listing",
            )
        ]
    findings: list[Finding] = []
    if weights.missing or weights.pointers:
        parts = []
        if weights.pointers:
            parts.append(f"Git LFS pointers instead of files: {_listed(weights.pointers)}")
        if weights.missing:
            parts.append(f"missing: {_listed(weights.missing)}")
        expected = weights.index_total_bytes or weights.pointer_bytes
        whole = f" {expected / 1e9:.2f} GB ({expected / 2**30:.2f} GiB) are expected." if expected else ""
        findings.append(
            Finding(
                "weights-incomplete",
                Level.FAIL,
                f"The weights are not complete: {'; '.join(parts)}.",
                ("Loading a pointer ends in SafetensorError: HeaderTooLarge." if weights.pointers else "")
                + (" Loading stops at the first file that is missing." if weights.missing else "")
                + whole,
                (
                    *(("`git lfs install && git lfs pull`",) if weights.pointers else ()),
                    "download it again: `hf download OWNER/NAME --local-dir DIR`",
                ),
                _WEIGHTS_SOURCE,
            )
        )
    if weights.damaged:
        name, why = weights.damaged[0]
        more = f" ({len(weights.damaged) - 1} more)" if len(weights.damaged) > 1 else ""
        findings.append(
            Finding(
                "weights-damaged",
                Level.FAIL,
                f"{quote(name, 100)}: {quote(why, 200)}{more}.",
                "Loading it ends in an error, or in weights that are not those of the model.",
                ("download these files again: `hf download OWNER/NAME --local-dir DIR`",),
                _WEIGHTS_SOURCE,
            )
        )
    if weights.pickles and not weights.safetensors and not weights.pointers:
        findings.append(
            Finding(
                "pickle-weights",
                Level.WARN,
                f"The weights are pickles only ({quote(weights.pickles[0], 80)}).",
                "Loading a pickle can run code; transformers refuses it with torch below 2.6 (CVE-2025-32434).",
                (
                    "take the safetensors version of the model, when its repository has one",
                    "or convert it once in a throw-away container: `model.save_pretrained(DIR)`",
                ),
                "transformers 5.24, utils/import_utils.py, check_torch_load_is_safe",
            )
        )
    rows = _embedding_rows(directory)
    if shape is not None and shape.vocab_size and rows and shape.structure != "unknown" and rows != shape.vocab_size:
        findings.append(
            Finding(
                "weights-shape-mismatch",
                Level.FAIL,
                f"The embedding in the weights has {rows} rows, config.json says vocab_size {shape.vocab_size}.",
                "from_pretrained stops with a size mismatch; the vocabulary was resized on one side only.",
                (f"set vocab_size to {rows} in config.json, if the tokenizer has as many tokens",),
                _WEIGHTS_SOURCE,
            )
        )
    if not findings:
        findings.append(_whole(directory, shape))
    return findings


def _embedding_rows(directory: ModelDirectory) -> int | None:
    """Rows of the token embedding by the headers; None when it is not there under a usual name, or is packed."""
    names = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
    for name, (_, size) in directory.weights.tensors.items():
        if name.endswith(names) and len(size) == 2 and not any(w in name for w in ("vision", "visual", "audio")):
            return size[0]
    return None


def _whole(directory: ModelDirectory, shape: ModelShape | None) -> Finding:
    weights = directory.weights
    size = stored_bytes(weights)
    counted = shape.parameters if shape is not None else None
    files = len(weights.safetensors) or len(weights.pickles)
    note = ""
    if set(weights.safetensors) & set(directory.on_hub) or set(weights.pickles) & set(directory.on_hub):
        return Finding(
            "weights-on-hub",
            Level.OK,
            f"The weights are on the hub ({files} files, {(size or 0) / 2**30:.2f} GiB); they were not downloaded.",
            "Only the small files were fetched.",
            source="the hub's listing",
        )
    if weights.elements is not None and counted is not None and weights.elements != counted:
        note = (
            f"The headers hold {weights.elements:,} elements, the configuration describes {counted:,} parameters: "
            "packed weights, a tied head that is stored twice, or layers that transformers leaves out."
        )
    return Finding(
        "weights-complete",
        Level.OK,
        f"All weight files are here ({files}; {(size or 0) / 2**30:.2f} GiB).",
        note,
        source=_WEIGHTS_SOURCE,
    )


def check_links(directory: ModelDirectory) -> list[Finding]:
    """Links out of the directory and names made to deceive."""
    findings: list[Finding] = []
    if directory.links_outside:
        findings.append(
            Finding(
                "links-outside",
                Level.WARN,
                f"Links lead out of the directory: {_listed(directory.links_outside)}. They were not followed.",
                "A model from elsewhere should not point at other files of this machine; their text could end up in a "
                "report.",
                ("look where they lead; if they are yours, give `--follow-links`",),
                "preflight/model/model_directory.py",
            )
        )
    if directory.odd_names:
        findings.append(
            Finding(
                "odd-file-names",
                Level.WARN,
                f"File names with control characters: {_listed(directory.odd_names)}.",
                "They make listings and reports show something else than what is there.",
                ("delete them, or take the model from a source you trust",),
                "preflight/model/model_directory.py",
            )
        )
    if directory.truncated:
        findings.append(
            Finding(
                "too-many-files",
                Level.WARN,
                "The directory holds thousands of files; only the first 5000 were looked at.",
                "Weights or code beyond them were not seen.",
                ("name the model's own directory, not one that holds many things",),
                "preflight/model/model_directory.py",
            )
        )
    return findings


def _listed(names: tuple[str, ...], most: int = 4) -> str:
    shown = ", ".join(quote(name, 80) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
