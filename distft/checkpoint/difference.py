"""What two checkpoints hold differently, whatever the format of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import CASTABLE, LogicalTensor, ShardMap
from distft.checkpoint.stream import Stream

# Tensors of each kind that the text lists.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor that both have differs.

    Attributes:
        shapes: Its shape in each.
        dtypes: Its dtype in each.
        largest: Largest absolute difference of two numbers, infinite where only one is a number;
            None where shapes differ.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    largest: float | None

    def __str__(self) -> str:
        """Return the change in words."""
        if self.largest is None:
            return f"shape {self.shapes[0]} and {self.shapes[1]}"
        kinds = "" if self.dtypes[0] == self.dtypes[1] else f", {self.dtypes[0]}/{self.dtypes[1]}"
        return f"differs by up to {self.largest:.3g}{kinds}"


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two checkpoints.

    Moments are named ``optimizer.<parameter>.<moment>``.

    Attributes:
        num_equal: Tensors that are the same, bit for bit.
        only_in_first: Names that the second lacks.
        only_in_second: Names that the first lacks.
        changed: What both have and differs, by name.
        settings: Steps and settings of parameter groups that differ, in words.
    """

    num_equal: int
    only_in_first: Sequence[str]
    only_in_second: Sequence[str]
    changed: Mapping[str, Change]
    settings: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        parts = (self.only_in_first, self.only_in_second, self.changed, self.settings)
        return not any(parts)

    def __str__(self) -> str:
        """Return what differs, line by line."""
        lines = [f"{self.num_equal} tensors are equal, bit for bit."]
        for where, names in (("first", self.only_in_first), ("second", self.only_in_second)):
            if names:
                lines.append(f"{len(names)} are in the {where} only: {_listed(names)}")
        if self.changed:
            shown = [f"{name} {change}" for name, change in self.changed.items()]
            lines.append(f"{len(self.changed)} differ: {_listed(shown)}")
        return "\n".join([*lines, *self.settings])


def diff(first: str | Path, second: str | Path) -> Difference:
    """Return what two checkpoints of any formats hold differently.

    Tensors are compared by name, bit for bit, where both are in one dtype, and by value where they
    are not, through small buffers. An optimizer is compared where both have one.

    Raises:
        ValueError: One of them is no checkpoint, or a broken one.

    Collective: none.
    """
    left, right = read_map(first), read_map(second)
    both = left.optimizer is not None and right.optimizer is not None
    ours, theirs = _named(left, both), _named(right, both)
    changed: dict[str, Change] = {}
    shared = [name for name in ours if name in theirs]
    with Stream(left.root, BUFFER_BYTES) as one, Stream(right.root, BUFFER_BYTES) as other:
        for name in shared:
            change = _compare(one, ours[name], other, theirs[name])
            if change is not None:
                changed[name] = change
    return Difference(
        len(shared) - len(changed),
        [name for name in ours if name not in theirs],
        [name for name in theirs if name not in ours],
        changed,
        _settings(left, right) if both else [],
    )


def _named(found: ShardMap, with_optimizer: bool) -> dict[str, LogicalTensor]:
    named = dict(found.tensors)
    if with_optimizer and found.optimizer is not None:
        for name, moments in found.optimizer.moments.items():
            named |= {f"optimizer.{name}.{key}": moment for key, moment in moments.items()}
    return named


def _compare(
    one: Stream, first: LogicalTensor, other: Stream, second: LogicalTensor
) -> Change | None:
    shapes, dtypes = (first.shape, second.shape), (first.dtype, second.dtype)
    if first.shape != second.shape:
        return Change(shapes, dtypes, None)
    if dtypes[0] == dtypes[1]:
        pairs = zip(
            one.windows(first, first.dtype), other.windows(second, second.dtype), strict=True
        )
        if all(np.array_equal(a, b) for (_, a), (_, b) in pairs):
            return None
    if not {*dtypes} <= {*CASTABLE}:
        return Change(shapes, dtypes, float("inf"))
    largest = 0.0
    pairs = zip(one.windows(first, "float64"), other.windows(second, "float64"), strict=True)
    for (_, a), (_, b) in pairs:
        left, right = np.frombuffer(a, np.float64), np.frombuffer(b, np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(left - right)
        # Of equal infinities the difference is no number.
        apart[left == right] = 0.0
        largest = max(largest, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)))
    return Change(shapes, dtypes, largest)


def _settings(left: ShardMap, right: ShardMap) -> list[str]:
    found = []
    if left.step != right.step:
        found.append(f"{left.step} steps were made, and {right.step}.")
    assert left.optimizer is not None
    assert right.optimizer is not None
    counters = left.optimizer.steps, right.optimizer.steps
    other = [n for n in counters[0] if n in counters[1] and counters[0][n] != counters[1][n]]
    if other:
        found.append(
            f"{len(other)} parameters were updated another number of times, such as {other[0]}: "
            f"{counters[0][other[0]]:g} and {counters[1][other[0]]:g}."
        )
    ours, theirs = (
        {name: group.settings for group in side.groups for name in group.names}
        for side in (left.optimizer, right.optimizer)
    )
    for name in ours:
        keys = [k for k in ours[name] if ours[name][k] != theirs.get(name, ours[name]).get(k)]
        keys = [key for key in keys if key in theirs.get(name, {})]
        if keys:
            key = keys[0]
            found.append(
                f"{name} has {key} {ours[name][key]!r}, and {theirs[name][key]!r} in the second."
            )
            break
    return found


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
