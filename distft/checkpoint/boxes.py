"""Boxes of whole tensors: what a rank holds, and which bytes of a checkpoint's pieces lie there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import mul

from distft.checkpoint.shards import Block, LogicalTensor, Piece, row_major


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> list[Block]:
    """Return the boxes that a range of a flattened tensor is made of, in its order.

    At most two for each dim, as a range begins and ends in the middle of a row.

    >>> boxes_of_range((3, 4), 2, 9)
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]

    Args:
        shape: Shape of the whole.
        first: First element.
        last: The one after the last.

    Collective: none.
    """
    if first >= last:
        return []
    if not shape:
        return [((), ())]
    inner, found = math.prod(shape[1:]), list[Block]()
    row, stop = first // inner, last // inner

    def add_part(row: int, low: int, high: int) -> None:
        parts = boxes_of_range(shape[1:], low, high)
        found.extend(((row, *start), (1, *size)) for start, size in parts)

    if row == stop:
        add_part(row, first % inner, last % inner)
        return found
    if first % inner:
        add_part(row, first % inner, inner)
        row += 1
    if row < stop:
        found.append(((row, *(0 for _ in shape[1:])), (stop - row, *shape[1:])))
    add_part(stop, 0, last % inner)
    return found


def crop(tensor: LogicalTensor, start: Sequence[int], size: Sequence[int]) -> LogicalTensor:
    """Return a box of a tensor as a tensor of its own, made of those bytes that lie in the box.

    Args:
        tensor: The whole.
        start: First index of the box, for each dim.
        size: Its shape.

    Collective: none.
    """
    box = tuple(start), tuple(size)
    if box[1] == tensor.shape:
        return tensor
    pieces = [
        part
        for piece in tensor.pieces()
        for block in _blocks(piece, tensor)
        if (part := _within(block, *box, tensor.item_bytes)) is not None
    ]
    return LogicalTensor(tensor.name, box[1], tensor.dtype, pieces)


def _blocks(piece: Piece, tensor: LogicalTensor) -> Iterator[Piece]:
    """Yield a piece as blocks of the whole: a range of the flattened tensor is several."""
    if not piece.flat:
        yield piece
        return
    strides, (begin,) = row_major(tensor.shape), piece.start
    for start, size in boxes_of_range(tensor.shape, begin, begin + piece.num_elements):
        skipped = sum(map(mul, start, strides)) - begin
        offset = piece.offset + skipped * tensor.item_bytes
        yield Piece(piece.file, offset, start, size, strides=strides)


def _within(
    piece: Piece, start: tuple[int, ...], size: tuple[int, ...], item_bytes: int
) -> Piece | None:
    """Return what of a block lies in a box, placed in the box, or None."""
    low = tuple(map(max, piece.start, start))
    ends = (
        min(a + b, c + d) for a, b, c, d in zip(piece.start, piece.shape, start, size, strict=True)
    )
    shape = tuple(end - first for end, first in zip(ends, low, strict=True))
    if any(count <= 0 for count in shape):
        return None
    strides = piece.strides or row_major(piece.shape)
    skipped = sum((a - b) * c for a, b, c in zip(low, piece.start, strides, strict=True))
    packed = all(
        count == 1 or stride == close
        for count, stride, close in zip(shape, strides, row_major(shape), strict=True)
    )
    return Piece(
        piece.file,
        piece.offset + skipped * item_bytes,
        tuple(a - b for a, b in zip(low, start, strict=True)),
        shape,
        strides=None if packed else strides,
    )
