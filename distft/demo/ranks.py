"""Two ways to get ranks: start them here, or be one of those that a launcher started."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distft.demo.plan import Job
from distft.demo.progress import Bar, FileReport, NoReport, following
from distft.demo.training import Report, Run

Work = Callable[[Job, Report], Run]

# A run of any length may finish; a rank that fails ends the others long before.
_TIMEOUT_SECONDS = 24 * 3600.0


class Ranks(ABC):
    """Where the work of a job runs."""

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""

    @abstractmethod
    def run(self, work: Work, job: Job, bar: Bar) -> list[Run]:
        """What ``work`` brings back from each rank of the job.

        Collective: every rank of a launcher's job.
        """

    @abstractmethod
    def check(self, step: Callable[[], Any]) -> None:
        """Do ``step`` on the first rank; an error there is raised on every rank.

        Collective: every rank of a launcher's job.
        """


class StartedRanks(Ranks):
    """Ranks of this machine, started by this process with gloo."""

    def __init__(self) -> None:
        self._pool: Any = None

    @property
    def is_first(self) -> bool:
        """Always: the ranks are other processes."""
        return True

    def run(self, work: Work, job: Job, bar: Bar) -> list[Run]:
        """Start as many ranks as the job needs, or use those of the last job again."""
        from distft.testing import WorkerPool

        if self._pool is None or self._pool.world_size != job.ranks:
            self.close()
            self._pool = WorkerPool(job.ranks, timeout=_TIMEOUT_SECONDS)
        with TemporaryDirectory(prefix="distft-demo-") as folder:
            lines = Path(folder, "steps")
            with following(lines, bar):
                return list(self._pool.run(_on_rank, work, job, lines))

    def check(self, step: Callable[[], Any]) -> None:
        """Do it here."""
        step()

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _on_rank(work: Work, job: Job, lines: Path) -> Run:
    silence()
    report = FileReport(lines) if os.environ.get("RANK", "0") == "0" else NoReport()
    return work(job, report)


class LaunchedRanks(Ranks):
    """The ranks that torchrun (or another launcher) started; this process is one of them."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return os.environ["RANK"] == "0"

    def run(self, work: Work, job: Job, bar: Bar) -> list[Run]:
        """Do this rank's part and gather every rank's."""
        import torch.distributed as dist

        run = work(job, bar if self.is_first else NoReport())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, run)
        return everyone

    def check(self, step: Callable[[], Any]) -> None:
        """Do it on rank 0 and tell the others how it went."""
        from distft.process_group import raise_together

        error: BaseException | None = None
        if self.is_first:
            try:
                step()
            except (RuntimeError, ValueError, OSError) as caught:
                error = caught
        raise_together(error)


def silence() -> None:
    """Turn off the bars and notes of libraries that would be drawn into ours.

    Collective: none
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
