"""Published numbers of the closed formulas, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from distft import formulas

GB = 10**9


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)]
)
def test_zero_paper_example_of_7_5_billion_parameters_on_64_ranks(stage, gigabytes):
    assert formulas.model_state_bytes(7.5e9, 64, stage) == gigabytes * GB


def test_hsdp_state_of_8_billion_parameters_is_8_gb_sharded_16_ways_and_16_gb_in_groups_of_8():
    assert formulas.model_state_bytes(8e9, 16, 3) == 8 * GB
    assert formulas.model_state_bytes(8e9, 8, 3) == 16 * GB


@pytest.mark.parametrize(
    ("op", "passes"),
    [
        ("all_reduce", 2),
        ("all_gather", 1),
        ("reduce_scatter", 1),
        ("reduce", 1),
        ("broadcast", 1),
        ("all_to_all", 1),
    ],
)
def test_a_ring_sends_its_passes_times_n_minus_one_over_n(op, passes):
    assert formulas.ring_bytes(op, 16 * GB, 8) == passes * 14 * GB


def test_ring_bytes_is_an_int_where_the_value_is_whole_and_a_float_where_not():
    assert isinstance(formulas.ring_bytes("all_gather", 9.0, 3), int)
    assert formulas.ring_bytes("all_gather", 4, 3) == pytest.approx(8 / 3)


def test_one_rank_sends_nothing():
    assert formulas.ring_bytes("all_reduce", 1000, 1) == 0


def test_ddp_of_8_billion_bf16_gradients_on_8_ranks_moves_28_gb_a_step():
    assert formulas.ring_bytes("all_reduce", 16e9, 8) == 28 * GB
    assert formulas.zero_traffic_bytes(8e9, 8, 0) == 28 * GB


def test_zero3_of_8_billion_bf16_parameters_on_8_ranks_moves_42_gb_a_micro_step():
    assert formulas.zero_traffic_bytes(8e9, 8, 3) == 42 * GB
    assert formulas.zero_traffic_bytes(8e9, 8, 3, grad_accum=4) == 4 * 42 * GB


def test_gradient_accumulation_is_free_for_stage_1_and_adds_one_reduction_each_for_stage_2():
    assert formulas.zero_traffic_bytes(8e9, 8, 1, grad_accum=4) == 28 * GB
    assert formulas.zero_traffic_bytes(8e9, 8, 2, grad_accum=4) == 5 * 14 * GB


def test_lora_state_is_2_bytes_per_base_and_16_per_trained_parameter_over_the_shards():
    assert formulas.lora_state_bytes(8e9, 4e6, 8) == 2 * 8e9 / 8 + 16 * 4e6 / 8


def test_expert_lora_of_qwen3_30b_a3b_has_830_million_parameters_at_rank_16():
    assert formulas.expert_lora_params(48, 128, 16, 2048, 768) == 830_472_192
    assert formulas.expert_lora_params(48, 128, max(1, 16 // 128), 2048, 768) == 51_904_512


def test_expert_lora_of_the_toy_mixture_has_576_parameters():
    assert formulas.expert_lora_params(1, 4, 2, 8, 16) == 576


def test_expert_lora_on_fused_gate_and_up_shares_one_factor():
    assert formulas.expert_lora_params(1, 4, 2, 8, 16, fused=True) == 4 * 2 * (2 * 8 + 3 * 16)


def test_pipeline_bubble_of_4_stages_and_16_micro_batches_is_3_nineteenths():
    assert formulas.pipeline_bubble(4, 16) == Fraction(3, 19)


def test_2048_tokens_of_8_billion_parameters_take_a_quarter_second_at_400_teraflops():
    flops = formulas.training_flops(8e9, 2048)
    assert flops == 98_304_000_000_000
    assert round(formulas.seconds(flops, 400e12), 2) == 0.25


def test_42_gb_hide_behind_that_compute_on_nvlink_and_not_on_pcie():
    compute = formulas.seconds(formulas.training_flops(8e9, 2048), 400e12)
    assert round(formulas.seconds(42 * GB, 450e9), 2) == 0.09
    assert formulas.seconds(42 * GB, 64e9) > 2 * compute


def test_tensor_parallelism_moves_four_all_reduces_of_an_activation_per_layer():
    one = formulas.ring_bytes("all_reduce", 2 * 128 * 64 * 2, 4)
    assert formulas.tensor_parallel_bytes(3, 2, 128, 64, 4) == 3 * 4 * one


def test_expert_parallelism_moves_tokens_times_top_k_and_not_parameters():
    one = formulas.ring_bytes("all_to_all", 100 * 8 * 64 * 2, 4)
    assert formulas.expert_parallel_bytes(2, 100, 8, 64, 4) == 2 * 4 * one


def test_chunks_are_cut_as_torch_chunk_cuts_them():
    assert formulas.chunk_rows(6, 4) == (2, 2, 2, 0)
    assert formulas.chunk_rows(131, 3) == (44, 44, 43)


@pytest.mark.parametrize("stage", [-1, 4, 1.5, True, "3", None])
def test_a_stage_outside_0_to_3_is_refused(stage):
    with pytest.raises(ValueError, match="stages 0, 1, 2 and 3"):
        formulas.model_state_bytes(1, 1, stage)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2", None, float("nan")])
def test_ranks_that_are_no_whole_number_of_at_least_one_are_refused(ranks):
    with pytest.raises(ValueError, match="ranks is"):
        formulas.ring_bytes("all_reduce", 8, ranks)
    with pytest.raises(ValueError, match="dp_shard is"):
        formulas.model_state_bytes(8, ranks, 0)


@pytest.mark.parametrize("amount", [-1, True, "8", None, float("inf"), float("nan")])
def test_amounts_that_are_negative_or_no_numbers_are_refused(amount):
    with pytest.raises(ValueError, match="num_bytes is"):
        formulas.ring_bytes("all_reduce", amount, 2)
    with pytest.raises(ValueError, match="num_params is"):
        formulas.model_state_bytes(amount, 2, 0)
    with pytest.raises(ValueError, match="tokens is"):
        formulas.training_flops(1, amount)


def test_an_unknown_collective_lists_the_known_ones_and_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"all_gather, reduce_scatter.*Did you mean 'all_reduce'"):
        formulas.ring_bytes("allreduce", 8, 2)


def test_a_speed_of_zero_is_refused():
    with pytest.raises(ValueError, match="per_second is 0"):
        formulas.seconds(1, 0)


def test_the_package_imports_nothing_outside_the_standard_library():
    code = (
        "import sys, distft.formulas; "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
