"""A cluster: nodes of GPUs, what joins them, and how fast collectives are on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.formulas._numbers import amount, whole
from distft.topology.bandwidth import bus_factor, group_alpha, group_bandwidth
from distft.topology.defects import wiring_warnings
from distft.topology.gpus import Gpu, gpu_by_name
from distft.topology.parse import parse_table
from distft.topology.placement import Placement
from distft.topology.table import Table, unknown_table
from distft.topology.visible_devices import visible_numbers
from distft.topology.wiring import Hop, Wiring

if TYPE_CHECKING:
    from distft.topology.measurements import Measurements


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of GPUs. Make one with `parse`, `detect` or `preset`.

    Args:
        table: The links inside of one node.
        gpu: The kind of GPU; None where it is not known, and then speeds are not known either.
        nodes: Number of nodes.
        internode_gbps: Gbit/s in each direction between a node and all others, all its network
            cards together: 8 cards of 400 are 3200. None with a single node.
        nvlink_nodes: Nodes that share one NVLink switch: 18 trays in a rack of GB200, else 1.
        visible: GPUs that may be used, in the order of `CUDA_VISIBLE_DEVICES`; empty for all.
        name: Name of the preset.
        measured: Times that stand before predicted ones, for the groups that they have.

    Raises:
        ValueError: An argument is out of range, or there are nodes but no speed between them.
    """

    table: Table
    gpu: Gpu | None = None
    nodes: int = 1
    internode_gbps: float | None = None
    nvlink_nodes: int = 1
    visible: tuple[int, ...] = ()
    name: str = ""
    measured: Measurements | None = None
    _cache: dict[Any, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole("nodes", self.nodes, 1)
        whole("nvlink_nodes", self.nvlink_nodes, 1)
        if self.internode_gbps is not None and amount("internode_gbps", self.internode_gbps) == 0:
            raise ValueError("internode_gbps is 0, but nodes need a wire. Pass Gbit/s above 0.")
        if self.internode_gbps is None and self.nodes > self.nvlink_nodes and not self.measured:
            raise ValueError(
                f"There are {self.nodes} nodes, but internode_gbps is not given. Pass the Gbit/s "
                "of all network cards of a node together."
            )
        for gpu in self.visible:
            self.table.link(gpu, gpu)

    @classmethod
    def parse(
        cls,
        text: str,
        gpu: str | Gpu | None = None,
        nodes: int = 1,
        internode_gbps: float | None = None,
        *,
        visible_devices: str | Sequence[int] | None = None,
        nvlink_nodes: int = 1,
    ) -> Cluster:
        r"""Return the cluster whose nodes `nvidia-smi topo -m` describes.

        Args:
            text: What `nvidia-smi topo -m` prints, of any driver, out of a log or a comment too.
            gpu: Kind of GPU, such as "H100-80GB" or nvidia-smi's name. Without it links and
                placements are known, bandwidths are not.
            nodes: Number of such nodes.
            internode_gbps: Gbit/s in each direction between a node and all others.
            visible_devices: GPUs that may be used: a value of `CUDA_VISIBLE_DEVICES`, or numbers.
            nvlink_nodes: Nodes that share one NVLink switch; a GB200 shows its own tray alone.

        Raises:
            ValueError: The text is no such table or a part of one, or a name is not known.

        Collective: none.

        >>> text = "GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4 X"
        >>> Cluster.parse(text, gpu="A6000").nvlink_groups
        [[0, 1]]
        """
        table = parse_table(text)
        return cls(
            table,
            gpu_by_name(gpu) if isinstance(gpu, str) else gpu,
            nodes,
            internode_gbps,
            nvlink_nodes,
            visible_numbers(visible_devices, table.gpus),
        )

    @classmethod
    def detect(cls, nodes: int = 1, internode_gbps: float | None = None) -> Cluster:
        """Return the cluster whose nodes are like this machine, as `nvidia-smi` sees it.

        `CUDA_VISIBLE_DEVICES` of this process says which GPUs may be used, and in which order.

        Args:
            nodes: Number of such nodes.
            internode_gbps: Gbit/s in each direction between a node and all others.

        Raises:
            RuntimeError: `nvidia-smi` is missing, fails or does not answer.
            ValueError: Its table, or `CUDA_VISIBLE_DEVICES`, cannot be read.

        Collective: none.
        """
        from distft.topology.detect import detected

        table, gpu, usable = detected()
        return cls(table, gpu, nodes, internode_gbps, visible=usable)

    @classmethod
    def preset(cls, name: str, nodes: int = 1, internode_gbps: float | None = None) -> Cluster:
        """Return a common machine by its name, such as "8xH100-SXM", "DGX-2" or "p5".

        Args:
            name: A name of `distft.topology.PRESETS`. A smaller number in front takes the best
                GPUs of the machine: "4xH100-SXM".
            nodes: Number of such nodes.
            internode_gbps: Gbit/s between a node and the others; default as the machine is sold.

        Raises:
            ValueError: No preset has that name; the message lists them.

        Collective: none.

        >>> Cluster.preset("8xH100-SXM").fabric
        'nvswitch'
        """
        from distft.topology.presets import preset

        found, count = preset(name)
        gbps = found.internode_gbps if internode_gbps is None else internode_gbps
        cluster = cls(found.table, found.gpu, nodes, gbps, found.nvlink_nodes, name=found.name)
        if count is None:
            return cluster
        return replace(cluster, visible=cluster.place(count).gpus, name=f"{count}x{found.name}")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Return the cluster on which `distft.topology.measure` was run, with what it measured.

        Without `nvidia-smi` there, links are "unknown".

        Raises:
            ValueError: The file is none that `Measurements.save` wrote.

        Collective: none.
        """
        from distft.topology.measurements import load_measurements

        measured = load_measurements(path)
        each = measured.local_world_size
        table = parse_table(measured.topology) if measured.topology else unknown_table(each)
        try:
            gpu = gpu_by_name(measured.device)
        except ValueError:
            gpu = None
        usable = table.gpus[:each] if each < len(table.gpus) else ()
        nodes = -(-measured.world_size // each)
        # What was measured between nodes says how fast they are joined.
        return cls(table, gpu, nodes, visible=usable, measured=measured)

    def with_measured(self, measured: str | Path | Measurements) -> Cluster:
        """Return this cluster with measured times, which stand before predicted ones.

        They hold for the collectives and group sizes that they have; others are predicted.

        Args:
            measured: What `distft.topology.measure` returned, or the file it was saved to.

        Raises:
            ValueError: The file is none that `Measurements.save` wrote.

        Collective: none.
        """
        from distft.topology.measurements import Measurements, load_measurements

        if not isinstance(measured, Measurements):
            measured = load_measurements(measured)
        return replace(self, measured=measured)

    def with_visible(self, devices: str | Sequence[int]) -> Cluster:
        """Return this cluster with other GPUs of each node in use.

        Args:
            devices: A value of `CUDA_VISIBLE_DEVICES`, or numbers, in CUDA's order.

        Raises:
            ValueError: A GPU is not there, or there twice.

        Collective: none.

        >>> Cluster.preset("8xH200-NVL").with_visible("0,1,4,5").nvlink_groups
        [[0, 1], [4, 5]]
        """
        return replace(self, visible=visible_numbers(devices, self.table.gpus))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all nodes that may be used."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs of one node that may be used."""
        return len(self.usable)

    @property
    def usable(self) -> tuple[int, ...]:
        """Numbers of the GPUs of a node that may be used: `usable[i]` is what CUDA calls `i`."""
        return self.visible or self.table.gpus

    @cached_property
    def nvlink_groups(self) -> list[list[int]]:
        """Numbers of the usable GPUs of one node that NVLinks join, group by group."""
        kept = ([gpu for gpu in group if gpu in self.usable] for group in self.wiring.groups)
        return [group for group in kept if len(group) > 1]

    @property
    def nvlink_kinds(self) -> list[str]:
        """What joins each of `nvlink_groups`.

        "switch": each GPU shows more links than its card has. "bridge": two GPUs. "mesh": each two
        of more are joined directly. "partial mesh": some are not, as in the cube mesh of a DGX-1.
        """
        whole_groups = [
            next(group for group in self.wiring.groups if kept[0] in group)
            for kept in self.nvlink_groups
        ]
        return [self.wiring.kind(group) for group in whole_groups]

    @cached_property
    def fabric(self) -> str:
        """What joins the GPUs of a node.

        "nvswitch": each at full speed with each. "nvl-groups": bridges or a mesh. "pcie": no
        NVLink. "single": one GPU. "unknown": some link cannot be read.
        """
        if len(self.usable) == 1:
            return "single"
        if self.wiring.fabric in ("nvswitch", "unknown"):
            return self.wiring.fabric
        return "nvl-groups" if self.nvlink_groups else "pcie"

    @cached_property
    def wiring(self) -> Wiring:
        """The links of one node, seen by collectives."""
        return Wiring(self.table, self.gpu.nvlinks if self.gpu else None)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What did not add up in the text, and bridges that are broken or unlike others."""
        found = [*self.table.warnings, *wiring_warnings(self.wiring, self.gpu)]
        if self.gpu and self.gpu.name.startswith("GB") and self.nodes > 1 == self.nvlink_nodes:
            found.append(
                "Trays of one rack share a switch, which the table of a tray does not show. "
                "Pass nvlink_nodes=18 for a rack of 72 GPUs."
            )
        return tuple(found)

    def slowest_hop(self, gpus: Sequence[int]) -> Hop | None:
        """Return the slowest link that the best ring over some GPUs of a node needs.

        A collective is as fast as this hop. None for a single GPU.

        Raises:
            ValueError: A number is none of the node's, or there twice.

        Collective: none.

        >>> Cluster.preset("8xH200-NVL").slowest_hop([0, 1, 4]).link
        'SYS'
        """
        return self.wiring.slowest_hop(self.checked(gpus))

    def place(self, count: int) -> Placement:
        """Return the GPUs between which collectives of `count` ranks are fastest.

        On several nodes each gets the same number. `print` shows `CUDA_VISIBLE_DEVICES=...`, with
        the numbers of `nvidia-smi`.

        Raises:
            ValueError: There are fewer GPUs, or `count` does not fall evenly on nodes.

        Collective: none.

        >>> print(Cluster.preset("8xH200-NVL").place(4))
        CUDA_VISIBLE_DEVICES=0,1,2,3
        """
        count, each = whole("count", count, 1), self.gpus_per_node
        if count > self.num_gpus:
            raise ValueError(
                f"place({count}) wants more GPUs than the {self.num_gpus} there are. "
                f"Pass at most {self.num_gpus}, or a cluster of more nodes."
            )
        nodes = next((n for n in range(-(-count // each), self.nodes + 1) if count % n == 0), 0)
        if not nodes:
            raise ValueError(
                f"place({count}) falls unevenly on {self.nodes} nodes of {each} GPUs. "
                f"Pass a multiple of {-(-count // each)} nodes."
            )
        gpus = self.wiring.place(count // nodes, self.usable)
        return Placement(self.wiring.in_order(gpus), self.wiring.slowest_hop(gpus), nodes)

    def bus_bandwidth(self, op: str, ranks: int | Sequence[int], stride: int = 1) -> float:
        """Bytes/s per rank of a collective at large sizes, in the terms of nccl-tests (busbw).

        A collective takes `ring_bytes(op, num_bytes, ranks) / bus_bandwidth` and a start. The
        slowest hop decides; see `distft.topology.links` for the shares and their sources.

        Args:
            op: One of `distft.topology.OPS`, which are "all_reduce", "all_gather",
                "reduce_scatter", "all_to_all", "broadcast", "reduce", "send".
            ranks: Ranks of the group, placed as well as possible; or numbers of GPUs of one node.
            stride: Global ranks from one rank of the group to the next: the product of the mesh
                axes inside of this one. The groups between them work at once and share the wires
                between nodes.

        Raises:
            ValueError: The kind of GPU is not known, an argument is, or the group is too large.

        Collective: none.

        >>> round(Cluster.preset("8xA100-SXM").bus_bandwidth("all_reduce", 8) / 1e9)
        234
        """
        if self.measured and stride == 1 and isinstance(ranks, int):
            found = self.measured.bus_bandwidth(op, ranks)
            if found is not None:
                return found
        key = (op, ranks if isinstance(ranks, int) else tuple(ranks), stride)
        if key not in self._cache:
            self._cache[key] = group_bandwidth(self, *key)
        return self._cache[key]

    def time(self, op: str, num_bytes: float, ranks: int | Sequence[int], stride: int = 1) -> float:
        """Seconds of one collective: `alpha + bytes on the bus / bus bandwidth`.

        Args:
            op: As in `bus_bandwidth`.
            num_bytes: Bytes of the full buffer: the gathered output, the input of a
                reduce-scatter, what one rank holds in an all-to-all, the message of a "send".
            ranks: As in `bus_bandwidth`.
            stride: As in `bus_bandwidth`.

        Raises:
            ValueError: As `bus_bandwidth`, or `num_bytes` is negative.

        Collective: none.

        >>> round(Cluster.preset("8xH100-SXM").time("all_gather", 16e9, 8), 3)
        0.04
        """
        amount("num_bytes", num_bytes)
        if self.measured and stride == 1 and isinstance(ranks, int):
            found = self.measured.seconds(op, num_bytes, ranks)
            if found is not None:
                return found
        count = ranks if isinstance(ranks, int) else len(ranks)
        bandwidth = self.bus_bandwidth(op, ranks, stride)
        moved = num_bytes * bus_factor(op, count)
        return group_alpha(self, op, ranks, stride) + moved / bandwidth

    def checked(self, gpus: Sequence[int]) -> tuple[int, ...]:
        """Return numbers of GPUs of one node, or raise ValueError where they are none."""
        for gpu in gpus:
            self.table.link(gpu, gpu)
        if len(set(gpus)) < len(gpus) or not gpus:
            raise ValueError(f"GPUs {list(gpus)} must be there, each once. Pass different numbers.")
        return tuple(gpus)
