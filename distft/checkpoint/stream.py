"""Reading a logical tensor from its first element to its last through small reused buffers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

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
        self._raw = memoryview(bytearray(buffer_bytes))
        self._block: memoryview | None = None
        self._cast: memoryview | None = None

    def __enter__(self) -> Stream:
        """Return the stream."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self._files.__exit__(*error)

    def windows(
        self, tensor: LogicalTensor, dtype: str, start: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield a range of the flattened tensor in order: the first element, and a window's bytes.

        The bytes are overwritten by the next window. Nothing that is copied as it lies needs numpy.

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
        pieces = list(tensor.pieces())
        begins = [run_begin(piece, tensor.shape) for piece in pieces]
        if None in begins:
            found = self._blocks(tensor, pieces, start, stop, step)
        else:
            found = self._runs(tensor, pieces, begins, start, stop, step)  # type: ignore[arg-type]
        if dtype == tensor.dtype:
            yield from found
            return
        from distft.checkpoint.casts import cast_bytes

        cast = cast_bytes(tensor.dtype, dtype)
        if self._cast is None:
            self._cast = memoryview(bytearray(self._buffer_bytes))
        for first, raw in found:
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
    ) -> Iterator[tuple[int, memoryview]]:
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
            raise gap(tensor, position)
        if held:
            yield position - held, self._raw[: held * size]

    def _blocks(
        self, tensor: LogicalTensor, pieces: list[Piece], start: int, stop: int, step: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Blocks that fill only a part of the whole's rows."""
        from distft.checkpoint.blocks import Bands

        if self._block is None:
            self._block = memoryview(bytearray(self._buffer_bytes))
        return Bands(tensor, pieces, self._read, self._raw, self._block).windows(start, stop, step)

    def _read(self, file: str, offset: int, part: memoryview) -> None:
        path = os.path.join(self._root, file)
        descriptor, done = self._files.descriptor(path), 0
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


def gap(tensor: LogicalTensor, position: int) -> ValueError:
    """Return the error of a tensor of which no piece holds an element.

    Collective: none.
    """
    return ValueError(
        f"{tensor.name} {tensor.shape} has no piece at its element {position} of "
        f"{tensor.num_elements}. The checkpoint is incomplete: use another one."
    )
