"""Measure what `import distft` adds to starting Python, and that it loads no torch.

Starts of `python -c pass` and `python -c "import distft"` alternate in the order ABBA; the number
reported is the median difference with a 95 % interval. Exit code 1: the upper end is above 0.1 s,
or torch was loaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import machine
from interval import median_interval

BOUND = 0.1
HEAVY = ("torch", "transformers", "deepspeed", "numpy")


def main() -> int:
    """Print the result and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="pairs of starts (default 30)")
    pairs = parser.parse_args().pairs
    _start("import distft")  # Writes the byte code.
    differences = []
    for pair in range(pairs):
        order = ("import distft", "pass") if pair % 2 == 0 else ("pass", "import distft")
        seconds = {statement: _start(statement) for statement in order}
        differences.append(seconds["import distft"] - seconds["pass"])
    added = median_interval(differences)
    loaded = _loaded()
    print("# What `import distft` costs", "", *machine.describe(()), "", sep="\n")
    print("| added, s | 95 % interval | pairs | heavy modules loaded |\n|---|---|---|---|")
    print(
        f"| {added.value:.4f} | {added.low:.4f} to {added.high:.4f} | {pairs} "
        f"| {', '.join(loaded) or 'none'} |"
    )
    return int(added.high > BOUND or bool(loaded))


def _start(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def _loaded() -> list[str]:
    code = f"import distft, sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return run.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
