"""Known errors are recognised by messages as their sources print them; numbers of OOM messages are worked out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from preflight import facts
from preflight.findings import Level
from preflight.software import explain
from preflight.software.explain import exceptions, explained, first_match, matches, read_oom, signatures, size_bytes

ROWS = facts.table("error_signatures")["signatures"]
SAMPLES = [(row["id"], text) for row in ROWS for text in row.get("sample", [])]
GIB = 2**30
MIB = 2**20


@pytest.mark.parametrize(("name", "text"), SAMPLES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SAMPLES)])
def test_each_signature_is_the_first_to_match_its_own_message(name: str, text: str) -> None:
    match = first_match(text)
    assert match is not None and match.signature.id == name


def test_at_least_a_hundred_signatures_have_a_message_of_their_own() -> None:
    assert len({name for name, _ in SAMPLES}) >= 100


def test_every_signature_says_cause_fix_and_source_and_its_fields_are_its_groups() -> None:
    for row, signature in zip(ROWS, signatures(), strict=True):
        assert row["cause"] and row["fix"] and all(row["fix"]) and row["source"], row["id"]
        if row.get("fields"):
            assert signature.pattern.groups >= len(row["fields"]), row["id"]
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", signature.code), row["id"]
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_a_log_without_an_error_matches_nothing() -> None:
    log = """Loading checkpoint shards: 100%|##########| 2/2 [00:03<00:00,  1.61s/it]
{'loss': 1.8231, 'grad_norm': 0.42, 'learning_rate': 0.0002, 'epoch': 0.1}
FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.
Saving model checkpoint to ./out/checkpoint-500
trust_remote_code=True, bf16=True, per_device_train_batch_size=2
"""
    assert matches(log) == []
    observed, findings = explained(log)
    assert [finding.code for finding in findings] == ["no-error-found"]
    assert findings[0].level is Level.UNKNOWN and observed["exceptions"] == []


def test_an_empty_text_is_not_taken_for_a_healthy_run() -> None:
    _, findings = explained("")
    assert findings[0].level is Level.UNKNOWN


def test_the_cause_of_a_chain_comes_before_what_follows_from_it() -> None:
    log = """Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/transformers/utils/import_utils.py", line 2317, in __getattr__
    module = self._get_module(self._class_to_module[name])
  File "/opt/env/lib/python3.11/site-packages/torchvision/_meta_registrations.py", line 163, in <module>
    @torch.library.register_fake("torchvision::nms")
RuntimeError: operator torchvision::nms does not exist

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 3, in <module>
    from transformers import LlavaForConditionalGeneration
ModuleNotFoundError: Could not import module 'LlavaForConditionalGeneration'. Are this object's requirements defined?
"""
    observed, findings = explained(log)
    assert findings[0].code == "torchvision-mismatch" and findings[0].level is Level.FAIL
    assert [one["type"] for one in observed["exceptions"]] == ["RuntimeError", "ModuleNotFoundError"]
    assert all(finding.level is not Level.FAIL for finding in findings[1:])


def test_a_message_counts_more_than_a_line_of_code_that_a_traceback_quotes() -> None:
    log = """Traceback (most recent call last):
  File "check.py", line 9, in load
    raise OSError("CUDA error: out of memory")
  File "x.py", line 1, in <module>
ValueError: Attempting to unscale FP16 gradients.
"""
    assert matches(log)[0].code == "unscale-fp16"


def test_ansi_colours_carriage_returns_and_windows_line_ends_do_not_hide_an_error() -> None:
    log = "step 1\r\x1b[31mRuntimeError: CUDA error: device-side assert triggered\x1b[0m\r\nmore"
    assert explained(log)[1][0].code == "device-assert"


def test_a_prefix_of_a_distributed_launcher_does_not_hide_an_exception() -> None:
    log = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/workspace/train.py", line 88, in <module>
[rank0]:     trainer.train()
[rank0]: ValueError: Attempting to unscale FP16 gradients.
"""
    assert exceptions(log)[0].type == "ValueError"
    assert exceptions(log)[0].line == 88


def test_a_keyerror_is_an_unknown_architecture_only_below_the_config_mapping() -> None:
    assert first_match("KeyError: 'qwen3'") is None
    inside = "File \"transformers/models/auto/configuration_auto.py\", line 1117\nKeyError: 'qwen3'"
    match = first_match(inside)
    assert match is not None and match.signature.id == "arch_unknown_keyerror"


# --- out of memory: the numbers of the messages, worked out by hand ---------------------------------------------------

OTHERS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB "
    "of "
    "which 1.15 GiB is free. Process 4242 has 12.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "10.50 GiB memory in use. Of the allocated memory 9.80 GiB is allocated by PyTorch, and 210.00 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FRAGMENTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.65 GiB "
    "of "
    "which 512.00 MiB is free. Including non-PyTorch memory, this process has 23.10 GiB memory in use. Of the "
    "allocated "
    "memory 18.00 GiB is allocated by PyTorch, and 4.60 GiB is reserved by PyTorch but unallocated."
)
SHORT = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacty of 44.34 "
    "GiB of which 160.81 MiB is free. Process 47694 has 44.17 GiB memory in use. Of the allocated memory 43.36 GiB is "
    "allocated by PyTorch, with 31.88 MiB allocated in private pools (e.g., CUDA Graphs), and 396.27 MiB is reserved "
    "by "
    "PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.40 GiB (GPU 0; 23.65 GiB total capacity; 19.21 GiB already "
    "allocated; 3.12 GiB free; 19.21 GiB reserved in total by PyTorch)"
)
OLD_FRAGMENTED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.00 GiB (GPU 1; 11.00 GiB total capacity; 6.00 GiB already "
    "allocated; 300.00 MiB free; 9.50 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try "
    "setting max_split_size_mb to avoid fragmentation."
)


def test_sizes_are_read_with_their_binary_units() -> None:
    assert size_bytes("31.88 MiB") == round(31.88 * MIB)
    assert size_bytes("512 bytes") == 512
    assert size_bytes("1.00 TiB") == 2**40
    assert size_bytes("soon") is None and size_bytes(None) is None


def test_memory_held_by_others_is_the_cause_when_the_request_would_fit_without_them() -> None:
    oom = read_oom(OTHERS)
    assert oom is not None and oom.kind == "other-processes"
    assert oom.tried == 2 * GIB and oom.total == round(23.65 * GIB) and oom.free == round(1.15 * GIB)
    assert oom.process_used == round(10.5 * GIB) and oom.allocated == round(9.8 * GIB)
    assert oom.reserved_unallocated == 210 * MIB
    assert oom.others == (("process 4242", 12 * GIB),)
    assert oom.missing == 2 * GIB - round(1.15 * GIB)
    finding = explain.oom_finding(oom)
    assert "12.00 GiB" in finding.fix[0] and "nvidia-smi" in finding.fix[0]


def test_memory_that_no_process_line_accounts_for_is_held_by_others_too() -> None:
    # 15.51 total - 0.146 free - 11.65 of this process = 3.71 GiB, of which the message names 0.31.
    text = next(text for name, text in SAMPLES if name == "oom_torch2" and "1839" in text)
    oom = read_oom(text)
    assert oom is not None and oom.kind == "other-processes"
    assert oom.others[0] == ("process 1839", round(322.23 * MIB))
    held = round(15.51 * GIB) - round(149.62 * MIB) - round(11.65 * GIB)
    assert sum(size for _, size in oom.others) == held
    assert "3.71 GiB" in explain.oom_finding(oom).fix[0]


def test_a_large_unused_reserve_is_fragmentation_and_says_what_can_come_back() -> None:
    oom = read_oom(FRAGMENTED)
    assert oom is not None and oom.kind == "fragmentation"
    assert oom.reserved == round(18.0 * GIB) + round(4.6 * GIB)
    finding = explain.oom_finding(oom)
    assert "expandable_segments" in finding.fix[0] and "4.60 GiB" in finding.fix[0]


def test_the_spelling_of_torch_2_1_and_its_own_process_line_are_read_as_a_shortage() -> None:
    oom = read_oom(SHORT)
    # 396 MiB would hold the 224 asked for, but are 0.9 % of the card: nearly all of it is in use.
    assert oom is not None and oom.kind == "shortage"
    assert oom.total == round(44.34 * GIB) and oom.private_pools == round(31.88 * MIB)
    assert oom.others == ()  # process 47694 is this process itself: it holds what torch reserved


def test_equal_reserved_and_allocated_is_no_fragmentation() -> None:
    # The reverse is often told: a small difference does not mean fragmentation.
    oom = read_oom(OLD)
    assert oom is not None
    assert (oom.tried, oom.allocated, oom.reserved) == (round(2.4 * GIB), round(19.21 * GIB), round(19.21 * GIB))
    assert oom.reserved_unallocated == 0
    assert oom.kind != "fragmentation"


def test_the_old_message_with_a_large_reserve_is_fragmentation_too() -> None:
    oom = read_oom(OLD_FRAGMENTED)
    assert oom is not None and oom.kind == "fragmentation" and oom.gpu == "1"
    assert oom.reserved_unallocated == round(3.5 * GIB)


def test_a_message_wrapped_over_lines_is_read_whole() -> None:
    wrapped = OTHERS.replace(" of which ", "\nof which ").replace(" this process has ", "\n  this process has ")
    assert read_oom(wrapped) == read_oom(OTHERS)


def test_only_the_first_of_several_messages_is_counted() -> None:
    both = f"{FRAGMENTED}\nTraceback (most recent call last):\n{OLD}"
    assert read_oom(both) == read_oom(FRAGMENTED)


def test_no_number_is_invented_for_a_message_that_has_none() -> None:
    assert read_oom("RuntimeError: CUDA error: out of memory") is None
    short = read_oom("CUDA out of memory. Tried to allocate 1.00 GiB")
    assert short is not None
    assert (short.total, short.free, short.allocated, short.reserved, short.missing) == (None,) * 5
    assert "could not tell" not in explain.oom_finding(short).what


def test_the_command_line_explains_a_log_and_standard_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"epoch 1\n{FRAGMENTED}\n", encoding="utf-8")
    assert explain.main([str(log), "--json"]) == 1
    section = json.loads(capsys.readouterr().out)
    assert section["stage"] == "explain" and section["findings"][0]["code"] == "oom-fragmentation"
    assert section["observed"]["out_of_memory"]["tried_bytes"] == round(1.5 * GIB)


def test_a_log_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    from preflight.console import UsageError

    with pytest.raises(UsageError, match=r"nothing\.log: cannot be read"):
        explain.main([str(tmp_path / "nothing.log")])
    with pytest.raises(UsageError, match="is a folder"):
        explain.main([str(tmp_path)])


@pytest.mark.parametrize(
    "data", [b"\x00\xff\xfe" * 500, b"\xff\xfeE\x00r\x00r\x00", "Traceback 🦙".encode(), b"\x1b[" * 999]
)
def test_a_binary_or_oddly_encoded_log_is_read_without_a_crash(tmp_path: Path, data: bytes) -> None:
    log = tmp_path / "odd.log"
    log.write_bytes(data)
    assert explain.main([str(log), "--json"]) == 3


def test_long_logs_are_explained_quickly(tmp_path: Path) -> None:
    import time

    line = "{'loss': 1.8231, 'grad_norm': 0.42, 'learning_rate': 0.0002, 'epoch': 0.1, 'file': 'a/b/c.py'}\n"
    text = line * 20000 + "RuntimeError: CUDA error: device-side assert triggered\n"  # 2 MB
    began = time.monotonic()
    assert explained(text)[1][0].code == "device-assert"
    assert time.monotonic() - began < 30


def test_with_the_model_each_setting_says_what_it_frees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5-1.5B in full: 4-bit adapters free most, and all figures are positive and within the whole."""
    config = {
        "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = tmp_path / "plan.yaml"
    plan.write_text("method: full\nsequence_tokens: 2048\nmicro_batch: 4\ngradient_checkpointing: false\n")
    log = tmp_path / "train.log"
    log.write_text(SHORT)
    assert explain.main([str(log), "--json", "--model", str(tmp_path), "--config", str(plan)]) == 1
    fixes = json.loads(capsys.readouterr().out)["findings"][0]["fix"]
    freed = [float(re.search(r"frees about ([\d.]+) GiB", fix).group(1)) for fix in fixes]  # type: ignore[union-attr]
    whole = [float(re.search(r"estimated ([\d.]+) GiB", fix).group(1)) for fix in fixes]  # type: ignore[union-attr]
    assert len(fixes) == 3 and freed == sorted(freed, reverse=True)
    assert all(0 < part < total for part, total in zip(freed, whole, strict=True))


def test_a_model_or_plan_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    from preflight.console import UsageError

    log = tmp_path / "train.log"
    log.write_text(SHORT)
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        explain.main([str(log), "--model", str(tmp_path)])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        explain.main([str(log), "--model", str(tmp_path)])
    with pytest.raises(UsageError, match="only together with --model"):
        explain.main([str(log), "--config", "x.yaml"])


def test_a_known_architecture_names_the_first_release_that_has_it() -> None:
    # Qwen3 came with transformers 4.51.0 (read from the wheels, facts/arch_support.json).
    text = (
        "ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not recognize "
        "this architecture."
    )
    assert "transformers>=4.51.0" in explained(text)[1][0].fix[0]


def test_a_collective_that_timed_out_follows_from_the_rank_that_ran_out_of_memory() -> None:
    timeout = next(text for name, text in SAMPLES if name == "nccl_timeout")
    findings = explained(f"{timeout}\n[rank0]: {FRAGMENTED}\n")[1]
    assert [finding.code for finding in findings] == ["oom-fragmentation", "nccl-timeout"]
    assert explained(timeout)[1][0].level is Level.FAIL


def test_no_row_speaks_of_files_or_documents_that_a_reader_does_not_have() -> None:
    for row in ROWS:
        for text in (row["cause"], *row["fix"]):
            assert not re.search(r"\bseed\b|_torch[12]\b|(?<!config)(?<!tokenizer)\.json\)", text), (row["id"], text)
