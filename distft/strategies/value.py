"""A strategy as a value: its fields, how it prints, and the axis sizes it means."""

from __future__ import annotations

from dataclasses import dataclass, fields

from distft.mesh import Mesh
from distft.process_group import group_rank, group_size
from distft.strategies.guards import check_offload
from distft.strategies.hooks import StrategyHooks

PRECISIONS = ("fp32", "bf16-mixed", "bf16")


@dataclass(frozen=True, kw_only=True, repr=False)
class StrategyValue(StrategyHooks):
    """The fields of every strategy; `Strategy` says what each means."""

    precision: str = "fp32"
    activation_checkpointing: bool = False
    offload: str | None = None
    compile: str | None = None

    def __post_init__(self) -> None:
        """Check the fields, so that a wrong one is found where it is written."""
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"{type(self).__name__}(precision={self.precision!r}) is none of the "
                f"{len(PRECISIONS)} precisions {', '.join(PRECISIONS)}. "
                "Use bf16-mixed in place of fp16."
            )
        check_offload(self)
        if self.compile not in (None, "block"):
            raise ValueError(
                f"{type(self).__name__}(compile={self.compile!r}): this version supports only "
                "None and 'block'. Leave it out."
            )
        self._check_fields()

    def __repr__(self) -> str:
        """Show the constructor call, without the fields that are at their defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def mesh(self, world_size: int | None = None) -> Mesh:
        """Return the axis sizes on ``world_size`` ranks; default those of the process group.

        Raises:
            ValueError: The degrees do not fit the number of ranks.
            RuntimeError: There is no process group and no ``world_size``.

        Collective: none.
        """
        num_ranks = group_size(f"{self!r}.mesh()") if world_size is None else world_size
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ValueError(
                f"{self!r}.mesh(world_size={num_ranks!r}) needs an integer of at least 1 rank."
            )
        return self._mesh(num_ranks)

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different rows."""
        return self.mesh().dp_size

    @property
    def dp_rank(self) -> int:
        """Which slice of the data this rank reads, from 0 to ``dp_size - 1``."""
        return self.mesh().dp_rank(group_rank())
