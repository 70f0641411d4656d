"""Invariants and the hang doctor around a training loop that somebody else wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from distft.diagnose.hangs import watch_hangs
from distft.diagnose.invariants import hold_invariants

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distft.strategies.base import Strategy


@contextmanager
def watched(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer,
    invariants_every: int | None,
    hangs: bool | float,
) -> Iterator[None]:
    """Hold invariants and watch for hangs, each unless it is turned off.

    Args:
        strategy: The strategy.
        model: What `Strategy.apply` returned.
        optimizer: What `Strategy.apply` returned.
        invariants_every: As ``every`` of `hold_invariants`; None holds none.
        hangs: The limit of `watch_hangs` in seconds; True for its default, False watches none.

    Collective: every rank, entering and leaving.
    """
    with ExitStack() as stack:
        if hangs is not False:
            stack.enter_context(watch_hangs(None if hangs is True else hangs))
        if invariants_every is not None:
            stack.enter_context(hold_invariants(strategy, model, optimizer, every=invariants_every))
        yield
