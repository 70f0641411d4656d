"""Strategies by name, for scripts with a ``--strategy`` argument."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from distft.strategies.base import Strategy
from distft.strategies.ddp import DDP
from distft.strategies.fsdp import FSDP2, HSDP
from distft.strategies.parallel import EP, TP, NDParallel
from distft.strategies.zero import ZeRO1, ZeRO2
from distft.strategies.zero3 import ZeRO3

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (DDP, ZeRO1, ZeRO2, ZeRO3, FSDP2, HSDP, TP, EP, NDParallel)
}


def strategy(name: str, **policies: Any) -> Strategy:
    """Return the strategy of a name, its degrees and policies as keywords.

    >>> strategy("hsdp", dp_replicate=2)
    HSDP(dp_replicate=2)

    Raises:
        ValueError: No strategy has the name, or the strategy has no such field.

    Collective: none.
    """
    cls = STRATEGIES.get(name.lower()) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(
            f"There is no strategy {name!r} among the {len(STRATEGIES)}: "
            f"{', '.join(STRATEGIES)}.{_nearest(str(name).lower(), STRATEGIES)}"
        )
    known = [field.name for field in fields(cls)]
    for policy in policies:
        if policy not in known:
            raise ValueError(
                f"{cls.__name__} has no field {policy!r} among its {len(known)}: "
                f"{', '.join(known)}.{_nearest(policy, known)}"
            )
    return cls(**policies)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" Did you mean {close[0]!r}?" if close else " Choose one of them."
