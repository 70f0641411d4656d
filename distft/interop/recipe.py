"""`Recipe`: a strategy, its ranks and its load as plain values, between two tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distft.formulas._numbers import choice, whole

NAMES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "tp", "ep", "nd")
_DEGREES = ("dp_replicate", "dp_shard", "tp", "ep")


@dataclass(frozen=True)
class Recipe:
    """One strategy with what a launcher needs beside it.

    Args:
        name: Name that `distft.strategy` takes.
        fields: Its degrees and policies that are not at their defaults.
        num_ranks: Ranks, 0 where a file does not say.
        nodes: Nodes.
        micro_batch: Rows of a micro-step.
        grad_accum: Micro-steps of a step.
        notes: What was dropped or changed on the way, and why, in sentences.

    Raises:
        ValueError: The name is unknown, or a number is out of range.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 0
    nodes: int = 1
    micro_batch: int = 1
    grad_accum: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        choice("name", self.name, NAMES)
        whole("num_ranks", self.num_ranks)
        for name in ("nodes", "micro_batch", "grad_accum"):
            whole(name, getattr(self, name), 1)

    @property
    def stage(self) -> int | None:
        """Stage of ZeRO, None for other strategies."""
        return int(self.name[-1]) if self.name.startswith("zero") else None

    @property
    def precision(self) -> str:
        """Its precision."""
        return str(self.fields.get("precision", "fp32"))

    def degrees(self) -> dict[str, int]:
        """Return the ranks along each axis, those that are left open filled in.

        Raises:
            ValueError: The degrees do not divide the ranks.
        """
        found = {name: int(self.fields.get(name) or 1) for name in _DEGREES}
        if self.name == "tp" and not self.fields.get("tp"):
            found["tp"] = max(self.num_ranks, 1)
        if self.name == "ep" and not self.fields.get("ep"):
            found["ep"] = max(self.num_ranks, 1)
        if self.name in ("fsdp2", "hsdp", "tp", "ep", "nd") and not self.fields.get("dp_shard"):
            known = found["dp_replicate"] * found["tp"]
            if self.num_ranks % known:
                raise ValueError(
                    f"{self.num_ranks} ranks are no multiple of the {known} that the degrees of "
                    f"{self.name} take. Choose degrees that divide the ranks."
                )
            found["dp_shard"] = max(self.num_ranks // known, 1)
        return found
