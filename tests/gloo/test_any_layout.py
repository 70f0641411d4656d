"""A checkpoint goes on under any strategy, on any number of ranks, read in place or resharded."""

from __future__ import annotations

import pytest
import torch

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.readers import read_map
from tests.gloo.checkpoint_jobs import (
    Recipe,
    bytes_of_a_load,
    load_and_save,
    load_and_step,
    load_by_deepspeed,
    save_and_step,
    train_and_save,
    train_on,
)

STEPS = 3
# Every kind of source and every kind of target, and back.
CHAIN = [(ZeRO3(), 3), (FSDP2(), 4), (TP(tp=2), 2), (ZeRO2(), 2), (DDP(), 1)]
PAIRS = [
    ((ZeRO1(), 2), (ZeRO3(), 3)),
    ((ZeRO2(), 3), (ZeRO2(), 2)),
    ((DDP(), 2), (ZeRO1(), 3)),
    ((HSDP(dp_replicate=2), 4), (ZeRO3(), 2)),
]
WORLDS = [
    (DDP(), 2),
    (ZeRO1(), 3),
    (ZeRO2(), 2),
    (ZeRO3(), 3),
    (FSDP2(), 3),
    (HSDP(dp_replicate=2), 4),
    (TP(tp=2), 2),
    (EP(ep=3), 3),
    (EP(ep=2), 4),
    (NDParallel(tp=2), 4),
    (NDParallel(dp_replicate=2, tp=2), 4),
    (NDParallel(tp=2, ep=2), 4),
]
# Layers and experts that a rank of two axes holds in parts, from and into flat vectors.
QUICK = {(3, 11), (11, 1), (8, 2)}


def assert_goes_on(found, expected):
    """Compare the steps after a load with those of the run that never stopped."""
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(expected["losses"][1:]), rtol=1e-6, atol=0
    )
    assert found["counts"] == {1.0 + STEPS}
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def never_stopped(pools):
    """Return what one process has after all steps, by the number of groups."""
    return {
        two: pools(1).run(train_on, DDP(), Recipe(two_groups=two), 1 + STEPS)[0]
        for two in (False, True)
    }


def test_a_run_goes_from_strategy_to_strategy_and_nothing_changes(pools, never_stopped, tmp_path):
    recipe = Recipe(two_groups=True)
    (first, ranks), *others = CHAIN
    live = pools(ranks).run(train_and_save, first, recipe, tmp_path / "0", 1)[0]["weights"]
    for number, (strategy, ranks) in enumerate(others):
        pools(ranks).run(
            load_and_save, strategy, recipe, tmp_path / str(number), tmp_path / str(number + 1)
        )
        # Of every tensor, moment, counter and setting.
        found = distft.diff(tmp_path / str(number), tmp_path / str(number + 1))
        assert found.same, str(found)
        assert found.num_equal == 3 * len(live)
    found = pools(1).run(load_and_step, DDP(), recipe, tmp_path / str(len(others)), STEPS)[0]
    assert_goes_on(found, never_stopped[True])


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_any_checkpoint_goes_on_under_any_strategy(pools, never_stopped, tmp_path, source, target):
    pools(source[1]).run(train_and_save, source[0], Recipe(), tmp_path / "saved", 1)
    found = pools(target[1]).run(load_and_step, target[0], Recipe(), tmp_path / "saved", STEPS)[0]
    assert_goes_on(found, never_stopped[False])


@pytest.mark.parametrize("source", [(ZeRO3(), 3), (DDP(), 2)], ids=str)
def test_a_rank_reads_its_own_part_of_a_checkpoint(pools, tmp_path, source):
    recipe = Recipe(rows=2)
    pools(source[1]).run(train_and_save, source[0], recipe, tmp_path / "saved", 1)
    found = read_map(tmp_path / "saved")
    weights = sum(tensor.num_bytes for tensor in found.tensors.values())
    total = 3 * weights

    def read_by(strategy, ranks):
        return pools(ranks).run(bytes_of_a_load, strategy, recipe, tmp_path / "saved")

    for ranks in (2, 3, 4):
        read = read_by(FSDP2(), ranks)
        assert sum(read) == total
        # Of 4 key heads there is none for a third rank in four, and rows are dealt out unevenly.
        assert max(read) < 1.2 * total / ranks
    # DeepSpeed keeps vectors whole on every rank, beside its part of them.
    vectors = sum(t.num_bytes for t in found.tensors.values() if len(t.shape) == 1)
    assert sum(read_by(ZeRO3(), 2)) <= total + 2 * vectors
    # Weights are whole on every rank of stage 1, moments are not.
    assert sum(read_by(ZeRO1(), 2)) <= total + weights
    assert read_by(DDP(), 3) == [total] * 3


def test_a_resharded_run_goes_on(pools, never_stopped, tmp_path):
    recipe = Recipe(two_groups=True)
    pools(3).run(train_and_save, ZeRO3(), recipe, tmp_path / "saved", 1)
    for strategy, ranks in ((FSDP2(), 4), (ZeRO2(), 2)):
        out = distft.reshard(tmp_path / "saved", tmp_path / strategy.name, strategy, ranks)
        assert distft.diff(tmp_path / "saved", out).same
        found = pools(ranks).run(load_and_step, strategy, recipe, out, STEPS)[0]
        assert_goes_on(found, never_stopped[True])


@pytest.mark.parametrize(("strategy", "ranks"), [(ZeRO2(), 2), (ZeRO3(), 3)], ids=str)
def test_deepspeeds_own_engine_resumes_a_resharded_run(
    pools, never_stopped, tmp_path, strategy, ranks
):
    pools(2).run(train_and_save, FSDP2(), Recipe(), tmp_path / "saved", 1)
    out = distft.reshard(tmp_path / "saved", tmp_path / "out", strategy, ranks)
    found = pools(ranks).run(load_by_deepspeed, strategy, Recipe(), out / "deepspeed", STEPS)[0]
    assert_goes_on(found, never_stopped[False])


@pytest.mark.parametrize(
    ("source", "recipe"),
    [
        (ZeRO3(), Recipe(two_groups=True)),
        (FSDP2(), Recipe(two_groups=True, frozen="mlp.down", extra="buffers")),
    ],
    ids=str,
)
def test_the_engine_of_stage_3_goes_on_from_its_own_files_for_other_ranks(
    pools, never_stopped, tmp_path, source, recipe
):
    expected = never_stopped[True]
    if recipe.frozen:
        expected = pools(1).run(train_on, DDP(), recipe, 1 + STEPS)[0]
    pools(2).run(train_and_save, source, recipe, tmp_path / "saved", 1)
    strategy = ZeRO3(sub_group_size=2_000)
    out = distft.reshard(tmp_path / "saved", tmp_path / "out", strategy, 3, native=True)
    found = distft.diff(tmp_path / "saved", out)
    assert found.same, str(found)
    assert_goes_on(pools(3).run(load_and_step, strategy, recipe, out, STEPS)[0], expected)
    arguments = (strategy, recipe, out / "deepspeed", STEPS, False)
    assert_goes_on(pools(3).run(load_by_deepspeed, *arguments)[0], expected)


def test_files_of_an_engine_are_written_for_zero3_alone(pools, tmp_path):
    pools(2).run(train_and_save, FSDP2(), Recipe(), tmp_path / "saved", 1)
    with pytest.raises(ValueError, match=r"native=True.*of ZeRO-3, 1 of the strategies, and FSDP2"):
        distft.reshard(tmp_path / "saved", tmp_path / "out", FSDP2(), 2, native=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """Return the folder that a world wrote of a model with experts, and the next step's loss."""
    made = {}

    def write(world):
        if world not in made:
            strategy, ranks = WORLDS[world]
            path = tmp_path_factory.mktemp("saved") / "checkpoint"
            made[world] = path, pools(ranks).run(save_and_step, strategy, Recipe("M"), path)[0]
        return made[world]

    return write


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(
            source,
            target,
            id=f"{WORLDS[source][0]}@{WORLDS[source][1]}-{WORLDS[target][0]}@{WORLDS[target][1]}",
            marks=() if (source, target) in QUICK else pytest.mark.slow,
        )
        for source in range(len(WORLDS))
        for target in range(len(WORLDS))
    ],
)
def test_every_world_loads_what_every_other_saved(pools, saved, tmp_path, source, target):
    path, expected = saved(source)
    strategy, ranks = WORLDS[target]
    losses = pools(ranks).run(load_and_save, strategy, Recipe("M"), path, tmp_path / "again")
    assert losses == pytest.approx([expected] * ranks, rel=1e-6)
    found = distft.diff(path, tmp_path / "again")
    assert found.same, str(found)
