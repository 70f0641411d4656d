"""What the links of a node amount to: NVLink groups, switch or bridges, rings, placements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from distft.topology.links import UNKNOWN, distance
from distft.topology.table import Table

# Links of the largest chip so far; a chip that is not named may have as many.
_MOST_LINKS = 18
# Above it, sets of GPUs are grown one by one instead of all being compared: C(10, 5) is 252.
_COMPARE_ALL = 10


@dataclass(frozen=True)
class Hop:
    """The slowest link that a ring over some GPUs needs.

    Args:
        first: Number of the GPU on one side.
        second: Number of the GPU on the other side.
        link: The link between them, as `nvidia-smi topo -m` names it.
    """

    first: int
    second: int
    link: str


@dataclass(frozen=True)
class Wiring:
    """The links of one node, seen by collectives.

    Args:
        table: The links.
        chip_links: NVLinks of the card; None where the GPU is not known.
    """

    table: Table
    chip_links: int | None = None

    @cached_property
    def _distances(self) -> dict[tuple[int, int], tuple[int, int]]:
        """What sorts the links of each ordered pair, which everything below asks for often."""
        return {
            (first, second): distance(link)
            for first, row in zip(self.table.gpus, self.table.links, strict=True)
            for second, link in zip(self.table.gpus, row, strict=True)
            if first != second
        }

    @cached_property
    def groups(self) -> list[list[int]]:
        """GPUs that NVLinks join, directly or through others; groups of one are left out."""
        left, groups = list(self.table.gpus), []
        while left:
            group, todo = set(), [left[0]]
            while todo:
                gpu = todo.pop()
                group.add(gpu)
                todo += [other for other in left if other not in group and self.nvlinks(gpu, other)]
            left = [gpu for gpu in left if gpu not in group]
            if len(group) > 1:
                groups.append(sorted(group))
        return groups

    @cached_property
    def fabric(self) -> str:
        """`"nvswitch"`, `"nvl-groups"`, `"pcie"`, `"single"`, or `"unknown"`."""
        if len(self.table.gpus) == 1:
            return "single"
        if any(UNKNOWN in row for row in self.table.links):
            return "unknown"
        if not self.groups:
            return "pcie"
        everyone = len(self.groups[0]) == len(self.table.gpus)
        return "nvswitch" if everyone and self.is_switched(self.groups[0]) else "nvl-groups"

    def is_switched(self, group: Sequence[int]) -> bool:
        """Say whether a switch joins a group: one GPU shows more links than its card has.

        A switch shows all links of a GPU towards each other one; a bridge or mesh divides them.
        """
        most = max(self.nvlinks(first, second) for first, second in combinations(group, 2))
        chip = max(self.chip_links or _MOST_LINKS, most)
        return self.is_clique(group) and any(self.degree(gpu, group) > chip for gpu in group)

    def kind(self, group: Sequence[int]) -> str:
        """Return what joins a group: "switch", "bridge", "mesh" or "partial mesh"."""
        if self.is_switched(group):
            return "switch"
        if len(group) == 2:
            return "bridge"
        return "mesh" if self.is_clique(group) else "partial mesh"

    def is_clique(self, group: Sequence[int]) -> bool:
        """Say whether each two GPUs of a group are joined directly."""
        return all(self.nvlinks(first, second) for first, second in combinations(group, 2))

    def nvlinks(self, first: int, second: int) -> int:
        """Return the number of NVLinks between two GPUs, 0 for a GPU and itself."""
        return -self._distances[first, second][1] if first != second else 0

    def degree(self, gpu: int, group: Iterable[int]) -> int:
        """Return the sum of NVLinks from one GPU to the others of a group."""
        return sum(self.nvlinks(gpu, other) for other in group if other != gpu)

    def ring_links(self, gpus: Sequence[int]) -> int:
        """NVLinks that rings over `gpus` use out of each GPU at once, 0 where no ring of them is.

        Through a switch each GPU has all of its own. In a mesh several rings share the links, and
        no set of GPUs can be left faster than by the links that lead out of it: the minimum cut.
        A hybrid cube mesh of V100 has two rings, of double and of single links: six of each GPU.
        """
        group = next((group for group in self.groups if set(gpus) <= set(group)), None)
        if group is None or len(gpus) < 2:
            return 0
        if self.is_switched(group):
            return min(self.nvlinks(first, second) for first, second in combinations(gpus, 2))
        if not find_ring(gpus, lambda first, second: self.nvlinks(first, second) > 0):
            return 0
        largest = len(gpus) // 2 if len(gpus) <= _COMPARE_ALL else 1
        return min(
            sum(self.nvlinks(a, b) for a in part for b in gpus if b not in part)
            for size in range(1, largest + 1)
            for part in combinations(gpus, size)
        )

    def slowest_hop(self, gpus: Sequence[int]) -> Hop | None:
        """Return the slowest link of the best ring over `gpus`; None for a single GPU."""
        away = self._distances
        for limit in sorted({away[pair] for pair in combinations(gpus, 2)}):
            ring = find_ring(gpus, lambda a, b, limit=limit: away[a, b] <= limit)  # type: ignore[misc]
            if ring:
                steps = zip(ring, [*ring[1:], ring[0]], strict=True)
                first, second = max(steps, key=away.__getitem__)
                return Hop(first, second, self.table.link(first, second))
        return None

    def place(self, count: int, among: Sequence[int]) -> tuple[int, ...]:
        """Return the `count` GPUs of `among` between which collectives are fastest.

        First the slowest hop and the NVLinks in use decide, then few NUMA nodes, then network
        cards that are near, then low numbers.
        """
        if len({self._distances[pair] for pair in combinations(among, 2)}) < 2:
            return self._nearest(count, among)
        if len(among) <= _COMPARE_ALL:
            return min(combinations(sorted(among), count), key=self._cost)
        grown = []
        for start in among:
            chosen = [start]
            while len(chosen) < count:
                rest = (gpu for gpu in sorted(among) if gpu not in chosen)
                chosen.append(min(rest, key=lambda gpu: self._attach(gpu, chosen)))
            grown.append(tuple(sorted(chosen)))
        return min(grown, key=lambda gpus: (self._attach_all(gpus), self._near(gpus), gpus))

    def in_order(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """Return `gpus` with neighbours of one NVLink group together, else of one NUMA node."""
        first = {gpu: min(group) for group in self.groups for gpu in group}
        for gpu in self.table.gpus:
            near = (other for other in self.table.gpus if self._numa(other) == self._numa(gpu))
            first.setdefault(gpu, min(near))
        return tuple(sorted(gpus, key=lambda gpu: (first[gpu], gpu)))

    def _cost(self, gpus: Sequence[int]) -> tuple[object, ...]:
        links = self.ring_links(gpus)
        hop = self.slowest_hop(gpus)
        reach = distance(hop.link)[0] if hop and not links else 0
        inside = sum(self.nvlinks(*pair) for pair in combinations(gpus, 2))
        return reach, -links, -inside, *self._near(gpus), tuple(gpus)

    def _nearest(self, count: int, among: Sequence[int]) -> tuple[int, ...]:
        """Return `count` GPUs where all links are alike: whole NUMA nodes first."""
        nodes: dict[str, list[int]] = {}
        for gpu in sorted(among):
            nodes.setdefault(self._numa(gpu), []).append(gpu)
        # The smallest node that holds them all; without one, the largest nodes.
        fitting = [gpus for gpus in nodes.values() if len(gpus) >= count]
        if fitting:
            return tuple(min(fitting, key=lambda gpus: (self._near(gpus), gpus))[:count])
        ordered = sorted(nodes.values(), key=lambda gpus: (-len(gpus), gpus))
        return tuple(sorted([gpu for gpus in ordered for gpu in gpus][:count]))

    def _near(self, gpus: Sequence[int]) -> tuple[int, int]:
        """Return the number of NUMA nodes, and how far the GPUs' nearest network cards are."""
        nics = self.table.nic_links
        away = [
            min(distance(link)[0] for link in nics[self.table.gpus.index(gpu)] if link != "?")
            for gpu in gpus
            if nics and set(nics[self.table.gpus.index(gpu)]) - {"?"}
        ]
        return len({self._numa(gpu) for gpu in gpus}), sum(away)

    def _numa(self, gpu: int) -> str:
        numa = self.table.numa_affinity
        return (numa[self.table.gpus.index(gpu)] if numa else None) or ""

    def _attach(self, gpu: int, chosen: Sequence[int]) -> tuple[object, ...]:
        far = max(self._distances[gpu, other] for other in chosen)
        return far, self._numa(gpu) != self._numa(chosen[0]), gpu

    def _attach_all(self, gpus: Sequence[int]) -> tuple[int, int]:
        return max((self._distances[pair] for pair in combinations(gpus, 2)), default=(0, 0))


def find_ring(gpus: Sequence[int], joined: Callable[[int, int], bool]) -> list[int] | None:
    """Return `gpus` in an order in which each is joined to the next and the last to the first.

    Two GPUs are a ring, and so is one. Where each has half of the others as neighbours there is a
    ring (Dirac 1952), and the search below finds one at once in what machines are built as.
    """
    neighbours = {a: [b for b in gpus if b != a and joined(a, b)] for a in gpus}
    least = 1 if len(gpus) == 2 else 2
    if len(gpus) > 1 and min(map(len, neighbours.values())) < least:
        return None

    hopeless: set[tuple[frozenset[int], int]] = set()

    def extend(path: list[int]) -> list[int] | None:
        if len(path) == len(gpus):
            return path if len(path) == 1 or path[0] in neighbours[path[-1]] else None
        state = (frozenset(path), path[-1])
        if state in hopeless:
            return None
        steps = (gpu for gpu in neighbours[path[-1]] if gpu not in path)
        # The GPU with the fewest ways out first (Warnsdorff): dead ends show early.
        for gpu in sorted(steps, key=lambda gpu: len(set(neighbours[gpu]) - set(path))):
            ring = extend([*path, gpu])
            if ring:
                return ring
        hopeless.add(state)
        return None

    return extend([gpus[0]])
