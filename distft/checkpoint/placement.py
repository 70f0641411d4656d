"""Which part of a whole tensor a rank's `DTensor` holds, strided parts and all.

torch describes the part of a rank as one block. A part is several blocks where a fused tensor is
split inside each of its halves, or where two axes of the mesh split one dimension: torch's
checkpoints and ``full_tensor`` then name other elements than the ones that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Half-open ranges of indices in a dimension of the whole, in the order in which a rank has them.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """A box of the whole tensor that lies in one box of a rank's part.

    Attributes:
        start: First index of the box in the whole tensor, for each dimension.
        local: First index of the box in the rank's part.
        size: Its shape.
    """

    start: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]


def chunk_ranges(ranges: Ranges, parts: int, index: int) -> Ranges:
    """Return the share of one part, as `torch.chunk` cuts: full shares first, then a rest, then 0.

    >>> [chunk_ranges(((0, 5),), 4, part) for part in range(4)]
    [((0, 2),), ((2, 4),), ((4, 5),), ()]

    Collective: none.
    """
    length = sum(stop - start for start, stop in ranges)
    step = -(-length // parts)
    return _cut(ranges, min(index * step, length), min((index + 1) * step, length))


def strided_ranges(ranges: Ranges, groups: int, parts: int, index: int) -> Ranges:
    """Return the share of one part of each of ``groups`` chunks: both halves of gate and up, say.

    >>> strided_ranges(((0, 8),), 2, 2, 1)
    ((2, 4), (6, 8))

    Collective: none.
    """
    found: list[tuple[int, int]] = []
    for group in range(groups):
        found += chunk_ranges(chunk_ranges(ranges, groups, group), parts, index)
    return tuple(found)


def _cut(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return what lies between two positions, counted along the ranges."""
    found, position = [], 0
    for start, stop in ranges:
        low = max(start, start + first - position)
        high = min(stop, start + last - position)
        if low < high:
            found.append((low, high))
        position += stop - start
    return tuple(found)


def held_ranges(tensor: Any, dim: int) -> Ranges:
    """Return the indices of one dimension of the whole that this rank's part of a DTensor has.

    A `_StridedShard` whose factor is the number of parts that axes to its right make comes after
    these, as ``fully_shard`` splits what TP or EP has split; any other one splits each group.

    Collective: none.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    steps: list[tuple[int, int, int]] = []
    late: list[tuple[int, int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard | _StridedShard) or placement.dim % tensor.ndim != dim:
            continue
        parts, index = mesh.size(axis), mesh.get_local_rank(axis)
        factor = getattr(placement, "split_factor", 1)
        after = 1
        for other in range(axis + 1, mesh.ndim):
            there = tensor.placements[other]
            if isinstance(there, Shard | _StridedShard) and there.dim % tensor.ndim == dim:
                after *= mesh.size(other)
        if factor > 1 and factor == after:
            late.append((1, parts, index))
        else:
            steps.append((factor, parts, index))
    ranges: Ranges = ((0, tensor.shape[dim]),)
    for factor, parts, index in (*steps, *reversed(late)):
        ranges = strided_ranges(ranges, factor, parts, index)
    return ranges


def held_blocks(tensor: Any) -> list[Block]:
    """Return the boxes of the whole that this rank's part of a DTensor is made of.

    Raises:
        RuntimeError: The part has another shape than its placements say.

    Collective: none.
    """
    axes: list[list[tuple[int, int, int]]] = []
    for dim in range(tensor.ndim):
        position, spans = 0, []
        for start, stop in held_ranges(tensor, dim):
            spans.append((start, position, stop - start))
            position += stop - start
        have = tensor.to_local().shape[dim]
        if have != position:
            raise RuntimeError(
                f"A rank's part of a tensor of shape {tuple(tensor.shape)} has {have} indices in "
                f"dimension {dim}, and its placements {tensor.placements} give {position}. "
                "Report this with the strategy and the versions of torch and transformers."
            )
        axes.append(spans)
    return [
        Block(
            tuple(span[0] for span in spans),
            tuple(span[1] for span in spans),
            tuple(span[2] for span in spans),
        )
        for spans in product(*axes)
    ]


def is_strided(tensor: Any) -> bool:
    """Return whether torch may name other elements for this rank's part than are there.

    Collective: none.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def narrow(tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the box of a tensor that begins at ``starts``, without a copy.

    Collective: none.
    """
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def gather_whole(tensor: Any) -> Tensor:
    """Return a DTensor whole, on its device.

    Strided parts are put where they belong by us, and summed with the zeros of the other ranks.

    Collective: every rank of the mesh axes that split it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate

    if not is_strided(tensor):
        whole: Tensor = tensor.full_tensor()
        return whole
    part = tensor.to_local()
    found = torch.zeros(tensor.shape, dtype=part.dtype, device=part.device)
    for block in held_blocks(tensor):
        narrow(found, block.start, block.size).copy_(narrow(part, block.local, block.size))
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1:
            dist.all_reduce(found, group=tensor.device_mesh.get_group(axis))
    return found


def by_blocks(tensor: Any) -> Any:
    """Return a tensor that torch's checkpoints read block by block; others as they are.

    A `DTensor` says in two methods what of it lies where; here they are told it as it is. The
    returned tensor shares its memory.

    Collective: none.
    """
    if not hasattr(tensor, "device_mesh") or not is_strided(tensor):
        return tensor
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    alias = tensor.detach()
    part, blocks = alias.to_local(), [b for b in held_blocks(alias) if 0 not in b.size]
    chunks = [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.size)) for b in blocks]

    def find(index: Any) -> Tensor:
        place = next(i for i, chunk in enumerate(chunks) if chunk.offsets == index.offset)
        return narrow(part, blocks[place].local, blocks[place].size)

    alias.__create_chunk_list__ = lambda: chunks
    alias.__get_tensor_shard__ = find
    return alias
