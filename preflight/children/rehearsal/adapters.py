"""Adapters by the installed peft, and how models of few bits are prepared for training."""

from rehearsal import DTYPES


def add_adapters(torch, model, plan):
    from peft import LoraConfig, get_peft_model

    method = plan["method"]
    targets = list(plan["target_modules"]) or "all-linear"
    kind = "CAUSAL_LM"
    if getattr(model.config, "is_encoder_decoder", False):
        kind = "SEQ_2_SEQ_LM"
    if plan.get("loss") == "classification":
        kind = "SEQ_CLS"
    if method == "ia3":
        from peft import IA3Config

        return get_peft_model(model, IA3Config(task_type=kind))
    if method == "prefix_tuning":
        from peft import PrefixTuningConfig

        return get_peft_model(model, PrefixTuningConfig(task_type=kind, num_virtual_tokens=plan["virtual_tokens"]))
    options = {}
    if plan.get("use_dora"):
        options["use_dora"] = True
    if plan.get("modules_to_save"):
        options["modules_to_save"] = list(plan["modules_to_save"])
    config = LoraConfig(
        r=plan["lora_rank"],
        lora_alpha=plan["lora_alpha"],
        lora_dropout=plan["lora_dropout"],
        target_modules=targets,
        task_type=kind,
        **options,
    )
    model = get_peft_model(model, config)
    wanted = getattr(torch, DTYPES[plan["adapter_dtype"]])
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != wanted and parameter.dtype.is_floating_point:
            parameter.data = parameter.data.to(wanted)
    return model


def prepare_kbit(torch, model, plan):
    """prepare_model_for_kbit_training of the installed peft, on the meta device; by hand when that fails."""
    try:
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    except Exception:
        for parameter in model.parameters():
            parameter.requires_grad = False
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.to(torch.float32)


def cast_like_trl(torch, model):
    """TRL's SFTTrainer (0.7 to 0.18) on a 4-bit model with bf16: norms in float32, embeddings and head in bfloat16.

    Source: trl trainer/utils.py, peft_module_casting_to_bf16.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype == torch.float32:
                module.to(torch.bfloat16)
