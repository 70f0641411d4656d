"""What real runs lost when they went on elsewhere: moments, counters, groups, the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import distft
from distft import DDP, FSDP2, HSDP, TP, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.readers import read_map
from tests.gloo.checkpoint_jobs import (
    Recipe,
    count_beyond_bf16,
    decay,
    go_on,
    load_and_save,
    train_and_save,
    train_on,
)
from tests.reading import values

HSDP_2X2 = HSDP(dp_replicate=2)


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory) -> Path:
    """Return the folder of 6 steps in one process."""
    folder = tmp_path_factory.mktemp("alone") / "six"
    pools(1).run(go_on, DDP(), Recipe(), None, folder, 6)
    return folder


STRATEGIES = (FSDP2(), ZeRO1(), ZeRO2(), ZeRO3())
WAYS = ((2, 3), (3, 2), (1, 4), (4, 1))


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [
        # Each strategy and each way once; the rest with the slow tests.
        pytest.param(strategy, *way, marks=() if one == other else pytest.mark.slow)
        for one, strategy in enumerate(STRATEGIES)
        for other, way in enumerate(WAYS)
    ],
    ids=str,
)
def test_after_6_steps_on_two_numbers_of_ranks_all_is_as_in_one_process(
    pools, alone, tmp_path, strategy, before, after
):
    # Case RESH-01
    expected = read_map(alone)
    first, second = tmp_path / "first", tmp_path / "second"
    pools(before).run(go_on, strategy, Recipe(), None, first, 3)
    pools(after).run(go_on, strategy, Recipe(seed=77), first, second, 3)
    found = read_map(second)
    assert set(found.optimizer.steps.values()) == {6.0}
    for name, tensor in expected.tensors.items():
        pairs = [(found.tensors[name], tensor)]
        pairs += [
            (found.optimizer.moments[name][key], moment)
            for key, moment in expected.optimizer.moments[name].items()
        ]
        for mine, theirs in pairs:
            torch.testing.assert_close(
                values(second, mine), values(alone, theirs), rtol=0, atol=1e-5, msg=name
            )


def test_hsdp_goes_on_as_zero3_and_back(pools, tmp_path):
    # Case RESH-04, the way to ZeRO-3
    first, second, third = (tmp_path / name for name in ("hsdp", "zero3", "back"))
    pools(4).run(train_and_save, HSDP_2X2, Recipe(), first, 3)
    expected = pools(4).run(train_on, HSDP_2X2, Recipe(), 4)[0]["losses"][3]
    losses = pools(2).run(load_and_save, ZeRO3(), Recipe(), first, second)
    assert losses == pytest.approx([expected] * 2, rel=1e-6)
    losses = pools(4).run(load_and_save, HSDP_2X2, Recipe(), second, third)
    assert losses == pytest.approx([expected] * 4, rel=1e-6)
    for path in (second, third):
        found = distft.diff(first, path)
        assert found.same, str(found)
        assert found.num_equal == 3 * 21


def test_a_tp_run_goes_on_at_another_degree_with_its_own_moments(pools, tmp_path):
    # Case RESH-10
    recipe, first = Recipe("Q", changes={"num_key_value_heads": 4}), tmp_path / "tp2"
    pools(2).run(train_and_save, TP(tp=2), recipe, first, 3)
    expected = pools(2).run(train_on, TP(tp=2), recipe, 4)[0]["losses"][3]
    for strategy, ranks in ((TP(tp=4), 4), (FSDP2(), 2), (DDP(), 1)):
        again = tmp_path / f"{strategy.name}-{ranks}"
        losses = pools(ranks).run(load_and_save, strategy, recipe, first, again)
        assert losses == pytest.approx([expected] * ranks, rel=1e-5)
        found = distft.diff(first, again)
        assert found.same, str(found)


def test_norms_never_decay_and_matrices_do_with_the_resumed_schedule(pools, tmp_path):
    # Case RESH-07: with gradients of zero a step is the decay alone.
    before = pools(2).run(decay, ZeRO3(), tmp_path / "saved", 2, False)[0]
    after = pools(4).run(decay, ZeRO3(), tmp_path / "saved", 3, True)[0]
    assert before["rates"] == pytest.approx([1e-3, 2e-3])
    assert after["rates"] == pytest.approx([3e-3, 4e-3, 5e-3])
    shrunk = 1.0
    for rate in after["rates"]:
        shrunk *= 1 - rate * 0.5
    for name, weight in before["weights"].items():
        if weight.dim() == 1:
            assert torch.equal(after["weights"][name], weight), name
        else:
            torch.testing.assert_close(after["weights"][name], weight * shrunk)


def test_a_counter_goes_on_beyond_256_in_bf16_training(pools, tmp_path):
    # Case RESH-09
    strategy, recipe = FSDP2(precision="bf16"), Recipe(dtype="bfloat16")
    pools(2).run(count_beyond_bf16, strategy, recipe, tmp_path / "saved", False)
    for found in pools(2).run(count_beyond_bf16, strategy, recipe, tmp_path / "saved", True):
        assert found == [("torch.float32", 302.0)]
