"""One strategy on its way through a parity check: what its ranks say, or that they say nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distft.diagnose.certificate import (
    FAILED,
    NOT_APPLICABLE,
    PASSED,
    QUANTITIES,
    Difference,
    StrategyResult,
)
from distft.diagnose.ranks import Report, load_under, train_under
from distft.diagnose.recipe import Recipe
from distft.strategies.base import Strategy
from distft.testing.pool import GONE, RanksFailed, RanksTimedOut, WorkerPool


class StrategyRun:
    """One strategy: trained, then loaded from what others saved."""

    def __init__(
        self, strategy: Strategy, recipe: Recipe, folder: Path, path: Path, timeout: float
    ) -> None:
        self.strategy, self.path = strategy, path
        self._recipe, self._folder, self._timeout = recipe, folder, timeout
        self._reports: list[list[Report]] = []
        self._status, self._reason = PASSED, ""
        self._num_loads, self._seconds = 0, 0.0
        self.saved = False

    def train(self, pool: WorkerPool) -> None:
        """Train and save under the strategy."""
        try:
            self.strategy.mesh(pool.world_size)
        except ValueError as error:
            self._status, self._reason = NOT_APPLICABLE, str(error)
            return
        self._call(pool, train_under, self.path)
        self.saved = self._status == PASSED

    def load(self, pool: WorkerPool, runs: Sequence[StrategyRun]) -> None:
        """Load what strategies have saved that passed so far."""
        if self._status != PASSED:
            return
        sources = [(str(run.strategy), run.path) for run in runs if run.saved]
        self._call(pool, load_under, sources)
        self._num_loads = len(sources)

    def _call(self, pool: WorkerPool, job: Any, argument: Any) -> None:
        began = time.monotonic()
        try:
            reports = pool.run(
                job, self.strategy, self._recipe, self._folder, argument, timeout=self._timeout
            )
        except RanksFailed as error:
            self._fail(_what_failed(error, self._folder))
        except RanksTimedOut as error:
            self._fail(_who_waits(self._folder, pool.world_size, self._timeout) + f"\n{error}")
        else:
            self._reports.append(reports)
            if reports[0].not_applicable is not None:
                self._status, self._reason = NOT_APPLICABLE, reports[0].not_applicable
            elif any(report.differs for report in reports):
                self._status = FAILED
        self._seconds += time.monotonic() - began

    def _fail(self, reason: str) -> None:
        self._status, self._reason = FAILED, reason

    def result(self) -> StrategyResult:
        """Return what became of it."""
        differences: list[Difference] = []
        largest: dict[tuple[str, str], float] = {}
        for reports in self._reports:
            differences += _merge(reports)
            for found in (found for report in reports for found in report.found):
                key = (found.when, found.quantity)
                largest[key] = max(largest.get(key, 0.0), found.gap.error)
        return StrategyResult(
            str(self.strategy),
            self._status,
            self._reason,
            tuple(differences),
            largest,
            self._num_loads,
            round(self._seconds, 1),
        )


def _merge(reports: Sequence[Report]) -> list[Difference]:
    """Return what differs on any rank, each once, in the order of the run."""
    merged: dict[tuple[str, str, str], list[Any]] = {}
    for rank, report in enumerate(reports):
        for found in report.found:
            if found.gap.differs:
                key = (found.when, found.quantity, found.gap.name)
                merged.setdefault(key, []).append((rank, found.gap))
    stages = list(dict.fromkeys(found.when for report in reports for found in report.found))
    made = []
    # Stages in the order of the run, and in each what is computed first.
    for when, quantity, name in sorted(
        merged, key=lambda key: (stages.index(key[0]), QUANTITIES.index(key[1]))
    ):
        gaps = merged[when, quantity, name]
        worst = max((gap for _, gap in gaps), key=lambda gap: (gap.error != gap.error, gap.error))
        ranks = tuple(rank for rank, _ in gaps)
        made.append(
            Difference(when, quantity, name, worst.error, worst.tolerance, ranks, worst.values)
        )
    return made


def _what_failed(error: RanksFailed, folder: Path) -> str:
    raised = [(rank, cause) for rank, cause in enumerate(error.errors) if cause is not None]
    # Where a process is gone, errors of the others come of that.
    gone = [(rank, cause) for rank, cause in raised if str(cause) == GONE]
    rank, cause = (gone or raised)[0]
    where = _stage_of(folder, rank)
    return f"rank {rank}{where}: {type(cause).__name__}: {cause}"


def _who_waits(folder: Path, world_size: int, timeout: float) -> str:
    stages = {rank: _stage_of(folder, rank) for rank in range(world_size)}
    places = ", ".join(f"rank {rank}{where}" for rank, where in stages.items() if where)
    return f"ranks did not come back in {timeout:g} s: {places or 'none had begun'}."


def _stage_of(folder: Path, rank: int) -> str:
    path = folder / f"stage-{rank}"
    text = path.read_text() if path.is_file() else ""
    return f", in {text}" if text else ""
