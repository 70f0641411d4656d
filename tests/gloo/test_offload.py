"""Offload: model state in host memory, the same training, checkpoints that go both ways."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim import AdamW

import distft
from distft import FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.process_group import host_backends
from distft.testing import tiny_batches, tiny_model
from distft.testing.checks import check_memory, check_save_and_load, check_traffic
from distft.testing.runs import (
    LOSS_TOKENS,
    Training,
    differences,
    train_alone,
    train_under,
)

OFFLOADED = [
    (ZeRO1(offload="optimizer"), 2),
    (ZeRO2(offload="optimizer"), 3),
    (ZeRO2(offload="optimizer"), 2),
    (ZeRO1(offload="optimizer"), 3),
    (ZeRO3(offload="optimizer"), 2),
    (ZeRO3(offload="optimizer"), 3),
    (ZeRO3(offload="params"), 2),
    (ZeRO3(offload="params"), 3),
    (FSDP2(offload="params"), 2),
    (FSDP2(offload="params"), 3),
    (HSDP(dp_replicate=2, offload="params"), 4),
]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in OFFLOADED]


@pytest.mark.parametrize(("strategy", "ranks"), OFFLOADED, ids=IDS)
def test_offloaded_training_equals_one_process(pools, strategy, ranks):
    training = Training("Lt", 3, 3 * ranks, max_norm=0.1)
    expected = train_alone(training)
    for rank, found in enumerate(pools(ranks).run(train_under, strategy, training)):
        assert differences(found, expected) == [], f"rank {rank}"


@pytest.mark.parametrize("check", [check_save_and_load, check_memory, check_traffic])
@pytest.mark.parametrize(("strategy", "ranks"), OFFLOADED[::2], ids=IDS[::2])
def test_offload_keeps_the_promises(pools, strategy, ranks, check):
    check(strategy, pools(ranks))


def train(strategy, steps, path, load=False, save=None, dropout=0.0):
    """Train with dropout where asked, from the start or a checkpoint; return losses and weights."""
    distft.init(seed=0)
    model, optimizer = strategy.apply(
        tiny_model("L", attention_dropout=dropout), partial(AdamW, lr=1e-3)
    )
    if load:
        strategy.load(path, model, optimizer)
    losses = []
    for step in steps:
        rows = tiny_batches(LOSS_TOKENS[: 2 * strategy.dp_size], seed=step)
        mine = rows[strategy.dp_rank :: strategy.dp_size]
        losses.append(strategy.train_step(model, optimizer, mine, max_grad_norm=0.1).loss)
        if save == step:
            strategy.save(path, model, optimizer, step=step)
    return losses, strategy.gather_weights(model)


@pytest.mark.parametrize("strategy", [s for s, n in OFFLOADED if n == 2], ids=str)
def test_checkpointing_and_dropout_draw_the_same_masks_offloaded(pools, strategy):
    with_it = replace(strategy, activation_checkpointing=True)
    expected = pools(2).run(
        train, replace(strategy, offload=None), range(2), None, False, None, 0.3
    )
    found = pools(2).run(train, with_it, range(2), None, False, None, 0.3)
    plain = pools(2).run(train, with_it, range(2), None)
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    assert found[0][0] != pytest.approx(plain[0][0], rel=1e-6)
    for name, weight in expected[0][1].items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "strategy", [ZeRO2(offload="optimizer"), *[s for s, _ in OFFLOADED[6:9:2]]]
)
@pytest.mark.parametrize("out_of", [True, False], ids=["from the host", "to the host"])
def test_a_checkpoint_goes_on_with_and_without_offload(pools, tmp_path, strategy, out_of):
    first, then = strategy, replace(strategy, offload=None)
    if not out_of:
        first, then = then, first
    whole = pools(2).run(train, first, range(1, 4), tmp_path / "c", False, 2)
    resumed = pools(2).run(train, then, range(3, 4), tmp_path / "c", True)
    assert resumed[0][0] == pytest.approx(whole[0][0][2:], rel=1e-6)
    for name, weight in whole[0][1].items():
        torch.testing.assert_close(resumed[0][1][name], weight, rtol=0, atol=1e-5)


def test_a_group_of_nccl_alone_moves_no_host_tensor():
    assert host_backends("cpu:gloo,cuda:nccl") == ["gloo"]
    assert host_backends("cuda:nccl") == []


@pytest.mark.parametrize("strategy", [ZeRO1, ZeRO2, ZeRO3])
def test_bf16_masters_offloaded_are_refused(strategy):
    with pytest.raises(ValueError, match=r"precision='bf16'.*Use bf16-mixed"):
        strategy(precision="bf16", offload="optimizer")
