"""Matrices of tests: every pair of values in each run, the whole product in `nox -s full`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of axes as parameters; all but a covering few are marked slow.

    The few are chosen so that each value of an axis meets each value of every other one: most
    faults show in two factors (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004), and the rows left
    out are run by the session `full`. A value that is a tuple gives several arguments. Greedy and
    in order, so the same rows are chosen on every machine.
    """
    values = [list(axis) for axis in axes]
    rows = list(product(*(range(len(axis)) for axis in values)))
    chosen = _covering(rows)
    return [
        pytest.param(
            *_arguments([axis[index] for axis, index in zip(values, row, strict=True)]),
            marks=() if row in chosen else pytest.mark.slow,
        )
        for row in rows
    ]


def _covering(rows: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    wanted = set().union(*pairs.values())
    uses: Counter[Any] = Counter()
    chosen: set[tuple[int, ...]] = set()
    while wanted:
        # Among rows that add as much, the one whose pairs were taken least often.
        best = max(
            rows, key=lambda row: (len(pairs[row] & wanted), -sum(uses[p] for p in pairs[row]))
        )
        chosen.add(best)
        wanted -= pairs[best]
        uses.update(pairs[best])
    return chosen


def _arguments(values: Sequence[Any]) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
