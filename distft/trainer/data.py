"""Rows dealt to data ranks in whole rounds, without one that counts twice.

Accelerate fills the last round of an epoch with rows of its beginning: their loss and gradient
would count twice, more so on more ranks. Here what fills it has no loss tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from distft.trainer.progress import Dealing

# The label that counts for nothing.
_IGNORED = -100


class FilledBatches(BatchSampler):
    """Batches of a sampler's rows, filled to whole rounds of all data ranks.

    A row that fills is given as ``~index``, which `MaskedRows` knows.

    Args:
        sampler: Order of the rows.
        batch_size: Rows of a batch.
        ranks: Batches of a round.
        drop_last: Whether a round that is not full is left out in place of filled.

    Attributes:
        first_row: Row of the order that the next epoch begins with.
    """

    def __init__(self, sampler: Any, batch_size: int, ranks: int, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last=drop_last)
        self.sampler: Any
        self.first_row = 0
        self._ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch, or of what is left of it."""
        batch: list[int] = []
        first, number, left = None, 0, len(self)
        for index in islice(self.sampler, self.first_row, None):
            first = index if first is None else first
            batch.append(index)
            if len(batch) == self.batch_size:
                if number == left:
                    return
                yield batch
                batch, number = [], number + 1
        while first is not None and number < left:
            yield batch + [~first] * (self.batch_size - len(batch))
            batch, number = [], number + 1

    def __len__(self) -> int:
        """Return the number of batches of all ranks."""
        dealing = Dealing(len(self.sampler), self.batch_size, self._ranks, 1, self.drop_last)
        return dealing.rounds_from(self.first_row) * self._ranks


class MaskedRows(Dataset[Any]):
    """A dataset in which ``~index`` is a row of one token without a loss.

    Args:
        rows: Tokenized rows by index.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of rows that count."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Return one row."""
        return self.rows[index] if index >= 0 else _masked(self.rows[~index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows, as the dataset reads them fastest."""
        plain = [index if index >= 0 else ~index for index in indices]
        many = getattr(self.rows, "__getitems__", None)
        rows = many(plain) if many else [self.rows[index] for index in plain]
        return [
            row if index >= 0 else _masked(row) for index, row in zip(indices, rows, strict=True)
        ]


def _masked(row: Mapping[str, Any]) -> dict[str, Any]:
    if "input_ids" not in row:
        raise ValueError(
            f"A round of batches is not full, and a row with the columns {', '.join(row)} has no "
            "input_ids to mask. Set dataloader_drop_last=True, or give a number of rows that fills "
            "its rounds."
        )
    size = len(row["input_ids"])
    short = {
        name: value[:1] if hasattr(value, "__len__") and len(value) == size else value
        for name, value in row.items()
    }
    if "seq_lengths" in row:
        short["seq_lengths"] = [1]
    return {**short, "labels": [_IGNORED]}


def in_whole_rounds(
    loader: DataLoader[Any], ranks: int, drop_last: bool = False
) -> DataLoader[Any]:
    """Return a loader whose epoch is whole rounds of all data ranks, or the loader as it is.

    ``drop_last`` is what the arguments say: transformers does not pass it on for streams.

    As it is stay loaders whose batches are made by a sampler of their own.

    Raises:
        ValueError: A stream would be filled with rows of its beginning.

    Collective: none.
    """
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return loader if ranks == 1 else _stream_of(loader, ranks, drop_last)
    if type(batches) is not BatchSampler:
        return loader
    filled = FilledBatches(batches.sampler, batches.batch_size, ranks, batches.drop_last)
    return _like(loader, MaskedRows(loader.dataset), batch_sampler=filled)


def _stream_of(loader: DataLoader[Any], ranks: int, drop_last: bool) -> DataLoader[Any]:
    if not drop_last:
        raise ValueError(
            f"The rows are a stream, whose end nobody knows, and Accelerate fills the last round "
            f"of {ranks} data ranks with its first rows, which would count twice. Set "
            "dataloader_drop_last=True, which leaves that round out, or pass a dataset with a "
            "length."
        )
    return _like(loader, OneStream(loader.dataset), batch_size=loader.batch_size, drop_last=True)


class OneStream(IterableDataset[Any]):
    """A stream of rows that is dealt out row by row, whatever files it is made of.

    Accelerate deals out the files of a stream of several, and then ranks may have other numbers of
    batches: the one with more waits for ever.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows."""
        return iter(self.rows)

    def set_epoch(self, epoch: int) -> None:
        """Let the rows know the epoch, which some draw their order from."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)


def _like(loader: DataLoader[Any], rows: Any, **batches: Any) -> DataLoader[Any]:
    """Return a loader of other rows or batches, and otherwise the same."""
    return DataLoader(
        rows,
        **batches,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        in_order=loader.in_order,
    )


def filled_batches(loader: Any) -> FilledBatches | None:
    """Return what deals the rows of a loader of ours, or None.

    Collective: none.
    """
    batches = getattr(loader, "batch_sampler", None)
    # Accelerate's own, which takes a rank's batches, stands around it where there are several.
    batches = getattr(batches, "batch_sampler", batches)
    return batches if isinstance(batches, FilledBatches) else None


class SeededOrder(Sampler[int]):
    """A sampler whose order is drawn anew for each epoch, the same on every rank.

    Samplers that draw from the generator of their process give each rank another order.

    Args:
        sampler: One with a ``generator``.
        seed: Seed of the first epoch.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed, self._epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Say whose order comes next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield the rows in order."""
        seed = self._seed * 1_000_003 + self._epoch
        self._sampler.generator = torch.Generator().manual_seed(seed)
        return iter(self._sampler)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._sampler)


@dataclass(frozen=True)
class LastRound:
    """The last round of an epoch.

    Args:
        num_rows: Rows of an epoch.
        batch_size: Rows of a batch.
        ranks: Batches of a round.
    """

    num_rows: int
    batch_size: int
    ranks: int

    @property
    def num_filled(self) -> int:
        """Rows that fill it.

        >>> LastRound(22, 2, 4).num_filled, LastRound(24, 2, 4).num_filled
        (2, 0)
        """
        return -self.num_rows % (self.batch_size * self.ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks that get a row of their own in it.

        >>> LastRound(22, 2, 4).num_ranks, LastRound(24, 2, 4).num_ranks
        (3, 4)
        """
        return self.ranks - self.num_filled // self.batch_size

    def num_rows_of(self, rank: int) -> int:
        """Rows of its own that a rank gets in it.

        >>> [LastRound(21, 2, 4).num_rows_of(rank) for rank in range(4)]
        [2, 2, 1, 0]
        """
        rows = self.ranks * self.batch_size - self.num_filled
        return min(max(rows - rank * self.batch_size, 0), self.batch_size)

    def num_filling_tokens(self, in_rows: bool) -> int:
        """Tokens that fill it: one of each row that `without_filling_rows` leaves.

        >>> [LastRound(21, 2, 4).num_filling_tokens(rows) for rows in (True, False)]
        [2, 3]
        """
        return (self.ranks - self.num_ranks) * self.batch_size if in_rows else self.num_filled


def is_in_rows(inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch is rows side by side, not all of them in one.

    Collective: none.
    """
    return "attention_mask" in inputs


def without_filling_rows(inputs: Mapping[str, Any], last: LastRound, rank: int) -> dict[str, Any]:
    """Return a rank's batch of the last round without rows that fill it, if one is its own.

    They have no loss tokens, but a router counts each token.

    Collective: none.
    """
    rows = last.num_rows_of(rank)
    if not is_in_rows(inputs) or rows in (0, last.batch_size):
        return dict(inputs)
    size = len(inputs["attention_mask"])
    return {
        name: value[:rows] if getattr(value, "ndim", 0) and len(value) == size else value
        for name, value in inputs.items()
    }
