"""ZeRO-Infinity: optimizer state of ZeRO-3 on a disk, a sub-group of parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Less than this stays in memory: DeepSpeed 0.19 `swap_tensor/utils.py`, MIN_AIO_BYTES.
LEAST_BYTES = 2**20
# What a file is a multiple of, in elements of fp32: `AIO_ALIGNED_BYTES`, 1024.
ALIGNMENT = 256
# State on a disk is fp32 in every precision that has it.
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class DiskState:
    """Elements of one rank's master weights by where they lie, and what moves them.

    Attributes:
        on_disk: Elements on the disk.
        aligned: Elements of their files.
        in_memory: Elements of sub-groups too small for the disk.
        largest: Elements of the largest sub-group.
    """

    on_disk: int
    aligned: int
    in_memory: int
    largest: int

    def buffer_bytes(self, moments: int) -> int:
        """Bytes of the buffers that a sub-group passes through: weights, gradient and moments."""
        return (2 + moments) * aligned_numel(self.largest) * ELEMENT_BYTES

    def moved_bytes(self, moments: int) -> int:
        """Bytes read from the disk in a step, and as many written: weights and moments."""
        return (1 + moments) * self.aligned * ELEMENT_BYTES


def aligned_numel(numel: int) -> int:
    """Elements of the file of so many.

    >>> aligned_numel(257)
    512

    Collective: none.
    """
    return -(-numel // ALIGNMENT) * ALIGNMENT


def sub_groups(parts: Sequence[int], size: int) -> list[int]:
    """Elements of each sub-group of a parameter group, which is updated as one.

    One ends with the parameter that makes it hold `size` elements.

    Source: DeepSpeed 0.19 `stage3.py`, `_create_fp16_sub_groups`.

    >>> sub_groups([40, 40, 40], 50)
    [80, 40]

    Args:
        parts: Elements of this rank's part of each parameter.
        size: The engine's `sub_group_size`.

    Collective: none.
    """
    if size >= sum(parts):
        return [sum(parts)]
    found = [0]
    for part in parts:
        if found[-1] >= size:
            found.append(0)
        found[-1] += part
    return found


def disk_state(parts: Sequence[int], size: int) -> DiskState:
    """Where master weights lie that DeepSpeed is told to keep on a disk; moments lie beside them.

    Source: Rajbhandari et al. 2021 (ZeRO-Infinity), section 5; DeepSpeed 0.19
    `swap_tensor/optimizer_utils.py`. Assumes: one parameter group.

    >>> disk_state([200_000, 200_000, 100_000], size=300_000)
    DiskState(on_disk=400000, aligned=400128, in_memory=100000, largest=400000)

    Args:
        parts: Elements of this rank's part of each trained parameter.
        size: The engine's `sub_group_size`.

    Collective: none.
    """
    groups = sub_groups(parts, size)
    there = [numel for numel in groups if numel * ELEMENT_BYTES >= LEAST_BYTES]
    return DiskState(
        sum(there), sum(map(aligned_numel, there)), sum(groups) - sum(there), max(groups)
    )
