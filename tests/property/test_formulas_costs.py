"""Laws that the costs of implementations keep for any tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distft.formulas import FetchLimits, Visit, ddp_traffic, fetch_counts, zero_memory
from distft.formulas.native import Shards, ddp_memory, padded_numel, sharded_memory
from distft.spec import ModelSpec, TensorSpec

shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=8)
ranks = st.integers(1, 9)


def spec_of(sizes: list[list[int]]) -> ModelSpec:
    return ModelSpec(
        tuple(
            TensorSpec(f"blocks.{i}.weight", tuple(shape), f"blocks.{i}" if i % 2 else "")
            for i, shape in enumerate(sizes)
        )
    )


@given(shapes, ranks)
def test_shards_hold_every_element_once(sizes, n):
    spec = spec_of(sizes)
    shards = Shards.of(spec.tensors, n)
    assert sum(shards.held) == spec.total_params
    assert n * max(shards.held) <= padded_numel(spec.tensors, n)


@given(shapes, ranks)
def test_the_heaviest_rank_holds_at_least_the_papers_even_share(sizes, n):
    spec = spec_of(sizes)
    report = sharded_memory(spec.units, n, 1, "fp32")
    assert report.model_state_bytes >= report.paper_bytes
    for stage in (1, 2, 3):
        partitioned = zero_memory(spec.tensors, n, stage, "bf16-mixed")
        assert n * max(partitioned.kind_bytes("optimizer")) >= 12 * spec.total_params


@given(shapes)
def test_one_rank_shards_nothing(sizes):
    spec = spec_of(sizes)
    whole = ddp_memory(spec.tensors, 1, "fp32").per_rank
    assert sharded_memory(spec.units, 1, 1, "fp32").per_rank == whole
    assert ddp_traffic(spec.tensors, 1, "fp32", 3).bytes_per_step == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 200))
def test_each_parameter_is_gathered_at_least_once_and_at_most_at_each_use(numels, prefetch):
    forward = [Visit((index,)) for index in range(len(numels))]
    counts = fetch_counts(numels, [*forward, *reversed(forward)], FetchLimits(prefetch=prefetch))
    assert all(1 <= count <= 2 for count in counts)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_without_look_ahead_every_use_gathers(numels):
    forward = [Visit((index,)) for index in range(len(numels))]
    counts = fetch_counts(numels, [*forward, *reversed(forward)], FetchLimits(prefetch=0))
    assert counts == [2] * len(numels)
