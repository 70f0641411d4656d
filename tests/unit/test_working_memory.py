"""Logits and activations of `strategy.memory`, against live tensors on the CPU."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from distft import DDP, FSDP2, TP, ModelSpec, Workload, ZeRO2
from distft.testing import tiny_config

WIDE = {
    "vocab_size": 32_000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LOAD = Workload(micro_batch=1, seq_len=256)


class LiveBytes(TorchDispatchMode):
    """The highest number of bytes in storages that operations made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def logits_line(spec: ModelSpec, load: Workload, **fields: Any) -> int:
    report = DDP(**fields).memory(spec, load, world_size=1)
    return next(line.num_bytes for line in report.lines if line.kind == "logits")


def test_logits_are_within_2x_of_live_bytes_and_at_least_10_bytes_an_element():
    from distft.training.loss import next_token_loss

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**WIDE)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tokens = torch.randint(0, 32_000, (1, 256))
    batch = {"input_ids": tokens, "labels": tokens}
    next_token_loss(model, batch).backward()
    with LiveBytes() as measured:
        next_token_loss(model, batch).backward()
    predicted = logits_line(ModelSpec.from_config(config), LOAD, precision="bf16")
    assert predicted >= 10 * 256 * 32_000
    assert predicted / 2 <= measured.peak <= 2 * predicted


def test_logits_grow_with_tokens_times_vocabulary_and_model_state_does_not():
    spec = ModelSpec.from_config({**WIDE, "model_type": "llama"})
    twice = Workload(micro_batch=2, seq_len=256)
    assert logits_line(spec, twice) == 2 * logits_line(spec, LOAD)
    states = {DDP().memory(spec, load, world_size=1).model_state_bytes for load in (LOAD, twice)}
    assert len(states) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("activation_checkpointing", True), ("precision", "bf16-mixed")]
)
def test_activations_fall_with_checkpointing_and_with_bf16(field, value):
    spec = ModelSpec.from_config("Llama-3.2-1B")
    kinds = [
        max(FSDP2(**fields).memory(spec, LOAD, world_size=8).kind_bytes("activations"))
        for fields in ({}, {field: value})
    ]
    assert kinds[1] < kinds[0]


def test_tensor_parallel_splits_what_is_inside_of_layers_and_not_the_norms():
    spec = ModelSpec.from_config("Llama-3.1-8B")
    one, four = (
        max(strategy.memory(spec, LOAD, world_size=ranks).kind_bytes("activations"))
        for strategy, ranks in ((DDP(), 1), (TP(tp=4), 4))
    )
    assert one / 4 < four < one


def test_files_are_read_a_tensor_at_a_time_and_consolidated_within_2_gb_of_the_host():
    report = FSDP2(precision="bf16").memory(
        ModelSpec.from_config("Llama-3.1-8B"), LOAD, world_size=8
    )
    host = {line.name: line.num_bytes for line in report.lines if line.on_host}
    assert host["largest tensor of the files, read or written"] == 2 * 128_256 * 4096
    assert host["buffers of consolidate"] == 2_000_000_000


def test_zero_holds_two_buckets_of_gradients_and_none_larger_than_the_model():
    def buckets(name: str, **fields: Any) -> int:
        report = ZeRO2(**fields).memory(ModelSpec.from_config(name), LOAD, world_size=2)
        return next(x.num_bytes for x in report.lines if x.name.startswith("buckets of"))

    assert buckets("Llama-3.1-8B", precision="bf16-mixed") == 2 * 2 * 500_000_000
    assert buckets("GPT-2") == 2 * 4 * ModelSpec.from_config("GPT-2").total_params


def test_a_model_without_known_widths_has_no_activations_and_the_report_says_so():
    spec = ModelSpec.from_model(torch.nn.Linear(2, 2))
    shown = str(DDP().memory(spec, LOAD, world_size=1))
    assert "without activations, whose widths are not known" in shown


def test_a_report_names_the_three_kinds_of_memory():
    report = DDP().memory(ModelSpec.from_config(tiny_config("L")), LOAD, world_size=2)
    assert all(word in str(report) for word in ("live tensors", "reserved", "of the process"))
