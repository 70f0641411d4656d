"""Parameters inside flat vectors, as DeepSpeed's ZeRO keeps them: pieces by arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distft.checkpoint.readers.unpickle import StoredTensor
from distft.checkpoint.shards import ITEM_BYTES, Piece


@dataclass(frozen=True, slots=True)
class FlatVector:
    """Stored vectors laid end to end.

    Attributes:
        parts: The vectors.
        starts: Element with which each begins, and the number of all elements.
    """

    parts: tuple[StoredTensor, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[StoredTensor]) -> FlatVector:
        """Return the vector of these parts."""
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.num_elements)
        return cls(tuple(parts), tuple(starts))

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.starts[-1]

    def pieces(self, begin: int, count: int, at: int) -> Iterator[Piece]:
        """Yield the pieces of a range; ``at`` is its place in the flattened tensor it belongs to.

        Collective: none.
        """
        index, end = bisect_right(self.starts, begin) - 1, begin + count
        while begin < end:
            part, first = self.parts[index], self.starts[index]
            stop = min(end, self.starts[index + 1])
            if stop > begin:
                offset = part.offset + (begin - first) * ITEM_BYTES[part.dtype]
                yield Piece(part.file, offset, (at,), (stop - begin,), flat=True)
                at, begin = at + stop - begin, stop
            index += 1


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter that is one range of a vector, as in ZeRO-1 and ZeRO-2."""

    vector: FlatVector
    begin: int
    count: int

    def __iter__(self) -> Iterator[Piece]:
        return self.vector.pieces(self.begin, self.count, 0)


@dataclass(frozen=True, slots=True)
class Dealt:
    """A parameter of which every rank holds as many elements, as in ZeRO-3.

    Rank ``r`` holds those from ``r * per_rank`` on; what is beyond ``count`` is padding.
    """

    vectors: tuple[FlatVector, ...]
    begin: int
    per_rank: int
    count: int

    def __iter__(self) -> Iterator[Piece]:
        for rank, vector in enumerate(self.vectors):
            at = rank * self.per_rank
            held = min(self.per_rank, self.count - at)
            if held > 0:
                yield from vector.pieces(self.begin, held, at)
