"""Measure a training step through distft against the same step written by hand.

Both sides live in the same ranks, one process each, and take turns in the order ABBA. Their losses
are compared first. The number reported is the median over pairs of `time(distft) / time(by hand)`,
a pair's time being that of its slowest rank, with a 95 % interval. Exit code 1: a bound is
exceeded.

    python benchmarks/step.py --strategy zero3 --pairs 40 --out result.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import machine
import paired
from interval import Median, median_interval

from distft.testing import WorkerPool

RANKS = {
    "ddp": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tp": 2,
    "ep": 2,
    "nd": 4,
}
BOUND = 1.03
SHORTEST_STEP = 0.2
TIMEOUT = 1800.0
HEAD = (
    "| strategy | ranks | distft, s | by hand, s | median ratio | 95 % interval | pairs "
    f"| loss, rel. diff. | at most {BOUND} |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Run the strategies asked for, print the table, and return the exit code."""
    arguments = _parse()
    workload = paired.Workload()
    rows, ratios, steps = [], [], []
    for name in arguments.strategy:
        with WorkerPool(RANKS[name], timeout=TIMEOUT) as pool:
            ranks = pool.run(paired.run_pairs, name, arguments.pairs, workload)
        ours = _slowest([rank.ours for rank in ranks])
        hand = _slowest([rank.by_hand for rank in ranks])
        ratio = median_interval([a / b for a, b in zip(ours, hand, strict=True)])
        difference = max(rank.loss_difference for rank in ranks)
        ratios.append(ratio)
        steps.append(median(hand))
        rows.append(_row(name, median(ours), median(hand), ratio, arguments.pairs, difference))
        print(rows[-1], file=sys.stderr, flush=True)
    machine.publish(_report(rows, workload), arguments.out)
    if min(steps) < SHORTEST_STEP:
        print(f"A step takes {min(steps):.3f} s, less than {SHORTEST_STEP} s.", file=sys.stderr)
        return 1
    return int(any(ratio.high > BOUND for ratio in ratios))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--pairs", type=int, default=100, help="pairs per strategy (default 100)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    if arguments.pairs < 6:
        parser.error(f"--pairs {arguments.pairs} gives no 95 % interval; take at least 6.")
    return arguments


def _slowest(ranks: list[list[float]]) -> list[float]:
    return [max(step) for step in zip(*ranks, strict=True)]


def _row(name: str, ours: float, hand: float, ratio: Median, pairs: int, difference: float) -> str:
    verdict = "yes" if ratio.high <= BOUND else "no"
    return (
        f"| {name} | {RANKS[name]} | {ours:.3f} | {hand:.3f} | {ratio.value:.4f} "
        f"| {ratio.low:.4f} to {ratio.high:.4f} | {pairs} | {difference:.0e} | {verdict} |"
    )


def _report(rows: list[str], workload: paired.Workload) -> list[str]:
    num_params = sum(p.numel() for p in workload.model().parameters())
    return [
        "# A step through distft against the same step written by hand",
        "",
        *machine.describe(),
        f"- Model: Qwen3, {num_params:,} parameters, fp32 (tp, nd: Llama; ep: Qwen3-MoE); "
        f"{paired.MICRO_STEPS} micro-steps of {workload.rows} rows of {workload.tokens} tokens on "
        "each rank; AdamW, norm clipped at 1",
        "- gloo; by hand: plain torch (DDP, `fully_shard`), DeepSpeed, or transformers' own way "
        "(tp, ep, nd); ABBA order; the slowest rank counts; losses of "
        f"{paired.WARM_UP} steps equal to "
        f"{paired.LOSS_TOLERANCE:.0e} relative before any time is taken",
        "",
        HEAD,
        *rows,
    ]


if __name__ == "__main__":
    sys.exit(main())
