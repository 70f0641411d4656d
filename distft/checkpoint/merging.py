"""Adding an adapter into the weights of its base, tensor by tensor, without torch.

``W + scale * B A``, summed in fp32 and rounded once, where PEFT rounds the product too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distft.checkpoint.casts import cast_bytes
from distft.checkpoint.copy import BUFFER_BYTES, Output, write_at
from distft.checkpoint.merge_plan import Change, Merge
from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor
from distft.checkpoint.stream import OpenFiles, Stream


def split_outputs(
    outputs: Iterable[Output], names: Collection[str]
) -> tuple[list[Output], list[Output]]:
    """Return outputs that are copied as they are, and those of tensors with a change.

    Collective: none.
    """
    copied, summed = list[Output](), list[Output]()
    for output in outputs:
        (summed if output.tensor.name in names else copied).append(output)
    return copied, summed


def write_sums(
    root: Path,
    folder: Path,
    outputs: Sequence[Output],
    merge: Merge,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill ranges of files with tensors of a base and what an adapter adds to them.

    Args:
        root: Folder that the base's pieces are relative to.
        folder: Folder of the files, which exist.
        outputs: Ranges of tensors that `merge` changes, of whole rows each.
        merge: The changes, by the tensors' names.
        advance: Called with the number of bytes after each window.

    Raises:
        ValueError: A tensor has a gap.
        RuntimeError: A source file ends too early.

    Collective: none.
    """
    columns = max((merge.changes[output.tensor.name].columns for output in outputs), default=1)
    # A whole row fits, of the wider dtype.
    buffer_bytes = max(BUFFER_BYTES, columns * 8)
    with Stream(root, buffer_bytes) as stream, OpenFiles(os.O_WRONLY) as files:
        pair: FactorPair | None = None
        for output in outputs:
            change = merge.changes[output.tensor.name]
            if pair is None or pair.b_of is not change.b:
                # The factors of before go first.
                pair = None
                pair = FactorPair.read(merge.root, change)
            descriptor = files.descriptor(folder / output.file)
            _write_sum(stream, descriptor, output, change, pair, advance)


def _write_sum(
    stream: Stream,
    descriptor: int,
    output: Output,
    change: Change,
    pair: FactorPair,
    advance: Callable[[int], None],
) -> None:
    tensor, columns = output.tensor, change.columns
    wide = "float64" if tensor.dtype == "float64" else "float32"
    cast, item = cast_bytes(wide, output.dtype), ITEM_BYTES[output.dtype]
    step = max(1, BUFFER_BYTES // 8 // columns) * columns
    sums, made = np.empty(step, wide), np.empty(step * item, np.uint8)
    for start in range(output.start, output.start + output.count, step):
        count = min(step, output.start + output.count - start)
        for first, window in stream.windows(tensor, wide, start, count):
            part = np.frombuffer(window, wide)
            sums[first - start : first - start + len(part)] = part
        pair.add(change, start // columns, sums[:count].reshape(-1, columns))
        done = made[: count * item]
        cast(sums[:count].view(np.uint8).data, done.data)
        write_at(descriptor, done.data, output.offset + (start - output.start) * item)
        advance(len(done))


@dataclass(frozen=True)
class FactorPair:
    """Both factors in memory, fp32, A as (experts, r, in) and B as (out, r, experts)."""

    b_of: LogicalTensor
    a: NDArray[np.float32]
    b: NDArray[np.float32]

    @classmethod
    def read(cls, root: Path, change: Change) -> FactorPair:
        """Return the factors of a change of an adapter in a folder."""
        b = read_whole(root, change.b)
        if change.a is None:
            return cls(change.b, np.ones((1, 1, 1), np.float32), b.reshape(-1, 1, 1))
        a = read_whole(root, change.a).reshape(change.experts, -1, change.a.shape[1])
        return cls(change.b, a, b.reshape(len(b), -1, change.experts))

    def add(self, change: Change, row: int, rows: NDArray[Any]) -> None:
        """Add to rows of the base's tensor, the first of which is given."""
        at, done = change.first_row + row, 0
        while done < len(rows):
            expert, within = divmod(at + done, change.rows)
            many = min(len(rows) - done, change.rows - within)
            a, b = self.a[expert], self.b[:, :, expert]
            left, right = (a.T, b.T) if change.transposed else (b, a)
            product = left[within : within + many] @ right
            product *= np.float32(change.scale)
            rows[done : done + many] += product
            done += many


def read_whole(root: Path, tensor: LogicalTensor) -> NDArray[np.float32]:
    """Return all of a small tensor in fp32.

    Collective: none.
    """
    made = np.empty(tensor.num_elements, np.float32)
    with Stream(root, BUFFER_BYTES) as stream:
        for first, window in stream.windows(tensor, "float32"):
            part = np.frombuffer(window, np.float32)
            made[first : first + len(part)] = part
    return made.reshape(tensor.shape)
