"""The collectives as tensor algebra: the identities that data parallelism stands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distft.testing import simulate

# Whole numbers in fp32 add without rounding, so that every identity is exact.
SMALL = 64

# The first call into torch may take longer than hypothesis allows a call.
property_of_torch = settings(deadline=None, max_examples=60)


@st.composite
def tensors_of_ranks(draw: st.DrawFn, rows_of: Any = None) -> list[torch.Tensor]:
    ranks = draw(st.integers(1, 5))
    rows = draw(st.integers(0, 9)) if rows_of is None else rows_of * ranks
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (rows, draw(st.integers(1, 3)))
    return [torch.randint(-SMALL, SMALL, shape, generator=generator).float() for _ in range(ranks)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@property_of_torch
@given(tensors_of_ranks())
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(tensors):
    shards = simulate.reduce_scatter(tensors)
    assert equal(simulate.all_gather(shards, len(tensors[0])), simulate.all_reduce(tensors))


@property_of_torch
@given(tensors_of_ranks())
def test_shards_of_a_padded_reduce_scatter_are_equal_and_padded_with_zeros(tensors):
    rows, ranks = len(tensors[0]), len(tensors)
    shards = simulate.reduce_scatter(tensors)
    assert {len(shard) for shard in shards} == {-(-rows // ranks)}
    assert torch.equal(torch.cat(shards)[:rows], torch.stack(tensors).sum(0))
    assert not torch.cat(shards)[rows:].any()


@property_of_torch
@given(st.integers(1, 3).flatmap(lambda rows: tensors_of_ranks(rows_of=rows)))
def test_all_to_all_of_equal_parts_is_its_own_inverse(tensors):
    assert equal(simulate.all_to_all(simulate.all_to_all(tensors)), tensors)


@property_of_torch
@given(st.data())
def test_all_to_all_comes_back_with_the_transposed_splits(data):
    ranks = data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    splits = data.draw(st.lists(row, min_size=ranks, max_size=ranks))
    tensors = [torch.randn(sum(sizes), 2) for sizes in splits]
    there = simulate.all_to_all(tensors, splits)
    assert equal(simulate.all_to_all(there, list(zip(*splits, strict=True))), tensors)


@property_of_torch
@given(tensors_of_ranks(), st.data())
def test_a_broadcast_gives_every_rank_the_source_in_memory_of_its_own(tensors, data):
    src = data.draw(st.integers(0, len(tensors) - 1))
    before = tensors[src].clone()
    found = simulate.broadcast(tensors, src)
    for tensor in found:
        assert torch.equal(tensor, before)
        tensor.add_(1)
    assert torch.equal(tensors[src], before)


@property_of_torch
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=4).filter(
        lambda ranks: sum(map(sum, ranks)) > 0
    )
)
def test_shards_over_the_global_count_sum_to_the_gradient_of_the_global_mean(counts):
    """Rank by rank, micro-step by micro-step, with unequal loss tokens: the DDP identity."""
    generator = torch.Generator().manual_seed(sum(map(sum, counts)))
    weight = torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = [
        [torch.randn(count, 3, dtype=torch.float64, generator=generator) for count in rank]
        for rank in counts
    ]
    total = sum(map(sum, counts))

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, weight)[0]

    shares = []
    for rank in rows:
        of_rank = [gradient(((batch @ weight) ** 2).sum() / total) for batch in rank]
        shares.append(torch.stack(of_rank).sum(0))
    everything = torch.cat([batch for rank in rows for batch in rank])
    expected = gradient(((everything @ weight) ** 2).mean())
    for found in simulate.all_reduce(shares):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: simulate.all_reduce([]), "at least 1 rank, and got 0"),
        (lambda: simulate.all_reduce([torch.ones(2), torch.ones(3)]), r"rank 1 has \(3,\)"),
        (lambda: simulate.reduce_scatter([torch.tensor(1.0)]), "0 dims"),
        (lambda: simulate.broadcast([torch.ones(2)], src=1), "src=1.* on 1 ranks"),
        (lambda: simulate.all_gather([torch.ones(2)], num_rows=3), "num_rows=3.* 2 rows"),
        (lambda: simulate.all_to_all([torch.ones(3)] * 2), "3 rows on 2 ranks has no equal"),
        (lambda: simulate.all_to_all([torch.ones(3)], [[2]]), "has 3 rows .* sum to 2"),
        (lambda: simulate.all_to_all([torch.ones(3)], [[1, 2]]), "1 x 1 numbers"),
        (lambda: simulate.shard_size(3, 0), "at least 0 rows and 1 rank"),
    ],
)
def test_what_real_ranks_would_hang_on_is_refused_with_the_numbers(call, says):
    with pytest.raises(ValueError, match=says):
        call()
