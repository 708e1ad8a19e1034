"""The model of a configuration, built by the installed transformers on the meta device."""

import contextlib

from rehearsal import DTYPES, CannotRehearse


def read_config(transformers, job):
    if job.get("trust_remote_code") and job.get("model_dir"):
        return transformers.AutoConfig.from_pretrained(job["model_dir"], trust_remote_code=True)
    config = dict(job["config"])
    config.pop("quantization_config", None)
    kind = config.pop("model_type", None)
    if not kind:
        raise CannotRehearse("config.json names no model_type")
    if config.get("auto_map"):
        config.pop("auto_map")
    try:
        return transformers.AutoConfig.for_model(kind, **config)
    except ValueError:
        raise CannotRehearse(
            "transformers %s does not know the model type %s" % (transformers.__version__, kind)
        ) from None


def model_class(transformers, job, config):
    """The class that is trained: the one that config.json names, else by what the configuration is registered for."""
    if job["plan"].get("loss") == "classification":
        return transformers.AutoModelForSequenceClassification
    if job.get("trust_remote_code") and job.get("model_dir"):
        return transformers.AutoModelForCausalLM
    names = job["config"].get("architectures") or ()
    for name in names:
        found = getattr(transformers, str(name), None)
        if found is not None and hasattr(found, "_from_config"):
            heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
            if str(name).endswith(heads):
                return found
    for auto in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForImageTextToText",
        "AutoModelForVision2Seq",
        "AutoModelForMaskedLM",
    ):
        chosen = getattr(transformers, auto, None)
        if chosen is not None and type(config) in chosen._model_mapping:
            return chosen
    raise CannotRehearse(
        "transformers %s has no trainable class for %s" % (transformers.__version__, type(config).__name__)
    )


def build(torch, transformers, job, config, attention):
    plan = job["plan"]
    dtype = getattr(torch, DTYPES[plan["weight_dtype"]])
    cls = model_class(transformers, job, config)
    make = cls.from_config if cls.__name__.startswith("AutoModel") else cls._from_config
    options = (
        {"trust_remote_code": True} if job.get("trust_remote_code") and cls.__name__.startswith("AutoModel") else {}
    )
    trouble = None
    for name in (attention, "eager"):
        for key in ("dtype", "torch_dtype"):
            try:
                with torch.device("meta"):
                    return make(config, attn_implementation=name, **{key: dtype}, **options), name
            except TypeError as error:
                trouble = error
            except ValueError as error:
                if name == "eager":
                    raise
                trouble = error
                break
    raise trouble


def set_cache(model, wanted):
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
            if part is not None and hasattr(part, "use_cache"):
                with contextlib.suppress(Exception):
                    part.use_cache = wanted


def enable_checkpointing(model, plan, adapters):
    reentrant = plan.get("reentrant")
    options = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": bool(reentrant)}}
    try:
        model.gradient_checkpointing_enable(**options)
    except TypeError:
        model.gradient_checkpointing_enable()
    except ValueError as error:
        raise CannotRehearse(str(error)) from None
    if adapters:
        model.enable_input_require_grads()
