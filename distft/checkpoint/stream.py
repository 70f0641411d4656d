"""Reading a logical tensor from its first element to its last through small reused buffers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from distft.checkpoint.casts import cast_bytes, storage_dtype
from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor, Piece, row_major

# Files that one thread keeps open; a process may have 1,024.
_OPEN_FILES = 32
# Buffers of one stream: what was read, what was read of a block, what was cast.
NUM_BUFFERS = 3


class OpenFiles:
    """Descriptors of the files used last, a context manager that closes them."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._open: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        """Return the files."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        while self._open:
            os.close(self._open.popitem()[1])

    def descriptor(self, path: str | Path) -> int:
        """Return the open file's descriptor.

        Collective: none.
        """
        path = str(path)
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) == _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, self._flags)
        return self._open[path]


class Stream:
    """Reads tensors of one checkpoint; a context manager that keeps files open until it ends.

    Args:
        root: Folder that the pieces' files are relative to.
        buffer_bytes: Size of one buffer; there are up to `NUM_BUFFERS`.
    """

    def __init__(self, root: Path, buffer_bytes: int) -> None:
        self._root = str(root)
        self._files = OpenFiles(os.O_RDONLY)
        self._buffer_bytes = buffer_bytes
        self._raw = np.empty(buffer_bytes, np.uint8)
        self._block: NDArray[np.uint8] | None = None
        self._cast: NDArray[np.uint8] | None = None

    def __enter__(self) -> Stream:
        """Return the stream."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self._files.__exit__(*error)

    def windows(
        self, tensor: LogicalTensor, dtype: str, start: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield a range of the flattened tensor in order: the first element, and a window's bytes.

        The bytes are overwritten by the next window.

        Args:
            tensor: What to read.
            dtype: What to turn it into.
            start: First element.
            count: Number of elements, or None for all that follow.

        Raises:
            ValueError: Elements lie in no piece, or the dtype cannot be had.
            RuntimeError: A file ends too early.

        Collective: none.
        """
        stop = tensor.num_elements if count is None else start + count
        sizes = tensor.item_bytes, ITEM_BYTES[dtype]
        step = self._buffer_bytes // max(sizes)
        cast = None if dtype == tensor.dtype else cast_bytes(tensor.dtype, dtype)
        if cast and self._cast is None:
            self._cast = np.empty(self._buffer_bytes, np.uint8)
        pieces = list(tensor.pieces())
        begins = [run_begin(piece, tensor.shape) for piece in pieces]
        if None in begins:
            found = self._blocks(tensor, pieces, start, stop, step)
        else:
            found = self._runs(tensor, pieces, begins, start, stop, step)  # type: ignore[arg-type]
        for first, raw in found:
            if cast is None or self._cast is None:
                yield first, raw
            else:
                made = self._cast[: len(raw) // sizes[0] * sizes[1]]
                cast(raw, made)
                yield first, made

    def _runs(
        self,
        tensor: LogicalTensor,
        pieces: list[Piece],
        begins: list[int],
        start: int,
        stop: int,
        step: int,
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Pieces that lie in the whole as they lie in their file, small ones several a window."""
        size, held, position = tensor.item_bytes, 0, start
        for number in sorted(range(len(pieces)), key=begins.__getitem__):
            piece, begin = pieces[number], begins[number]
            end = min(stop, begin + piece.num_elements)
            if end <= position:
                continue
            if begin > position:
                break
            while position < end:
                many = min(step - held, end - position)
                at = piece.offset + (position - begin) * size
                self._read(piece.file, at, self._raw[held * size : (held + many) * size])
                held, position = held + many, position + many
                if held == step:
                    yield position - held, self._raw[: held * size]
                    held = 0
        if position < stop:
            raise _gap(tensor, position)
        if held:
            yield position - held, self._raw[: held * size]

    def _blocks(
        self, tensor: LogicalTensor, pieces: list[Piece], start: int, stop: int, step: int
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Blocks that fill only a part of the whole's rows: bands of rows are put together."""
        shape, kind = tensor.shape, storage_dtype(tensor.dtype)
        inner = row_major(shape)
        axis = next(dim for dim, elements in enumerate(inner) if elements <= step)
        low = np.array([piece.start for piece in pieces])
        high = low + np.array([piece.shape for piece in pieces])
        position = start
        while position < stop:
            outer, within = divmod(position, shape[axis] * inner[axis])
            first = within // inner[axis]
            last = min(shape[axis], first + step // inner[axis])
            begin = position - within + first * inner[axis]
            index = np.unravel_index(outer, shape[:axis]) if axis else ()
            raw = self._raw[: (last - first) * inner[axis] * tensor.item_bytes]
            band = raw.view(kind).reshape(last - first, *shape[axis + 1 :])
            there = (low[:, axis] < last) & (high[:, axis] > first)
            for dim, at in enumerate(index):
                there &= (low[:, dim] <= at) & (high[:, dim] > at)
            filled = 0
            for number in np.flatnonzero(there):
                filled += self._place(pieces[number], axis, index, first, last, band)
            if filled != band.size:
                raise _gap(tensor, begin)
            end = min(stop, begin + band.size)
            size = tensor.item_bytes
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
        length = (1 + sum(reach)) * size
        if length > self._buffer_bytes:
            dim = max(range(len(reach)), key=reach.__getitem__)
            half = target.shape[dim] // 2
            for low, high in ((0, half), (half, target.shape[dim])):
                part = (*(slice(None),) * dim, slice(low, high))
                self._gather(piece, begin + low * strides[dim], strides, target[part])
            return
        if self._block is None:
            self._block = np.empty(self._buffer_bytes, np.uint8)
        raw = self._block[:length]
        self._read(piece.file, piece.offset + begin * size, raw)
        bytes_apart = tuple(stride * size for stride in strides)
        target[...] = as_strided(raw.view(target.dtype), target.shape, bytes_apart)

    def _read(self, file: str, offset: int, into: NDArray[np.uint8]) -> None:
        path = os.path.join(self._root, file)
        descriptor = self._files.descriptor(path)
        part, done = into.data, 0
        while done < len(part):
            got = os.preadv(descriptor, [part[done:]], offset + done)
            if got == 0:
                raise RuntimeError(
                    f"{path} ended at byte {offset + done}, and {offset + len(part)} were wanted. "
                    "It is cut short or changed while it was read: use another checkpoint."
                )
            done += got


def run_begin(piece: Piece, shape: tuple[int, ...]) -> int | None:
    """Return the element of the whole where a piece begins if it is one run of it, else None.

    It is one where every dim after the first of size above 1 is whole.

    >>> run_begin(Piece("f", 0, (2, 0), (2, 5)), (9, 5))
    10
    >>> run_begin(Piece("f", 0, (0, 2), (9, 1)), (9, 5)) is None
    True

    Collective: none.
    """
    if piece.flat:
        return piece.start[0]
    if 0 in piece.shape:
        return 0
    if piece.strides is not None and piece.strides != row_major(piece.shape):
        return None
    free = next((dim for dim, size in enumerate(piece.shape) if size != 1), len(shape))
    if piece.shape[free + 1 :] != shape[free + 1 :]:
        return None
    return sum(at * stride for at, stride in zip(piece.start, row_major(shape), strict=True))


def _gap(tensor: LogicalTensor, position: int) -> ValueError:
    return ValueError(
        f"{tensor.name} {tensor.shape} has no piece at its element {position} of "
        f"{tensor.num_elements}. The checkpoint is incomplete: use another one."
    )
