"""The byte counter sees every collective, whoever makes it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distft.formulas import ring_bytes
from distft.measure import count_collectives


def make_one(op):
    ranks = dist.get_world_size()
    part = torch.ones(6)
    whole = torch.ones(6 * ranks)
    with count_collectives() as made:
        {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part),
            "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(ranks))),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "reduce": lambda: dist.reduce(whole, 0),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        }[op]()
        dist.barrier()
    return [(r.op, r.num_bytes, r.group_size) for r in made.records], made.wire_bytes


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_counts_its_full_buffer_once(pools, op, ranks):
    payload = 4 * 6 * ranks
    for records, wire_bytes in pools(ranks).run(make_one, op):
        assert records == [(op, payload, ranks)]
        assert wire_bytes == ring_bytes(op, payload, ranks)


def in_a_part_of_the_world():
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    with count_collectives() as made:
        dist.all_reduce(torch.ones(4), group=groups[0 if dist.get_rank() < 2 else 1])
    return [(r.op, r.num_bytes, r.group_size) for r in made.records]


def test_a_group_of_one_rank_moves_nothing(pools):
    two = [("all_reduce", 16, 2)]
    assert pools(3).run(in_a_part_of_the_world) == [two, two, []]
