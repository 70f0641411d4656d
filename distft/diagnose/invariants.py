"""Invariants of a run: what must hold in every step, looked at in some of them.

At an optimizer's step, before weights change, each rank brings a few numbers to one all_gather:
what its forward passes showed (`evidence`) and the norms of the tensors that others hold copies of
(`copies`). What a rank can see alone (`contract`) it tells in the same numbers, so that a violation
is raised on every rank alike, and names the rank and the tensor.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from distft.diagnose.contract import (
    check_dtypes,
    check_optimizer,
    check_planned_bytes,
    check_ties,
    read_dtypes,
    tensors_of,
)
from distft.diagnose.copies import digests, find_copies, first_difference
from distft.diagnose.evidence import Evidence, Window, number_of
from distft.diagnose.judge import Shown, Step, first_fault
from distft.process_group import group_size, local_device, raise_together
from distft.training.step import control_device
from distft.training.wrappers import is_engine

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distft.strategies.base import Strategy

logger = logging.getLogger("distft")


def hold_invariants(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, *, every: int = 50
) -> Invariants:
    """Return a context in which a step that breaks an invariant raises, on every rank alike.

    Looked at in the first two steps and then in every ``every``-th, before weights change: all
    that is trained is summed over the ranks that hold copies; copies of weights and buffers are
    equal; dtypes are those of the precision; the optimizer holds the model's tensors; tied tensors
    are one; bytes are as planned; ranks of a tp group read the same rows and draw the same random
    numbers, data ranks read others; loss tokens count once; each rank makes as many forward
    passes; settings such as the learning rate are the same; recomputed blocks draw their dropout
    masks again. Printed, it shows the dtypes and what was looked at.

    Args:
        strategy: The strategy.
        model: What `Strategy.apply` returned.
        optimizer: What `Strategy.apply` returned.
        every: Steps from one look to the next.

    Raises:
        ValueError: ``every`` is below 1.
        RuntimeError: An invariant does not hold; later, in ``optimizer.step``, the same.

    Collective: every rank; later every rank, in ``optimizer.step`` of a step that is looked at.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"hold_invariants(every={every!r}) needs at least 1 step. Pass every=50.")
    return Invariants(strategy, model, optimizer, every)


@final
class Invariants:
    """What `hold_invariants` returns.

    Attributes:
        seconds: What was spent in here so far, waiting for other ranks included.
        looks: Number of steps that were looked at.
        dtypes: Those of the last look.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, every: int
    ) -> None:
        began = time.perf_counter()
        self.strategy, self.model, self.optimizer, self.every = strategy, model, optimizer, every
        self._mesh, self._num_ranks = strategy.mesh(), group_size("hold_invariants()")
        self.looks, self._steps, self.seconds = 0, 0, 0.0
        self._planned = "bytes as planned: not looked at yet"
        self._last: list[Shown] = []
        self._fewest = sys.maxsize
        self._held = tensors_of(optimizer)
        self.dtypes = self._first = read_dtypes(model, optimizer)
        raise_together(_error_of(self._check_at_start))
        self._copied = find_copies(model, has_gradients=not is_engine(model))
        self._evidence = Evidence(model, self._timed)
        hook = optimizer.register_step_pre_hook(self._timed(self._on_step))
        self._undo: Callable[[], None] | None = hook.remove
        self.seconds += time.perf_counter() - began

    def __enter__(self) -> Invariants:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop looking."""
        self.close()

    def close(self) -> None:
        """Take all hooks off; safe to call twice.

        Collective: none.
        """
        if self._undo is not None:
            self._undo()
            self._undo = None
            self._evidence.close()

    def __str__(self) -> str:
        """Show dtypes, bytes, and what was looked at."""
        kinds = [each.kind for each in self._copied]
        return (
            f"{self.strategy!r}, precision {self.strategy.precision}\n{self.dtypes}\n"
            f"{self._planned}\n"
            f"copies on other ranks: {kinds.count('weight')} weights, {kinds.count('gradient')} "
            f"gradients, {kinds.count('buffer')} buffers\n"
            f"looked at in {self.looks} of {self._steps} steps, {self.seconds:.3f} s in all"
        )

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed

    def _check_at_start(self) -> None:
        check_optimizer(self.model, self._held)
        check_ties(self.model)
        check_dtypes(self.strategy, self.dtypes, self.dtypes)

    def _on_step(self, *_: Any) -> None:
        window = self._evidence.window
        if not window.forwards:
            # An optimizer whose tensors have several layouts steps once for each.
            return
        self._steps += 1
        self._fewest = min(self._fewest, window.forwards)
        looked = self._evidence.notes
        upcoming = self._steps + 1
        self._evidence.start(upcoming <= 2 or upcoming % self.every == 0)
        if looked:
            self._look(window)

    def _look(self, window: Window) -> None:
        """Compare this step with the other ranks'."""
        import torch
        import torch.distributed as dist

        error = _error_of(lambda: self._check_alone(window))
        shown = self._shown(window, error is not None)
        norms = digests(self.model, self._copied, local_device())
        mine = torch.cat([torch.tensor(shown.numbers(), dtype=torch.float64), norms.cpu()])
        everyone = [mine]
        if self._num_ranks > 1:
            mine = mine.to(control_device())
            everyone = [torch.empty_like(mine) for _ in range(self._num_ranks)]
            dist.all_gather(everyone, mine)
        size = len(fields(Shown))
        rows = torch.stack(everyone).tolist()
        ranks = [Shown(*row[:size]) for row in rows]
        if any(rank.failed for rank in ranks):
            raise_together(error)
        before, self._last = self._last, ranks
        fault = first_fault(ranks, before, self._mesh, Step(self._steps, self.strategy.precision))
        fault = fault or first_difference(self._copied, [row[size:] for row in rows], self._mesh.tp)
        self.looks += 1
        if self.looks == 1:
            logger.info("Invariants of this run:\n%s", self)
        if fault is not None:
            raise RuntimeError(f"Step {self._steps} breaks an invariant. {fault}")

    def _check_alone(self, window: Window) -> None:
        """Check what one rank sees by itself."""
        now = read_dtypes(self.model, self.optimizer, window.compute)
        # Where tensors have several layouts, an optimizer shows some of them at a time.
        check_optimizer(self.model, self._held | tensors_of(self.optimizer))
        check_ties(self.model)
        check_dtypes(self.strategy, self._first, now)
        self.dtypes = now
        # What is not there in the first step must stay as it is when it first is.
        self._first = replace(
            self._first,
            gradients=self._first.gradients or now.gradients,
            moments=self._first.moments or now.moments,
        )
        if window.masks_drawn_anew:
            raise RuntimeError(
                f"Step {self._steps}: {window.masks_drawn_anew} was run again in the backward pass "
                "with another random state than at first, and it draws random numbers: its "
                "dropout masks differ, and its gradients are wrong. Use "
                "activation_checkpointing=True of the strategy, or preserve_rng_state=True."
            )
        if self._steps == 2:
            self._planned = check_planned_bytes(self.strategy, self.model, self.optimizer)

    def _shown(self, window: Window, failed: bool) -> Shown:
        """Return what this rank tells the others; the one place that waits for the device."""
        rows = [int(each) for each in window.rows]
        tokens = [float(each) for each in window.loss_tokens]
        losses = [float(each) for each in window.losses]
        shares = [float(each) for each in window.shares]
        # An update that was left out, since its gradients were not finite, adds its window here.
        one_window = window.forwards <= self._fewest and all(map(math.isfinite, shares))
        has_losses = one_window and len(losses) == len(tokens) == window.forwards
        has_shares = has_losses and len(shares) == window.forwards
        known = one_window and len(set(window.divisors)) == 1 and len(tokens) == window.forwards
        settings = [
            sorted((k, v) for k, v in group.items() if isinstance(v, int | float | tuple))
            for group in self.optimizer.param_groups
        ]
        return Shown(
            float(failed),
            float(window.forwards),
            float(number_of(repr(rows))) if rows else math.nan,
            float(window.randomness),
            float(window.draws),
            float(number_of(repr(settings))),
            float(self.optimizer.param_groups[0]["lr"]),
            sum(tokens),
            window.divisors[0] if known else math.nan,
            sum(a * b for a, b in zip(losses, tokens, strict=True)) if has_losses else math.nan,
            sum(losses) if has_losses else math.nan,
            sum(shares) if has_shares else math.nan,
        )


def _error_of(check: Callable[[], Any]) -> Exception | None:
    """Return what a check raises: the other ranks are told before anybody leaves."""
    try:
        check()
    except Exception as error:
        return error
    return None
