"""The same small training on one process and under a strategy, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.testing.compare import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    WEIGHT_TOLERANCE,
    absolute,
    compare_numbers,
    compare_tensors,
    relative,
)
from distft.testing.models import tiny_batches, tiny_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distft.strategies.base import Strategy
    from distft.training.step import CountFunction, LossFunction

# Rows of unequal loss tokens, so that a mean of means is visibly wrong.
LOSS_TOKENS = (3, 11, 7, 2, 5, 9, 1, 13, 4, 8, 6, 10)


@dataclass(frozen=True)
class Training:
    """A training of some steps on a tiny model, the same wherever it runs.

    Attributes:
        model: Name of a tiny model.
        num_steps: Optimizer steps; the first is made of the pieces of `Strategy.train_step`.
        num_micro_batches: One-row micro-batches of a step over all ranks.
        max_norm: Clipping bound, or None.
        learning_rate: Of AdamW.
        changes: Changes to the model's config.
        seed: Of the rows. AdamW moves a weight by ``lr / eps`` times the rounding of its gradient
            where that is below ``eps``, 1e-8: with some rows a weight is there, and proves nothing.
    """

    model: str = "L"
    num_steps: int = 3
    num_micro_batches: int = 6
    max_norm: float | None = None
    learning_rate: float = 1e-3
    changes: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return the micro-batches of a step over all ranks."""
        tokens = [LOSS_TOKENS[i % len(LOSS_TOKENS)] for i in range(self.num_micro_batches)]
        return tiny_batches(tokens, seed=self.seed + step)

    def build(self) -> nn.Module:
        """Return the model at its start."""
        return tiny_model(self.model, **self.changes)


@dataclass(frozen=True)
class TrainingRecord:
    """What a training did: losses and norms by step, the first gradients, the last weights."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_alone(training: Training) -> TrainingRecord:
    """Return the record of one process with plain torch: the reference.

    Collective: none.
    """
    import torch

    from distft.training.loss import count_next_tokens, next_token_loss

    model = training.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    losses, norms, gradients = [], [], {}
    for step in range(training.num_steps):
        batches = training.batches(step)
        num_tokens = sum(count_next_tokens(batch) for batch in batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            share = next_token_loss(model, batch) / num_tokens
            share.backward()
            loss += share.item()
        if step == 0:
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        bound = float("inf") if training.max_norm is None else training.max_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), bound)))
        losses.append(loss)
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return TrainingRecord(losses, norms, gradients, weights)


def train_under(strategy: Strategy, training: Training, peft_config: Any = None) -> TrainingRecord:
    """Return the record of this rank's training under a strategy, with adapters where given.

    Collective: every rank.
    """
    import torch
    import torch.distributed as dist

    from distft.process_group import init

    init(seed=0)
    model, optimizer = strategy.apply(
        training.build(),
        partial(torch.optim.AdamW, lr=training.learning_rate),
        peft_config=peft_config,
    )
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(training.num_steps):
        mine = training.batches(step)[strategy.dp_rank :: strategy.dp_size]
        if step == 0:
            loss, norm, gradients = step_by_pieces(
                strategy, model, optimizer, mine, training.max_norm
            )
        else:
            result = strategy.train_step(model, optimizer, mine, max_grad_norm=training.max_norm)
            loss, norm = result.loss, result.grad_norm
        losses.append(loss)
        norms.append(norm)
    weights = strategy.gather_weights(model)
    dist.barrier()
    return TrainingRecord(losses, norms, gradients, weights)


def step_by_pieces(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Mapping[str, Any]],
    max_norm: float | None,
    loss_fn: LossFunction | None = None,
    count_fn: CountFunction | None = None,
    clipped: dict[str, Tensor] | None = None,
) -> tuple[float, float, dict[str, Tensor]]:
    """Make a step of a strategy's pieces, as a loop of one's own would: loss, norm, gradients.

    Every rank needs the same number of batches here. The loss is without a router's own, and
    gradients as they are after clipping go into ``clipped``.

    Collective: every rank.
    """
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist

    from distft.training.loss import next_token_loss, router_losses

    num_tokens = strategy.count_loss_tokens(batches, count_fn)
    optimizer.zero_grad()
    shares = []
    with router_losses(model) as routers:
        for index, batch in enumerate(batches):
            more = index < len(batches) - 1
            with strategy.no_sync(model) if more else nullcontext():
                share = (loss_fn or next_token_loss)(model, batch) / num_tokens
                router = router_share(model, routers, len(batches) * strategy.dp_size)
                strategy.backward(share + router)
            shares.append(share.detach())
    gradients = strategy.gather_gradients(model)
    norm = strategy.clip_grad_norm_(model, max_norm)
    if clipped is not None:
        clipped |= strategy.gather_gradients(model)
    optimizer.step()
    loss = torch.stack(shares).sum()
    # Ranks of a tp group work on the same rows and have the same loss.
    loss *= float(dist.get_rank() % strategy.mesh().tp == 0)
    dist.all_reduce(loss)
    return float(loss), norm, gradients


def router_share(model: nn.Module, routers: list[Tensor], num_micro_batches: int) -> Any:
    """Return the last pass's share of the router's own loss, 0 for a model without one.

    Collective: none.
    """
    from distft.training.loss import router_coefficient

    if not routers:
        return 0.0
    return router_coefficient(model) * routers[-1] / num_micro_batches


def differences(found: TrainingRecord, expected: TrainingRecord) -> list[str]:
    """Return a line for everything that differs by more than the fp32 tolerances, causes first.

    Losses and norms relatively, gradients by ``||g - ref|| / ||ref||`` of each tensor (absolutely
    where the reference is 0), weights absolutely.

    Collective: none.
    """
    gaps = {
        "gradient": compare_tensors(
            found.gradients, expected.gradients, relative, GRADIENT_TOLERANCE
        ),
        "norm": compare_numbers(found.norms, expected.norms, NORM_TOLERANCE),
        "loss": compare_numbers(found.losses, expected.losses, LOSS_TOLERANCE),
        "weight": compare_tensors(found.weights, expected.weights, absolute, WEIGHT_TOLERANCE),
    }
    return [f"{what} {gap}" for what, each in gaps.items() for gap in each if gap.differs]
