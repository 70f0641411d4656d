"""Parameter groups with clipping bounds of their own, against torch's rule in one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.process_group import init
from distft.testing.models import tiny_batches, tiny_model
from distft.training.loss import count_next_tokens, next_token_loss

WORLDS = [
    *[(s, 2) for s in (DDP(), ZeRO1(), ZeRO2(), ZeRO3(sub_group_size=5000), FSDP2())],
    (ZeRO3(), 3),
    (HSDP(dp_replicate=2), 4),
]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in WORLDS]
NUM_STEPS = 3
NUM_ROWS = 12


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups: bounded below its norm, without a bound, bounded far above its norm."""
    attention = [n for n, _ in model.named_parameters() if "self_attn" in n]
    mlp = [n for n, _ in model.named_parameters() if "mlp" in n]
    rest = [n for n, _ in model.named_parameters() if n not in {*attention, *mlp}]
    return [
        {"params": attention, "max_grad_norm": 0.05, "lr": 2e-3},
        {"params": mlp, "weight_decay": 0.0},
        {"params": rest, "max_grad_norm": 50.0},
    ]


def rows(step: int) -> list[dict[str, Any]]:
    return tiny_batches(range(2, 2 + NUM_ROWS), seed=step)


@cache
def alone(max_norm: float | None) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    model = tiny_model("L")
    parameters = dict(model.named_parameters())
    groups = groups_of(model)
    optimizer = torch.optim.AdamW(
        [
            {
                **{k: v for k, v in group.items() if k != "max_grad_norm"},
                "params": [parameters[name] for name in group["params"]],
            }
            for group in groups
        ],
        lr=1e-3,
    )
    clipped: dict[str, Any] = {}
    numbers = []
    for step in range(NUM_STEPS):
        total = sum(count_next_tokens(batch) for batch in rows(step))
        optimizer.zero_grad()
        for batch in rows(step):
            (next_token_loss(model, batch) / total).backward()
        whole = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        norms = tuple(
            float(
                nn.utils.clip_grad_norm_(
                    [parameters[name] for name in group["params"]],
                    group.get("max_grad_norm", float("inf")),
                )
            )
            for group in groups
        )
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if step == 0:
            clipped = {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        numbers.append((whole, norms))
    return numbers, clipped, {name: p.detach().clone() for name, p in parameters.items()}


def train(strategy: Any, max_norm: float | None) -> tuple[Any, ...]:
    init(seed=0)
    model = tiny_model("L")
    model, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=1e-3), groups_of(model))
    mine = rows(0)[strategy.dp_rank :: strategy.dp_size]
    total = strategy.count_loss_tokens(mine)
    optimizer.zero_grad()
    for index, batch in enumerate(mine):
        if index < len(mine) - 1:
            with strategy.no_sync(model):
                strategy.backward(next_token_loss(model, batch) / total)
        else:
            strategy.backward(next_token_loss(model, batch) / total)
    first = strategy.clip_grad_norm_(model, max_norm)
    clipped = strategy.gather_gradients(model)
    optimizer.step()
    results = []
    for step in range(1, NUM_STEPS):
        mine = rows(step)[strategy.dp_rank :: strategy.dp_size]
        result = strategy.train_step(model, optimizer, mine, max_grad_norm=max_norm)
        results.append((result.grad_norm, result.group_norms))
    keys = {key for group in optimizer.param_groups for key in group}
    return first, results, clipped, strategy.gather_weights(model), "max_grad_norm" in keys


@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["groups", "groups_and_whole"])
@pytest.mark.parametrize(("strategy", "ranks"), WORLDS, ids=IDS)
def test_groups_are_clipped_as_in_one_process(pools, strategy, ranks, max_norm):
    numbers, clipped, weights = alone(max_norm)
    for first, results, gradients, trained, in_groups in pools(ranks).run(
        train, strategy, max_norm
    ):
        assert first == pytest.approx(numbers[0][0], rel=1e-5)
        for (norm, norms), (expected, group_norms) in zip(results, numbers[1:], strict=True):
            assert norm == pytest.approx(expected, rel=1e-5)
            assert norms == pytest.approx(group_norms, rel=1e-5)
        for name, reference in clipped.items():
            error = (gradients[name] - reference).norm() / reference.norm()
            assert error <= 1e-5, f"{name}: {error:.1e}"
        for name, reference in weights.items():
            assert (trained[name] - reference).abs().max() <= 1e-5, name
        assert not in_groups, "an optimizer would save the bound and load an old one"


def step_without_bounds(strategy: Any) -> tuple[float, ...]:
    init(seed=0)
    model, optimizer = strategy.apply(tiny_model("L"), partial(torch.optim.SGD, lr=0.1))
    return strategy.train_step(model, optimizer, tiny_batches([5])).group_norms


def test_without_a_bound_no_group_has_a_norm(pools):
    assert pools(2).run(step_without_bounds, DDP()) == [(), ()]


def apply_with_bound(bound: Any) -> str:
    init(seed=0)
    model = tiny_model("L")
    group = {"params": list(model.parameters()), "max_grad_norm": bound}
    with pytest.raises(ValueError, match=r"param_groups\[0\]") as raised:
        DDP().apply(model, partial(torch.optim.SGD, lr=0.1), [group])
    return str(raised.value)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), True, "1"])
def test_a_group_bound_that_is_not_above_0_is_refused(pools, bound):
    for message in pools(2).run(apply_with_bound, bound):
        assert f"max_grad_norm={bound!r}" in message
        assert "above 0" in message
