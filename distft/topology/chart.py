"""Bus bandwidth over size: a picture of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.topology.measurements import Measurements

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito: told apart with every kind of colour vision.
_COLOURS = {
    "all_reduce": "#0072B2",
    "all_gather": "#E69F00",
    "reduce_scatter": "#009E73",
    "all_to_all": "#CC79A7",
    "send": "#D55E00",
}
_MARKERS = dict(zip(_COLOURS, "os^Dv", strict=True))
_UNITS = ("B", "KiB", "MiB", "GiB")


def plot_bandwidth(path: Path, measured: Measurements, other: Measurements | None) -> Path:
    """Draw a panel for each number of ranks, all on one scale."""
    counts = sorted({point.ranks for point in measured.points})
    figure, panels = _figure(len(counts))
    for panel, count in zip(panels, counts, strict=True):
        _draw(panel, measured, count, "-")
        if other is not None:
            _draw(panel, other, count, (0, (4, 2)))
        panel.set_title(f"{count} ranks", loc="left")
        panel.set_xlabel("size of the buffer")
    panels[0].set_ylabel("bus bandwidth (GB/s)")
    handles, labels = panels[0].get_legend_handles_labels()
    # One line of each collective, whatever else is dashed beside it.
    named = dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=len(named), frameon=False
    )
    figure.suptitle(_title(measured, other), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
    return path


def _title(measured: Measurements, other: Measurements | None) -> str:
    title = f"Collectives over {measured.backend}, {measured.device}"
    if not measured.p2p:
        title += ", without NVLink"
    if other is None:
        return title
    beside = "without NVLink" if measured.p2p and not other.p2p else f"{other.device}"
    return f"{title}; dashed: {beside}"


def _draw(panel: Axes, measured: Measurements, count: int, style: Any) -> None:
    for op, colour in _COLOURS.items():
        points = sorted(
            (point.num_bytes, point.bus_bandwidth / 1e9)
            for point in measured.points
            if point.op == op and point.ranks == count
        )
        if not points:
            continue
        sizes, speeds = zip(*points, strict=True)
        label = op if style == "-" else None
        panel.plot(
            sizes, speeds, color=colour, marker=_MARKERS[op], ms=4, ls=style, lw=1.6, label=label
        )


def _figure(columns: int) -> tuple[Any, list[Axes]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    except ImportError:
        raise RuntimeError(
            "A plot needs matplotlib, which is not installed. Run: pip install 'distft[plot]'."
        ) from None
    figure = Figure(figsize=(2.2 + 3.2 * columns, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.grid(True, which="major", color="#dddddd", lw=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _size(num_bytes: float) -> str:
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:g} {_UNITS[-1]}"
