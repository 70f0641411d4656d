"""Where this rank is: the public call that it is in, and how often that was made before.

`diagnose.hangs` asks when ranks wait for each other; noting it costs a microsecond a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A call, the how manieth of its name, and what tells it from others: the same on all ranks."""

    call: str
    number: int
    detail: str = ""

    def __str__(self) -> str:
        """Say it in a few words."""
        return f"{self.call} {self.number}" + (f", {self.detail}" if self.detail else "")


_inside: list[Place] = []
_counts: Counter[str] = Counter()
_last: Place | None = None
# The last error that left a call, and the innermost call that it left.
_left_by: tuple[BaseException, Place] | None = None


@contextmanager
def at(call: str, detail: str = "") -> Iterator[None]:
    """Note that this rank is in a call.

    Collective: none.
    """
    global _last, _left_by
    _counts[call] += 1
    place = Place(call, _counts[call], detail)
    _inside.append(place)
    try:
        yield
    except BaseException as error:
        if _left_by is None or _left_by[0] is not error:
            _left_by = (error, place)
        raise
    finally:
        _inside.remove(place)
        _last = place


def whereabouts() -> str:
    """Return where this rank is, in words that are the same on every rank that is there.

    Collective: none.
    """
    inside = list(_inside)
    if inside:
        return " > ".join(map(str, inside))
    return f"after {_last}" if _last is not None else "before any call of distft"


def raised_in(error: BaseException) -> str:
    """Return where this rank was when an error was raised.

    Collective: none.
    """
    if _left_by is not None and _left_by[0] is error:
        return str(_left_by[1])
    return whereabouts()
