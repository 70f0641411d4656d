"""The Trainer: TRL's own numbers under every strategy, and runs that go on."""

from __future__ import annotations

import pytest
import torch

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from tests.gloo.trainer_jobs import (
    evaluate_alone,
    interrupted,
    lora,
    resumed,
    train,
    train_loaded,
    train_plainly,
)

STEPS = {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 10}
# Ranks, and how many of them read the same rows.
CELLS = [
    (DDP(), 2, 1, "L", False),
    (ZeRO1(), 2, 1, "Q", True),
    (ZeRO2(), 2, 1, "Lt", False),
    (ZeRO3(), 2, 1, "L", True),
    (FSDP2(), 4, 1, "L", False),
    (FSDP2(), 2, 1, "L", True),
    (HSDP(dp_replicate=2), 4, 1, "Q", True),
    (TP(tp=2), 2, 2, "L", True),
    (EP(ep=2), 2, 1, "M", False),
    (NDParallel(tp=2), 4, 2, "Lt", False),
]
MORE = [
    (DDP(), 2, 1, "L", True),
    (ZeRO1(), 2, 1, "L", False),
    (ZeRO2(), 4, 1, "Q", True),
    (ZeRO3(), 4, 1, "Q", False),
    (HSDP(dp_replicate=2), 4, 1, "L", False),
    (TP(tp=2), 2, 2, "Q", False),
    (EP(ep=2), 4, 1, "M", True),
    (NDParallel(tp=2), 4, 2, "L", True),
    (NDParallel(tp=2, ep=2), 4, 2, "M", False),
]
LOGGED = ("loss", "grad_norm", "learning_rate", "num_tokens", "mean_token_accuracy", "entropy")


def logged(history):
    return [{k: entry[k] for k in LOGGED} for entry in history if "loss" in entry]


def pick(entry, keys):
    return {key: entry[key] for key in keys}


def check(pools, folder, strategy, ranks, copies, model, adapted, **changes):
    data_ranks = ranks // copies
    whole = {"per_device_train_batch_size": 4 // data_ranks, "gradient_accumulation_steps": 2}
    # TRL's metrics are means over rounds of micro-batches, so a round of one process has the rows
    # of all ranks; but a router's loss depends on which rows one rank has together.
    routed = model == "M"
    alone = (
        {**whole, "gradient_accumulation_steps": 2 * data_ranks}
        if routed
        else {**whole, "per_device_train_batch_size": 4}
    )
    config = lora() if adapted else None
    expected = pools(1).run(train_plainly, folder, model, {**STEPS, **alone, **changes}, config)[0]
    found = pools(ranks).run(train, folder, strategy, model, {**STEPS, **whole, **changes}, config)
    assert len(logged(expected)) == 10
    for history in found:
        for ours, theirs in zip(logged(history), logged(expected), strict=True):
            for key in ("loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-6), (key, ours, theirs)
            keys = LOGGED[:4] if routed else LOGGED
            assert pick(ours, keys) == pytest.approx(pick(theirs, keys), rel=2e-5, abs=1e-6)
    return found


@pytest.mark.parametrize(("strategy", "ranks", "copies", "model", "adapted"), CELLS, ids=str)
def test_ten_steps_log_what_trl_logs_on_one_process(
    pools, tmp_path, strategy, ranks, copies, model, adapted
):
    check(pools, tmp_path, strategy, ranks, copies, model, adapted)


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True, "max_length": 16},
        pytest.param({"padding_free": True, "max_length": None}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_packed_rows_are_filled_to_whole_rounds_too(pools, tmp_path, changes):
    check(pools, tmp_path, FSDP2(), 2, 1, "L", False, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "copies", "model", "adapted"), MORE, ids=str)
def test_so_do_other_strategies_and_models(
    pools, tmp_path, strategy, ranks, copies, model, adapted
):
    check(pools, tmp_path, strategy, ranks, copies, model, adapted)


def test_a_model_of_which_each_rank_read_its_part_trains_the_same(pools, tmp_path):
    strategy = FSDP2(activation_checkpointing=True)
    expected = pools(1).run(
        train_plainly, tmp_path, "L", {**STEPS, "per_device_train_batch_size": 4}
    )[0]
    for history in pools(2).run(train_loaded, tmp_path, strategy, STEPS):
        for ours, theirs in zip(logged(history), logged(expected), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_evaluation_counts_each_row_once_whatever_the_batches(pools, tmp_path, size):
    changes = {"per_device_eval_batch_size": size}
    expected = pools(1).run(evaluate_alone, tmp_path, {"per_device_eval_batch_size": 11})[0]
    for loss in pools(2).run(evaluate_alone, tmp_path, changes):
        assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "ranks", "adapted"),
    [
        (DDP(), DDP(), 2, False),
        (ZeRO3(), ZeRO3(), 2, True),
        (FSDP2(), TP(tp=2), 2, False),
        (ZeRO2(), FSDP2(), 2, True),
    ],
    ids=str,
)
def test_a_run_goes_on_in_mid_epoch_and_its_model_is_published(
    pools, tmp_path, first, second, ranks, adapted
):
    config = lora() if adapted else None
    whole = pools(ranks).run(interrupted, tmp_path, first, config)[0]
    checkpoint = tmp_path / "checkpoint-5"
    assert str(distft.verify(checkpoint, require="proven"))
    # As if the process had ended before this file was there.
    (checkpoint / "trainer_state.json").unlink()
    found = pools(ranks).run(resumed, tmp_path, second, config)[0]
    exact = first == second
    for ours, theirs in zip(logged(found["log"]), logged(whole["log"]), strict=True):
        if exact:
            assert ours == theirs
        else:
            assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    for name, weight in whole["published"].items():
        torch.testing.assert_close(
            found["published"][name], weight, rtol=0, atol=0 if exact else 1e-5
        )
