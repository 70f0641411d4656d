"""Speeds of a machine as the formulas want them: of its GPU, and of its wires for a layout."""

from __future__ import annotations

from collections.abc import Mapping

from distft.formulas.peak import Layout
from distft.formulas.speed import Chip, Wires
from distft.topology import Cluster, Gpu
from distft.topology.bandwidth import group_alpha

# Share of the peak that wide matrix products of a training step reach, and that attention does,
# both by generation: fitted to llm-foundry's tables (A100, H100) and to NVIDIA's (Blackwell).
# FlashAttention-2 reaches 0.7 of an A100 and 0.35 of an H100 (Shah et al. 2024), before what
# surrounds it; attention is counted without its causal mask.
_SHARES: Mapping[str, tuple[float, float]] = {
    "A100": (0.72, 0.49),
    "A800": (0.72, 0.49),
    "H": (0.50, 0.27),
    "B": (0.50, 0.40),
    "GB": (0.50, 0.40),
    "V100": (0.60, 0.20),
}
_OTHERS = (0.65, 0.40)
# What kernels fused by hand (Transformer Engine) add to these shares.
_FUSED = 1.15
_FUSED_ATTENTION = 0.50


def chip_of(gpu: Gpu, kernels: str = "eager") -> Chip:
    """Return the speed of a GPU for layers that are run in one way.

    Collective: none.
    """
    name = gpu.name
    key = max((key for key in _SHARES if name.startswith(key)), key=len, default="")
    share, attention = _SHARES.get(key, _OTHERS)
    if kernels == "fused":
        share, attention = share * _FUSED, max(attention, _FUSED_ATTENTION)
    return Chip(gpu.flops, gpu.memory_bandwidth, share, attention)


def wires_of(cluster: Cluster, layout: Layout) -> Wires:
    """Return the bus bandwidths that the axes of a layout have on a machine.

    Ranks are placed `pp, dp_replicate, dp_shard, cp, tp` from outer to inner; experts over ranks
    that lie side by side.

    Raises:
        ValueError: The GPU is not known, or the layout has more ranks than the machine.

    Collective: none.
    """

    def speed(op: str, ranks: int, stride: int) -> float:
        return cluster.bus_bandwidth(op, ranks, stride) if ranks > 1 else float("inf")

    inner = layout.tp
    shards = layout.shards
    outer = inner * shards
    stages = outer * layout.dp_replicate
    slot = cluster.gpu.pcie_bandwidth if cluster.gpu else 25e9
    return Wires(
        shard=speed("all_gather" if layout.stage == 3 else "all_reduce", shards, inner),
        replicate=speed("all_reduce", layout.dp_replicate, outer),
        tp=speed("all_reduce", layout.tp, 1),
        ep=speed("all_to_all", layout.ep, 1),
        pp=speed("send", 2, stages) if layout.pp > 1 else float("inf"),
        # What a copy reaches of the slot's wire speed.
        host=0.8 * slot,
        start=group_alpha(cluster, "all_gather", shards, inner) if shards > 1 else 0.0,
    )
