"""The same training under TP, EP and products of axes, against one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distft import EP, FSDP2, HSDP, TP, NDParallel
from distft.testing.runs import (
    WEIGHT_TOLERANCE,
    Training,
    TrainingRecord,
    differences,
    train_alone,
    train_under,
)

FOUR_KV = {"num_key_value_heads": 4}
ODD = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
BIASED = {"attention_bias": True, "mlp_bias": True}

# Strategy, ranks, model, changes, micro-batches over all data ranks, clipping bound.
CASES = [
    *[(TP(tp=2), 2, model, {}, 4, 0.1) for model in ("L", "Lt", "Q", "M", "X", "G")],
    (TP(tp=2), 2, "L", BIASED, 6, None),
    (TP(tp=2), 2, "Lt", BIASED, 1, None),
    (TP(tp=3), 3, "L", ODD, 2, None),
    (TP(tp=3), 3, "Lt", {**ODD, **BIASED}, 2, 0.1),
    *[(TP(tp=4), 4, model, FOUR_KV, 2, 0.1) for model in ("Lt", "Q", "M")],
    *[(EP(ep=2), 2, model, {}, 4, 0.1) for model in ("M", "G")],
    *[(EP(ep=3), 3, model, {}, 6, None) for model in ("M", "X")],
    (EP(ep=2), 4, "M", {}, 8, 0.1),
    (EP(ep=2), 4, "G", {}, 4, None),
    *[(NDParallel(tp=2), 4, model, {}, 4, 0.1) for model in ("Lt", "Q", "M", "X")],
    (NDParallel(dp_replicate=2, tp=2), 4, "Q", {}, 4, None),
    (NDParallel(dp_replicate=2, ep=2), 4, "M", {}, 8, 0.1),
    (NDParallel(tp=2, ep=2), 4, "M", {}, 4, 0.1),
    (NDParallel(tp=2, ep=4), 4, "G", {}, 4, None),
    (NDParallel(tp=2, ep=2, plan={}), 2, "M", {}, 2, None),
]
# Rows other than the first ones, by model, micro-batches and bound. With the first ones some
# gradient is near 1e-8, AdamW's eps, and the rounding of another CPU moves its weight by 1e-5.
SEEDS = {
    ("L", 4, 0.1): 10,
    ("L", 6, None): 50,
    ("Q", 4, 0.1): 70,
    ("M", 2, None): 20,
    ("M", 4, 0.1): 40,
    ("M", 6, None): 20,
    ("M", 8, 0.1): 20,
    ("X", 4, 0.1): 30,
    ("X", 6, None): 80,
    ("G", 4, 0.1): 80,
}
IDS = [f"{case[0]}@{case[1]}-{case[2]}{'+' if case[3] else ''}-{case[4]}" for case in CASES]


Key = tuple[str, tuple[tuple[str, object], ...], int, float | None]


def training_of(key: Key) -> Training:
    model, changes, num_micro_batches, max_norm = key
    seed = SEEDS.get((model, num_micro_batches, max_norm), 0)
    return Training(model, 3, num_micro_batches, max_norm, changes=dict(changes), seed=seed)


@cache
def reference(key: Key) -> TrainingRecord:
    return train_alone(training_of(key))


def check(pool, strategy, model, changes, num_micro_batches, max_norm):
    key = (model, tuple(changes.items()), num_micro_batches, max_norm)
    for rank, found in enumerate(pool.run(train_under, strategy, training_of(key))):
        assert differences(found, reference(key)) == [], f"rank {rank}"


@pytest.mark.parametrize(("strategy", "ranks", "model", "changes", "micro", "clip"), CASES, ids=IDS)
def test_three_steps_equal_one_process(pools, strategy, ranks, model, changes, micro, clip):
    check(pools(ranks), strategy, model, changes, micro, clip)


KEYS = {(case[2], tuple(case[3].items()), *case[4:]) for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(KEYS, key=str), ids=str)
def test_rounding_moves_no_weight_of_these_rows_far(key):
    # Gradients are off by some 1e-7 of their size on another CPU; a third of what is tolerated.
    shift = max(weight_shift(training_of(key), noise=3e-7, seed=seed) for seed in (0, 1))
    assert shift < WEIGHT_TOLERANCE / 3


def weight_shift(training: Training, noise: float, seed: int) -> float:
    """Return by how much the last weights move when noise is added to each gradient.

    Args:
        training: What is trained.
        noise: Its deviation, as a part of the root mean square of the gradient it is added to.
        seed: Of the noise.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            drawn = torch.randn(gradient.shape, generator=generator)
            # What is exactly zero has no rounding: rows of tokens that are not there.
            gradient += noise * gradient.square().mean().sqrt() * drawn * (gradient != 0)

    plain = train_alone(training)
    handle = register_optimizer_step_pre_hook(disturb)
    try:
        noisy = train_alone(training)
    finally:
        handle.remove()
    return max(float((noisy.weights[n] - w).abs().max()) for n, w in plain.weights.items())


@pytest.mark.parametrize("model", ["M", pytest.param("G", marks=pytest.mark.slow)])
def test_three_axes_on_eight_ranks_equal_one_process(model):
    from distft.testing import WorkerPool

    with WorkerPool(8, timeout=600) as pool:
        if model == "M":
            strategy = NDParallel(dp_replicate=2, dp_shard=2, tp=2, ep=2)
        else:
            strategy = NDParallel(dp_shard=4, tp=2, ep=4)
        check(pool, strategy, model, {}, 4, 0.1)


@pytest.mark.parametrize("field", ["reshard_after_forward", "defer_reduce", "checkpointing"])
def test_policies_of_sharding_hold_on_products_of_axes(pools, field):
    policies = {
        "reshard_after_forward": {"reshard_after_forward": False},
        "defer_reduce": {"defer_reduce": True},
        "checkpointing": {"activation_checkpointing": True},
    }
    strategy = NDParallel(tp=2, ep=2, **policies[field])
    check(pools(4), strategy, "M", {}, 4, 0.1)


@pytest.mark.parametrize(
    ("strategy", "same"),
    [
        (NDParallel(), FSDP2()),
        (NDParallel(dp_replicate=2), HSDP(dp_replicate=2)),
        (NDParallel(tp=2), TP(tp=2)),
        (NDParallel(ep=2), EP(ep=2)),
    ],
    ids=str,
)
def test_a_named_strategy_is_its_product_to_the_bit(pools, strategy, same):
    training = Training("M", 2, 4)
    mine, theirs = (pools(4).run(train_under, each, training)[0] for each in (strategy, same))
    assert mine.losses == theirs.losses
    assert all((mine.weights[name] == theirs.weights[name]).all() for name in theirs.weights)
