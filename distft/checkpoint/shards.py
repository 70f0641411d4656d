"""The shard map: every tensor of a checkpoint, and the bytes of which files it is made of.

Readers make one from a folder of any format, writers and checks take one. Nothing here or in the
readers imports torch: offsets and shapes are arithmetic on plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

# Bytes of one element, by torch's names of dtypes.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
# Those that are cast; the 8-bit ones carry scales elsewhere, and a number without its scale is
# another number.
CASTABLE = ("bfloat16", "float16", "float32", "float64")
# Problems that one tensor or file lists; more of them say nothing new.
MAX_PROBLEMS = 3

# Start and shape.
Block = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a whole tensor, stored in one file.

    Attributes:
        file: Path relative to the checkpoint's folder.
        offset: Byte of the file at which the block's first element lies.
        start: First index of the block in the whole tensor; of a flat piece ``(begin,)``, in
            elements of the flattened tensor.
        shape: Shape of the block; of a flat piece ``(count,)``.
        flat: Whether it is a range of the flattened tensor.
        strides: Elements from one index of the block to the next, for each dim, where they do not
            lie in row-major order without gaps; otherwise None.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    flat: bool = False
    strides: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def runs(self, whole: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield runs that are without gaps both in the whole tensor and in the file.

        Args:
            whole: Shape of the whole tensor.

        Yields:
            First element in the flattened whole, first element counted from ``offset`` on, and the
            number of elements; ascending in the whole.

        Collective: none.
        """
        if not self.num_elements:
            return
        if self.flat:
            yield self.start[0], 0, self.shape[0]
            return
        to_whole = row_major(whole)
        stored = self.strides or row_major(self.shape)
        base = sum(map(_multiply, self.start, to_whole))
        outer, count = len(self.shape), 1
        while outer and _continues(self.shape, to_whole, stored, outer - 1, count):
            outer -= 1
            count *= self.shape[outer]
        for index in product(*map(range, self.shape[:outer])):
            yield (
                base + sum(map(_multiply, index, to_whole)),
                sum(map(_multiply, index, stored)),
                count,
            )

    def end(self, item_bytes: int) -> int:
        """Return the byte after the last one that the piece takes up in its file.

        Collective: none.
        """
        if not self.num_elements:
            return self.offset
        stored = self.strides or row_major(self.shape)
        last = sum((size - 1) * stride for size, stride in zip(self.shape, stored, strict=True))
        return self.offset + (last + 1) * item_bytes


def _multiply(a: int, b: int) -> int:
    return a * b


def _continues(
    shape: Sequence[int], to_whole: Sequence[int], stored: Sequence[int], dim: int, count: int
) -> bool:
    """Return whether neighbours in a dim follow each other ``count`` elements apart in both."""
    return shape[dim] == 1 or (to_whole[dim] == count and stored[dim] == count)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return how many elements apart neighbours of each dim are in a tensor without gaps.

    Collective: none.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A whole tensor, wherever its pieces lie.

    Attributes:
        name: Its name.
        shape: Shape of the whole.
        dtype: torch's name of the dtype, such as ``"bfloat16"``.
        stored: What `pieces` goes through, as often as it is called.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: Iterable[Piece]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * self.item_bytes

    def pieces(self) -> Iterator[Piece]:
        """Return the pieces; they are made as they are asked for, in the order of the file.

        Collective: none.
        """
        return iter(self.stored)

    def check(self) -> list[str]:
        """Return what is wrong with the pieces: none where they cover the whole exactly once.

        Collective: none.
        """
        pieces = [(piece.start, piece.shape, piece.flat) for piece in self.pieces()]
        shape = self.shape
        blocks: list[Block]
        if any(flat for *_, flat in pieces):
            blocks = [
                ((first,), (count,))
                for piece in self.pieces()
                for first, _, count in piece.runs(self.shape)
            ]
            shape = (self.num_elements,)
        else:
            blocks = [(start, size) for start, size, _ in pieces]
        return [f"{self.name} {text}" for text in _check_blocks(shape, blocks)]


def _check_blocks(shape: tuple[int, ...], blocks: Sequence[Block]) -> list[str]:
    """Return where blocks leave a whole, overlap, or leave a gap."""
    problems = []
    for start, size in blocks:
        ends = [first + count for first, count in zip(start, size, strict=False)]
        fits = len(start) == len(size) == len(shape)
        if not fits or any(first < 0 for first in start) or any(map(_more, ends, shape)):
            problems.append(f"has a piece at {start} of shape {size}, outside of {shape}")
    if problems:
        return problems[:MAX_PROBLEMS]
    filled = [block for block in blocks if math.prod(block[1])]
    twice = _overlap(filled, 0, len(shape))
    if twice is not None:
        return [f"has the piece at {twice[1][0]} twice: it overlaps the one at {twice[0][0]}"]
    covered = sum(math.prod(size) for _, size in filled)
    if covered != math.prod(shape):
        return [f"has a gap: its pieces hold {covered} of {math.prod(shape)} elements"]
    return []


def _more(a: int, b: int) -> bool:
    return a > b


def _overlap(blocks: Sequence[Block], dim: int, dims: int) -> tuple[Block, Block] | None:
    """Return two blocks that overlap in every dim from one on, or None.

    Blocks of the same extent in a dim are compared in the next one, so that a grid takes one sort
    for each dim, not a comparison of each with each.
    """
    if len(blocks) < 2:
        return None
    if dim == dims:
        return blocks[0], blocks[1]
    bands: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        bands.setdefault((block[0][dim], block[1][dim]), []).append(block)
    open_until, reaching = -1, list[tuple[int, int]]()
    for first, count in sorted(bands):
        if first < open_until:
            reaching = [band for band in reaching if band[0] + band[1] > first]
            for band in reaching:
                crossing = _crossing(bands[band], bands[first, count], dim + 1, dims)
                if crossing is not None:
                    return crossing
        else:
            reaching = []
        reaching.append((first, count))
        open_until = max(open_until, first + count)
    for same in bands.values():
        found = _overlap(same, dim + 1, dims)
        if found is not None:
            return found
    return None


def _crossing(
    one: Sequence[Block], other: Sequence[Block], dim: int, dims: int
) -> tuple[Block, Block] | None:
    """Return a block of each list that overlap in every dim from one on, or None."""
    for a in one:
        for b in other:
            if all(
                a[0][d] < b[0][d] + b[1][d] and b[0][d] < a[0][d] + a[1][d]
                for d in range(dim, dims)
            ):
                return a, b
    return None


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Settings of one parameter group of an optimizer, and the names of its parameters."""

    settings: Mapping[str, Any]
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of an optimizer by the parameters' names.

    Attributes:
        kind: Class name of the optimizer, such as ``"AdamW"``, or "" where the folder does not say.
        moments: State tensors of each parameter, such as ``exp_avg``, in the parameter's shape.
        steps: Updates of each parameter so far.
        groups: Its parameter groups, in order.
    """

    kind: str
    moments: Mapping[str, Mapping[str, LogicalTensor]]
    steps: Mapping[str, float]
    groups: Sequence[ParamGroup]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """What a checkpoint holds, in any format.

    Attributes:
        root: Folder that the pieces' files are relative to.
        format: ``"distft"``, ``"dcp"``, ``"deepspeed"``, ``"safetensors"``, ``"peft"`` or
            ``"state_dict"``.
        tensors: Parameters and persistent buffers by name, a tied one under one name only.
        optimizer: Its optimizer, or None.
        ties: Names that share another name's tensor.
        frozen: Names of the parameters that were not trained, where the folder says so.
        buffers: Names of the buffers, where the folder says so.
        files: Bytes of each file that was read, by its path relative to ``root``.
        step: Optimizer steps made, or None where the folder does not say.
        strategy: How the model was spread over ranks, or None where the folder does not say.
        world_size: Number of ranks that wrote it, or None where the folder does not say.
        extras: What else a run needs, as plain values: ``"scheduler"``, ``"data"``.
        notes: What a user should know of it.
    """

    root: Path
    format: str
    tensors: Mapping[str, LogicalTensor]
    optimizer: OptimizerState | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    files: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    strategy: str | None = None
    world_size: int | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the model."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def all_tensors(self) -> Iterator[LogicalTensor]:
        """Yield the tensors of the model, then those of the optimizer.

        Collective: none.
        """
        yield from self.tensors.values()
        if self.optimizer is not None:
            for moments in self.optimizer.moments.values():
                yield from moments.values()

    def check(self) -> list[str]:
        """Return what is wrong: pieces outside of their files, gaps, overlaps.

        Collective: none.
        """
        problems: list[str] = []
        for tensor in self.all_tensors():
            problems += tensor.check()
            problems += self._beyond_files(tensor)[:MAX_PROBLEMS]
        return problems

    def _beyond_files(self, tensor: LogicalTensor) -> list[str]:
        return [
            f"{tensor.name} needs {end} bytes of {piece.file}, which has {self.files[piece.file]}"
            for piece in tensor.pieces()
            if (end := piece.end(tensor.item_bytes)) > self.files[piece.file]
        ]
