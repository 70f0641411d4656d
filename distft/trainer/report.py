"""The report of a run as one HTML file: its curves as SVG, and what it was."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Point = tuple[float, float]
# Keys of one picture, its title, and what its axis counts.
_PICTURES = (
    (("loss", "eval_loss"), "Loss", "nats per loss token"),
    (("grad_norm",), "Gradient norm before clipping", ""),
    (("learning_rate",), "Learning rate", ""),
    (("mean_token_accuracy", "eval_mean_token_accuracy"), "Token accuracy", "share"),
    (("aux_loss", "eval_aux_loss"), "Router's auxiliary loss", ""),
    (("distft/expert_imbalance", "distft/expert_slowdown"), "Experts, worst layer", "max / mean"),
    (("distft/dead_experts",), "Experts without a token", "experts, all layers"),
    (("distft/tokens_per_second",), "Speed, all ranks", "tokens/s"),
    (("distft/mfu",), "Share of the GPU's peak arithmetic (MFU)", ""),
    (("distft/peak_memory_gb",), "Peak memory of the rank that needs most", "GB"),
    (("distft/communication_share",), "Share of a step that waits for collectives", ""),
)
# Measured, predicted, and what they are.
_COSTS = (
    ("distft/model_state_gb", "distft/model_state_predicted_gb", "model state per rank, GB"),
    ("distft/sent_per_step_gb", "distft/sent_per_step_predicted_gb", "sent by a rank per step, GB"),
    ("distft/peak_memory_gb", "distft/peak_memory_predicted_gb", "peak memory per rank, GB"),
)
# Okabe and Ito: told apart with every kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 260, 62, 14, 12, 40
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1140px;margin:1.5em auto;
padding:0 1em;color:#222}dt{float:left;clear:left;width:8em;color:#666}dd{margin:0 0 0 8em}
.all{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:1em 2em}
figure{margin:0}small{font-weight:400}small span{margin-left:1em;display:inline-block}
h1{font-size:1.5em}
figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
table{margin:1em 0 1.5em;border-collapse:collapse;font-size:14px}
td,th{padding:.25em .8em .25em 0;text-align:right}
td:first-child,th:first-child{text-align:left}tr+tr{border-top:1px solid #ddd}
@media(max-width:600px){dt{float:none}dd{margin:0}}"""


def write_report(
    path: Path, history: Sequence[Mapping[str, Any]], facts: Mapping[str, str]
) -> None:
    """Write the report of a run.

    Args:
        path: The HTML file.
        history: What was logged, oldest first; each entry has its ``step``.
        facts: What the run was, by name.

    Raises:
        ValueError: Nothing was logged.

    Collective: none.
    """
    curves = [
        _Curves(title, unit, {key: points for key in keys if (points := _points(history, key))})
        for keys, title, unit in _PICTURES
    ]
    curves = [each for each in curves if each.by_key]
    if not curves:
        raise ValueError(
            f"The run has logged 0 numbers in {len(history)} entries, so there are no curves. "
            "Train first, with logging_steps of at most its number of steps."
        )
    losses = _points(history, "loss")
    said = {**facts, **_summary(history, losses)}
    title = f"Run of {int(max(entry['step'] for entry in history))} steps"
    if "strategy" in facts:
        title = f"{title} with {facts['strategy']}"
    body = [
        f"<h1>{_text(title)}</h1>",
        "<dl>" + "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in said.items()),
        "</dl>",
        _costs(history),
        f'<div class="all">{"".join(each.figure() for each in curves)}</div>',
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n",
        encoding="utf-8",
    )


def _points(history: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    return [
        (float(entry["step"]), float(entry[key]))
        for entry in history
        if isinstance(entry.get(key), int | float) and math.isfinite(entry[key])
    ]


def _last(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    points = _points(history, key)
    return points[-1][1] if points else None


def _summary(history: Sequence[Mapping[str, Any]], losses: Sequence[Point]) -> dict[str, str]:
    found = {}
    if losses:
        found["loss"] = f"{losses[0][1]:.4g} at step {losses[0][0]:g}, {losses[-1][1]:.4g} at last"
    tokens = _last(history, "num_tokens")
    if tokens is not None:
        found["tokens"] = f"{tokens:,.0f}"
    speed, per_rank = (
        _last(history, f"distft/tokens_per_second{end}") for end in ("", "_per_rank")
    )
    if speed is not None and per_rank is not None:
        found["speed"] = f"{speed:,.0f} tokens/s, {per_rank:,.0f} per rank, at last"
    return found


def _costs(history: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (what, _last(history, measured), _last(history, said)) for measured, said, what in _COSTS
    ]
    lines = "".join(
        f"<tr><td>{what}</td><td>{measured:.4g}</td><td>{said:.4g}</td></tr>"
        for what, measured, said in rows
        if measured is not None and said is not None
    )
    head = "<tr><th></th><th>measured</th><th>predicted</th></tr>"
    return f"<table>{head}{lines}</table>" if lines else ""


@dataclass(frozen=True)
class _Curves:
    """Curves in one picture, by the keys of the log."""

    title: str
    unit: str
    by_key: Mapping[str, Sequence[Point]]

    def figure(self) -> str:
        """Return the picture with its title."""
        every = [point for points in self.by_key.values() for point in points]
        x_ticks = _ticks(min(x for x, _ in every), max(x for x, _ in every), whole=True)
        y_ticks = _ticks(min(y for _, y in every), max(y for _, y in every))
        frame = _Frame(
            (min(x_ticks[0], min(x for x, _ in every)), max(x_ticks[-1], max(x for x, _ in every))),
            (y_ticks[0], y_ticks[-1]),
        )
        parts = [frame.grid(x_ticks, y_ticks)]
        for points, colour in zip(self.by_key.values(), _COLOURS, strict=False):
            parts.append(frame.curve(points, colour))
        label = f"{self.title} ({self.unit})" if self.unit else self.title
        return (
            f"<figure><figcaption>{_text(label)}{self._legend()}</figcaption>"
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(label)}" '
            f'font-size="12" font-family="system-ui,sans-serif">{"".join(parts)}</svg></figure>'
        )

    def _legend(self) -> str:
        """Return the names of several curves, which none of them can cover."""
        if len(self.by_key) == 1:
            return ""
        names = (
            f'<span style="color:{colour}">&#9632; {_text(_short(key))}</span>'
            for key, colour in zip(self.by_key, _COLOURS, strict=False)
        )
        return f"<small>{''.join(names)}</small>"


@dataclass(frozen=True)
class _Frame:
    """Where values lie in a picture."""

    xs: Point
    ys: Point

    def x(self, value: float) -> float:
        return _LEFT + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return _TOP + height - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * height

    def grid(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        """Return lines and numbers of both axes."""
        bottom = _HEIGHT - _BOTTOM
        lines = [
            f'<path d="M{_LEFT} {self.y(v):.1f}H{_WIDTH - _RIGHT}" stroke="#e3e3e3"/>'
            f'<text x="{_LEFT - 6}" y="{self.y(v) + 4:.1f}" text-anchor="end" fill="#555">'
            f"{_number(v)}</text>"
            for v in ys
        ]
        lines += [
            f'<text x="{self.x(v):.1f}" y="{bottom + 17}" text-anchor="middle" fill="#555">'
            f"{_number(v)}</text>"
            for v in xs
        ]
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        lines.append(
            f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle" fill="#555">step</text>'
        )
        return "".join(lines)

    def curve(self, points: Sequence[Point], colour: str) -> str:
        """Return a line through points, or a dot where there is one."""
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dots = (
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{colour}"/>'
            for x, y in (points if len(points) <= 12 else ())
        )
        line = f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        return line + "".join(dots)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return about five round numbers whose range holds both.

    >>> _ticks(0.0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if high == low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _number(value: float) -> str:
    """Return a number as short as it can be told from its neighbours.

    >>> [_number(v) for v in (0.0, 0.25, 20000.0, 1.5e6, 2e-5)]
    ['0', '0.25', '20k', '1.5M', '2e-05']
    """
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            scale = 1e3 if letter == "k" else unit
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def _short(key: str) -> str:
    """Return what tells a curve from the other one of its picture.

    >>> _short("distft/expert_imbalance"), _short("eval_loss"), _short("loss")
    ('imbalance', 'evaluation', 'training')
    """
    if key.startswith("distft/"):
        return key.rpartition("_")[2]
    return "evaluation" if key.startswith("eval_") else "training"


def _text(value: str) -> str:
    return html.escape(str(value))
