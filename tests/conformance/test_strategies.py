"""Every strategy × every check, and a strategy of somebody else's."""

from __future__ import annotations

import pytest

from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.testing import CHECKS, check_strategy
from tests.conformance.toy import WholeModel

STRATEGIES = [
    (DDP(), 2),
    (ZeRO1(), 2),
    (ZeRO2(), 2),
    (ZeRO3(), 2),
    (FSDP2(), 2),
    (FSDP2(defer_reduce=True), 3),
    (FSDP2(reshard_after_forward=False), 2),
    (HSDP(dp_replicate=2), 4),
    (TP(tp=2), 2),
    (EP(ep=2), 2),
    (NDParallel(tp=2, ep=2), 4),
    (WholeModel(), 2),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES, ids=[str(s) for s, _ in STRATEGIES])
def test_strategy_keeps_the_promise(pools, strategy, ranks, check):
    check(strategy, pools(ranks))


def test_check_strategy_names_what_a_broken_strategy_breaks(pools):
    with pytest.raises(AssertionError, match=r"gradient .* off"):
        check_strategy(WholeModel(forget_the_sum=True), pool=pools(2))
