"""Every optimizer of the allow-list under every strategy: the same weights as in one process.

What could hide or invent a difference is chosen away. Most of these optimizers divide a gradient
by its own size plus ``eps``, so that at the default of 1e-8 a rounding error of 1e-9 in a small
gradient becomes a tenth of a step. With ``eps=1e-3`` it stays 1e-6 of a step, and the formula is
the same. Weights start ten times as wide as usual, which brings the gradients of all tensors above
0.05: at the usual width those of the attention are a thousand times smaller than the head's.
Learning rates are such that weights move by more than a hundred times the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import LOSS_TOKENS, WEIGHT_TOLERANCE
from distft.training.loss import count_next_tokens, next_token_loss
from distft.training.optimizers import ELEMENTWISE

Weights = dict[str, torch.Tensor]


class Lion(optim.Optimizer):
    """Chen et al. 2023, algorithm 2: a step of fixed size in the direction of a momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(torch.sign(momentum * beta1 + p.grad * (1 - beta1)), alpha=-rate)
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@dataclass(frozen=True)
class Case:
    """An optimizer as `apply` takes it, and the share of weights that may step the other way."""

    factory: Callable[..., optim.Optimizer]
    may_flip: float = 0.0


SOFT = {"lr": 5e-3, "eps": 1e-3}
CASES = {
    "Adadelta": Case(partial(optim.Adadelta, lr=1.0, weight_decay=0.1)),
    "Adagrad": Case(partial(optim.Adagrad, **SOFT, initial_accumulator_value=1e-3, lr_decay=0.1)),
    "Adam": Case(partial(optim.Adam, **SOFT, weight_decay=0.1)),
    "AdamW": Case(partial(optim.AdamW, **SOFT, weight_decay=0.1)),
    "Adamax": Case(partial(optim.Adamax, **SOFT)),
    # A sign has no eps: where the momentum is as small as rounding, a weight may step the other
    # way. A tensor that was cut wrongly would do so in half of its weights.
    "Lion": Case(partial(Lion, lr=1e-3, weight_decay=0.1), may_flip=1e-3),
    "NAdam": Case(partial(optim.NAdam, **SOFT, decoupled_weight_decay=True, weight_decay=0.1)),
    "RAdam": Case(partial(optim.RAdam, lr=5e-2, eps=1e-3)),
    "RMSprop": Case(partial(optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9, centered=True)),
    "SGD": Case(partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
}
VARIANTS = {
    "AdamW-amsgrad": Case(partial(optim.AdamW, **SOFT, amsgrad=True)),
    "AdamW-foreach": Case(partial(optim.AdamW, **SOFT, foreach=True)),
    "AdamW-fused": Case(partial(optim.AdamW, **SOFT, fused=True)),
    "AdamW-maximize": Case(partial(optim.AdamW, **SOFT, maximize=True)),
    "SGD-plain": Case(partial(optim.SGD, lr=0.1)),
}
ALL = {**CASES, **VARIANTS}
STRATEGIES = (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP(dp_replicate=2))
# DTensors are where sharding differs most from one process, then flat pieces of one vector; these
# have state that is made early, no tensor alone, or no eps.
QUICK = {
    *((FSDP2(), name) for name in (*CASES, "AdamW-fused")),
    *((ZeRO3(), name) for name in ("Adagrad", "NAdam", "SGD")),
    (ZeRO2(), "Lion"),
}
MATRIX = [
    pytest.param(
        strategy,
        name,
        id=f"{name}-{strategy}",
        marks=[] if (strategy, name) in QUICK else [pytest.mark.slow],
    )
    for name in ALL
    for strategy in STRATEGIES
]
# Ranks that save and ranks that load, 3 and 2 if not here: where they differ, ZeRO's own engine
# does not read the files. Two replicas of two parts each go on as two of one.
RANKS = {"hsdp": (4, 2)}
HALF, STEPS = 3, 6


def batches_of(step: int) -> list[dict[str, torch.Tensor]]:
    return tiny_batches(LOSS_TOKENS[:6], seed=step)


@cache
def alone(name: str) -> tuple[Weights, Weights, Weights]:
    """Return the weights of one process at the start, after 3 steps and after 6."""
    model = start()
    optimizer = ALL[name].factory(groups(name, model))
    found = [snapshot(model)]
    for step in range(STEPS):
        batches = batches_of(step)
        total = sum(map(count_next_tokens, batches))
        optimizer.zero_grad()
        for batch in batches:
            (next_token_loss(model, batch) / total).backward()
        optimizer.step()
        if step + 1 in (HALF, STEPS):
            found.append(snapshot(model))
    begin, half, end = found
    return begin, half, end


def snapshot(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def groups(name: str, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups, vectors with half the rate: what an engine may merge into one."""
    factory: Any = ALL[name].factory
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() == 1], "lr": factory.keywords["lr"] / 2},
    ]


def start(seed: int = 0) -> Any:
    return tiny_model("L", seed, initializer_range=0.2)


def train(strategy: Any, model: Any, optimizer: Any, first: int, stop: int) -> Weights:
    for step in range(first, stop):
        mine = batches_of(step)[strategy.dp_rank :: strategy.dp_size]
        strategy.train_step(model, optimizer, mine)
    return dict(strategy.gather_weights(model))


def train_and_save(strategy: Any, name: str, path: Path) -> Weights:
    distft.init()
    model = start()
    model, optimizer = strategy.apply(model, ALL[name].factory, groups(name, model))
    weights = train(strategy, model, optimizer, 0, HALF)
    strategy.save(path, model, optimizer, step=HALF)
    return weights


def load_and_train(strategy: Any, name: str, path: Path) -> Weights:
    distft.init()
    model = start(seed=9)
    model, optimizer = strategy.apply(model, ALL[name].factory, groups(name, model))
    state = strategy.load(path, model, optimizer)
    return train(strategy, model, optimizer, state.step, STEPS)


def assert_equal(name: str, found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for tensor, reference in expected.items():
        far = (found[tensor] - reference).abs() > WEIGHT_TOLERANCE
        worst = (found[tensor] - reference).abs().max()
        assert far.float().mean() <= ALL[name].may_flip, f"{tensor} is {worst:.1e} off"


@pytest.mark.parametrize(("strategy", "name"), MATRIX)
def test_weights_equal_one_process_before_and_after_a_load(pools, tmp_path, strategy, name):
    path = tmp_path / "saved"
    _, half, end = alone(name)
    first, then = RANKS.get(strategy.name, (3, 2))
    for found in pools(first).run(train_and_save, strategy, name, path):
        assert_equal(name, found, half)
    for found in pools(then).run(load_and_train, strategy, name, path):
        assert_equal(name, found, end)


@pytest.mark.parametrize("name", ALL)
def test_the_reference_moves_every_tensor_far_beyond_the_tolerance(name):
    begin, half, end = alone(name)
    for before, after in ((begin, half), (half, end)):
        for tensor, value in after.items():
            assert (value - before[tensor]).abs().max() > 100 * WEIGHT_TOLERANCE, tensor


def test_every_optimizer_of_the_allow_list_is_in_the_matrix():
    assert set(CASES) == ELEMENTWISE
