"""Memory by phase from a few numbers: published and measured amounts, and what grows with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distft import ModelSpec
from distft.formulas.peak import Held, Layout, Run, predicted_memory
from distft.formulas.shape import Shape
from distft.formulas.working import (
    Kept,
    layer_copies,
    logit_bytes,
    score_bytes,
    selective_copies,
)

GIB = 2**30
GB = 10**9
MIXED = Held(4, 4, 8, 2, 2, 0, 2, 4)


def shape(name: str) -> Shape:
    found = ModelSpec.from_config(name).shape
    assert found is not None
    return found


def line(run: Run, name: str) -> int:
    return next(each.num_bytes for each in predicted_memory(run).lines if each.name == name)


@pytest.mark.parametrize(
    ("name", "measured"),
    [("Llama-3.1-8B", 28), ("Mistral-7B", 28), ("Qwen3-8B", 29.8), ("Qwen3-4B", 38)],
)
def test_copies_of_an_eager_layer_are_within_5_percent_of_those_measured(name, measured):
    assert layer_copies(shape(name)) == pytest.approx(measured, rel=0.05)


def test_selective_checkpointing_of_every_second_product_keeps_7_75_copies_of_an_8b():
    assert selective_copies(shape("Llama-3.1-8B")) == 7.75


def test_fused_kernels_keep_14_5_copies_of_a_1b():
    assert layer_copies(shape("Llama-3.2-1B"), Kept("fused")) == 14.5


def test_scores_of_qwen_7b_at_2048_tokens_are_20_gib():
    assert 32 * score_bytes(32, 2048, 1) == 20 * GIB


def test_logits_of_gemma_2_at_8192_tokens_are_about_28_gb():
    assert logit_bytes(8192, 256_000, "eager") / GIB == pytest.approx(28.0, rel=0.03)


def test_bytes_of_a_loss_fall_from_eager_to_fused():
    sizes = [logit_bytes(4096, 32_000, loss) for loss in ("eager", "compiled", "chunked", "fused")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)]
)
def test_states_follow_the_zero_paper(stage, gigabytes):
    model = Shape(1, 1, 1, 1, 1, 1, 0, 7_500_000_000, 7_500_000_000, 0)
    held = Held(weight=2, gradient=2, optimizer=12)
    report = predicted_memory(Run(model, Layout(dp_shard=64, stage=stage), held))
    assert report.model_state_bytes == gigabytes * GB


def test_sharding_over_128_gpus_in_place_of_8_saves_14_gib_of_states():
    run = Run(shape("Llama-3.1-8B"), Layout(dp_shard=8), MIXED)
    many = replace(run, layout=Layout(dp_shard=128))
    saved = predicted_memory(run).model_state_bytes - predicted_memory(many).model_state_bytes
    assert saved / GIB == pytest.approx(14.0, rel=0.01)


def test_the_peak_is_that_of_the_fullest_phase_and_no_sum():
    report = predicted_memory(Run(shape("Llama-3.1-8B"), Layout(dp_shard=8), MIXED))
    phases = {phase: report.phase_bytes(phase) for phase in ("loss", "backward", "step")}
    assert report.peak_bytes == max(phases.values()) == phases[report.peak_phase]
    assert report.peak_bytes < sum(each.num_bytes for each in report.lines)


def test_gradients_are_not_there_at_the_loss_unless_micro_steps_came_before():
    run = Run(shape("Llama-3.2-1B"), held=MIXED)
    more = replace(run, accumulates=True)
    gradients = 4 * run.shape.total
    phases = [predicted_memory(each).phase_bytes("loss") for each in (run, more)]
    assert phases[1] - phases[0] == gradients


def test_logits_grow_with_tokens_and_states_do_not():
    run = Run(shape("Llama-3.2-1B"), held=MIXED, rows=1)
    twice = replace(run, rows=2)
    assert line(twice, "logits and loss") == 2 * line(run, "logits and loss")
    states = {predicted_memory(each).model_state_bytes for each in (run, twice)}
    assert len(states) == 1


def test_checkpointing_keeps_one_copy_of_each_layer_and_computes_one_block_again():
    run = Run(shape("Llama-3.1-8B"), rows=1, seq_len=1024, checkpointing="full")
    copy = 1024 * 4096 * 2
    assert line(run, "activations") == 32 * copy
    assert line(run, "one block computed again") == 27 * copy


def test_a_root_that_is_not_split_is_embedding_and_head_together():
    run = Run(shape("Llama-3.1-8B"), Layout(dp_shard=8), MIXED)
    assert line(run, "gathered root") == 2 * 128_256 * 4096 * 2


def test_lora_holds_2_bytes_of_each_frozen_parameter_and_all_of_its_own():
    run = Run(shape("Llama-3.1-8B"), Layout(dp_shard=8), Held(4, 4, 8, 2, 2), adapters=42_000_000)
    held = 2 * run.shape.total / 8 + 16 * 42_000_000 / 8
    assert predicted_memory(run).model_state_bytes == pytest.approx(held, rel=1e-6)


def test_the_rank_of_adapters_hardly_matters():
    run = Run(shape("Llama-2-7B"), adapters=4_000_000, seq_len=2048)
    more = replace(run, adapters=32 * 4_000_000)
    grown = predicted_memory(more).peak_bytes - predicted_memory(run).peak_bytes
    assert 0 < grown < 0.1 * predicted_memory(run).peak_bytes


def test_nf4_weights_are_about_a_quarter_of_bf16_and_a_dequantized_matrix_comes_with_them():
    run = Run(shape("Llama-2-70B"), adapters=1, held=Held(frozen=0.516))
    frozen = line(run, "frozen parameters")
    assert frozen / (2 * run.shape.total) == pytest.approx(0.26, abs=0.01)
    assert line(run, "dequantized matrix") == 2 * 8192 * 28672


def test_offload_of_params_moves_states_to_the_host():
    run = Run(shape("Llama-3.1-8B"), Layout(dp_shard=8), MIXED, offload="params")
    report = predicted_memory(run)
    assert report.model_state_bytes == 0
    assert report.host_bytes == pytest.approx(2 * run.shape.total, rel=1e-6)


def test_experts_are_spread_over_ep_and_the_rest_over_all_ranks():
    model = shape("Qwen3-30B-A3B")
    report = predicted_memory(Run(model, Layout(dp_shard=8, ep=8), MIXED))
    assert report.kind_bytes("parameters") == (round(4 * model.total / 8),)


def test_reserved_and_process_memory_lie_above_live_tensors():
    report = predicted_memory(Run(shape("Llama-3.1-8B"), Layout(dp_shard=8), MIXED))
    assert report.peak_bytes < report.reserved_bytes < report.process_bytes


def test_an_expert_degree_that_divides_no_ranks_is_refused():
    with pytest.raises(ValueError, match="ep is 3, which does not divide the 8 ranks"):
        Layout(dp_shard=8, ep=3)
