"""Work and time: FLOPs of training, seconds of transfers, idle time of pipelines."""

from __future__ import annotations

from fractions import Fraction

from distft.formulas._numbers import amount, exact, whole


def training_flops(num_params: float, tokens: float) -> int | float:
    """FLOPs of forward and backward over `tokens` tokens: 6 N per token.

    Two per parameter and token forward, four backward; attention's `12 L h s` is left out.

    Source: Kaplan et al. 2020, section 2.1. For a mixture of experts pass the active parameters.

    Raises:
        ValueError: An argument is negative, not finite or not a number.

    Collective: none.

    >>> training_flops(8e9, 2048)
    98304000000000
    """
    num_params, tokens = amount("num_params", num_params), amount("tokens", tokens)
    return exact(6 * Fraction(num_params) * Fraction(tokens))


def seconds(work: float, per_second: float) -> float:
    """Seconds that `work` (FLOPs or bytes) takes at `per_second` (FLOP/s or bytes/s).

    Raises:
        ValueError: `work` is negative or `per_second` is not above 0.

    Collective: none.

    >>> round(seconds(training_flops(8e9, 2048), 400e12), 2)
    0.25
    >>> round(seconds(42e9, 450e9), 2)
    0.09
    """
    if amount("per_second", per_second) == 0:
        raise ValueError("per_second is 0, but work takes a speed. Pass a per_second above 0.")
    return amount("work", work) / per_second


def pipeline_bubble(stages: int, micro_batches: int) -> Fraction:
    """Share of a pipeline step that is idle: (p - 1) / (m + p - 1).

    Source: Huang et al. 2019 (GPipe), section 2.3.

    Args:
        stages: Number of pipeline stages p.
        micro_batches: Micro-batches m in one step.

    Raises:
        ValueError: An argument is not a whole number of at least 1.

    Collective: none.

    >>> pipeline_bubble(4, 16)
    Fraction(3, 19)
    """
    stages, micro_batches = whole("stages", stages, 1), whole("micro_batches", micro_batches, 1)
    return Fraction(stages - 1, micro_batches + stages - 1)
