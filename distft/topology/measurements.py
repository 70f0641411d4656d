"""Times of collectives that were measured, as a table, as JSON, and as what they predict."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distft.topology.bandwidth import OPS, bus_factor

_FORMAT = "distft.topology.measurements/1"
_GB = 1e9


@dataclass(frozen=True)
class Point:
    """One collective of one size.

    Args:
        op: Name of the collective, one of `distft.topology.OPS`.
        ranks: Ranks of the group.
        num_bytes: Bytes of the full buffer, as in `Cluster.time`.
        seconds: Mean over repeats, of the slowest rank.
    """

    op: str
    ranks: int
    num_bytes: int
    seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes/s of the buffer: nccl-tests' algbw."""
        return self.num_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes/s that the slowest wire carries: nccl-tests' busbw."""
        return self.algorithm_bandwidth * bus_factor(self.op, self.ranks)


@dataclass(frozen=True)
class Measurements:
    """What `distft.topology.measure` found, on which machine. `print` shows nccl-tests' columns.

    Args:
        points: Times by collective, ranks and size.
        backend: Backend of the group, such as "nccl".
        device: Name of the device of rank 0.
        world_size: Ranks of the job.
        local_world_size: Ranks per node.
        p2p: False where GPUs could not reach each other's memory, so that NVLink was not used.
        topology: What `nvidia-smi topo -m` printed there; None without it.
    """

    points: tuple[Point, ...]
    backend: str
    device: str
    world_size: int
    local_world_size: int
    p2p: bool = True
    topology: str | None = None

    def __str__(self) -> str:
        head = (
            f"# {self.backend} on {self.world_size} ranks, {self.local_world_size} per node, "
            f"{self.device}{'' if self.p2p else ', without peer access (no NVLink)'}"
        )
        columns = "# op              ranks        size       time     algbw     busbw"
        units = "#                               (B)       (us)    (GB/s)    (GB/s)"
        rows = (
            f"  {point.op:15} {point.ranks:5} {point.num_bytes:11} {point.seconds * 1e6:10.1f}"
            f" {point.algorithm_bandwidth / _GB:9.3f} {point.bus_bandwidth / _GB:9.3f}"
            for point in self.points
        )
        return "\n".join([head, columns, units, *rows])

    @cached_property
    def _curves(self) -> dict[tuple[str, int], list[Point]]:
        curves: dict[tuple[str, int], list[Point]] = {}
        for point in sorted(self.points, key=lambda point: point.num_bytes):
            curves.setdefault((point.op, point.ranks), []).append(point)
        return curves

    def bus_bandwidth(self, op: str, ranks: int) -> float | None:
        """Bytes/s of the largest size, or None where this group was not measured."""
        curve = self._curves.get((op, ranks))
        return curve[-1].bus_bandwidth if curve else None

    def seconds(self, op: str, num_bytes: float, ranks: int) -> float | None:
        """Seconds of a collective of any size, or None where this group was not measured.

        Between two sizes on the line through both; below the smallest as that one, since a start
        dominates there; above the largest at the bandwidth of that one.
        """
        curve = self._curves.get((op, ranks))
        if not curve:
            return None
        at = bisect_left([point.num_bytes for point in curve], num_bytes)
        if at == 0:
            return curve[0].seconds
        before = curve[at - 1]
        if at == len(curve):
            return before.seconds * num_bytes / before.num_bytes
        after = curve[at]
        share = (num_bytes - before.num_bytes) / (after.num_bytes - before.num_bytes)
        return before.seconds + share * (after.seconds - before.seconds)

    def save(self, path: str | Path) -> Path:
        """Write JSON that `Cluster.with_measured` and `Cluster.load` read, and return its path.

        Collective: none.
        """
        path = Path(path)
        path.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1), "utf-8")
        return path

    def plot(self, path: str | Path, other: Measurements | None = None) -> Path:
        """Draw bus bandwidth over size, a panel for each number of ranks, and return the path.

        Args:
            path: File to write; its suffix is the format.
            other: Measurements to draw dashed beside these, such as those without NVLink.

        Raises:
            RuntimeError: matplotlib is not installed.

        Collective: none.
        """
        from distft.topology.chart import plot_bandwidth

        return plot_bandwidth(Path(path), self, other)


def load_measurements(path: str | Path) -> Measurements:
    """Read what `Measurements.save` wrote.

    Raises:
        ValueError: The file is no such JSON, or a value is out of range.

    Collective: none.
    """
    way_out = "Write it with distft.topology.measure().save(path)."
    try:
        fields = json.loads(Path(path).read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no measurements: {error}. {way_out}") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} holds no measurements of format {_FORMAT}. {way_out}")
    try:
        points = tuple(_point(point) for point in fields.pop("points"))
        found = Measurements(points, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no measurements as saved: {error}. {way_out}") from None
    if not points:
        raise ValueError(f"{path} holds 0 measured points. {way_out}")
    return found


def _point(fields: dict[str, Any]) -> Point:
    point = Point(**fields)
    positive: Iterable[float] = (point.ranks - 1, point.num_bytes, point.seconds)
    if point.op not in OPS or not all(math.isfinite(x) and x > 0 for x in positive):
        raise ValueError(f"{point} has an unknown op, fewer than 2 ranks, or no bytes or seconds")
    return point
