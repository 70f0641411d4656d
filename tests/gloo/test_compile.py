"""`compile="block"`: compiled blocks train as one process does, and cost what is said."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import pytest
import torch

from distft import DDP, FSDP2, HSDP, ModelSpec, Workload, ZeRO1, ZeRO2, ZeRO3, unwrap
from distft.measure import count_collectives, model_state_bytes
from distft.process_group import init
from distft.testing.models import tiny_batches, tiny_model
from distft.testing.runs import Training, TrainingRecord, differences, train_alone, train_under

WORLDS = [
    *[(kind(compile="block"), 2) for kind in (DDP, ZeRO1, ZeRO2, ZeRO3, FSDP2)],
    (FSDP2(compile="block"), 3),
    (HSDP(dp_replicate=2, compile="block"), 4),
]
# Compiling takes most of the time: three seams in every run, all of them in the slow ones.
FAST = ("ddp", "zero3", "fsdp2")
PARAMS = [
    pytest.param(
        strategy,
        ranks,
        id=f"{strategy}@{ranks}",
        marks=[] if strategy.name in FAST and ranks == 2 else [pytest.mark.slow],
    )
    for strategy, ranks in WORLDS
]
DROPOUT = {"attention_dropout": 0.2}


@cache
def reference(ranks: int) -> TrainingRecord:
    return train_alone(Training("L", 3, 2 * ranks, 0.1))


def compiled_training(strategy: Any, training: Training) -> tuple[TrainingRecord, int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    record = train_under(strategy, training)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    return record, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("strategy", "ranks"), PARAMS)
def test_compiled_blocks_train_as_one_process(pools, strategy, ranks):
    training = Training("L", 3, 2 * ranks, 0.1)
    for record, graphs in pools(ranks).run(compiled_training, strategy, training):
        assert differences(record, reference(ranks)) == []
        # Two blocks: one graph serves both.
        assert graphs == 1


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param(
            strategy,
            ranks,
            id=f"{strategy}@{ranks}",
            marks=[] if (strategy.name, ranks) == ("fsdp2", 2) else [pytest.mark.slow],
        )
        for strategy, ranks in WORLDS
    ],
)
def test_recomputed_compiled_blocks_draw_the_same_dropout(pools, strategy, ranks):
    training = Training("L", 3, 2 * ranks, 0.1, changes=DROPOUT)
    checkpointed = dataclasses.replace(strategy, activation_checkpointing=True)
    kept = pools(ranks).run(train_under, strategy, training)
    for found, expected in zip(
        pools(ranks).run(train_under, checkpointed, training), kept, strict=True
    ):
        assert differences(found, expected) == []


def uses(strategy: Any, path: str) -> dict[str, Any]:
    """Lengths that differ, a save, a load, evaluation and generation, beside the eager model."""
    init(seed=0)
    found: dict[str, list[Any]] = {}
    for which in (strategy, dataclasses.replace(strategy, compile=None)):
        model, optimizer = which.apply(tiny_model("L"), partial(torch.optim.AdamW, lr=1e-3))
        values: list[Any] = []
        for length in (16, 20, 12):
            batches = tiny_batches([5, 9], length=length)
            values.append(which.train_step(model, optimizer, batches).loss)
        if which.compile:
            which.save(path, model, optimizer, step=3)
            which.load(path, model, optimizer)
        values.append(which.eval_step(model, tiny_batches([7])).loss)
        ids = which.generate(model, input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=5)
        found[str(which.compile)] = [values, ids.tolist(), sorted(which.gather_weights(model))]
        assert not any("_orig_mod" in key for key in unwrap(model).state_dict())
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DDP(compile="block"), marks=pytest.mark.slow),
        pytest.param(ZeRO3(compile="block"), marks=pytest.mark.slow),
        FSDP2(compile="block"),
    ],
    ids=repr,
)
def test_a_compiled_model_evaluates_generates_saves_and_loads(pools, strategy, tmp_path):
    for found in pools(2).run(uses, strategy, str(tmp_path / "saved")):
        assert found["block"][0] == pytest.approx(found["None"][0], rel=1e-6)
        assert found["block"][1:] == found["None"][1:]


def costs(strategy: Any) -> tuple[list[int], float, int]:
    init(seed=0)
    spec = ModelSpec.from_model(tiny_model("L"))
    model, optimizer = strategy.apply(tiny_model("L"), partial(torch.optim.AdamW, lr=1e-3))
    for step in range(3):
        strategy.train_step(model, optimizer, tiny_batches([5], seed=step))
    with count_collectives() as made:
        strategy.train_step(model, optimizer, tiny_batches([5]))
    optimizer.zero_grad()
    strategy.backward(model(**tiny_batches([9])[0]).loss)
    held = model_state_bytes(model, optimizer).total
    optimizer.zero_grad()
    load = Workload(seq_len=16)
    return (
        [strategy.memory(spec, load, world_size=2).per_rank[strategy.dp_rank], held],
        strategy.traffic(spec, load, world_size=2).bytes_per_step,
        made.wire_bytes,
    )


@pytest.mark.parametrize(
    "strategy",
    [
        ZeRO3(compile="block"),
        pytest.param(ZeRO3(compile="block", prefetch_bucket_size=0), marks=pytest.mark.slow),
        pytest.param(ZeRO3(compile="block", activation_checkpointing=True), marks=pytest.mark.slow),
        ZeRO3(compile="block", activation_checkpointing=True, prefetch_bucket_size=0),
        FSDP2(compile="block"),
    ],
    ids=repr,
)
def test_costs_of_compiled_blocks_are_exact(pools, strategy):
    for memory, said, sent in pools(2).run(costs, strategy):
        assert memory[0] == memory[1]
        assert said == sent


def without_compiler(rank_without: int) -> str:
    init(seed=0)
    mine = torch.distributed.get_rank() == rank_without
    search = {"cpp.cxx": ("/no/such/compiler",)} if mine else {}
    with torch._inductor.config.patch(search), pytest.raises(RuntimeError) as raised:
        DDP(compile="block").apply(tiny_model("L"), partial(torch.optim.SGD, lr=0.1))
    return str(raised.value)


def test_a_rank_without_a_compiler_stops_every_rank(pools):
    for message in pools(2).run(without_compiler, 1):
        assert 'compile="block" needs 1 working compiler' in message
        assert "leave compile out" in message


def compile_twice() -> bool:
    from distft.strategies.blocks import compile_blocks

    model = tiny_model("L")
    compile_blocks(model)
    before = [layer.forward for layer in model.model.layers]
    compile_blocks(model)
    return all(a is b.forward for a, b in zip(before, model.model.layers, strict=True))


def test_a_compiled_block_is_not_compiled_again(pools):
    assert pools(2).run(compile_twice) == [True, True]
