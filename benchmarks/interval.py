"""The median of a sample with its distribution-free confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True)
class Median:
    """A sample median between the order statistics that bound the true one."""

    value: float
    low: float
    high: float


def median_interval(sample: Sequence[float], confidence: float = 0.95) -> Median:
    """Return the median and the tightest symmetric pair of order statistics around the true one.

    The number of values below the true median is Binomial(n, 1/2), so the interval from the k-th
    smallest to the k-th largest misses it with probability 2 P(X < k). No assumption is made on
    the shape of the noise, and nothing is drawn at random.

    >>> median_interval(range(1, 31))
    Median(value=15.5, low=10, high=21)

    Raises:
        ValueError: The sample is too small for any interval of that confidence.
    """
    n = len(sample)
    ordered = sorted(sample)
    allowed = (1 - confidence) / 2 * 2**n
    k = 0
    while sum(comb(n, i) for i in range(k + 1)) <= allowed:
        k += 1
    if k == 0:
        raise ValueError(f"{n} values give no {confidence:.0%} interval. Take at least 6.")
    return Median(median(ordered), ordered[k - 1], ordered[n - k])
