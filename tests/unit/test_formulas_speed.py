"""Time of a step: FLOPs, what hides communication, bubbles, launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distft import ModelSpec
from distft.formulas.peak import Held, Layout, Run
from distft.formulas.speed import Chip, Wires, step_time
from distft.formulas.working import Kept

H100 = Chip(989e12, 3.35e12, 0.5, 0.27)
NVLINK, PCIE = Wires(shard=370e9, start=0), Wires(shard=35e9, start=0)


def run_of(name: str, layout: Layout, rows: int = 1, seq_len: int = 2048) -> Run:
    shape = ModelSpec.from_config(name).shape
    assert shape is not None
    return Run(shape, layout, Held(2, 2, 4, reduced=2), rows, seq_len, Kept("compiled"))


def test_flops_are_six_a_parameter_and_token_plus_attention():
    run = run_of("Llama-3.1-8B", Layout())
    products = 6 * (run.shape.total - 128_256 * 4096)
    attention = 12 * 32 * 4096 * 2048
    assert step_time(run, H100, NVLINK).flops == 2048 * (products + attention)


def test_the_gathers_of_an_8b_move_42_gb_which_nvlink_hides_and_pcie_does_not():
    fast, slow = (
        step_time(run_of("Llama-3.1-8B", Layout(dp_shard=8)), H100, wires)
        for wires in (NVLINK, PCIE)
    )
    assert fast.communication == pytest.approx(7 / 8 * 3 * 2 * 8.03e9 / 370e9, rel=1e-3)
    assert fast.exposed < 0.1 * fast.compute
    assert slow.communication > 2 * slow.compute
    assert slow.exposed > slow.compute


def test_accumulation_amortizes_the_sum_of_ddp_and_not_the_gathers_of_fsdp():
    times = {
        stage: step_time(run_of("Llama-3.1-8B", Layout(dp_shard=8, stage=stage)), H100, PCIE, 8)
        for stage in (0, 3)
    }
    moved = 7 / 8 * 2 * 8_030_261_248 / 35e9
    assert times[0].communication == pytest.approx(2 * moved)
    assert times[3].communication == pytest.approx(8 * 3 * moved)


def test_a_pipeline_idles_p_minus_1_over_m_of_its_work():
    run = run_of("Llama-3.1-8B", Layout(pp=4))
    time = step_time(run, H100, Wires(pp=float("inf")), grad_accum=16)
    assert time.bubble / (time.seconds - time.update) == pytest.approx(3 / 19)


def test_experts_are_counted_by_those_that_a_token_visits():
    run = run_of("Qwen3-30B-A3B", Layout(dp_shard=8, ep=8))
    time = step_time(run, H100, NVLINK)
    assert time.flops / 2048 < 1.5 * 6 * 3.35e9


def test_frozen_weights_need_two_thirds_of_the_flops():
    run = run_of("Llama-3.1-8B", Layout(), seq_len=1)
    full = step_time(run, H100, NVLINK).flops
    assert step_time(replace(run, adapters=1), H100, NVLINK).flops == pytest.approx(
        full * 2 / 3, rel=1e-3
    )


def test_a_step_of_a_few_tokens_is_bound_by_launches():
    assert step_time(run_of("Llama-3.1-8B", Layout(), seq_len=16), H100, NVLINK).launch_bound


def test_mfu_is_the_share_of_the_peak():
    time = step_time(run_of("Llama-3.1-8B", Layout(), 4), H100, NVLINK)
    assert time.mfu(H100) == pytest.approx(time.flops / time.seconds / 989e12)
    assert 0.3 < time.mfu(H100) < 0.5
