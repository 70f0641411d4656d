"""What the ranks' numbers of one step say when they are laid beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from distft.diagnose.flight import say_ranks
from distft.mesh import Mesh
from distft.training.rows import unequal_neighbours


@dataclass(frozen=True)
class Shown:
    """What one rank tells the others of one step: numbers that a float64 holds, NaN if unknown.

    Attributes:
        failed: 1 where a check of this rank alone failed.
        forwards: Forward passes of the step.
        rows: Digest of token ids and labels.
        randomness: Digest of the random state before the first forward pass.
        draws: 1 where a block draws random numbers.
        settings: Digest of the optimizer's settings.
        rate: Learning rate of its first group.
        loss_tokens: Loss tokens in the labels.
        divisor: What forward passes were told to divide their loss by.
        weighted: Sum over forward passes of loss times loss tokens.
        losses: Sum over forward passes of their losses.
        shares: Sum of what went into backward passes.
    """

    failed: float
    forwards: float
    rows: float
    randomness: float
    draws: float
    settings: float
    rate: float
    loss_tokens: float
    divisor: float
    weighted: float
    losses: float
    shares: float

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers, in order."""
        return astuple(self)


@dataclass(frozen=True)
class Step:
    """Number of a step, and the precision that it is computed in."""

    number: int
    precision: str


Judge = Callable[[Sequence[Shown], Sequence[Shown], Mesh, Step], str | None]


def first_fault(
    ranks: Sequence[Shown], before: Sequence[Shown], mesh: Mesh, step: Step
) -> str | None:
    """Return what is wrong with a step, or None.

    Args:
        ranks: What each rank shows, in order.
        before: The same of the step that was looked at before; empty in the first.
        mesh: The axis sizes.
        step: Which step.

    Collective: none.
    """
    return next((said for judge in _JUDGES if (said := judge(ranks, before, mesh, step))), None)


def _forwards(ranks: Sequence[Shown], *_: object) -> str | None:
    by_number: dict[int, list[int]] = {}
    for rank, shown in enumerate(ranks):
        by_number.setdefault(int(shown.forwards), []).append(rank)
    if len(by_number) == 1:
        return None
    said = ", ".join(f"{say_ranks(at)} made {number}" for number, at in sorted(by_number.items()))
    return (
        f"Forward passes of one step: {said}. A rank left batches out, so their tokens do not "
        "count, and where a forward pass gathers weights the others wait for ever. Leave no batch "
        "out on one rank alone: train_step takes windows of any length, and weights of 0."
    )


def _same_rows_in_tp(
    ranks: Sequence[Shown], before: Sequence[Shown], mesh: Mesh, _: Step
) -> str | None:
    for first, rank in unequal_neighbours([_word(shown.rows) for shown in ranks], mesh.tp):
        return (
            f"Ranks {first} and {rank} are in one tp group of {mesh.tp}, which works on the same "
            "rows, and got different ones. Read data by strategy.dp_rank of strategy.dp_size, as "
            "strategy.batches does."
        )
    return None


def _same_masks_in_tp(
    ranks: Sequence[Shown], before: Sequence[Shown], mesh: Mesh, _: Step
) -> str | None:
    if not any(shown.draws for shown in ranks):
        return None
    for first, rank in unequal_neighbours([shown.randomness for shown in ranks], mesh.tp):
        return (
            f"Ranks {first} and {rank} are in one tp group of {mesh.tp} and have different random "
            "states, so dropout keeps other elements of what is the same on both. Draw random "
            "numbers alike on them, or from a generator of your own."
        )
    return None


def _other_rows_on_data_ranks(
    ranks: Sequence[Shown], before: Sequence[Shown], mesh: Mesh, _: Step
) -> str | None:
    if mesh.dp_size == 1 or not before:
        return None
    now, then = ({shown.rows for shown in each[:: mesh.tp]} for each in (ranks, before))
    # One batch for all ranks and all steps is somebody's experiment, and NaN equals nothing.
    if len(now) > 1 or len(then) > 1 or now == then or any(map(math.isnan, now | then)):
        return None
    return (
        f"All {mesh.dp_size} data ranks read the same rows, in this step and in the one that was "
        f"looked at before: each row counts {mesh.dp_size} times. Read data by strategy.dp_rank of "
        "strategy.dp_size, as strategy.batches does."
    )


def _settings(ranks: Sequence[Shown], *_: object) -> str | None:
    wrong = [rank for rank, shown in enumerate(ranks) if shown.settings != ranks[0].settings]
    if not wrong:
        return None
    rates = (ranks[0].rate, ranks[wrong[0]].rate)
    return (
        f"The optimizer's settings on rank {wrong[0]} are not those on rank 0: learning rates "
        f"{rates[1]:g} and {rates[0]:g}. Step the scheduler, and set what it sets, on every rank."
    )


def _tokens_once(
    ranks: Sequence[Shown], before: Sequence[Shown], mesh: Mesh, _: Step
) -> str | None:
    divisors = [shown.divisor for shown in ranks]
    if any(map(math.isnan, divisors)):
        return None
    tokens = sum(shown.loss_tokens for shown in ranks[:: mesh.tp])
    if all(divisor == tokens for divisor in divisors):
        return None
    wrong = next(rank for rank, divisor in enumerate(divisors) if divisor != tokens)
    return (
        f"Rank {wrong} divides its loss by {divisors[wrong]:g} loss tokens, and the labels of "
        f"{mesh.dp_size} data ranks have {tokens:g}, each counted once. Count with "
        "strategy.count_loss_tokens, which leaves out copies of tp and first labels."
    )


def _mean_over_tokens(
    ranks: Sequence[Shown], before: Sequence[Shown], mesh: Mesh, step: Step
) -> str | None:
    data = ranks[:: mesh.tp]
    tokens = sum(shown.loss_tokens for shown in data)
    weighted, losses, shares = (
        sum(getattr(shown, name) for shown in data) for name in ("weighted", "losses", "shares")
    )
    passes = sum(shown.forwards for shown in data)
    if not tokens or not all(map(math.isfinite, (weighted, losses, shares))):
        return None
    near = 1e-5 if step.precision == "fp32" else 1e-3
    right, mean_of_means = weighted / tokens, losses / passes
    if abs(shares - mean_of_means) > near * abs(mean_of_means):
        return None
    if abs(shares - right) <= 10 * near * abs(right):
        return None
    return (
        f"The loss that was backpropagated is {shares:.6g}, the mean of {passes:g} batches' means, "
        f"and the mean over their {tokens:g} loss tokens is {right:.6g}: tokens of short batches "
        "weigh more. Divide each batch's sum by strategy.count_loss_tokens(batches), or use "
        "train_step."
    )


def _word(value: float) -> float:
    return -1.0 if math.isnan(value) else value


_JUDGES: tuple[Judge, ...] = (
    _forwards,
    _same_rows_in_tp,
    _same_masks_in_tp,
    _other_rows_on_data_ranks,
    _settings,
    _tokens_once,
    _mean_over_tokens,
)
