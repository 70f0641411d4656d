"""Reports: what they add up to, how they print, and what the six strategies say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.formulas import (
    Collective,
    FetchLimits,
    MemoryLine,
    MemoryReport,
    TrafficReport,
    fetch_counts,
    flat_numel,
    model_state_bytes,
    zero_memory,
)
from distft.spec import ModelSpec, TensorSpec, Workload

SMALL = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = SMALL | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
}
L, M = ModelSpec.from_config(SMALL), ModelSpec.from_config(MOE)
LOAD = Workload()
SIX = [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP(dp_replicate=2)]


def heaviest_parameters(spec: ModelSpec, ranks: int) -> int:
    return max(FSDP2().memory(spec, LOAD, world_size=ranks).kind_bytes("parameters")) // 4


def test_the_heaviest_rank_of_fsdp2_holds_the_uneven_rows():
    assert heaviest_parameters(L, 3) == 8_151
    assert heaviest_parameters(L, 4) == 5_992


def test_six_experts_on_four_ranks_go_two_two_two_none():
    assert heaviest_parameters(M, 4) == 9_968
    gate_up = (
        FSDP2()
        .memory(ModelSpec((TensorSpec("e", (6, 32, 32)),)), LOAD, world_size=4)
        .kind_bytes("parameters")
    )
    assert gate_up == (8_192, 8_192, 8_192, 0)


def test_hsdp_holds_what_fsdp2_holds_on_the_ranks_of_one_group():
    hsdp = HSDP(dp_replicate=2, dp_shard=3).memory(L, LOAD, world_size=6)
    fsdp2 = FSDP2().memory(L, LOAD, world_size=3)
    assert hsdp.per_rank == fsdp2.per_rank * 2


def test_ddp_holds_16_bytes_a_parameter_and_a_step_count_a_tensor():
    report = DDP().memory(L, LOAD, world_size=2)
    assert report.per_rank == (16 * 23_904 + 4 * 21,) * 2
    assert report.paper_bytes == 16 * 23_904


def test_zero_names_a_master_copy_that_the_paper_does_not_have_in_fp32():
    report = ZeRO3().memory(L, LOAD, world_size=2)
    assert report.model_state_bytes == 20 * 23_904 // 2 + 4


def test_the_paper_value_of_a_mixed_zero_3_is_the_papers_with_fp32_gradients():
    spec = ModelSpec.from_config(LLAMA_8B)
    report = ZeRO3(precision="bf16-mixed").memory(spec, LOAD, world_size=64)
    assert report.paper_bytes == model_state_bytes(spec.total_params, 64, 3, 2, 4, 12)


def test_flat_groups_are_padded_to_two_elements_a_rank():
    assert flat_numel(7, 3) == 12
    tensors = (TensorSpec("a", (7,)),)
    assert zero_memory(tensors, 3, 1, "fp32").kind_bytes("parameters") == (48, 48, 48)


def test_a_step_counts_micro_step_traffic_once_for_each_micro_step():
    sent = (
        Collective.of("all_gather", "dp_shard", 800, 4, "micro_step", "weights"),
        Collective.of("all_reduce", "dp", 800, 4, "step", "gradients"),
        Collective.of("all_gather", "dp", 800, 4, "save", "state"),
    )
    report = TrafficReport(sent, 3, 0, "nothing")
    assert report.bytes_per_step == 3 * 600 + 1_200
    assert report.payload_per_step() == {("all_gather", 4): 2_400, ("all_reduce", 4): 800}


def test_the_peak_is_the_fullest_phase_and_not_the_sum():
    lines = (
        MemoryLine("weights", "parameters", ("forward", "backward", "step"), (10, 12)),
        MemoryLine("gradients", "gradients", ("backward", "step"), (5, 5)),
        MemoryLine("gathered", "buffer", ("forward",), (20, 20)),
    )
    report = MemoryReport(lines, 0, "nothing")
    assert report.peak_bytes == 32
    assert report.per_rank == (15, 17)
    assert report.model_state_bytes == 17


def test_ddp_of_8b_in_bf16_on_8_ranks_sends_7_eighths_twice():
    spec = ModelSpec.from_config(LLAMA_8B)
    report = DDP(precision="bf16").traffic(spec, LOAD, world_size=8)
    gradients = 2 * 7 * 2 * spec.total_params / 8
    assert report.paper_bytes_per_step == gradients
    assert report.bytes_per_step - gradients == pytest.approx(7 * 24 + 2 * 7 * 16 / 8)


def test_zero_3_with_look_ahead_sends_less_than_the_paper_says_and_names_both():
    report = ZeRO3().traffic(L, LOAD, world_size=2)
    assert report.paper_bytes_per_step == 3 * 4 * 23_904 / 2
    assert report.bytes_per_step < report.paper_bytes_per_step
    without = ZeRO3(prefetch_bucket_size=0).traffic(L, LOAD, world_size=2)
    assert without.bytes_per_step == pytest.approx(without.paper_bytes_per_step, rel=1e-3)


def test_fsdp2_gathers_blocks_twice_and_the_root_once():
    twice = FSDP2().traffic(L, LOAD, world_size=2).payload_per_step()
    once = FSDP2(reshard_after_forward=False).traffic(L, LOAD, world_size=2).payload_per_step()
    blocks = 4 * sum(unit.numel for unit in L.units if unit.name)
    assert twice["all_gather", 2] - once["all_gather", 2] == blocks


def test_nothing_is_gathered_twice_where_all_fits_ahead():
    counts = fetch_counts([tensor.numel for tensor in L.tensors], L.module_visits(), FetchLimits())
    assert set(counts) == {1}


def test_a_70b_model_on_512_ranks_is_counted_in_seconds():
    values = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672}
    values |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    spec = ModelSpec.from_config(values)
    for strategy in SIX:
        strategy = HSDP(dp_shard=8) if isinstance(strategy, HSDP) else strategy
        assert strategy.traffic(spec, LOAD, world_size=512).bytes_per_step > 0
        assert len(strategy.memory(spec, LOAD, world_size=512).per_rank) == 512


@pytest.mark.parametrize("strategy", SIX, ids=str)
def test_one_rank_sends_nothing(strategy):
    strategy = HSDP(dp_replicate=1, dp_shard=1) if isinstance(strategy, HSDP) else strategy
    assert strategy.traffic(L, LOAD, world_size=1).bytes_per_step == 0


@pytest.mark.parametrize("strategy", SIX, ids=str)
def test_reports_print_the_implementation_and_the_paper(strategy):
    memory = str(strategy.memory(L, LOAD, world_size=4))
    traffic = str(strategy.traffic(L, LOAD, world_size=4))
    assert "model state" in memory
    assert "by the paper" in memory
    assert "in a step" in traffic
    assert "by the paper" in traffic
    assert max(len(line) for line in f"{memory}\n{traffic}".splitlines()) <= 120


def test_degrees_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ValueError, match="4 ranks"):
        HSDP(dp_replicate=2, dp_shard=2).memory(L, LOAD, world_size=6)


def test_a_model_that_is_all_frozen_gives_zero_nothing_to_partition():
    with pytest.raises(ValueError, match="0 of 1 parameters are trainable"):
        ZeRO2().memory(ModelSpec((TensorSpec("a", (4,), trainable=False),)), LOAD, world_size=2)


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="load, forward, loss, backward, step, save"):
        DDP().memory(L, LOAD, world_size=1).phase_bytes("bakward")


def test_planning_imports_no_torch():
    code = (
        "import sys\n"
        "from distft import HSDP, ModelSpec, Workload, ZeRO3\n"
        f"spec = ModelSpec.from_config({SMALL!r})\n"
        "for strategy in (ZeRO3(), HSDP(dp_shard=2)):\n"
        "    strategy.memory(spec, Workload(), world_size=4)\n"
        "    strategy.traffic(spec, Workload(), world_size=4)\n"
        "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
