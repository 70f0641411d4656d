"""FSDP2 and HSDP: every parameter split by rows over ranks, gathered block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distft.mesh import Mesh, check_degree, resolve_axes
from distft.strategies.sharded import Sharded


@dataclass(frozen=True, kw_only=True, repr=False)
class FSDP2(Sharded):
    """Weights, gradients and moments split by rows over all ranks; blocks gathered on the fly.

    Memory: ``1/N`` of each tensor, by whole rows; the block at work is whole for a moment.
    Traffic: gather, gather, reduce-scatter: three passes of ``(N-1)/N`` each micro-step.

    Attributes:
        dp_shard: Ranks to split over; default all.
        reshard_after_forward: Free a block's whole weights after its forward pass (True), or keep
            them for the backward pass: one gather less, the whole model in memory. The root
            (embedding, last norm, head) is kept either way: its backward pass comes first.
        defer_reduce: Keep whole gradients until the last micro-step and reduce once (True), or
            reduce every micro-step and hold ``1/N`` of them.
    """

    name: ClassVar[str] = "fsdp2"
    offloads: ClassVar[tuple[str, ...]] = ("params",)

    dp_shard: int | None = None

    def _check_fields(self) -> None:
        check_degree(repr(self), "dp_shard", self.dp_shard)

    def _mesh(self, num_ranks: int) -> Mesh:
        return Mesh(**resolve_axes(repr(self), num_ranks, dp_shard=self.dp_shard))


@dataclass(frozen=True, kw_only=True, repr=False)
class HSDP(Sharded):
    """FSDP2 inside groups of ranks, DDP between the groups.

    Memory: that of FSDP2 on ``dp_shard`` ranks. Traffic: FSDP2's inside a group, and once a step
    an all-reduce of a rank's shard between groups.

    Attributes:
        dp_replicate: Number of groups; default the ranks that remain.
        dp_shard: Ranks of a group; default ``LOCAL_WORLD_SIZE``, the ranks of one machine, where
            neither is given.
        reshard_after_forward: As for `FSDP2`.
        defer_reduce: As for `FSDP2`.
    """

    name: ClassVar[str] = "hsdp"
    offloads: ClassVar[tuple[str, ...]] = ("params",)

    dp_replicate: int | None = None
    dp_shard: int | None = None

    def _check_fields(self) -> None:
        check_degree(repr(self), "dp_replicate", self.dp_replicate)
        check_degree(repr(self), "dp_shard", self.dp_shard)

    def _mesh(self, num_ranks: int) -> Mesh:
        dp_shard = self.dp_shard
        if self.dp_replicate is None and dp_shard is None:
            import os

            dp_shard = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        axes = resolve_axes(
            repr(self), num_ranks, dp_replicate=self.dp_replicate, dp_shard=dp_shard
        )
        return Mesh(**axes)
