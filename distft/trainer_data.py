"""Rows dealt to data ranks in whole rounds, without one that counts twice.

Accelerate fills the last round of an epoch with rows of its beginning: their loss and gradient
would count twice, more so on more ranks. Here what fills it has no loss tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

# The label that counts for nothing.
_IGNORED = -100


class FilledBatches(BatchSampler):
    """Batches of a sampler's rows, filled to whole rounds of all data ranks.

    A row that fills is given as ``~index``, which `MaskedRows` knows.

    Args:
        sampler: Order of the rows.
        batch_size: Rows of a batch.
        ranks: Batches of a round.
    """

    def __init__(self, sampler: Any, batch_size: int, ranks: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.sampler: Any
        self._ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch."""
        batch: list[int] = []
        first, number = None, 0
        for index in self.sampler:
            first = index if first is None else first
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch, number = [], number + 1
        while first is not None and (batch or number % self._ranks):
            yield batch + [~first] * (self.batch_size - len(batch))
            batch, number = [], number + 1

    def __len__(self) -> int:
        """Return the number of batches of all ranks."""
        rows_of_a_round = self.batch_size * self._ranks
        return -(-len(self.sampler) // rows_of_a_round) * self._ranks


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


def in_whole_rounds(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """Return a loader whose epoch is whole rounds of all data ranks, or the loader as it is.

    As it is stay streams, loaders that drop an incomplete round, and those whose batches are made
    by a sampler of their own.

    Collective: none.
    """
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return loader
    if batches.drop_last:
        return loader
    return DataLoader(
        MaskedRows(loader.dataset),
        batch_sampler=FilledBatches(batches.sampler, batches.batch_size, ranks),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        in_order=loader.in_order,
    )


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
