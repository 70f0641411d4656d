"""Saves and loads of TP, EP and products of axes, in each other's layouts."""

from __future__ import annotations

import pytest

from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, consolidate
from distft.testing import tiny_model
from tests.gloo.parallel_jobs import load_and_train, load_pretrained, train_and_save

WORLDS = [
    (DDP(), 2),
    (FSDP2(), 3),
    (HSDP(dp_replicate=2), 4),
    (TP(tp=2), 2),
    (EP(ep=3), 3),
    (EP(ep=2), 4),
    (NDParallel(tp=2), 4),
    (NDParallel(dp_replicate=2, tp=2), 4),
    (NDParallel(tp=2, ep=2), 4),
]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in WORLDS]
# Each once as source and once as target.
RING = [
    (WORLDS[source], WORLDS[target])
    for source, target in zip(
        range(len(WORLDS)), [(index + 4) % 9 for index in range(9)], strict=True
    )
]
EVERY = [(source, target) for source in WORLDS for target in WORLDS]
LATER = [pair for pair in EVERY if pair not in RING]


def same(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert (found[name] == tensor).all(), name


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """Return the folder that a strategy wrote, its whole state, and the losses after it."""
    made = {}

    def write(strategy, ranks):
        if repr(strategy) not in made:
            path = tmp_path_factory.mktemp("saved") / "checkpoint"
            answer = pools(ranks).run(train_and_save, strategy, "M", str(path))
            made[repr(strategy)] = (path, *answer[0])
        return made[repr(strategy)]

    return write


def check(pools, saved, source, target):
    path, state, losses = saved(*source)
    for found, after in pools(target[1]).run(load_and_train, target[0], "M", str(path)):
        same(found, state)
        exact = source[0] == target[0]
        for mine, expected in zip(after, losses, strict=True):
            assert mine == expected if exact else abs(mine - expected) <= 1e-6 * expected


@pytest.mark.parametrize(("source", "target"), RING, ids=str)
def test_what_one_saves_another_loads_whole_and_goes_on_from(pools, saved, source, target):
    check(pools, saved, source, target)


@pytest.mark.parametrize("world", WORLDS[3:], ids=IDS[3:])
def test_a_run_resumes_to_the_bit(pools, saved, world):
    check(pools, saved, world, world)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), LATER, ids=str)
def test_every_layout_loads_every_other(pools, saved, source, target):
    check(pools, saved, source, target)


@pytest.mark.parametrize("world", [WORLDS[3], WORLDS[8]], ids=str)
def test_a_consolidated_checkpoint_loads_in_transformers(pools, saved, world, tmp_path):
    from transformers import AutoModelForCausalLM

    path, state, _ = saved(*world)
    consolidate(path, tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert (parameter == state[f"{name}."]).all(), name


@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [
        (TP(tp=2), 2, "Lt"),
        (EP(ep=3), 3, "X"),
        (NDParallel(tp=2), 4, "M"),
        (NDParallel(tp=2, ep=2), 4, "G"),
        (NDParallel(tp=2, ep=2), 4, "M"),
    ],
    ids=str,
)
def test_each_rank_loads_its_part_of_a_folder(pools, tmp_path, strategy, ranks, model):
    import torch

    plain = tiny_model(model)
    for number, parameter in enumerate(plain.parameters()):
        # Its own index in every element: a wrong order cannot look right.
        parameter.data = torch.arange(parameter.numel()).view(parameter.shape) / 1e4 + number
    plain.save_pretrained(tmp_path / "model")
    expected = dict(plain.named_parameters())
    for whole, buffers, _, losses in pools(ranks).run(
        load_pretrained, strategy, str(tmp_path / "model")
    ):
        assert set(whole) == set(expected)
        assert all((whole[name] == expected[name]).all() for name in expected)
        assert all((buffers[name] == buffer).all() for name, buffer in plain.named_buffers())
        assert losses


def test_the_ring_has_each_strategy_as_source_and_as_target():
    assert {str(source) for source, _ in RING} == {str(world) for world in WORLDS}
    assert {str(target) for _, target in RING} == {str(world) for world in WORLDS}
