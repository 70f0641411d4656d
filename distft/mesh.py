"""The mesh: axis sizes, the rule that their product is the number of ranks, who shares data."""

from __future__ import annotations

from dataclasses import dataclass

# Outer to inner. A rank's number counts the inner axis fastest, so `dp_shard` neighbours are
# neighbours on the machine, where the links are fast.
DENSE_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Mesh:
    """Axis sizes of a job whose product is its number of ranks.

    >>> Mesh(dp_replicate=2, dp_shard=4).num_ranks
    8
    """

    dp_replicate: int = 1
    dp_shard: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the product of all axes."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different rows: ``dp_replicate * dp_shard``."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on each axis.

        >>> Mesh(dp_replicate=2, dp_shard=4).coordinates(5)
        {'dp_replicate': 1, 'dp_shard': 1}
        """
        return {"dp_replicate": rank // self.dp_shard, "dp_shard": rank % self.dp_shard}


def resolve_axes(caller: str, num_ranks: int, **axes: int | None) -> dict[str, int]:
    """Return the size of every axis, where one axis left ``None`` takes the ranks that remain.

    Args:
        caller: The constructor call to name in an error, such as ``HSDP(dp_replicate=2)``.
        num_ranks: Ranks of the process group.
        axes: Axis sizes in mesh order; at most one of them ``None``.

    Raises:
        ValueError: A size is below 1, two axes are open, or the product is not ``num_ranks``.

    >>> resolve_axes("HSDP(dp_replicate=2)", 8, dp_replicate=2, dp_shard=None)
    {'dp_replicate': 2, 'dp_shard': 4}
    """
    known = 1
    open_axes = [name for name, size in axes.items() if size is None]
    for name, size in axes.items():
        check_degree(caller, name, size)
        known *= size or 1
    if len(open_axes) > 1:
        raise ValueError(f"{caller} leaves {' and '.join(open_axes)} open. Give all but one.")
    if open_axes and num_ranks % known:
        raise ValueError(
            f"{caller} needs a multiple of {known} ranks, but there are {num_ranks}. "
            f"Start {known * max(1, num_ranks // known)} or {known * (num_ranks // known + 1)} "
            f"ranks, or choose degrees that divide {num_ranks}."
        )
    if not open_axes and known != num_ranks:
        raise ValueError(
            f"{caller} needs {known} ranks, but there are {num_ranks}. "
            f"Start {known} ranks, or choose degrees whose product is {num_ranks}."
        )
    return {name: num_ranks // known if size is None else size for name, size in axes.items()}


def check_degree(caller: str, name: str, size: int | None) -> None:
    """Raise where an axis size is not None and not an integer of at least 1.

    Raises:
        ValueError: The size is not an integer of at least 1.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f"{caller}: {name} is {size!r}, and a degree is an integer of at least 1. "
            f"Pass {name}=1 to switch the axis off."
        )
