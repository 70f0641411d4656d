"""The pictures of a plan: what a GPU holds, what a step's time goes to, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.planning.fits import MARGIN
from distft.planning.machine import chip_of
from distft.planning.options import Option

if TYPE_CHECKING:
    from distft.planner import Plan

GIB = 2**30
# Okabe and Ito: told apart with every kind of colour vision.
_KINDS = (
    ("parameters", "#0072B2", "weights"),
    ("gradients", "#E69F00", "gradients"),
    ("optimizer", "#009E73", "optimizer"),
    ("buffer", "#999999", "buffers"),
    ("activations", "#CC79A7", "activations"),
    ("logits", "#D55E00", "logits and loss"),
)
_TIMES = (
    ("compute", "#0072B2", "compute"),
    ("exposed", "#D55E00", "communication that nothing hides"),
    ("bubble", "#F0E442", "pipeline idle"),
    ("update", "#009E73", "optimizer update"),
)
# More bars than this cannot be read.
_MOST = 16
# Times the reachable speed beyond which a strategy counts as one that hardly communicates.
_MOST_HIDDEN = 8
_FORMATS = (".png", ".svg", ".pdf")


def draw(plan: Plan, path: Path) -> Path:
    """Write the pictures of a plan into one file.

    Raises:
        ValueError: The ending is none of png, svg and pdf.

    Collective: none.
    """
    if path.suffix not in _FORMATS:
        raise ValueError(
            f"{path.name} ends with {path.suffix!r}, but a plot is one of {', '.join(_FORMATS)}. "
            "Name it plan.png."
        )
    from matplotlib.figure import Figure

    options = plan.options[:_MOST]
    height = 2.2 + 0.34 * len(options)
    figure = Figure(figsize=(13, height + 4.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(height, 4.6))
    above, below = parts
    left, right = above.subplots(1, 2, sharey=True)
    _draw_memory(left, options)
    _draw_time(right, options)
    _draw_roofline(below.subplots(), options)
    setting = plan.setting
    gpu = setting.cluster.gpu
    assert gpu is not None
    figure.suptitle(
        f"{setting.spec.total_params / 1e9:.1f}B parameters on {setting.num_ranks} {gpu.name}, "
        f"{setting.load.tuning} tuning in {setting.precision}, "
        f"{setting.load.micro_batch} x {setting.load.seq_len} tokens a micro-step",
        fontsize=13,
    )
    figure.savefig(path, dpi=110)
    return path


def _labels(axes: Any, options: Sequence[Option]) -> None:
    names = [f"{option.label}  [{place}]" for place, option in enumerate(options, 1)]
    axes.set_yticks(range(len(options)), names, fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _draw_memory(axes: Any, options: Sequence[Option]) -> None:
    capacity = options[0].setting.capacity / GIB
    starts = [0.0] * len(options)
    for kind, colour, label in _KINDS:
        sizes = [_held(option, kind) / GIB for option in options]
        axes.barh(range(len(options)), sizes, left=starts, color=colour, label=label)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    more = [
        option.needed_bytes / GIB - start for option, start in zip(options, starts, strict=True)
    ]
    axes.barh(
        range(len(options)),
        more,
        left=starts,
        color="white",
        edgecolor="#555555",
        hatch="////",
        linewidth=0.5,
        label=f"margin ({100 * (MARGIN - 1):.0f} %), context, NCCL",
    )
    axes.axvline(capacity, color="black", lw=1.6)
    axes.text(
        capacity, -0.75, f" {capacity:.0f} GiB of the GPU", fontsize=9, ha="left", va="center"
    )
    # Bars far beyond the GPU would leave nothing to see of those that fit.
    most = max(1.05 * max(o.needed_bytes / GIB for o in options), 1.1 * capacity)
    axes.set_xlim(0, min(most, 4 * capacity))
    axes.set_xlabel("GiB on the heaviest rank in its fullest phase")
    axes.set_title("What one GPU holds", loc="left", pad=18)
    _legend(axes, 4)
    _labels(axes, options)


def _legend(axes: Any, columns: int) -> None:
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.09)}
    axes.legend(fontsize=8.5, ncols=columns, frameon=False, **place)


def _held(option: Option, kind: str) -> int:
    report = option.memory
    return sum(
        line.num_bytes
        for line in report.lines
        if line.kind == kind and line.is_held(report.peak_moment) and not line.on_host
    )


def _draw_time(axes: Any, options: Sequence[Option]) -> None:
    """Draw seconds for the tokens of one second's work of the fastest: shares compare so."""
    starts = [0.0] * len(options)
    for name, colour, label in _TIMES:
        sizes = [1e6 * getattr(o.time, name) / (o.time.tokens) for o in options]
        axes.barh(range(len(options)), sizes, left=starts, color=colour, label=label)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, (option, end) in enumerate(zip(options, starts, strict=True)):
        fits = "" if option.fits else ", does not fit"
        axes.text(
            end, place, f"  {option.tokens_per_second:,.0f} tokens/s{fits}", va="center", fontsize=8
        )
    axes.set_xlim(0, 1.45 * max(starts))
    axes.set_xlabel("GPU-microseconds of one token")
    axes.set_title("What the time of a token goes to", loc="left", pad=18)
    _legend(axes, 2)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_roofline(axes: Any, options: Sequence[Option]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    setting = options[0].setting
    assert setting.cluster.gpu is not None
    chip = chip_of(setting.cluster.gpu, options[0].run.kept.kernels)
    reachable = chip.peak_flops * chip.efficiency / 1e12
    # What hardly communicates is drawn at the right edge.
    most = _MOST_HIDDEN * reachable * 1e12
    waits = [
        (option, min(option.time.flops / option.time.communication, most))
        for option in options
        if option.time.communication
    ]
    axes.axhline(reachable, color="black", lw=1.4)
    axes.text(0.995, reachable * 1.05, f"reachable: {reachable:.0f} TFLOP/s",
              ha="right", fontsize=9, transform=axes.get_yaxis_transform())  # fmt: skip
    if waits:
        rates = [rate / 1e12 for _, rate in waits]
        low, high = 0.5 * min(*rates, reachable), 1.3 * max(*rates, reachable)
        axes.plot([low, high], [low, high], color="#D55E00", lw=1.4)
        axes.text(
            0.2,
            0.04,
            "on the line all of the communication is waited for",
            fontsize=9,
            color="#D55E00",
            transform=axes.transAxes,
        )
        axes.set_xlim(low, high)
    achieved = [option.time.flops / option.time.seconds / 1e12 for option, _ in waits]
    for (option, rate), reached in zip(waits, achieved, strict=True):
        colour = "#0072B2" if option.fits else "#999999"
        axes.plot(rate / 1e12, reached, "o", color=colour, ms=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = min(reachable, *(o.time.flops / o.time.seconds / 1e12 for o in options))
    axes.set_ylim(0.5 * lowest, 2 * reachable)
    if waits:
        numbers = [f"{options.index(option) + 1}" for option, _ in waits]
        places = list(zip(rates, achieved, strict=True))
        _number_points(axes, numbers, places, (low, high), (0.5 * lowest, 2 * reachable))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("TFLOPs of the model for each second of its communication")
    axes.set_ylabel("TFLOP/s that a GPU gets")
    axes.set_title(
        "Roofline, strategies by their numbers above: right of the crossing compute can hide the "
        "wires (grey: does not fit)",
        loc="left",
    )
    axes.grid(which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


# Points of a typographer (1/72 inch): the roofline's axes, about, and the box of a number.
_WIDTH, _HEIGHT = 860.0, 230.0
_BOX = (15.0, 11.0)


def _number_points(
    axes: Any,
    numbers: Sequence[str],
    places: Sequence[tuple[float, float]],
    across: tuple[float, float],
    up: tuple[float, float],
) -> None:
    """Write each number where no other and no point is, with a line to its point if it is far."""
    spots = [(_WIDTH * _share(x, across), _HEIGHT * _share(y, up)) for x, y in places]
    taken = list(spots)
    for number, place, (x, y) in zip(numbers, places, spots, strict=True):
        free = (
            (dx, dy) for dx, dy in _OFFSETS if all(_apart((x + dx, y + dy), it) for it in taken)
        )
        dx, dy = next(free, _OFFSETS[-1])
        taken.append((x + dx, y + dy))
        far = math.hypot(dx, dy) > 20
        axes.annotate(
            number,
            place,
            textcoords="offset points",
            xytext=(dx, dy),
            fontsize=9,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#777777", "lw": 0.6} if far else None,
        )


# From near to far, to the right first.
_OFFSETS = [
    (radius * math.cos(angle), radius * math.sin(angle))
    for radius in (13, 19, 27, 36, 46, 58)
    for angle in (math.pi * turn / 8 for turn in (1, 2, 0, 3, 15, 4, 14, 12, 5, 6, 8, 10))
]


def _share(value: float, ends: tuple[float, float]) -> float:
    """Return where a value lies between two ends of a logarithmic axis."""
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return abs(one[0] - other[0]) > _BOX[0] or abs(one[1] - other[1]) > _BOX[1]
