"""Which rows of which epoch a run has trained, so that another layout goes on at the next one.

An epoch is one order of rows, the same at any number of ranks. They are dealt out from the first
to the last: a round is one batch for each data rank, a step one or several rounds. A run is
therefore at one row of one order, whatever the ranks, batches and rounds that brought it there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("distft")


@dataclass(frozen=True)
class Position:
    """The next row to be trained.

    Args:
        epoch: Epochs that are over.
        row: Rows of the epoch at hand that were trained.
    """

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Dealing:
    """How the rows of an epoch become steps.

    Args:
        num_rows: Rows of an epoch.
        batch_size: Rows of a batch.
        ranks: Batches of a round.
        grad_accum: Rounds of a step; the last step of an epoch may have fewer.
        drop_last: Whether an incomplete round at the end is left out.
    """

    num_rows: int
    batch_size: int
    ranks: int
    grad_accum: int
    drop_last: bool = False

    @property
    def rows_per_step(self) -> int:
        """Rows of a full step."""
        return self.batch_size * self.ranks * self.grad_accum

    def rounds_from(self, row: int) -> int:
        """Return the rounds that are left of an epoch.

        >>> Dealing(22, 2, 2, 2).rounds_from(0), Dealing(22, 2, 2, 2).rounds_from(16)
        (6, 2)
        """
        left, size = self.num_rows - row, self.batch_size * self.ranks
        return left // size if self.drop_last else -(-left // size)

    def steps_from(self, row: int) -> int:
        """Return the steps that are left of an epoch.

        >>> Dealing(22, 2, 2, 2).steps_from(0), Dealing(22, 2, 2, 2).steps_from(16)
        (3, 1)
        """
        return -(-self.rounds_from(row) // self.grad_accum)

    def after(self, position: Position, steps: int) -> Position:
        """Return where a run is some steps later.

        >>> Dealing(22, 2, 2, 2).after(Position(), 4)
        Position(epoch=1, row=8)
        """
        epoch, row = position.epoch, position.row
        while steps >= (left := self.steps_from(row)):
            if not (left or row):
                # An epoch without a step, which no number of steps leaves.
                return Position(epoch)
            epoch, row, steps = epoch + 1, 0, steps - left
        return Position(epoch, row + steps * self.rows_per_step)

    def steps_to(self, position: Position) -> int:
        """Return the steps after which a run of this dealing has as many left as there are here.

        >>> Dealing(22, 2, 2, 2).steps_to(Position(1, 8))
        4
        """
        return (position.epoch + 1) * self.steps_from(0) - self.steps_from(position.row)


class Progress:
    """Where a run of the Trainer is.

    Args:
        seed: Seed of the order of rows.
        sampling: Name of the way in which they are ordered.
    """

    def __init__(self, seed: int, sampling: str) -> None:
        self._order = {"seed": seed, "sampling": sampling}
        self.dealing: Dealing | None = None
        self.begin(0, None)

    def begin(self, step: int, saved: Mapping[str, Any] | None, ranks: int = 0) -> None:
        """Start from the beginning, or from what a checkpoint of some data ranks says."""
        self._start, self._step, self._saved, self._ranks = Position(), step, saved, ranks
        self._group: int | None = None

    def group(self, size: int) -> int:
        """Return how many rows are ordered by length together: the number of the run's beginning.

        Args:
            size: The number without a run before.
        """
        self._group = int((self._saved or {}).get("group", size))
        return self._group

    def to_json(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of this step has to say."""
        if self.dealing is None:
            return {}
        here = self.position(step)
        rows = {"epoch": here.epoch, "row": here.row, "num_rows": self.dealing.num_rows}
        group = {} if self._group is None else {"group": self._group}
        return {**rows, **group, **self._order}

    def deal(self, dealing: Dealing | None, rows_per_step: int, ranks: int, skip: bool) -> int:
        """Say how rows are dealt from here on; return by how many steps the run is ahead.

        Ahead of a run that had been dealt so from the beginning and has as many steps left.

        Args:
            dealing: How, or None for a stream, of which the training loop skips what was read.
            rows_per_step: Rows of a step, over all data ranks.
            ranks: Data ranks.
            skip: Whether rows that a checkpoint says were trained are skipped.

        Raises:
            ValueError: The checkpoint is of other rows, of another order, or of a stream that was
                dealt otherwise.

        Collective: none.
        """
        self.dealing = dealing
        if self._saved is None:
            return 0
        before = self._saved["rows_per_step"]
        if dealing is None:
            if skip and (before, self._ranks) != (rows_per_step, ranks):
                raise ValueError(
                    f"The checkpoint's run had {before} rows a step on {self._ranks} data ranks, "
                    f"and this one has {rows_per_step} on {ranks}: of a stream the rows that are "
                    "left are not known then. Go on with the numbers of the run, or use a dataset "
                    "with a length."
                )
            return 0
        self._start = _saved_position(self._saved, dealing, self._step)
        if not skip:
            self._start = Position(self._start.epoch)
        else:
            self._check_order(dealing)
            # What an incomplete round left out is not trained later.
            self._start = dealing.after(self._start, 0)
        if before != rows_per_step:
            logger.warning(
                "A step has %d rows from here on, and had %d. Rows go on at number %d of epoch %d; "
                "the learning rate is what its schedule says at step %d.",
                rows_per_step,
                before,
                self._start.row,
                self._start.epoch,
                self._step,
            )
        return self._step - dealing.steps_to(self._start)

    def _check_order(self, dealing: Dealing) -> None:
        now = {"num_rows": dealing.num_rows, **self._order}
        saved = self._saved or {}
        for name, value in now.items():
            if saved.get(name, value) != value:
                raise ValueError(
                    f"The checkpoint's run had {name} {saved[name]!r} and this one has {value!r}, "
                    "so the rows that it has not trained yet are not known. Go on with the dataset "
                    "and data_seed of the run, or set ignore_data_skip=True."
                )

    def enter(self, epoch: int, step: int) -> int:
        """Return the first row that an epoch begins with, and count from there."""
        row = self._start.row if epoch == self._start.epoch else 0
        self._start, self._step = Position(epoch, row), step
        return row

    @property
    def start(self) -> Position:
        """Where the epoch at hand, or the run, began."""
        return self._start

    def position(self, step: int) -> Position:
        """Return where the run is after a step."""
        assert self.dealing is not None, "a stream has no rows to count"
        return self.dealing.after(self._start, step - self._step)

    def epochs(self, step: int) -> float:
        """Return the epochs that are trained after a step, a fraction of one included."""
        assert self.dealing is not None, "a stream has no rows to count"
        here = self.position(step)
        return here.epoch + here.row / self.dealing.num_rows


def _saved_position(saved: Mapping[str, Any], dealing: Dealing, step: int) -> Position:
    if "row" in saved:
        return Position(saved["epoch"], saved["row"])
    # Checkpoints of before: their runs had begun at 0 with the same rows a step.
    before = Dealing(dealing.num_rows, saved["rows_per_step"], 1, 1)
    return before.after(Position(), step)
