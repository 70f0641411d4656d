"""Writing a rank's shards in torch's distributed checkpoint format, hashed on the way.

Which rank writes what is worked out by each rank alone, and the first one writes the metadata when
all have told where their chunks lie: no collective, so that a save may go on beside training.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distft.checkpoint.capture import Finished, HostCopies, Written
from distft.checkpoint.dcp import METADATA, named_items
from distft.checkpoint.folder import SavedFile, describe_file
from distft.checkpoint.placement import Block, held_blocks, narrow
from distft.checkpoint.writeback import begin_writeback
from distft.checkpoint.writers.dcp import Chunk, make_metadata
from distft.checkpoint.writers.pickled import STORAGES
from distft.checkpoint.writers.torch_zip import frame

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

# What is hashed and written at a time: it stays in the cache in between. Smaller pieces wait for
# others until they are as many bytes.
_WINDOW = 1 << 20
# Bytes after which the kernel is asked to begin with the disk: a disk of 1 GB/s takes 16 ms for
# them, so that it never waits for long while the next are hashed, and calls are few.
_BEHIND = 16 * _WINDOW


@dataclass(frozen=True)
class Part:
    """A box of a tensor that this rank writes: the tensor's name, where the box begins, and it."""

    name: str
    start: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class CapturedItems:
    """A rank's parts of a run's tensors.

    Attributes:
        rank: The rank.
        items: Dtype and shape of every tensor.
        parts: What this rank writes.
    """

    rank: int
    items: Mapping[str, tuple[str, tuple[int, ...]]]
    parts: Sequence[Part]

    def write(self, folder: Path) -> Written:
        """Write this rank's file, none where it has nothing to write."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self.parts:
            return Written()
        name = f"__{self.rank}_0.distcp"
        with HashedFile(folder / name) as file:
            chunks = [_write_part(file, name, part) for part in self.parts]
        return Written({name: file.described()}, chunks)

    def finish(self, folder: Path, chunks: Sequence[Sequence[Any]]) -> Finished:
        """Write the metadata, and return where the archives of each tensor lie."""
        found: list[Chunk] = []
        ranges: dict[str, list[Any]] = {}
        seen = set()
        for name, start, shape, file, begin, length, hashed in (
            chunk for of_rank in chunks for chunk in of_rank
        ):
            # Ranks of meshes that share nothing may hold the same box.
            if (name, tuple(start)) in seen:
                continue
            seen.add((name, tuple(start)))
            found.append(Chunk(name, tuple(start), tuple(shape), file, begin, length))
            ranges.setdefault(name, []).append([file, begin, length, hashed])
        with HashedFile(folder / METADATA) as file:
            file.write(make_metadata(self.items, found))
        return Finished({METADATA: file.described()}, ranges)


def capture_dcp(
    model: nn.Module, optimizer: Optimizer, copies: HostCopies | None = None
) -> CapturedItems:
    """Return this rank's shards of weights and optimizer state; a replica is written once.

    Args:
        model: The model.
        optimizer: Its optimizer.
        copies: Where to copy them to; None leaves them where they are.

    Collective: none.
    """
    import torch
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tensors = named_items(model, optimizer)
    items = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    # No graph: torch makes a node of it for each part that requires a gradient.
    with torch.no_grad():
        parts = list(_own_parts(tensors, rank, world))
        if copies is not None:
            parts = [replace(part, tensor=copies.tensor(part.tensor)) for part in parts]
            copies.wait()
    return CapturedItems(rank, items, parts)


def _own_parts(tensors: Mapping[str, Any], rank: int, world: int) -> Iterator[Part]:
    """Yield what this rank writes: of parts that several ranks hold, each to the least loaded.

    All holders of a part hold the same parts before it, so they agree without a word.
    """
    import torch

    loads: dict[Any, list[int]] = {}
    # Tensors of one shape are split alike: training waits, so each split is worked out once. A part
    # of another shape than the others' is looked at again, and refused.
    known: dict[Any, list[Block]] = {}
    for name, tensor in tensors.items():
        mine, holders, group = _holders(tensor, rank, world)
        load = loads.setdefault(group, [0] * holders)
        local = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
        writer = min(range(holders), key=load.__getitem__)
        load[writer] += local.numel() * local.element_size()
        if writer != mine:
            continue
        if not hasattr(tensor, "device_mesh"):
            yield Part(name, (0,) * tensor.ndim, tensor.detach().as_subclass(torch.Tensor))
            continue
        split = tensor.shape, local.shape, tensor.placements, tensor.device_mesh
        blocks = known[split] = known.get(split) or held_blocks(tensor)
        for block in blocks:
            if 0 not in block.size or not prod(tensor.shape):
                yield Part(name, block.start, narrow(local.detach(), block.local, block.size))


def _holders(tensor: Any, rank: int, world: int) -> tuple[int, int, Any]:
    """Return this rank's number among the holders of its part, their number, and who they are."""
    if not hasattr(tensor, "device_mesh"):
        return rank, world, None
    mesh = tensor.device_mesh
    number, holders, axes = 0, 1, []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
            holders *= mesh.size(axis)
            axes.append(axis)
    return number, holders, (mesh, tuple(axes))


def _write_part(file: HashedFile, name: str, part: Part) -> list[Any]:
    """Append an archive of one tensor; return what the first rank has to know of it."""
    import torch
    from xxhash import xxh3_64

    tensor = part.tensor.detach().to("cpu").contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    begin = file.position
    archive: tuple[Any, ...]
    if dtype in STORAGES:
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        head, tail = frame(dtype, tuple(tensor.shape), zlib.crc32(data))
        archive = head, data, tail
    else:
        # torch alone has a storage for it.
        whole = BytesIO()
        torch.save(tensor, whole)
        archive = (whole.getbuffer(),)
    hashed = xxh3_64()
    for piece in archive:
        file.write(piece)
        hashed.update(piece)
    length = file.position - begin
    return [part.name, part.start, list(tensor.shape), name, begin, length, hashed.hexdigest()]


class HashedFile:
    """A new file that is hashed as it is written; on the disk when its context ends."""

    def __init__(self, path: Path) -> None:
        from xxhash import xxh3_64

        self._path, self._hash = path, xxh3_64()
        self._waiting = bytearray()
        self._written = self._begun = 0
        self.position = 0

    def __enter__(self) -> HashedFile:
        """Open the file."""
        self._file = self._path.open("xb", buffering=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Bring the file to the disk, unless something was raised."""
        with self._file:
            if error is None:
                self._flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.position += len(data)
        if len(data) + len(self._waiting) <= _WINDOW:
            self._waiting += data
            return
        self._flush()
        for low in range(0, len(data), _WINDOW):
            self._write(memoryview(data)[low : low + _WINDOW])

    def described(self) -> SavedFile:
        """Return size and checksum of what was written."""
        self._flush()
        return SavedFile(self.position, self._hash.hexdigest())

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        self._write(memoryview(waiting))

    def _write(self, window: memoryview) -> None:
        self._hash.update(window)
        while window:
            written = self._file.write(window)
            self._written += written
            window = window[written:]
        if self._written - self._begun >= _BEHIND:
            begin_writeback(self._file.fileno(), self._begun, self._written - self._begun)
            self._begun = self._written


def synced(path: Path) -> SavedFile:
    """Bring a file to the disk, and return its size and checksum.

    Collective: none.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return describe_file(path)
