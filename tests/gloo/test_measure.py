"""The byte counter sees every collective, whoever makes it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distft.formulas import ring_bytes
from distft.measure import count_collectives
from distft.mesh import Mesh


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
    return [(r.op, r.num_bytes, r.ranks) for r in made.records], made.wire_bytes


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_collective_counts_its_full_buffer_once(pools, op, ranks):
    payload = 4 * 6 * ranks
    for records, wire_bytes in pools(ranks).run(make_one, op):
        assert records == [(op, payload, tuple(range(ranks)))]
        assert wire_bytes == ring_bytes(op, payload, ranks)


def in_a_part_of_the_world():
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    with count_collectives() as made:
        dist.all_reduce(torch.ones(4), group=groups[0 if dist.get_rank() < 2 else 1])
    return [(r.op, r.num_bytes, r.ranks) for r in made.records]


def test_a_group_of_one_rank_moves_nothing(pools):
    two = [("all_reduce", 16, (0, 1))]
    assert pools(3).run(in_a_part_of_the_world) == [two, two, []]


FUNCTIONAL = [
    "all_reduce",
    "all_reduce coalesced",
    "all_gather",
    "all_gather coalesced",
    "reduce_scatter",
    "reduce_scatter coalesced",
    "all_to_all",
    "all_to_all autograd",
    "broadcast",
]


def make_functional(kind):
    import torch.distributed._functional_collectives as functional

    ranks, world = dist.get_world_size(), dist.group.WORLD
    part, whole = torch.ones(6), torch.ones(6 * ranks, requires_grad=kind.endswith("autograd"))
    sizes = [6] * ranks
    with count_collectives() as made:
        {
            "all_reduce": lambda: functional.all_reduce(whole, "sum", world),
            "all_reduce coalesced": lambda: functional.all_reduce_coalesced([whole], "sum", world),
            "all_gather": lambda: functional.all_gather_tensor(part, 0, world),
            "all_gather coalesced": lambda: functional.all_gather_into_tensor_coalesced(
                [part], world
            ),
            "reduce_scatter": lambda: functional.reduce_scatter_tensor(whole, "sum", 0, world),
            "reduce_scatter coalesced": lambda: functional.reduce_scatter_tensor_coalesced(
                [whole], "sum", [0], world
            ),
            "all_to_all": lambda: functional.all_to_all_single(whole, sizes, sizes, world),
            "all_to_all autograd": lambda: functional.all_to_all_single_autograd(
                whole, sizes, sizes, world
            ),
            "broadcast": lambda: functional.broadcast(whole, 0, world),
        }[kind]()
    return [(r.op, r.num_bytes, r.group_size) for r in made.records]


@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_a_functional_collective_counts_its_full_buffer_once(pools, kind):
    expected = [(kind.split()[0], 4 * 6 * 3, 3)]
    assert pools(3).run(make_functional, kind) == [expected] * 3


def sum_of_parts():
    """Finish the sum that a DTensor stands for, on one axis of a mesh of two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))["columns"]
    parts = DTensor.from_local(torch.ones(5), mesh, [Partial()])
    with count_collectives() as made:
        parts.redistribute(placements=[Replicate()]).to_local()
    return [(r.op, r.num_bytes, r.ranks) for r in made.records]


def test_what_a_dtensor_sends_is_seen_and_says_its_axis(pools):
    mesh = Mesh(dp_shard=2, tp=2)
    for rank, records in enumerate(pools(4).run(sum_of_parts)):
        assert records == [("all_reduce", 20, mesh.group("tp", rank))]
