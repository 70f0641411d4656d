"""How the planner does on sources that its fitted numbers have not seen.

Sources are dealt into three parts. For each part the two numbers that are fitted and not counted
from code (the allocator's fragmentation; one speed for each generation of GPU) are fitted anew on
the other two, and the errors on the part are reported. The structure of the formulas, what each
framework keeps, was worked out on all of the sources.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner_models import Row, gpu_of

from distft.formulas.reports import FRAGMENTATION

PARTS = 3


@dataclass(frozen=True)
class Point:
    """One comparison."""

    row: Row
    predicted: float
    measured: float
    fits: bool | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def held_out(
    points: Sequence[Point], fit: Callable[[Sequence[Point], Sequence[Point]], list[Point]]
) -> list[Point]:
    """Return each point as predicted by what was fitted without its source.

    Sources are dealt by size, so that no part is without a large one.
    """
    sizes: dict[str, int] = {}
    for point in points:
        source = str(point.row.get("source"))
        sizes[source] = sizes.get(source, 0) + 1
    dealt = {
        source: place % PARTS
        for place, source in enumerate(sorted(sizes, key=lambda source: -sizes[source]))
    }
    found: list[Point] = []
    for part in range(PARTS):
        inside = [p for p in points if dealt[str(p.row.get("source"))] == part]
        outside = [p for p in points if dealt[str(p.row.get("source"))] != part]
        if inside:
            found += fit(outside, inside) if outside else inside
    return found


def refitted_peaks(seen: Sequence[Point], unseen: Sequence[Point]) -> list[Point]:
    """Return unseen peaks with the fragmentation that fits the seen ones best."""

    def scaled(point: Point, factor: float) -> Point:
        if "reserved" not in str(point.row["measured"].get("mem_kind")):
            return point
        return replace(point, predicted=point.predicted * factor / FRAGMENTATION)

    def median(factor: float) -> float:
        return statistics.median(abs(scaled(point, factor).error) for point in seen)

    best = min((1 + step / 100 for step in range(31)), key=median)
    return [scaled(point, best) for point in unseen]


def refitted_speeds(seen: Sequence[Point], unseen: Sequence[Point]) -> list[Point]:
    """Return unseen speeds with each generation's speed that fits the seen ones best."""

    def generation(point: Point) -> str:
        gpu = gpu_of(point.row)
        return gpu.name.split("-")[0] if gpu else ""

    ratios: dict[str, list[float]] = {}
    for point in seen:
        ratios.setdefault(generation(point), []).append(point.measured / point.predicted)
    factors = {name: statistics.median(values) for name, values in ratios.items()}
    return [
        replace(point, predicted=point.predicted * factors.get(generation(point), 1.0))
        for point in unseen
    ]
