"""Checks of arguments and the one rule for exact results that all formulas share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from fractions import Fraction


def whole(name: str, value: object, minimum: int = 0) -> int:
    """Return `value` as an int, or raise ValueError where it is no whole number >= `minimum`."""
    number = Fraction(amount(name, value))
    if number.denominator != 1 or number < minimum:
        raise ValueError(
            f"{name} is {value!r}, but it must be a whole number of at least {minimum}. "
            f"Pass {name}={minimum} or more."
        )
    return int(number)


def amount(name: str, value: object) -> int | float:
    """Return `value`, or raise ValueError where it is no finite number >= 0 (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{name} is {value!r} of type {type(value).__name__}, but it must be a number. "
            f"Pass {name} as an int or a float."
        )
    if not math.isfinite(value) or value < 0:
        raise ValueError(
            f"{name} is {value!r}, but it must be finite and at least 0. "
            f"Pass a {name} that is not negative."
        )
    return value


def choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return `value`, or raise ValueError that lists `choices` and names the nearest one."""
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} is {value!r}, but it must be one of {', '.join(known)}.{hint}")


def exact(value: Fraction | int) -> int | float:
    """Return `value` as an int where it is whole, else as the nearest float."""
    return int(value) if value.denominator == 1 else float(value)
