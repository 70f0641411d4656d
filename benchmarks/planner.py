"""Compare what the planner predicts with peaks and speeds that others measured.

    python benchmarks/planner.py [POINTS.json]

A peak counts where its source states micro-batch, row length and number of GPUs; other peaks are
printed apart. Each is predicted in the kind of memory that its source reports. Fits or not is
judged by the live tensors with the planner's margin, and by what a process takes beside them,
against the GPU's memory. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
from planner_held_out import PARTS, Point, held_out, refitted_peaks, refitted_speeds
from planner_models import Row, Unmapped, capacity_bytes, gpu_of, measured_bytes, readable
from planner_rows import Mapped, is_stated, mapped, with_assumed_sizes

from distft.formulas.peak import predicted_memory
from distft.formulas.speed import step_time
from distft.planning.fits import MARGIN, needed_bytes
from distft.planning.machine import chip_of, wires_of
from distft.topology import Cluster

POINTS = Path(__file__).with_name("planner_points.json")
# Machines that a source's GPUs stand in, by the GPU; others are measured on one GPU only.
MACHINES = {
    "A100-40GB": "8xA100-SXM-40GB",
    "A100-80GB": "8xA100-SXM",
    "A800-80GB": "8xA800-SXM",
    "H100-80GB": "8xH100-SXM",
    "H100-96GB": "8xH100-SXM",
    "H200": "8xH200-SXM",
    "B200": "8xB200-SXM",
    "GB200": "GB200",
    "V100-32GB": "DGX-2",
}
GIB = 2**30


def main() -> int:
    """Print the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", nargs="?", default=str(POINTS), help="a points file")
    path = Path(parser.parse_args().points)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows, models = data["data_points"], data.get("models") or {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{path} is no points file with data_points: {error!r}", file=sys.stderr)
        return 1
    print("# Predicted against measured", "", *machine.describe(()), "", sep="\n")
    peaks, unscored, unmapped = _peaks(rows, models)
    speeds, unmapped_speeds = _speeds(rows, models)
    _print_points("Peak memory, GiB", peaks, GIB)
    _print_points(
        "Peaks whose source leaves out a size (1 row, 4,096 tokens, 1 GPU assumed): not scored",
        unscored,
        GIB,
    )
    _print_points("Throughput, tokens/s of a GPU or rows/s of a run", speeds, 1)
    _print_sources("Peak memory", peaks)
    _print_sources("Throughput", speeds)
    _print_fits(peaks)
    _print_held_out(peaks, speeds)
    _print_unmapped("peaks", unmapped)
    _print_unmapped("speeds", unmapped_speeds)
    print(json.dumps(_summary(peaks, speeds, unmapped)))
    return 0


def _peaks(rows: Sequence[Row], models: Any) -> tuple[list[Point], list[Point], list[Any]]:
    scored: list[Point] = []
    unscored: list[Point] = []
    unmapped, left = [], []
    for row in rows:
        if not isinstance(row, Mapping) or "peak_mem" not in _measured(row):
            continue
        stated = is_stated(row)
        try:
            with readable():
                point = _peak(row, mapped(row if stated else with_assumed_sizes(row), models))
        except Unmapped as reason:
            (unmapped if stated else left).append((row, str(reason)))
            continue
        (scored if stated else unscored).append(point)
    _print_unmapped("peaks without all sizes", left)
    return scored, unscored, unmapped


def _measured(row: Row) -> Row:
    found = row.get("measured")
    return found if isinstance(found, Mapping) else {}


def _peak(row: Row, found: Mapped) -> Point:
    report = predicted_memory(found.run)
    capacity = capacity_bytes(row)
    predicted = float(report.peak_bytes)
    if found.kind != "allocated":
        # On a full device the allocator gives back what it only keeps.
        room = max(report.peak_bytes, capacity - report.context_bytes)
        predicted = min(report.reserved_bytes, room)
    if found.kind == "process":
        predicted += report.context_bytes
    return Point(row, predicted, measured_bytes(row), needed_bytes(report) <= capacity)


def _speeds(rows: Sequence[Row], models: Any) -> tuple[list[Point], list[Any]]:
    points, unmapped = [], []
    for row in rows:
        measured = _measured(row) if isinstance(row, Mapping) else {}
        said = measured.get("tokens_per_s_per_gpu") or measured.get("samples_per_s")
        if not isinstance(said, (int, float)) or said <= 0:
            continue
        try:
            with readable():
                points.append(Point(row, _speed(row, models), float(said)))
        except Unmapped as reason:
            unmapped.append((row, str(reason)))
    return points, unmapped


def _speed(row: Row, models: Any) -> float:
    found = mapped(row, models)
    layout = found.run.layout
    if (
        layout.num_ranks > 1
        and "not stated" in str(row.get("note"))
        and "total" in str(row["note"])
    ):
        raise Unmapped("whether its speed is that of one GPU is not stated")
    gpu = gpu_of(row)
    if gpu is None:
        raise Unmapped(f"the GPU {row.get('gpu')!r} is not known")
    wires = wires_of(_cluster(gpu.name, layout.num_ranks), layout)
    time = step_time(
        found.run,
        chip_of(gpu, found.run.kept.kernels),
        wires,
        found.grad_accum,
        found.precision,
        found.interleave,
        found.asynchronous,
        found.row_tokens,
    )
    if "samples_per_s" not in row["measured"]:
        return time.tokens_per_second
    return time.tokens_per_second * layout.num_ranks / found.row_tokens


def _cluster(gpu: str, ranks: int) -> Cluster:
    if gpu not in MACHINES:
        if ranks > 1:
            raise Unmapped(f"how {ranks} {gpu} are wired is not stated")
        return Cluster.preset("2xRTX4090")
    machine_of = Cluster.preset(MACHINES[gpu])
    return Cluster.preset(MACHINES[gpu], nodes=-(-ranks // machine_of.gpus_per_node))


def _print_points(title: str, points: Sequence[Point], unit: float) -> None:
    print(
        f"## {title}",
        "",
        "| id | tier | model | strategy | tuning | predicted | measured | error |",
    )
    print("|---|---|---|---|---|---|---|---|")
    for point in points:
        row = point.row
        cells = [str(row.get(key)) for key in ("id", "tier", "model", "strategy", "tuning")]
        cells += [f"{value / unit:.4g}" for value in (point.predicted, point.measured)]
        print("|", " | ".join([*cells, f"{100 * point.error:+.1f} %"]), "|")
    print()


def _print_sources(title: str, points: Sequence[Point]) -> None:
    print(f"## {title} by source", "")
    print("| source | points | median error | mean signed | worst | rank correlation |")
    print("|---|---|---|---|---|---|")
    by_source: dict[str, list[Point]] = {}
    for point in points:
        by_source.setdefault(str(point.row.get("source")), []).append(point)
    for source, members in by_source.items():
        errors = [point.error for point in members]
        print(
            f"| {source} | {len(members)} | {100 * statistics.median(map(abs, errors)):.1f} % "
            f"| {100 * statistics.mean(errors):+.1f} % | {100 * max(errors, key=abs):+.1f} % "
            f"| {f'{rank_correlation(members):.3f}' if len(members) >= 5 else ''} |"
        )
    print()


def _print_held_out(peaks: Sequence[Point], speeds: Sequence[Point]) -> None:
    print(f"## Held out: a part of {PARTS} of the sources, fitted on the others", "")
    print("| what | points | median error | within 20 % |\n|---|---|---|---|")
    for what, points, fit in (
        ("peaks", peaks, refitted_peaks),
        ("speeds", speeds, refitted_speeds),
    ):
        errors = [abs(point.error) for point in held_out(points, fit)]
        if errors:
            print(
                f"| {what} | {len(errors)} | {100 * statistics.median(errors):.1f} % "
                f"| {100 * statistics.mean(error <= 0.2 for error in errors):.0f} % |"
            )
    print()


def _print_fits(peaks: Sequence[Point]) -> None:
    """Print where the answer to "does it fit" is wrong for the runs of tier A, all of which ran.

    A false "fits" is a measured peak above the predicted one times the margin: a GPU between both
    would have been said to do. A false "does not fit" is a run that was said not to fit its GPU.
    """
    tier_a = [point for point in peaks if point.row.get("tier") == "A"]
    above = [point for point in tier_a if point.measured > MARGIN * point.predicted]
    refused = [point for point in tier_a if not point.fits]
    print(f"## Does it fit? Predicted peak times {MARGIN}, {len(tier_a)} runs of tier A", "")
    print(f"false fits: {len(above)}")
    for point in above:
        over = 100 * (1 - MARGIN * point.predicted / point.measured)
        print(f"- {point.row.get('id')} {point.row.get('model')}: too small by {over:.1f} %")
    print(f"false misfits: {len(refused)}")
    for point in refused:
        row = point.row
        print(f"- {row.get('id')} {row.get('model')} on {row.get('gpu')}: it ran")
    print()


def rank_correlation(points: Sequence[Point]) -> float:
    """Return Spearman's correlation of predicted and measured, equal values sharing a rank."""
    ranks = [
        _ranks([point.predicted for point in points]),
        _ranks([point.measured for point in points]),
    ]
    if any(len(set(each)) == 1 for each in ranks):
        return float("nan")
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _print_unmapped(what: str, unmapped: Sequence[tuple[Row, str]]) -> None:
    for row, reason in unmapped:
        print(f"not mapped ({what}): {row.get('id')} {row.get('model')}: {reason}")
    print()


def _summary(peaks: Sequence[Point], speeds: Sequence[Point], unmapped: Sequence[Any]) -> Any:
    tier_a = [point for point in peaks if point.row.get("tier") == "A"]
    errors = [abs(point.error) for point in peaks]
    under = [1 - MARGIN * point.predicted / point.measured for point in tier_a]
    num = len(peaks) + len(unmapped)
    return {
        "median_error_pct": _percent(statistics.median(errors) if errors else None),
        "within_20_pct_tier_a": _percent(_share(abs(point.error) <= 0.2 for point in tier_a)),
        "worst_under_pct": _percent(max(0.0, *under) if under else None),
        "throughput_median_error_pct": _percent(
            statistics.median(abs(point.error) for point in speeds) if speeds else None
        ),
        "unmapped_pct": _percent(len(unmapped) / num if num else None),
        "false_does_not_fit_pct": _percent(_share(not point.fits for point in tier_a)),
        "margin": MARGIN,
        "scored": len(peaks),
    }


def _share(values: Any) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)


if __name__ == "__main__":
    sys.exit(main())
