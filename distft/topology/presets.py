"""Common machines by name: how their GPUs are joined, and what leaves a node."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from distft.topology.gpus import GPUS, Gpu
from distft.topology.table import Table


@dataclass(frozen=True)
class Preset:
    """A machine: its links, its GPU, Gbit/s out of a node (None where each is built otherwise)."""

    name: str
    table: Table
    gpu: Gpu
    internode_gbps: float | None
    nvlink_nodes: int = 1


def _table(count: int, link: Callable[[int, int], str], sockets: int = 2) -> Table:
    """Make the table of `count` GPUs, spread evenly over sockets."""
    links = tuple(tuple("X" if i == j else link(i, j) for j in range(count)) for i in range(count))
    numa = tuple(str(i * sockets // count) for i in range(count))
    return Table(tuple(range(count)), links, numa_affinity=numa)


def _switch(count: int, links: int) -> Table:
    return _table(count, lambda i, j: f"NV{links}")


def _bridged(count: int, size: int, links: int) -> Table:
    """Groups of `size` neighbours; a socket holds half of the GPUs."""

    def link(i: int, j: int) -> str:
        if i // size == j // size:
            return f"NV{links}"
        return "NODE" if i * 2 // count == j * 2 // count else "SYS"

    return _table(count, link)


def _cube_mesh() -> Table:
    """Hybrid cube mesh of DGX-1: two quads of four, each GPU joined to its like in the other.

    Source: NVIDIA DGX-1 with Tesla V100 system architecture, figure 4.
    """
    double = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
    single = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))

    def link(i: int, j: int) -> str:
        pair = (min(i, j), max(i, j))
        if pair in double:
            return "NV2"
        if pair in single:
            return "NV1"
        return "NODE" if i // 4 == j // 4 else "SYS"

    return _table(8, link)


def _pcie(count: int, near: str, far: str, sockets: int) -> Table:
    def link(i: int, j: int) -> str:
        return near if i * sockets // count == j * sockets // count else far

    return _table(count, link, sockets)


# Network as sold: DGX H100 eight cards of 400, DGX A100 eight of 200, DGX-2 eight of 100, DGX-1
# four of 100; p5, p4d, g6e as Amazon states; GB200 four of 400 per tray.
_ALL = (
    Preset("8xH100-SXM", _switch(8, 18), GPUS["H100-80GB"], 3200),
    Preset("8xH200-SXM", _switch(8, 18), GPUS["H200"], 3200),
    Preset("8xB200-SXM", _switch(8, 18), GPUS["B200"], 3200),
    Preset("8xA100-SXM", _switch(8, 12), GPUS["A100-80GB"], 1600),
    Preset("8xA100-SXM-40GB", _switch(8, 12), GPUS["A100-40GB"], 1600),
    Preset("8xA800-SXM", _switch(8, 8), GPUS["A800-80GB"], 1600),
    Preset("8xH800-SXM", _switch(8, 8), GPUS["H800-80GB"], 3200),
    Preset("8xH20-SXM", _switch(8, 18), GPUS["H20"], 3200),
    Preset("DGX-1", _cube_mesh(), GPUS["V100-32GB"], 400),
    Preset("DGX-2", _switch(16, 6), GPUS["V100-32GB"], 800),
    Preset("8xH200-NVL", _bridged(8, 4, 6), GPUS["H200-NVL"], None),
    Preset("8xH100-PCIe", _bridged(8, 2, 12), GPUS["H100-PCIe"], None),
    Preset("2xRTX4090", _pcie(2, "PHB", "SYS", 1), GPUS["RTX4090"], None),
    Preset("4xL40S", _pcie(4, "NODE", "SYS", 1), GPUS["L40S"], 100),
    Preset("8xL40S", _pcie(8, "NODE", "SYS", 2), GPUS["L40S"], 400),
    Preset("p4d", _switch(8, 12), GPUS["A100-40GB"], 400),
    Preset("p5", _switch(8, 18), GPUS["H100-80GB"], 3200),
    Preset("GB200", _switch(4, 18), GPUS["GB200"], 1600, nvlink_nodes=18),
)
PRESETS = {preset.name: preset for preset in _ALL}
_ALIASES = {
    "dgxh100": "8xH100-SXM",
    "dgxh200": "8xH200-SXM",
    "dgxb200": "8xB200-SXM",
    "dgxa100": "8xA100-SXM",
    "p4d24xlarge": "p4d",
    "p548xlarge": "p5",
    "g6e12xlarge": "4xL40S",
    "g6e48xlarge": "8xL40S",
    "dgxgb200": "GB200",
    "4xgb200": "GB200",
}


def preset(name: str) -> tuple[Preset, int | None]:
    """Return the machine of a name, and how many of its GPUs where the name says fewer.

    Raises:
        ValueError: No preset has that name; the message lists them.

    Collective: none.

    >>> found, count = preset("4xH100-SXM")
    >>> found.name, count
    ('8xH100-SXM', 4)
    """
    known = {_reduced(key): key for key in PRESETS} | _ALIASES
    key = _reduced(name)
    if key in known:
        return PRESETS[known[key]], None
    fewer = re.fullmatch(r"(\d+)x(.+)", key)
    if fewer and int(fewer[1]) > 0:
        for size in (8, 4, 2):
            full = known.get(f"{size}x{fewer[2]}")
            if full and int(fewer[1]) < size:
                return PRESETS[full], int(fewer[1])
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f" Did you mean {known[near[0]]!r}?" if near else ""
    raise ValueError(
        f"preset is {name!r}, but known presets are {', '.join(PRESETS)}.{hint} "
        "Pass one of them, or give what `nvidia-smi topo -m` prints to Cluster.parse."
    )


def _reduced(name: str) -> str:
    return re.sub(r"rtx|[^a-z0-9]", "", str(name).lower())
