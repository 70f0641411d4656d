"""The links that a strategy's collectives go over on a machine, and the seconds they take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distft.formulas.reports import Collective, TrafficReport

if TYPE_CHECKING:
    from distft.mesh import Mesh
    from distft.topology import Cluster


def on_links(report: TrafficReport, mesh: Mesh, cluster: Cluster) -> TrafficReport:
    """Return a report whose collectives say their link class and their seconds in one period.

    Ranks lie on the machine in their order. The link is the slowest that the best ring over the
    first group needs, as `nvidia-smi topo -m` calls it, or "network" where a group has ranks in
    several nodes. Seconds are bytes over bus bandwidth, without the start of each call.

    Raises:
        ValueError: The kind of GPU is not known, or the machine has fewer GPUs than ranks.

    Collective: none.
    """
    if mesh.num_ranks > cluster.num_gpus:
        raise ValueError(
            f"There are {mesh.num_ranks} ranks, but the cluster has {cluster.num_gpus} GPUs. "
            "Pass a cluster of more nodes."
        )
    placed = tuple(_placed(each, mesh, cluster) for each in report.collectives)
    return replace(report, collectives=placed)


def _placed(collective: Collective, mesh: Mesh, cluster: Cluster) -> Collective:
    if collective.ranks == 1:
        return collective
    stride = {
        "dp_shard": mesh.tp,
        "dp_replicate": mesh.tp * mesh.dp_shard,
        "efsdp": mesh.ep,
    }.get(collective.axis, 1)
    bandwidth = cluster.bus_bandwidth(collective.op, collective.ranks, stride)
    reach = (collective.ranks - 1) * stride + 1
    link = "network"
    if reach <= cluster.gpus_per_node:
        hop = cluster.slowest_hop(cluster.usable[:reach:stride])
        link = "" if hop is None else hop.link
    elif cluster.nvlink_nodes * cluster.gpus_per_node >= reach:
        link = "NVLink"
    return replace(collective, link=link, seconds=float(collective.num_bytes) / bandwidth)
