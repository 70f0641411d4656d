"""A progress bar over ranks: they append to a file, the process at the terminal reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


@dataclass(frozen=True)
class FileReport:
    """Appends each step to a file; it pickles to ranks in other processes."""

    path: Path

    def __call__(self, step: int, loss: float) -> None:
        """Write one line: the step and its loss."""
        with self.path.open("a") as file:
            file.write(f"{step} {loss}\n")


@dataclass(frozen=True)
class NoReport:
    """Says nothing: for every rank but the first."""

    def __call__(self, step: int, loss: float) -> None:
        """Do nothing."""


class Bars:
    """One progress bar for each strategy, drawn while its steps come in."""

    def __init__(self, console: Console, total: int) -> None:
        self._total = total
        self._progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Show the bars inside the context."""
        with self._progress:
            yield

    def start(self, name: str) -> Bar:
        """Add the bar of a strategy."""
        task = self._progress.add_task(name, total=self._total, note="starting ranks")
        return Bar(self._progress, task, self._total)


class Bar:
    """The bar of one strategy; called with a step and its loss."""

    def __init__(self, progress: Progress, task: TaskID, total: int) -> None:
        self._progress, self._task, self._total = progress, task, total

    def __call__(self, step: int, loss: float) -> None:
        """Move the bar to a step; after the last one, steps are those made again."""
        done = self._progress.tasks[self._task].completed >= self._total
        note = f"resumed at {step}" if done else f"loss {loss:.4f}"
        self._progress.update(self._task, completed=self._total if done else step, note=note)

    def say(self, note: str) -> None:
        """Show a word beside the bar."""
        self._progress.update(self._task, note=note)

    def finish(self, note: str) -> None:
        """Stop the clock of this bar and leave a word."""
        self._progress.update(self._task, completed=self._total, note=note)
        self._progress.stop_task(self._task)


@contextmanager
def following(path: Path, bar: Callable[[int, float], None]) -> Iterator[None]:
    """Feed the lines that ranks append to ``path`` to the bar, from a thread."""
    path.touch()
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, bar, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(path: Path, bar: Callable[[int, float], None], over: threading.Event) -> None:
    with path.open() as file:
        rest, last = "", False
        while not last:
            # The last look comes after the ranks have returned, so no line is lost.
            last = over.wait(0.1)
            *lines, rest = (rest + file.read()).split("\n")
            for line in lines:
                step, loss = line.split()
                bar(int(step), float(loss))
