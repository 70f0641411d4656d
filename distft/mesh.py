"""The mesh: axis sizes, the rule that their product is the number of ranks, who shares data."""

from __future__ import annotations

from dataclasses import dataclass

# Outer to inner. A rank's number counts the inner axis fastest, so `tp` neighbours are neighbours
# on the machine, where the links are fast. The second view is the experts' of the same ranks.
DENSE_AXES = ("dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("dp_replicate", "efsdp", "ep")


@dataclass(frozen=True)
class Mesh:
    """Axis sizes of a job: ``dp_replicate * dp_shard * tp`` is its number of ranks.

    Experts see the same ranks as ``dp_replicate * efsdp * ep``.

    >>> Mesh(dp_replicate=2, dp_shard=4).num_ranks
    8
    >>> Mesh(dp_shard=4, tp=2, ep=4).efsdp
    2
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the product of all dense axes."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different rows: ``dp_replicate * dp_shard``."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts and split them: ``dp_shard * tp / ep``."""
        return self.dp_shard * self.tp // self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on each axis, the experts' axes too.

        >>> Mesh(dp_replicate=2, dp_shard=4).coordinates(5)
        {'dp_replicate': 1, 'dp_shard': 1, 'tp': 0, 'efsdp': 1, 'ep': 0}
        """
        found: dict[str, int] = {}
        for axes in (DENSE_AXES, EXPERT_AXES):
            rest = rank
            for axis in reversed(axes):
                found[axis] = rest % getattr(self, axis)
                rest //= getattr(self, axis)
        return {axis: found[axis] for axis in (*DENSE_AXES, *EXPERT_AXES[1:])}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks with which a rank shares an axis, itself among them.

        "world" is all ranks, and so is "dp", which a strategy without `tp` has.

        Raises:
            ValueError: There is no such axis.

        >>> Mesh(dp_shard=4, tp=2, ep=4).group("tp", 5), Mesh(dp_shard=4, tp=2, ep=4).group("ep", 5)
        ((4, 5), (4, 5, 6, 7))
        """
        if axis in ("dp", "world"):
            return tuple(range(self.num_ranks))
        view = EXPERT_AXES if axis in EXPERT_AXES[1:] else DENSE_AXES
        if axis not in view:
            raise ValueError(
                f"{axis!r} is none of the {len(DENSE_AXES) + 4} axes {', '.join(DENSE_AXES)}, "
                f"{', '.join(EXPERT_AXES[1:])}, dp and world. Pass one of them."
            )
        mine = self.coordinates(rank)
        others = [name for name in view if name != axis]
        found = []
        for other in range(self.num_ranks):
            theirs = self.coordinates(other)
            if all(theirs[name] == mine[name] for name in others):
                found.append(other)
        return tuple(found)

    def dp_rank(self, rank: int) -> int:
        """Return which slice of the data a rank reads; the ranks of a `tp` group read one.

        >>> [Mesh(dp_shard=2, tp=2).dp_rank(rank) for rank in range(4)]
        [0, 0, 1, 1]
        """
        return rank // self.tp


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
