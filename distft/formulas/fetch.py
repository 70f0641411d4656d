"""How often DeepSpeed's stage 3 gathers each parameter in one micro-step.

The engine records the order in which modules work and, from its third micro-step on, gathers ahead
along that record. A parameter whose next use it passed while looking ahead stays gathered, so how
often it is gathered depends on the sizes and the limits; nothing closed gives it. What follows
replays the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Visit(NamedTuple):
    """A module at work, in the forward or the backward pass.

    Attributes:
        own: Indices of its own parameters.
        frees: Whether it frees them after.
        recomputed: Indices of the frozen parameters that recomputing inside of it has used. The
            engine frees them with it, also what it has looked ahead to and would keep.
    """

    own: tuple[int, ...]
    frees: bool = True
    recomputed: tuple[int, ...] = ()


@dataclass(frozen=True)
class FetchLimits:
    """DeepSpeed's limits, all in elements.

    Args:
        prefetch: Gathered ahead at once (`stage3_prefetch_bucket_size`).
        live: Gathered in all, beyond which nothing is gathered ahead (`max_live_parameters`).
        reuse: A parameter used again within so many elements stays (`max_reuse_distance`).
        persistence: Parameters up to this size stay whole (`param_persistence_threshold`).
    """

    prefetch: int = 50_000_000
    live: int = 1_000_000_000
    reuse: int = 0
    persistence: int = 0


def fetch_counts(numels: Sequence[int], visits: Sequence[Visit], limits: FetchLimits) -> list[int]:
    """Number of times that each parameter is gathered in one micro-step, in the steady state.

    Source: DeepSpeed 0.19 `partitioned_param_coordinator.py`, `fetch_sub_module` and
    `release_sub_module`.

    Args:
        numels: Elements of each parameter.
        visits: The modules in the order of work, forward and then backward.
        limits: The engine's limits.

    Collective: none.

    >>> there_and_back = [Visit(own) for own in ((), (0,), (1,), (), (1,), (0,))]
    >>> fetch_counts([4, 4], there_and_back, FetchLimits(prefetch=0))
    [2, 2]
    >>> fetch_counts([4, 4], there_and_back, FetchLimits(prefetch=100))
    [1, 1]
    """
    replay = _Replay(numels, visits, limits)
    for step, visit in enumerate(visits):
        replay.fetch(step, visit.own)
        if visit.frees:
            replay.release(step, visit.own)
        replay.free(index for index in visit.recomputed if index in replay.arrived)
    return replay.counts


@dataclass
class _Replay:
    numels: Sequence[int]
    visits: Sequence[Visit]
    limits: FetchLimits
    counts: list[int] = field(init=False)
    whole: set[int] = field(init=False)
    kept: frozenset[int] = field(init=False)
    queue: deque[tuple[int, int]] = field(init=False)
    passed: list[int] = field(init=False)
    # Of what is gathered, that which a module has waited for, alone or gathered in one call with
    # what it waited for.
    arrived: set[int] = field(default_factory=set)
    calls: dict[int, tuple[int, ...]] = field(default_factory=dict)
    live: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.numels)
        self.whole = {i for i, n in enumerate(self.numels) if n <= self.limits.persistence}
        self.kept = frozenset(self.whole)
        self.queue = deque(
            (index, step) for step, visit in enumerate(self.visits) for index in sorted(visit.own)
        )
        # The last use of each parameter that the look-ahead has passed.
        self.passed = [-1] * len(self.numels)

    def fetch(self, step: int, own: Sequence[int]) -> None:
        """Gather what a module needs, then ahead what the limits allow."""
        self._gather(own)
        for index in own:
            self.arrived.update(self.calls.get(index, ()))
        waiting = {index for index in own if self.passed[index] < step}
        while self.queue and waiting:
            index, use = self.queue.popleft()
            self.passed[index] = use
            waiting.discard(index)
        budget = min(self.limits.live - self.live, self.limits.prefetch)
        ahead: list[int] = []
        gathered = 0
        while self.queue and gathered < budget:
            index, use = self.queue.popleft()
            self.passed[index] = max(self.passed[index], use)
            if index not in self.whole and index not in ahead:
                ahead.append(index)
                gathered += self.numels[index]
        self._gather(ahead)

    def release(self, step: int, own: Sequence[int]) -> None:
        """Free what a module used, unless a passed or a near use keeps it."""
        near: set[int] = set()
        distance = 0
        for later in self.visits[step + 1 :]:
            if distance >= self.limits.reuse:
                break
            near.update(later.own)
            distance += sum(self.numels[index] for index in later.own)
        self.free(i for i in own if i not in near and self.passed[i] <= step + 1)

    def free(self, indices: Iterable[int]) -> None:
        """Free what is gathered and does not persist."""
        for index in list(indices):
            if index in self.whole and index not in self.kept:
                self.whole.discard(index)
                self.arrived.discard(index)
                self.calls.pop(index, None)
                self.live -= self.numels[index]

    def _gather(self, indices: Iterable[int]) -> None:
        call = tuple(index for index in indices if index not in self.whole)
        for index in call:
            self.counts[index] += 1
            self.whole.add(index)
            self.calls[index] = call
            self.live += self.numels[index]
