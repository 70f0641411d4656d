"""The same training under every strategy, against one process."""

from __future__ import annotations

from functools import cache

import pytest

from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing.runs import Training, TrainingRecord, differences, train_alone, train_under
from tests.matrix import every_pair

WORLDS = [
    *[(s, n) for n in (2, 3) for s in (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2())],
    (HSDP(dp_replicate=2), 4),
]


@cache
def reference(model: str, num_micro_batches: int, max_norm: float | None) -> TrainingRecord:
    return train_alone(Training(model, 3, num_micro_batches, max_norm))


@pytest.mark.parametrize(
    ("strategy", "ranks", "model", "grad_accum", "max_norm"),
    every_pair(WORLDS, ["L", "Lt", "Q", "M"], [1, 3], [0.1, None]),
    ids=str,
)
def test_three_steps_equal_one_process(pools, strategy, ranks, model, grad_accum, max_norm):
    training = Training(model, 3, ranks * grad_accum, max_norm)
    expected = reference(model, ranks * grad_accum, max_norm)
    for rank, found in enumerate(pools(ranks).run(train_under, strategy, training)):
        assert differences(found, expected) == [], f"rank {rank}"
