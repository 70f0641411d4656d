"""Measure a step of distft.Trainer("ddp") against one of TRL's SFTTrainer with DDP.

The rule is that of `step.py`: both sides in the same ranks, ABBA order, losses compared first, the
median over pairs of `time(distft) / time(TRL)` with a 95 % interval, the slowest rank's time. A
step is all from its beginning to the beginning of the next one, log and rows included. Exit code 1:
the bound is exceeded.

    python benchmarks/trainer.py --pairs 100 --out result.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import machine
import paired
import paired_trainers
from interval import median_interval
from step import BOUND, SHORTEST_STEP, TIMEOUT

from distft.testing import WorkerPool

RANKS = 2


def main() -> int:
    """Run the pairs, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps (default 100)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    if arguments.pairs < 6:
        parser.error(f"--pairs {arguments.pairs} gives no 95 % interval; take at least 6.")
    workload = paired.Workload()
    with WorkerPool(RANKS, timeout=TIMEOUT) as pool:
        ranks = pool.run(paired_trainers.run_pairs, arguments.pairs, workload)
    ours = [max(step) for step in zip(*(rank.ours for rank in ranks), strict=True)]
    theirs = [max(step) for step in zip(*(rank.by_hand for rank in ranks), strict=True)]
    ratio = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    difference = max(rank.loss_difference for rank in ranks)
    lines = [
        "# A step of distft.Trainer against one of TRL's SFTTrainer, both with DDP",
        "",
        *machine.describe(),
        f"- Qwen3, {sum(p.numel() for p in workload.model().parameters()):,} parameters, fp32; "
        f"{paired.MICRO_STEPS} micro-steps of {workload.rows} rows of {workload.tokens} tokens on "
        f"each of {RANKS} ranks; gloo; a log line every step; losses of {paired.WARM_UP} steps "
        f"equal to {paired.LOSS_TOLERANCE:.0e} relative before any time is taken",
        "",
        "| distft.Trainer, s | SFTTrainer, s | median ratio | 95 % interval | pairs "
        f"| loss, rel. diff. | at most {BOUND} |",
        "|---|---|---|---|---|---|---|",
        f"| {median(ours):.3f} | {median(theirs):.3f} | {ratio.value:.4f} "
        f"| {ratio.low:.4f} to {ratio.high:.4f} | {arguments.pairs} | {difference:.0e} "
        f"| {'yes' if ratio.high <= BOUND else 'no'} |",
    ]
    machine.publish(lines, arguments.out)
    if median(theirs) < SHORTEST_STEP:
        print(f"A step takes {median(theirs):.3f} s, less than {SHORTEST_STEP} s.", file=sys.stderr)
        return 1
    return int(ratio.high > BOUND)


if __name__ == "__main__":
    sys.exit(main())
