"""A cluster in a few lines: links, groups, bandwidths, where to run, what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from distft.topology.cluster import Cluster
from distft.topology.links import UNKNOWN


@dataclass(frozen=True)
class Summary:
    """What `python -m distft topo` prints.

    Args:
        gpu: Kind of GPU, or None.
        nodes: Number of nodes.
        num_gpus: GPUs of all nodes.
        fabric: As `Cluster.fabric`.
        nvlink_groups: As `Cluster.nvlink_groups`.
        nvlink_kinds: As `Cluster.nvlink_kinds`.
        link_pairs: Pairs of GPUs of each link, in one node.
        numa_affinity: NUMA node of each GPU.
        nics: For each usable GPU, the network cards that are nearest to it.
        placements: By number of ranks: the value of CUDA_VISIBLE_DEVICES, the slowest hop, and
            the bus bandwidth of an all_reduce and an all_gather in GB/s (None if not known).
        warnings: As `Cluster.warnings`.
    """

    gpu: str | None
    nodes: int
    num_gpus: int
    fabric: str
    nvlink_groups: list[list[int]]
    nvlink_kinds: list[str]
    link_pairs: dict[str, int]
    numa_affinity: tuple[str | None, ...]
    nics: tuple[tuple[str, ...], ...]
    placements: tuple[Place, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        kind = self.gpu or "GPUs of an unknown kind"
        kinds = zip(self.nvlink_groups, self.nvlink_kinds, strict=True)
        groups = "; ".join(f"{','.join(map(str, group))} ({kind})" for group, kind in kinds)
        pairs = ", ".join(f"{count} x {link}" for link, count in self.link_pairs.items())
        numa = ",".join(node or "?" for node in self.numa_affinity)
        lines = [
            f"{self.num_gpus} x {kind} on {self.nodes} node{'s'[: self.nodes > 1]}: {self.fabric}",
            f"NVLink groups  {groups or 'none'}",
            f"Links          {pairs or 'none'}",
            f"NUMA nodes     {numa if any(self.numa_affinity) else 'not stated'}",
            f"Network cards  {_cards(self.nics)}",
            "",
            "ranks  slowest hop  all_reduce  all_gather  run with",
            *map(str, self.placements),
            "Bus bandwidth in GB/s, as nccl-tests counts it.",
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


def _cards(nics: tuple[tuple[str, ...], ...]) -> str:
    """Name the nearest card of each GPU, with the number of others that are as near."""
    if not any(nics):
        return "none stated"
    more = (f"+{len(near) - 1}" if len(near) > 1 else "" for near in nics)
    return ", ".join(f"{near[0]}{n}" if near else "-" for near, n in zip(nics, more, strict=True))


@dataclass(frozen=True)
class Place:
    """The best GPUs for a number of ranks, and how fast collectives are between them."""

    ranks: int
    slowest_hop: str | None
    all_reduce_gbps: float | None
    all_gather_gbps: float | None
    run_with: str

    def __str__(self) -> str:
        speeds = (self.all_reduce_gbps, self.all_gather_gbps)
        first, second = ("?" if speed is None else f"{speed:.1f}" for speed in speeds)
        hop = self.slowest_hop or "-"
        return f"{self.ranks:5}  {hop:11}  {first:>10}  {second:>10}  {self.run_with}"


def summarize(cluster: Cluster, ranks: int | None = None) -> Summary:
    """Return the summary of a cluster, with placements of 2, 4, ... and all GPUs, or of `ranks`.

    Raises:
        ValueError: There are fewer GPUs than `ranks`.

    Collective: none.
    """
    counts = [ranks] if ranks else _counts(cluster)
    table = cluster.table
    at = [table.gpus.index(gpu) for gpu in cluster.usable]
    return Summary(
        cluster.gpu.name if cluster.gpu else None,
        cluster.nodes,
        cluster.num_gpus,
        cluster.fabric,
        cluster.nvlink_groups,
        cluster.nvlink_kinds,
        table.link_pairs(),
        tuple(table.numa_affinity[i] for i in at) if table.numa_affinity else (),
        tuple(map(table.nearest_nics, cluster.usable)),
        tuple(_place(cluster, count) for count in counts),
        cluster.warnings,
    )


def _counts(cluster: Cluster) -> list[int]:
    """Return the powers of two within a node, the node, and all nodes."""
    each = cluster.gpus_per_node
    powers = {2**i for i in range(1, each.bit_length())}
    return sorted({n for n in powers | {each, cluster.num_gpus} if n <= cluster.num_gpus})


def _place(cluster: Cluster, ranks: int) -> Place:
    placement = cluster.place(ranks)
    crosses = placement.nodes > cluster.nvlink_nodes
    hop = "network" if crosses else placement.hop and placement.hop.link
    known = cluster.gpu is not None and ranks > 1 and hop != UNKNOWN
    speeds = [
        cluster.bus_bandwidth(op, ranks) / 1e9 if known else None
        for op in ("all_reduce", "all_gather")
    ]
    return Place(ranks, hop or None, speeds[0], speeds[1], str(placement))
