"""Planted faults that an invariant catches, by name and on every rank; none in clean runs."""

from __future__ import annotations

import pytest

from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from tests.gloo.invariant_jobs import FAULTS, plant_all, train_clean

# Strategy, tiny model, changes of its config, whether adapters are trained.
DROPS = {"attention_dropout": 0.1}
CLEAN = {
    2: [
        (DDP(), "Lt", DROPS, False),
        (DDP(precision="bf16-mixed"), "L", {}, True),
        (DDP(precision="bf16"), "L", {}, False),
        (DDP(find_unused_parameters=True), "M", {}, False),
        (ZeRO1(), "L", {}, False),
        (ZeRO2(precision="bf16-mixed"), "Q", {}, True),
        (ZeRO3(), "Lt", DROPS, False),
        (FSDP2(activation_checkpointing=True), "Lt", DROPS, True),
        (FSDP2(precision="bf16-mixed", defer_reduce=True), "Q", {}, False),
        (TP(tp=2, activation_checkpointing=True), "Lt", DROPS, True),
        (TP(tp=2, precision="bf16"), "Q", {}, False),
        (EP(ep=2), "M", {}, False),
    ],
    4: [
        (HSDP(dp_replicate=2), "Lt", {}, True),
        (NDParallel(tp=2, precision="bf16-mixed"), "L", DROPS, False),
        (NDParallel(tp=2, ep=2), "M", {}, False),
    ],
}


@pytest.fixture(scope="module")
def planted(pools):
    return pools(2).run(plant_all)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_raised_on_every_rank_and_named(planted, fault):
    texts = [found[fault.__name__] for found in planted]
    assert all(texts), texts
    for text in texts:
        for words in FAULTS[fault]:
            assert words in text


@pytest.mark.parametrize("ranks", CLEAN)
def test_no_clean_strategy_raises_an_alarm(pools, ranks):
    for said in pools(ranks).run(train_clean, CLEAN[ranks]):
        for text, (strategy, *_) in zip(said, CLEAN[ranks], strict=True):
            assert repr(strategy) in text
            assert "looked at in 3 of 3 steps" in text
