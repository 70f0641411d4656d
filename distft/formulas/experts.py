"""What an uneven choice of experts costs."""

from __future__ import annotations

from collections.abc import Sequence

from distft.formulas._numbers import whole


def expert_imbalance(counts: Sequence[int]) -> float:
    """Tokens of the busiest expert over the mean of all: `max(c) / mean(c)`, 1 without a token.

    Source: Lepikhin et al. 2020 (GShard), section 2.2: an expert's capacity is set over this mean.

    Raises:
        ValueError: There is no expert, or a count is below 0.

    Collective: none.

    >>> expert_imbalance([6, 2, 0, 0])
    3.0
    """
    return expert_slowdown(counts, len(counts))


def expert_slowdown(counts: Sequence[int], ep: int) -> float:
    """Time of an expert layer over that of balanced experts: `max over ranks / mean over ranks`.

    Rank r of `ep` holds the experts from `r E/ep` on; all wait for the one with most tokens, and
    an expert's time grows with its tokens. One rank waits for nobody.

    Source: Lepikhin et al. 2020 (GShard), section 3.3. Assumes: compute by tokens alone, the
    routing of all data ranks alike.

    Raises:
        ValueError: `ep` does not divide the number of experts, or a count is below 0.

    Collective: none.

    >>> expert_slowdown([6, 2, 0, 0], 2)
    2.0
    >>> expert_slowdown([6, 2, 0, 0], 1)
    1.0
    """
    ep = whole("ep", ep, 1)
    tokens = [whole("counts", count, 0) for count in counts]
    if not tokens or len(tokens) % ep:
        raise ValueError(
            f"{len(tokens)} experts cannot be spread over {ep} ranks alike. Choose an ep that "
            "divides the number of experts."
        )
    share = len(tokens) // ep
    ranks = [sum(tokens[rank * share : (rank + 1) * share]) for rank in range(ep)]
    return max(ranks) * ep / sum(ranks) if sum(ranks) else 1.0
