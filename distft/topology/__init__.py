"""Links between GPUs: what `nvidia-smi topo -m` says, how fast collectives are, where to run."""

from distft.topology.bandwidth import OPS, bus_factor
from distft.topology.cluster import Cluster
from distft.topology.gpus import GPUS, Gpu
from distft.topology.placement import Placement
from distft.topology.presets import PRESETS
from distft.topology.table import Table
from distft.topology.wiring import Hop

__all__ = ["GPUS", "OPS", "PRESETS", "Cluster", "Gpu", "Hop", "Placement", "Table", "bus_factor"]
