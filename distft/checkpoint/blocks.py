"""Tensors stored in blocks that fill only a part of the whole's rows, put together by bands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from distft.checkpoint.casts import storage_dtype
from distft.checkpoint.shards import LogicalTensor, Piece, row_major
from distft.checkpoint.stream import gap

# What lies between rows that are wanted, and is not worth a call of its own to leave out.
_SKIPPED_BYTES = 4096
# Fills a buffer from a byte of a file on.
Read = Callable[[str, int, memoryview], None]


class Bands:
    """Bands of neighbouring rows of one tensor.

    Args:
        tensor: The tensor.
        pieces: Its pieces, blocks that may lie strides apart in their files.
        read: What reads them.
        raw: Buffer for a band.
        block: Buffer for what a band has of one block.
    """

    def __init__(
        self,
        tensor: LogicalTensor,
        pieces: Sequence[Piece],
        read: Read,
        raw: memoryview,
        block: memoryview,
    ) -> None:
        self._tensor, self._pieces, self._read = tensor, pieces, read
        self._raw, self._block = raw, block

    def windows(self, start: int, stop: int, step: int) -> Iterator[tuple[int, memoryview]]:
        """Yield a range of the flattened tensor: the first element, and a window's bytes.

        Args:
            start: First element.
            stop: The one after the last.
            step: Elements that a buffer has room for.

        Raises:
            ValueError: Elements lie in no piece.
            RuntimeError: A file ends too early.

        Collective: none.
        """
        tensor, size = self._tensor, self._tensor.item_bytes
        shape, inner = tensor.shape, row_major(tensor.shape)
        axis = next(dim for dim, elements in enumerate(inner) if elements <= step)
        low = np.array([piece.start for piece in self._pieces])
        high = low + np.array([piece.shape for piece in self._pieces])
        position = start
        while position < stop:
            outer, within = divmod(position, shape[axis] * inner[axis])
            first = within // inner[axis]
            last = min(shape[axis], first + step // inner[axis])
            begin = position - within + first * inner[axis]
            index = np.unravel_index(outer, shape[:axis]) if axis else ()
            raw = self._raw[: (last - first) * inner[axis] * size]
            band = np.frombuffer(raw, storage_dtype(tensor.dtype))
            band = band.reshape(last - first, *shape[axis + 1 :])
            there = (low[:, axis] < last) & (high[:, axis] > first)
            for dim, at in enumerate(index):
                there &= (low[:, dim] <= at) & (high[:, dim] > at)
            filled = 0
            for number in np.flatnonzero(there).tolist():
                filled += self._place(self._pieces[number], axis, index, first, last, band)
            if filled != band.size:
                raise gap(tensor, begin)
            end = min(stop, begin + band.size)
            yield position, raw[(position - begin) * size : (end - begin) * size]
            position = end

    def _place(
        self,
        piece: Piece,
        axis: int,
        index: tuple[Any, ...],
        first: int,
        last: int,
        band: NDArray[np.generic],
    ) -> int:
        """Put what a block has of a band's rows there; return the number of elements."""
        low, high = max(first, piece.start[axis]), min(last, piece.start[axis] + piece.shape[axis])
        strides = piece.strides or row_major(piece.shape)
        at = (*index, low)
        begin = sum((at[dim] - piece.start[dim]) * strides[dim] for dim in range(axis + 1))
        inside = tuple(
            slice(begin, begin + size)
            for begin, size in zip(piece.start[axis + 1 :], piece.shape[axis + 1 :], strict=True)
        )
        target = band[(slice(low - first, high - first), *inside)]
        if target.size:
            self._gather(piece, int(begin), strides[axis:], target)
        return target.size

    def _gather(
        self, piece: Piece, begin: int, strides: tuple[int, ...], target: NDArray[np.generic]
    ) -> None:
        """Fill an array from elements of a file that are strides apart, in halves if need be."""
        size = target.itemsize
        reach = [(many - 1) * stride for many, stride in zip(target.shape, strides, strict=True)]
        row = next((dim for dim, many in enumerate(target.shape) if many > 1), None)
        if row is not None and (strides[row] - 1 - sum(reach[row + 1 :])) * size >= _SKIPPED_BYTES:
            for number in range(target.shape[row]):
                part = (*(slice(None),) * row, slice(number, number + 1))
                self._gather(piece, begin + number * strides[row], strides, target[part])
            return
        length = (1 + sum(reach)) * size
        if length > len(self._block):
            dim = max(range(len(reach)), key=reach.__getitem__)
            half = target.shape[dim] // 2
            for low, high in ((0, half), (half, target.shape[dim])):
                part = (*(slice(None),) * dim, slice(low, high))
                self._gather(piece, begin + low * strides[dim], strides, target[part])
            return
        raw = self._block[:length]
        self._read(piece.file, piece.offset + begin * size, raw)
        bytes_apart = tuple(stride * size for stride in strides)
        target[...] = as_strided(np.frombuffer(raw, target.dtype), target.shape, bytes_apart)
