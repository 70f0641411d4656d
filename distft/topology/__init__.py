"""Links between GPUs: what `nvidia-smi topo -m` says, how fast collectives are, where to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distft.topology.bandwidth import OPS, bus_factor
from distft.topology.cluster import Cluster
from distft.topology.gpus import GPUS, Gpu
from distft.topology.measurements import Measurements, Point
from distft.topology.placement import Placement
from distft.topology.presets import PRESETS
from distft.topology.table import Table
from distft.topology.wiring import Hop

if TYPE_CHECKING:
    from distft.topology.microbenchmark import measure

__all__ = [
    "GPUS",
    "OPS",
    "PRESETS",
    "Cluster",
    "Gpu",
    "Hop",
    "Measurements",
    "Placement",
    "Point",
    "Table",
    "bus_factor",
    "measure",
]


def __getattr__(name: str) -> Any:
    """Load `measure` on first use: planning starts no processes and opens no sockets."""
    if name == "measure":
        from distft.topology.microbenchmark import measure

        return measure
    raise AttributeError(f"module 'distft.topology' has no attribute {name!r}")
