"""How fast a collective is on a cluster: its bus bandwidth, and its start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distft.formulas import ring_bytes
from distft.formulas._numbers import choice, whole
from distft.topology import links
from distft.topology.gpus import Gpu

if TYPE_CHECKING:
    from distft.topology.cluster import Cluster

# Names as in `distft.formulas.ring_bytes`, and "send" from one rank to another.
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")
_BITS = 8


def bus_factor(op: str, ranks: int) -> float:
    """Bytes on the bus per byte of the buffer, as nccl-tests counts: 1 for what is sent once.

    Collective: none.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("send", 2)
    (1.75, 0.875, 1.0)
    """
    if op in ("send", "broadcast", "reduce"):
        return 1.0 if ranks > 1 else 0.0
    return float(ring_bytes(op, 1, ranks))


def group_bandwidth(cluster: Cluster, op: str, ranks: int | tuple[int, ...], stride: int) -> float:
    """Bus bandwidth of `Cluster.bus_bandwidth`, not kept."""
    choice("op", op, OPS)
    members, domains = _spread(cluster, op, ranks, stride)
    count = members if isinstance(members, int) else len(members)
    inside = _inside(cluster, op, members)
    if domains == 1:
        return inside
    # The groups of a domain share its wires, each as many as it has ranks there.
    share = count / (cluster.gpus_per_node * cluster.nvlink_nodes)
    if cluster.internode_gbps is None:
        raise ValueError(
            f"{op} over {ranks} ranks crosses {domains} nodes, whose wire is neither given nor "
            "measured. Pass internode_gbps, or measure that group."
        )
    domain = cluster.internode_gbps * 1e9 / _BITS * cluster.nvlink_nodes
    wire = domain * share * links.NETWORK_SHARE
    if op == "all_to_all":
        total = count * domains
        return (total - 1) / max(count * (total - count) / wire, (count - 1) / inside)
    return min(inside, wire)


def group_alpha(cluster: Cluster, op: str, ranks: int | Sequence[int], stride: int) -> float:
    """Seconds that a collective takes however small it is."""
    members, domains = _spread(cluster, op, _ranks(ranks), stride)
    count = ranks if isinstance(ranks, int) else len(ranks)
    gpus = cluster.usable if isinstance(members, int) else members
    hop = links.NVLINK_HOP if cluster.wiring.ring_links(gpus) else links.PCIE_HOP
    return links.alpha(op, count, domains, hop)


def _ranks(ranks: int | Sequence[int]) -> int | tuple[int, ...]:
    return ranks if isinstance(ranks, int) else tuple(ranks)


def _spread(
    cluster: Cluster, op: str, ranks: int | tuple[int, ...], stride: int
) -> tuple[int | tuple[int, ...], int]:
    """Return the GPUs of a group in one NVLink domain, and the number of domains.

    Only the number of GPUs where they are of several nodes of one domain.
    """
    whole("stride", stride, 1)
    if not isinstance(ranks, int):
        return cluster.checked(ranks), 1
    whole("ranks", ranks, 1)
    if ranks * stride > cluster.num_gpus:
        raise ValueError(
            f"{op} over {ranks} ranks, {stride} apart, spans {ranks * stride} GPUs, but there "
            f"are {cluster.num_gpus}. Pass fewer ranks, or a cluster of more nodes."
        )
    domain = cluster.gpus_per_node * min(cluster.nvlink_nodes, cluster.nodes)
    inside = ranks if ranks * stride <= domain else max(1, domain // stride)
    return _members(cluster, inside, stride), math.ceil(ranks / inside)


def _members(cluster: Cluster, count: int, stride: int) -> int | tuple[int, ...]:
    if (count - 1) * stride >= cluster.gpus_per_node:
        return count
    if stride == 1:
        return cluster.place(count).gpus
    return cluster.wiring.in_order(cluster.usable)[: count * stride : stride]


def _inside(cluster: Cluster, op: str, members: int | tuple[int, ...]) -> float:
    """Bus bandwidth of a group inside of one node or NVLink domain."""
    gpu, wiring = cluster.gpu, cluster.wiring
    if gpu is None:
        raise ValueError(
            "The kind of GPU is not known, but bandwidths depend on it. "
            'Pass gpu="H100-80GB" or another of distft.topology.GPUS.'
        )
    if isinstance(members, int):
        # Over trays of one switch a GPU is as fast as with the others of its tray.
        num, gpus, switched = members, cluster.usable, True
    else:
        group = next((group for group in wiring.groups if set(members) <= set(group)), [])
        num, gpus, switched = len(members), members, bool(group) and wiring.is_switched(group)
    if num == 1:
        return math.inf
    if op == "all_to_all" and not switched:
        return _pairwise(cluster, gpu, gpus)
    lanes, hop = wiring.ring_links(gpus), wiring.slowest_hop(gpus)
    if not lanes:
        assert hop is not None
        return links.host_bandwidth(hop.link, gpu.pcie_bandwidth)
    wire = lanes * gpu.nvlink_bandwidth
    ring = links.NVLINK_SHARE * wire
    if op == "all_reduce" and switched and gpu.multicast and num > 2:
        return max(ring, links.MULTICAST_SHARE * wire * 2 * (num - 1) / (num + 1))
    return ring


def _pairwise(cluster: Cluster, gpu: Gpu, members: Sequence[int]) -> float:
    """Bus bandwidth of an all-to-all without a switch: each pair over its own link."""
    slowest = 0.0
    for first in members:
        slot = 0.0
        for second in members:
            link = cluster.table.link(first, second)
            if links.num_nvlinks(link):
                wire = links.num_nvlinks(link) * gpu.nvlink_bandwidth
                slowest = max(slowest, 1 / (links.NVLINK_SHARE * wire))
            elif first != second:
                slot += 1 / links.host_bandwidth(link, gpu.pcie_bandwidth)
        slowest = max(slowest, slot)
    return (len(members) - 1) / slowest
