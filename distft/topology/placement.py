"""Which GPUs of a node a run should use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distft.topology.wiring import Hop


@dataclass(frozen=True, eq=False)
class Placement(Sequence[int]):
    """The GPUs of a node that a run should use, as a sequence of their numbers.

    Args:
        gpus: Numbers as `nvidia-smi` counts, NVLink groups together.
        hop: The slowest link that a ring over them needs; None for a single GPU.
        nodes: Number of nodes, on each of which these GPUs are used.
    """

    gpus: tuple[int, ...]
    hop: Hop | None = None
    nodes: int = 1

    def __getitem__(self, index: Any) -> Any:
        return self.gpus[index]

    def __len__(self) -> int:
        return len(self.gpus)

    def __iter__(self) -> Iterator[int]:
        return iter(self.gpus)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.gpus)

    def __str__(self) -> str:
        return f"CUDA_VISIBLE_DEVICES={','.join(map(str, self.gpus))}"
