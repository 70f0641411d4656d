"""Two pictures: the losses of all strategies over each other, and the memory staircase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distft.demo.plan import TOLERANCE
from distft.demo.results import Result
from distft.demo.training import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito: told apart with every kind of colour vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_LABELS = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP",
}
_KINDS = (("parameters", "#0072B2"), ("gradients", "#E69F00"), ("optimizer", "#009E73"))


def plot_losses(path: Path, reference: Run, results: Sequence[Result]) -> None:
    """Write a picture of every strategy's loss over one process's, and of the differences.

    Collective: none
    """
    figure, (above, below) = _figure(9, 7.2, rows=2, heights=(3, 2))
    steps = range(1, len(reference.losses) + 1)
    # The curves cover each other: the first drawn is the widest, so that all stay visible.
    widths = [1.2 + 1.5 * (len(results) - i) for i in range(len(results))]
    for result, colour, width in zip(results, _COLOURS, widths, strict=False):
        above.plot(
            steps,
            result.losses,
            color=colour,
            lw=width,
            label=_LABELS[result.name],
            solid_capstyle="butt",
        )
    above.plot(steps, reference.losses, color="black", lw=1.2, label="one process")
    above.set_ylabel("loss (nats per answer token)")
    above.set_title(
        "Every strategy trains the same model: the curves lie on each other", loc="left"
    )
    for handle in above.legend(ncols=2, frameon=False).get_lines()[: len(results)]:
        handle.set_linewidth(5)
    for i, (result, colour) in enumerate(zip(results, _COLOURS, strict=False)):
        differences = [
            # A logarithmic axis has no 0; an equal loss is drawn at its lower edge.
            max(abs(a - b) / abs(b), 1e-9)
            for a, b in zip(result.losses, reference.losses, strict=True)
        ]
        below.plot(steps, differences, color=colour, lw=0.9 + 0.3 * (len(results) - i))
    below.axhline(TOLERANCE, color="black", lw=1, ls="--")
    below.annotate(
        f"tolerance {TOLERANCE:.0e}", (0.995, TOLERANCE), xycoords=("axes fraction", "data"),
        xytext=(0, 4), textcoords="offset points", ha="right",
    )  # fmt: skip
    below.set_yscale("log")
    below.set_ylim(6e-10, TOLERANCE * 10)
    below.set_xlabel("optimizer step")
    below.set_ylabel("relative difference\nfrom one process")
    _save(figure, path)


def plot_memory(path: Path, results: Sequence[Result]) -> None:
    """Write a picture of the bytes of model state per rank, by what they are.

    Collective: none
    """
    figure, axes = _figure(9, 5.4)
    axis = axes[0]
    places = range(len(results))
    bottoms = [0.0] * len(results)
    for kind, colour in _KINDS:
        heights = [getattr(result.state, kind) / 1e6 for result in results]
        axis.bar(places, heights, 0.62, bottom=bottoms, color=colour, label=kind)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, result in zip(places, results, strict=True):
        formula = result.state_formula / 1e6
        axis.plot([place - 0.38, place + 0.38], [formula] * 2, color="black", lw=2)
        total = result.state.total / 1e6
        axis.annotate(
            f"{total:.1f} MB", (place, max(total, formula)), xytext=(0, 5),
            textcoords="offset points", ha="center", weight="bold",
        )  # fmt: skip
    axis.plot([], [], color="black", lw=2, label="by the formula")
    axis.set_xticks(
        list(places), [f"{_LABELS[result.name]}\n{result.ranks} ranks" for result in results]
    )
    axis.set_ylabel("model state per rank (MB, 1 MB = 1,000,000 bytes)")
    axis.set_ylim(0, max(max(r.state.total, r.state_formula) for r in results) / 1e6 * 1.14)
    axis.set_title("What one rank holds: the more is sharded, the less", loc="left")
    axis.legend(frameon=False)
    _save(figure, path)


def _figure(
    width: float, height: float, rows: int = 1, heights: tuple[float, ...] = (1,)
) -> tuple[Figure, list[Axes]]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure with a canvas of its own: no display is asked for, no global state is left.
    with matplotlib.rc_context({"font.size": 11}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(
            rows, 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
    listed: list[Axes] = list(axes[:, 0])
    for axis in listed:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="0.88", lw=0.8)
        axis.set_axisbelow(True)
    return figure, listed


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path)
