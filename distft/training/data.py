"""Micro-batches in one global order that does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Collate = Callable[[list[Any]], dict[str, Any]]
PADDING = {"labels": -100}


class Batches:
    """The data of a run as lists of micro-batches; one item is one optimizer step.

    One pass over it is one epoch, or what is left of it. The epoch's rows are shuffled by seed
    and epoch, and dealt out window by window: a window is the next ``micro_batch * grad_accum *
    dp_size`` rows, and its m-th micro-batch goes to data rank ``m mod dp_size``. So every number
    of ranks reads the same rows in the same order, each row once, and the cursor is one number.
    The last window of an epoch may be short; a rank may then get fewer micro-batches or none,
    which `Strategy.train_step` pads with weight zero.

    A dataset without a length is this rank's own stream: every rank reads its own, and a rank
    that runs out first gets empty lists until all have.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch: int,
        grad_accum: int,
        seed: int,
        collate: Collate | None,
        shuffle: bool,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        for name, value in (("micro_batch", micro_batch), ("grad_accum", grad_accum)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"batches({name}={value!r}) needs an integer of at least 1.")
        self.dataset = dataset
        self.micro_batch = micro_batch
        self.grad_accum = grad_accum
        self.seed = seed
        self.collate = collate or pad_rows
        self.shuffle = shuffle
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.epoch = 0
        self.rows_read = 0
        # Of a dataset that is an iterator itself: the epoch it is in, the rows taken from it.
        self._epoch_of_iterator = 0
        self._rows_of_iterator = 0
        self.has_length = hasattr(dataset, "__len__")
        if self.has_length and len(dataset) == 0:
            raise ValueError("batches() got a dataset with 0 rows. Pass one with at least 1.")

    @property
    def rows_per_step(self) -> int:
        """Rows of a full window over all data ranks."""
        return self.micro_batch * self.grad_accum * self.dp_size

    def __len__(self) -> int:
        """Return the number of optimizer steps that are left in this epoch.

        Raises:
            TypeError: The dataset has no length.
        """
        if not self.has_length:
            raise TypeError("A dataset without a length has no number of steps.")
        return -(-(len(self.dataset) - self.rows_read) // self.rows_per_step)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rest of this epoch, then move on to the next.

        Collective: every rank, one all_reduce a step, for a dataset without a length; else none.
        """
        yield from self._windows() if self.has_length else self._stream()
        self.epoch += 1
        self.rows_read = 0

    def _windows(self) -> Iterator[list[dict[str, Any]]]:
        order = self._order()
        while self.rows_read < len(order):
            window = order[self.rows_read : self.rows_read + self.rows_per_step]
            # The cursor moves before the rows are handed out: a save inside the loop body then
            # counts the step that has just been made.
            self.rows_read += len(window)
            pieces = [
                window[start : start + self.micro_batch]
                for start in range(0, len(window), self.micro_batch)
            ]
            yield [
                self.collate([self.dataset[row] for row in piece])
                for piece in pieces[self.dp_rank :: self.dp_size]
            ]

    def _order(self) -> list[int]:
        import torch

        num_rows = len(self.dataset)
        if not self.shuffle:
            return list(range(num_rows))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order: list[int] = torch.randperm(num_rows, generator=generator).tolist()
        return order

    def _stream(self) -> Iterator[list[dict[str, Any]]]:
        rows = iter(self.dataset)
        one_shot = rows is self.dataset
        if one_shot and self.epoch > self._epoch_of_iterator:
            raise RuntimeError(
                f"The iterator was read to its end in epoch {self._epoch_of_iterator}, and epoch "
                f"{self.epoch} has 0 rows. Pass an object whose iter() starts anew."
            )
        # An iterator that was left in the middle goes on there by itself.
        for _ in range(self.rows_read - (self._rows_of_iterator if one_shot else 0)):
            next(rows, None)
        while True:
            taken: list[Any] = []
            for row in rows:
                taken.append(row)
                if len(taken) == self.micro_batch * self.grad_accum:
                    break
            if not _any_rank(bool(taken)):
                return
            self.rows_read += len(taken)
            self._rows_of_iterator = self.rows_read
            yield [
                self.collate(taken[start : start + self.micro_batch])
                for start in range(0, len(taken), self.micro_batch)
            ]

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: epoch, rows read in it, seed, and what must match on resume."""
        return {
            "epoch": self.epoch,
            "rows_read": self.rows_read,
            "seed": self.seed,
            "num_rows": len(self.dataset) if self.has_length else -1,
            "shuffle": int(self.shuffle),
            "dp_size": self.dp_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the cursor, so that the next pass yields exactly the rest of the epoch.

        Raises:
            ValueError: The state is of another dataset or seed, or of a stream on another number
                of data ranks.
        """
        mine = self.state_dict()
        for name in ("num_rows", "seed", "shuffle"):
            if state.get(name, mine[name]) != mine[name]:
                raise ValueError(
                    f"The saved data cursor has {name} {state[name]}, and this dataset has "
                    f"{mine[name]}. Resume with the dataset, seed and shuffle of the run."
                )
        if not self.has_length and state["dp_size"] != self.dp_size:
            raise ValueError(
                f"A stream saved on {state['dp_size']} data ranks cannot be split over "
                f"{self.dp_size}. Use a dataset with a length to change the number of ranks."
            )
        self.epoch, self.rows_read = state["epoch"], state["rows_read"]
        self._epoch_of_iterator = self.epoch


def _any_rank(value: bool) -> bool:
    """Return whether any rank says yes.

    Collective: every rank.
    """
    import torch
    import torch.distributed as dist

    from distft.training.step import control_device

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    flag = torch.tensor([int(value)], dtype=torch.int32, device=control_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def pad_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return one batch of rows, padded on the right to the longest: tensors (B, T).

    ``input_ids`` and other fields are padded with 0, ``labels`` with -100. ``labels`` default to
    ``input_ids``. ``attention_mask`` (0 on padding) is added unless rows bring their own.

    Raises:
        ValueError: Rows are no mappings with ``input_ids``, or do not share their fields.

    Collective: none.
    """
    import torch

    if not all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
        raise ValueError(
            f"The default collate reads rows with `input_ids`, and got {type(rows[0]).__name__}. "
            "Pass collate= for other rows."
        )
    names = list(rows[0])
    if any(set(row) != set(names) for row in rows):
        raise ValueError(
            f"Rows of one batch have the fields {sorted(map(sorted, {tuple(r) for r in rows}))}. "
            "Give every row the same fields."
        )
    fields = {name: [torch.as_tensor(row[name]) for row in rows] for name in names}
    fields.setdefault("labels", fields["input_ids"])
    fields.setdefault("attention_mask", [torch.ones_like(ids) for ids in fields["input_ids"]])
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            values, batch_first=True, padding_value=PADDING.get(name, 0)
        )
        if values[0].dim()
        else torch.stack(values)
        for name, values in fields.items()
    }
