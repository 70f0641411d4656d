"""Whether the ranks of a `tp` group, which work on the same rows, got the same rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn

# Set on a model whose rows were looked at.
_MARK = "_distft_rows_are_the_same"


def check_first_rows(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], copies: int, call: str
) -> None:
    """Check the rows of a model's first step, as `check_same_rows` does; later steps are free.

    Raises:
        ValueError: As `check_same_rows`.

    Collective: every rank where ``copies`` is above 1, in the first step of a model.
    """
    inner: Any = unwrap(model)
    if copies > 1 and not getattr(inner, _MARK, False):
        check_same_rows(batches, copies, call)
        setattr(inner, _MARK, True)


def check_same_rows(batches: Iterable[Mapping[str, Any]], copies: int, call: str) -> None:
    """Raise on every rank where neighbours that must work on the same rows got different ones.

    Args:
        batches: This rank's batches.
        copies: Neighbours that work on the same rows: the size of a `tp` group.
        call: What to name in an error.

    Raises:
        ValueError: Two ranks of one group, and what to do.

    Collective: every rank where ``copies`` is above 1: 16 bytes from each.
    """
    import torch.distributed as dist

    if copies == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _digest(batches))
    for first, rank in unequal_neighbours(everyone, copies):
        raise ValueError(
            f"{call} got different rows on ranks {first} and {rank}, which are in one tp group "
            f"of {copies} and work on the same rows. Read data by strategy.dp_rank of "
            "strategy.dp_size, as strategy.batches does."
        )


def unequal_neighbours(found: Sequence[Any], copies: int) -> Iterator[tuple[int, int]]:
    """Yield the first rank of a group of ``copies`` and each in it that found something else.

    >>> list(unequal_neighbours(["a", "a", "b", "c"], 2))
    [(2, 3)]

    Collective: none.
    """
    for rank in range(len(found) if copies > 1 else 0):
        first = rank - rank % copies
        if found[rank] != found[first]:
            yield first, rank


def _digest(batches: Iterable[Mapping[str, Any]]) -> bytes:
    import torch

    found = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for name, value in sorted(batch.items()):
            if isinstance(value, torch.Tensor):
                raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                found.update(raw.numpy().tobytes())
            else:
                found.update(f"{name} {value!r}".encode())
    return found.digest()
