"""Axis sizes: FSDP2, HSDP, TP and EP are the special cases of one product."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distft import EP, FSDP2, HSDP, TP, NDParallel
from distft.mesh import Mesh

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes)
def test_named_strategies_have_the_mesh_of_their_product(replicas, shards, tp):
    ranks = replicas * shards
    assert FSDP2().mesh(ranks) == NDParallel().mesh(ranks)
    hsdp = HSDP(dp_replicate=replicas, dp_shard=shards)
    assert hsdp.mesh(ranks) == NDParallel(dp_replicate=replicas, dp_shard=shards).mesh(ranks)
    assert TP(tp=tp).mesh(shards * tp) == NDParallel(tp=tp).mesh(shards * tp)
    assert EP(ep=shards).mesh(ranks) == NDParallel(ep=shards).mesh(ranks)
    assert TP().mesh(ranks) == NDParallel(tp=ranks).mesh(ranks)
    assert EP().mesh(ranks) == NDParallel(ep=ranks).mesh(ranks)


@given(sizes, sizes, sizes, sizes)
def test_both_views_have_every_rank_once(replicas, shards, tp, efsdp):
    mesh = Mesh(dp_replicate=replicas, dp_shard=shards * efsdp, tp=tp, ep=tp * shards)
    places = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
    for axes in (("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "efsdp", "ep")):
        found = {tuple(place[axis] for axis in axes) for place in places}
        assert len(found) == mesh.num_ranks
    assert mesh.efsdp == efsdp
    assert [mesh.dp_rank(rank) for rank in range(mesh.num_ranks)] == [
        rank // tp for rank in range(mesh.num_ranks)
    ]


@given(st.lists(st.sampled_from("abc"), max_size=3))
def test_a_plan_is_a_value(names):
    plan = {name: "colwise" for name in names}
    first, second = TP(tp=2, plan=plan), TP(tp=2, plan=dict(reversed(plan.items())))
    assert first == second
    assert hash(first) == hash(second)
    assert eval(repr(first), {"TP": TP}) == first


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from(["fp32", "bf16"]))
def test_a_product_without_tp_and_ep_holds_what_fully_shard_holds(shards, replicas, defer, kind):
    from distft.formulas import parallel_memory, sharded_memory
    from distft.spec import ModelSpec, TensorSpec

    spec = ModelSpec(
        (
            TensorSpec("embed", (131, 8)),
            TensorSpec("a.w", (7, 8), "a"),
            TensorSpec("a.b", (5,), "a"),
        )
    )
    axes = {"dp_replicate": replicas, "dp_shard": shards, "tp": 1, "ep": 1}
    mine = parallel_memory(spec.tensors, axes, ({}, {}), kind, defer_reduce=defer)
    theirs = sharded_memory(spec.units, shards, replicas, kind, defer_reduce=defer)
    assert mine.per_rank == theirs.per_rank


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_parts_of_a_split_tensor_add_up_to_it(tp, rows, columns):
    from distft.formulas.parallel import part_of
    from distft.spec import TensorSpec

    tensor = TensorSpec("w", (rows, columns))
    for style in ("colwise", "rowwise", "embedding_rowwise", "embedding_colwise"):
        assert sum(part_of(tensor, style, tp, rank).numel for rank in range(tp)) == tensor.numel
