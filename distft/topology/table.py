"""Links of one node, as `nvidia-smi topo -m` names them."""

from __future__ import annotations

from dataclasses import dataclass

from distft.topology.links import UNKNOWN, distance


@dataclass(frozen=True)
class Table:
    """Links of one node as `nvidia-smi topo -m` names them.

    Args:
        gpus: Numbers of the GPUs, ascending.
        links: Row i, column j: the link between `gpus[i]` and `gpus[j]`, such as "NV18" or "SYS";
            "X" on the diagonal, "unknown" where the text says nothing readable.
        nics: Names of the network cards; their devices where a legend gives them.
        nic_links: For each GPU its link to each network card; empty where the text is unclear.
        cpu_affinity: For each GPU its processors, such as "0-31,64-95", or None.
        numa_affinity: For each GPU its NUMA node or nodes, or None.
        gpu_numa_id: For each GPU the NUMA node of its own memory, or None.
        warnings: What did not add up, with counts.
    """

    gpus: tuple[int, ...]
    links: tuple[tuple[str, ...], ...]
    nics: tuple[str, ...] = ()
    nic_links: tuple[tuple[str, ...], ...] = ()
    cpu_affinity: tuple[str | None, ...] = ()
    numa_affinity: tuple[str | None, ...] = ()
    gpu_numa_id: tuple[str | None, ...] = ()
    warnings: tuple[str, ...] = ()

    def link(self, first: int, second: int) -> str:
        """Return the link between two GPUs by their numbers.

        Raises:
            ValueError: A number is none of this node's.
        """
        for gpu in (first, second):
            if gpu not in self.gpus:
                raise ValueError(
                    f"GPU {gpu} is not of this node, whose GPUs are {list(self.gpus)}. "
                    "Pass numbers of that list."
                )
        return self.links[self.gpus.index(first)][self.gpus.index(second)]

    def nearest_nics(self, gpu: int) -> tuple[str, ...]:
        """Return the network cards that are nearest to a GPU, all that are equally near.

        Nothing where the text does not say. Cards that the driver does not see, such as EFA's in
        some machines, are not in the table.

        Raises:
            ValueError: The number is none of this node's.
        """
        self.link(gpu, gpu)
        if not self.nic_links:
            return ()
        links = self.nic_links[self.gpus.index(gpu)]
        away = [distance(link) if link != "?" else distance(UNKNOWN) for link in links]
        near = min(away, default=None)
        return tuple(nic for nic, far in zip(self.nics, away, strict=True) if far == near)

    def link_pairs(self) -> dict[str, int]:
        """Count the pairs of GPUs of each link."""
        counts: dict[str, int] = {}
        for i, row in enumerate(self.links):
            for link in row[i + 1 :]:
                counts[link] = counts.get(link, 0) + 1
        return counts


def unknown_table(count: int) -> Table:
    """Return a table of `count` GPUs of which nothing is known.

    Collective: none.

    >>> unknown_table(2).link(0, 1)
    'unknown'
    """
    rows = (("X" if i == j else UNKNOWN for j in range(count)) for i in range(count))
    return Table(tuple(range(count)), tuple(map(tuple, rows)))
