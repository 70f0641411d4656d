"""Classes of links, and how fast collectives go over them: alpha-beta with few constants.

A collective of `ranks` takes `alpha + bytes on the bus / bus bandwidth`. The bus bandwidth is a
share of the wire's, one share per class of link; alpha is a start and a hop per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = "unknown"

# From the nearest to the farthest without NVLink; SOC is the old name of SYS.
_HOST_LINKS = {"PIX": 1, "PXB": 2, "PSB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5, UNKNOWN: 6}

# Share of NVLink's wire that a ring gets. A payload of 128 bytes has 32 of header: at most 0.8
# (NVIDIA/nccl-tests#149, #212). Measured, over links x 25, 50 or 14 GB/s: A100 8 ranks 0.78, H200
# 0.81, B200 0.76, H100 send 0.81, A100 pair 0.72, A40 pair 0.84, H200 NVL pair 0.76, quad 0.72.
# Not covered: one report of H100 PCIe pairs with 12 links at half of it (NVIDIA/nccl#1161).
NVLINK_SHARE = 0.78
# Share of the wire where the switch sums. A rank sends S (1 + 1/N) of a buffer S instead of
# 2 S (N-1)/N, so bus bandwidth is 2 (N-1)/(N+1) of this. Measured: H200 with 4 to 8 ranks 0.67 to
# 0.69, H100 0.69, H800 0.69, B200 0.60 to 0.62 (stas00/ml-engineering; NVIDIA/nccl#1374).
MULTICAST_SHARE = 0.65
# Share of a PCIe slot between GPUs below one switch: NCCL's 12 of 15.75 GB/s (graph/topo.h).
SWITCH_SHARE = 0.76
# Through the processor, in one socket or across two, or through its memory. Measured on PCIe 5: 28,
# 35, 39 GB/s with 2, 4, 8 H200 NVL across quads; 35, 28 with 4, 8 RTX 5090; 31 with 2 H200 whose
# NVLink is off. Virtual machines and broken set-ups get a tenth of it (3.2 on p5, 3.9 on A40).
HOST_SHARE = 0.52
# Share of what all network cards of a node carry. Measured: 0.97 two Hopper nodes, 0.92 four H200
# nodes, 0.95 four B200 nodes, 0.92 A100-class, 0.80 to 0.88 EFA on p5.
NETWORK_SHARE = 0.9

# Seconds to start a collective, and per step over each class: NCCL's own model of its Simple
# protocol in rings (tuning.cc). Shows: 71 us for 4 MiB on 8 H200, where 69 were measured.
START = 8.4e-6
NVLINK_HOP = 3.4e-6
PCIE_HOP = 5.7e-6
NETWORK_HOP = 14e-6


def num_nvlinks(link: str) -> int:
    """Return how many NVLinks a link is made of: 12 for "NV12", 0 for any other."""
    return int(link[2:]) if link.startswith("NV") else 0


def distance(link: str) -> tuple[int, int]:
    """Return what sorts links from the fastest to the slowest."""
    count = num_nvlinks(link)
    return (0, -count) if count else (_HOST_LINKS[link], 0)


def slower(links: Iterable[str]) -> str:
    """Return the slowest of some links.

    >>> slower(["NV18", "SYS", "NV6"])
    'SYS'
    """
    return max(links, key=distance)


def host_bandwidth(link: str, pcie_bandwidth: float) -> float:
    """Bus bandwidth of a link without NVLink, in bytes/s.

    Raises:
        ValueError: The link is not known.
    """
    if link == UNKNOWN:
        raise ValueError(
            "The link between two of the GPUs cannot be read, so no bandwidth is known. "
            "Pass a whole table, or what distft.topology.measure() saved."
        )
    share = SWITCH_SHARE if distance(link) <= distance("PXB") else HOST_SHARE
    return share * pcie_bandwidth


def ring_steps(op: str, ranks: int) -> int:
    """Steps of a ring that follow each other, each of which costs one hop.

    >>> ring_steps("all_reduce", 8), ring_steps("all_gather", 8), ring_steps("send", 2)
    (14, 7, 1)
    """
    if ranks < 2:
        return 0
    if op == "all_reduce":
        return 2 * (ranks - 1)
    # Messages of an all-to-all leave at once.
    return 1 if op in ("send", "all_to_all") else ranks - 1


def alpha(op: str, ranks: int, nodes: int, hop: float) -> float:
    """Seconds that a collective takes however small it is.

    Across nodes: a tree for all_reduce, `2 log2(nodes)` network steps, else a ring that leaves
    each node once.

    Args:
        op: Name of the collective.
        ranks: Ranks in the group.
        nodes: Nodes (or NVLink domains) that the group spans.
        hop: Seconds per step inside of one.
    """
    if ranks < 2:
        return 0.0
    steps = ring_steps(op, ranks)
    if nodes == 1:
        return START + steps * hop
    if steps == 1:
        return START + NETWORK_HOP
    if op == "all_reduce":
        inside = 2 * (math.ceil(ranks / nodes) - 1)
        return START + inside * hop + 2 * math.ceil(math.log2(nodes)) * NETWORK_HOP
    return START + (ranks - nodes) * hop + (nodes - 1) * NETWORK_HOP
