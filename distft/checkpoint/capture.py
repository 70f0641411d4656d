"""What a rank holds in the moment of a save, and memory of the host for a copy of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from distft.checkpoint.folder import SavedFile

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Written:
    """What one rank wrote of the state.

    Attributes:
        files: Size and checksum of its files, by their names in the folder of the state.
        chunks: What the first rank has to know of their insides; plain values of JSON.
    """

    files: Mapping[str, SavedFile] = field(default_factory=dict)
    chunks: Sequence[Any] = ()


@dataclass(frozen=True)
class Finished:
    """What one rank adds when all have written.

    Attributes:
        files: Size and checksum of what it wrote last.
        ranges: Of each tensor the archives of its parts: file in the folder of the state, first
            byte, number of bytes, and their XXH3.
    """

    files: Mapping[str, SavedFile] = field(default_factory=dict)
    ranges: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Captured(Protocol):
    """A state that is there to be written, by code that calls no collective."""

    def write(self, folder: Path) -> Written:
        """Write this rank's files; the folder may not be there yet."""

    def finish(self, folder: Path, chunks: Sequence[Sequence[Any]]) -> Finished:
        """On the first rank, write what needs the `Written.chunks` of all ranks in their order."""


class HostCopies:
    """Memory of the host that holds one copy of what a rank saves, and is used again.

    Tensors are taken in the same order in every save, so each gets the memory of the last time.
    Those of a GPU get pinned memory, which it fills by itself.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """Start another copy over the last one."""
        self._next = 0

    def bytes_of(self, source: Tensor) -> Tensor:
        """Return a copy of a flat tensor of bytes, there after `wait`."""
        import torch

        number, size = self._next, source.numel()
        self._next += 1
        if number == len(self._buffers) or self._buffers[number].numel() != size:
            made = torch.empty(size, dtype=torch.uint8, pin_memory=source.is_cuda)
            self._buffers[number : number + 1] = [made]
        self._buffers[number].copy_(source, non_blocking=True)
        return self._buffers[number]

    def tensor(self, source: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor, there after `wait`."""
        import torch

        flat = source.detach().contiguous().reshape(-1).view(torch.uint8)
        return self.bytes_of(flat).view(source.dtype).view(source.shape)

    def wait(self) -> None:
        """Return when all copies are there, and let go of memory that this save did not need."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        del self._buffers[self._next :]


_copies: WeakKeyDictionary[Any, HostCopies] = WeakKeyDictionary()


def copies_for(optimizer: Any) -> HostCopies:
    """Return the memory that the saves of a run share, ready for another copy.

    Collective: none.
    """
    copies = _copies.setdefault(optimizer, HostCopies())
    copies.begin()
    return copies
