"""The simulated collectives give what gloo gives on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distft.testing import simulate


def inputs(ranks: int, rows: int) -> list[torch.Tensor]:
    """Return each rank's tensor; whole numbers, so that the order of addition does not matter."""
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randint(-50, 50, (rows, 2), generator=generator).float() for _ in range(ranks)]


def splits(ranks: int) -> list[list[int]]:
    return [[(sender + 2 * receiver) % 3 for receiver in range(ranks)] for sender in range(ranks)]


def real_collectives(rows: int) -> dict[str, torch.Tensor]:
    """Return what this rank has after each of torch's own collectives."""
    import distft

    distft.init()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = inputs(ranks, rows)[rank]
    size = simulate.shard_size(rows, ranks)
    found = {}
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], src=ranks - 1)
    found["all_reduce"] = mine.clone()
    dist.all_reduce(found["all_reduce"])
    padded = torch.cat([mine, mine.new_zeros(size * ranks - rows, 2)])
    found["reduce_scatter"] = mine.new_empty(size, 2)
    dist.reduce_scatter(found["reduce_scatter"], list(padded.chunk(ranks)))
    whole = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(whole, mine)
    found["all_gather"] = torch.cat(whole)
    sizes = splits(ranks)
    sent = inputs(ranks, sum(sizes[rank]))[rank]
    of_me = [sizes[sender][rank] for sender in range(ranks)]
    found["all_to_all"] = mine.new_empty(sum(of_me), 2)
    dist.all_to_all_single(found["all_to_all"], sent, of_me, sizes[rank])
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_simulated_collective_equals_the_one_of_gloo(pools, ranks):
    rows = 7
    mine, sizes = inputs(ranks, rows), splits(ranks)
    sent = [inputs(ranks, sum(sizes[rank]))[rank] for rank in range(ranks)]
    expected = {
        "broadcast": simulate.broadcast(mine, src=ranks - 1),
        "all_reduce": simulate.all_reduce(mine),
        "reduce_scatter": simulate.reduce_scatter(mine),
        "all_gather": simulate.all_gather(mine),
        "all_to_all": simulate.all_to_all(sent, sizes),
    }
    for rank, found in enumerate(pools(ranks).run(real_collectives, rows)):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name][rank]), f"{name} on rank {rank}"
