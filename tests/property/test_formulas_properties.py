"""Laws that the closed formulas keep at any size."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distft import formulas

params = st.integers(1, 10**12)
ranks = st.integers(1, 4096)
several = st.integers(2, 4096)
sizes = st.integers(0, 10**13)


@given(params, several)
def test_state_strictly_falls_with_the_stage(num_params, dp_shard):
    values = [formulas.model_state_bytes(num_params, dp_shard, stage) for stage in range(4)]
    assert values == sorted(set(values), reverse=True)


@given(params, several, st.integers(1, 3))
def test_state_strictly_falls_with_the_degree(num_params, dp_shard, stage):
    wider = formulas.model_state_bytes(num_params, dp_shard + 1, stage)
    assert wider < formulas.model_state_bytes(num_params, dp_shard, stage)


@given(params, ranks)
def test_stage_3_times_the_degree_is_the_baseline(num_params, dp_shard):
    baseline = formulas.model_state_bytes(num_params, dp_shard, 0)
    whole = formulas.model_state_bytes(num_params * dp_shard, dp_shard, 3)
    assert whole == baseline


@given(params)
def test_one_rank_collapses_all_stages(num_params):
    assert len({formulas.model_state_bytes(num_params, 1, stage) for stage in range(4)}) == 1


@given(sizes, ranks)
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_bytes, n):
    parts = [formulas.ring_fraction(op, num_bytes, n) for op in ("reduce_scatter", "all_gather")]
    assert formulas.ring_fraction("all_reduce", num_bytes, n) == sum(parts)


@given(sizes, ranks)
def test_ring_bytes_is_the_fraction_rounded_once(num_bytes, n):
    fraction = formulas.ring_fraction("all_reduce", num_bytes, n)
    value = formulas.ring_bytes("all_reduce", num_bytes, n)
    assert value == float(fraction) or value == fraction


@given(params, several, st.integers(1, 64))
def test_stage_3_moves_half_as_much_again_as_ddp_every_micro_step(num_params, dp_shard, accum):
    ddp = formulas.zero_traffic_bytes(num_params, dp_shard, 0)
    zero3 = formulas.zero_traffic_bytes(num_params, dp_shard, 3, grad_accum=accum)
    assert zero3 == pytest.approx(1.5 * accum * ddp, rel=1e-15)


@given(st.integers(0, 10**6), ranks)
def test_chunks_cover_every_row_once_and_never_grow(rows, n):
    chunks = formulas.chunk_rows(rows, n)
    assert sum(chunks) == rows
    assert len(chunks) == n
    assert list(chunks) == sorted(chunks, reverse=True)


@given(st.integers(1, 64), st.integers(1, 1024))
def test_a_pipeline_is_idle_a_share_between_zero_and_one_that_falls_with_micro_batches(stages, m):
    bubble = formulas.pipeline_bubble(stages, m)
    assert Fraction(0) <= bubble < 1
    assert formulas.pipeline_bubble(stages, m + 1) <= bubble


@given(*(st.integers(1, 256) for _ in range(5)))
def test_fused_expert_lora_never_has_more_parameters_than_separate(layers, e, r, d, f):
    separate = formulas.expert_lora_params(layers, e, r, d, f)
    fused = formulas.expert_lora_params(layers, e, r, d, f, fused=True)
    assert separate - fused == layers * e * r * d
