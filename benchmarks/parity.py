"""Time the certificate of ten strategies: `distft.parity` of a model that its name builds.

A quiet process starts the ranks, shrinks the model, trains it alone and under every strategy,
saves, and loads what each other strategy wrote. Exit code 1: a strategy failed, or it took longer
than the bound of two minutes.

    python benchmarks/parity.py --model Qwen/Qwen3-30B-A3B --out result.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import machine

import distft

BOUND = 120.0
RANKS = 4


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    lines = [
        f"# Parity of all strategies on {RANKS} ranks",
        "",
        *machine.describe(),
        "",
        f"| model | passed | not applicable | loads | seconds | at most {BOUND:g} |",
        "|---|---|---|---|---|---|",
    ]
    good = True
    for model in options.model:
        started = time.perf_counter()
        certificate = distft.parity(model, "all", RANKS)
        seconds = time.perf_counter() - started
        status = [result.status for result in certificate.results]
        loads = sum(result.num_loads for result in certificate.results)
        met = certificate.passed and seconds <= BOUND
        good = good and met
        lines.append(
            f"| {model} | {status.count('passed')} of {len(status)} | "
            f"{status.count('not applicable')} | {loads} | {seconds:.1f} | "
            f"{'yes' if met else 'no'} |"
        )
    machine.publish(lines, options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
