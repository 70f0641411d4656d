"""Axis sizes: FSDP2, HSDP, TP and EP are the special cases of one product."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distft import EP, FSDP2, HSDP, TP, ModelSpec, NDParallel, Workload
from distft.mesh import Mesh

SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
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


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, sizes, st.data())
def test_the_groups_of_an_axis_are_of_its_size_and_share_no_rank(replicas, shards, tp, efsdp, data):
    mesh = Mesh(dp_replicate=replicas, dp_shard=shards * efsdp, tp=tp, ep=tp * shards)
    axis = data.draw(st.sampled_from(["dp_replicate", "dp_shard", "tp", "efsdp", "ep", "world"]))
    rank = data.draw(st.integers(0, mesh.num_ranks - 1))
    group = mesh.group(axis, rank)
    assert rank in group
    assert len(group) == (mesh.num_ranks if axis == "world" else getattr(mesh, axis))
    assert mesh.group(axis, group[0]) == mesh.group(axis, group[-1]) == group


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from(["fp32", "bf16"]))
def test_a_product_without_tp_and_ep_sends_what_fully_shard_sends(shards, replicas, defer, kind):
    from distft.formulas import MicroStep, parallel_traffic, sharded_traffic

    spec = ModelSpec.from_config(SMALL)
    axes = {"dp_replicate": replicas, "dp_shard": shards, "tp": 1, "ep": 1}
    mine = parallel_traffic(
        spec.units, spec.ties, axes, spec.rules, kind, MicroStep(16), 3, True, defer
    )
    theirs = sharded_traffic(spec.units, shards, replicas, kind, 3, True, defer)
    assert mine.payload_per_step() == theirs.payload_per_step()
    assert mine.bytes_per_step == theirs.bytes_per_step
    assert mine.paper_bytes_per_step == theirs.paper_bytes_per_step


PRODUCTS = [
    (TP(tp=2), 2),
    (TP(tp=2, activation_checkpointing=True), 4),
    (EP(ep=3), 6),
    (NDParallel(tp=2, ep=2), 4),
    (NDParallel(dp_replicate=2, tp=2, ep=6, precision="bf16-mixed"), 24),
]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(PRODUCTS), st.integers(1, 4), st.integers(1, 40), st.integers(1, 5))
def test_activations_grow_with_tokens_and_weights_with_micro_steps(case, rows, pairs, steps):
    strategy, ranks = case
    spec = ModelSpec.from_config(SMALL)

    def sent(rows, length, steps=1):
        load = Workload(micro_batch=rows, seq_len=length, grad_accum=steps)
        return strategy.traffic(spec, load, world_size=ranks)

    # An even number of tokens is cut into two equal slices.
    once, twice, thrice = (sent(rows, times * 2 * pairs).payload_by_axis() for times in (1, 2, 3))
    assert all(twice[key] - once[key] == thrice[key] - twice[key] for key in once)
    assert sent(rows, 2 * pairs) == sent(1, rows * 2 * pairs)
    one, more, most = (sent(rows, 2 * pairs, number) for number in (steps, steps + 1, steps + 2))
    assert one.collectives == more.collectives
    added = {key: n - one.payload_by_axis()[key] for key, n in more.payload_by_axis().items()}
    assert added == {
        key: n - more.payload_by_axis()[key] for key, n in most.payload_by_axis().items()
    }


def test_a_style_whose_traffic_nobody_counted_is_refused_by_name():
    spec = ModelSpec.from_config(SMALL)
    strategy = TP(tp=2, plan={"model.layers.*.self_attn.o_proj": "sequence_parallel"})
    with pytest.raises(ValueError, match=r"o_proj sends as 'sequence_parallel' over 2 ranks"):
        strategy.traffic(spec, Workload(), world_size=2)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_parts_of_a_split_tensor_add_up_to_it(tp, rows, columns):
    from distft.formulas.split_rules import part_of
    from distft.spec import TensorSpec

    tensor = TensorSpec("w", (rows, columns))
    for style in ("colwise", "rowwise", "embedding_rowwise", "embedding_colwise"):
        assert sum(part_of(tensor, style, tp, rank).numel for rank in range(tp)) == tensor.numel
