"""Provokes real errors of torch, transformers, peft and Python itself; prints one JSON line each: name, text.

Run by tests/test_provoked_errors.py in the interpreter that has these packages. Not a test itself.
"""

import json
import os
import sys
import tempfile
import traceback

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
FOLDER = tempfile.mkdtemp()
PROVOCATIONS = []


def provoke(function):
    PROVOCATIONS.append(function)
    return function


def folder_with(name, **files):
    place = os.path.join(FOLDER, name)
    os.makedirs(place, exist_ok=True)
    for file, text in files.items():
        with open(os.path.join(place, file.replace("__", ".")), "w", encoding="utf-8") as stream:
            stream.write(text)
    return place


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def tiny_tokenizer(**options):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), **options)


@provoke
def trainargs_removed():
    from transformers import TrainingArguments

    TrainingArguments(output_dir=FOLDER, evaluation_strategy="no")


@provoke
def trainer_tokenizer():
    from transformers import Trainer

    Trainer(model=tiny_llama(), tokenizer=None)


@provoke
def peft_no_targets():
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_llama(), LoraConfig(target_modules=["query_key_value"]))


@provoke
def peft_specify_targets():
    from peft import LoraConfig, get_peft_model
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    get_peft_model(Phi3ForCausalLM(config), LoraConfig(task_type="CAUSAL_LM"))


@provoke
def peft_version():
    from peft import LoraConfig

    tiny_llama().add_adapter(LoraConfig(target_modules=["q_proj"]))


@provoke
def peft_future_config():
    from peft import LoraConfig

    LoraConfig(config_of_next_year=None)


@provoke
def mamba_out_proj():
    from peft import LoraConfig, get_peft_model
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4, vocab_size=64))
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["out_proj"]))


@provoke
def arch_unknown_new():
    from transformers import AutoConfig

    AutoConfig.from_pretrained(folder_with("unknown", config__json='{"model_type": "qwen99"}'))


@provoke
def arch_unrecognized():
    from transformers import AutoConfig

    AutoConfig.from_pretrained(folder_with("without", config__json='{"hidden_size": 64}'))


@provoke
def arch_wrong_auto():
    from transformers import AutoModelForCausalLM, T5Config

    AutoModelForCausalLM.from_config(T5Config())


@provoke
def trust_remote_code():
    from transformers import AutoConfig

    config = '{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}'
    AutoConfig.from_pretrained(folder_with("own", config__json=config), trust_remote_code=False)


@provoke
def flash_attn_missing():
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny_llama().config, attn_implementation="flash_attention_2")


@provoke
def offline():
    from transformers import AutoConfig

    AutoConfig.from_pretrained("some-org/some-model")


@provoke
def hybrid_cache_gone():
    from transformers import HybridCache  # noqa: F401


@provoke
def missing_module():
    import a_module_that_nobody_has  # noqa: F401


@provoke
def torch_cpu_build():
    import torch

    torch.ones(1).cuda()


@provoke
def no_grad_inputs():
    import torch

    torch.ones(2).sum().backward()


@provoke
def meta_tensor():
    import torch

    torch.nn.Linear(2, 2, device="meta").to("cpu")


@provoke
def size_mismatch():
    import torch

    torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 2).state_dict())


@provoke
def batch_mismatch():
    import torch

    torch.nn.functional.cross_entropy(torch.randn(4, 8), torch.zeros(3, dtype=torch.long))


@provoke
def nan_probs():
    import torch

    torch.multinomial(torch.tensor([float("nan"), 0.5]), 1)


@provoke
def weights_only():
    import pathlib

    import torch

    path = os.path.join(FOLDER, "object.pt")
    torch.save({"path": pathlib.PurePosixPath("a")}, path)
    torch.load(path)


@provoke
def safetensors_header():
    import safetensors.torch

    path = os.path.join(FOLDER, "cut.safetensors")
    with open(path, "wb") as stream:
        stream.write(b"\xff\xff\xff\xff\xff\xff\xff\x7f{}")
    safetensors.torch.load_file(path)


@provoke
def chat_template_missing():
    tiny_tokenizer().apply_chat_template([{"role": "user", "content": "a"}])


@provoke
def pad_token():
    tiny_tokenizer()(["a", "a b"], padding=True)


@provoke
def disk_full():
    with open("/dev/full", "w") as stream:
        stream.write("x" * 100000)


def main():
    sys.stdin.close()
    for function in PROVOCATIONS:
        try:
            function()
        except BaseException:
            print(json.dumps({"name": function.__name__, "text": traceback.format_exc()}), flush=True)
        else:
            print(json.dumps({"name": function.__name__, "text": ""}), flush=True)


if __name__ == "__main__":
    main()
