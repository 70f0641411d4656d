"""How long a rank waits for collectives: their time that no computation hides."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]
_LOG_LEVEL = "KINETO_LOG_LEVEL"
# How the names of collectives begin in a profile.
_COLLECTIVES = ("gloo:", "nccl")


@dataclass
class Waiting:
    """Share of a stretch of a program that a rank waits, from 0 to 1; None where unmeasured."""

    share: float | None = None


@contextmanager
def measure_waiting() -> Iterator[Waiting]:
    """Measure the share of the time inside the context that is spent on collectives alone.

    ``(|C u K| - |K|) / T``: C the times of collectives, K those of other kernels (on a CPU those
    of torch's operations), T the whole. torch's profiler takes them, which makes the stretch
    slower; where another one runs nothing is measured.

    Collective: none of its own.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    found = Waiting()
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        yield found
        return
    on_gpu = torch.cuda.is_available()
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    began = time.perf_counter()
    with _quiet_kineto(), profile(activities=[kind]) as profiler:
        yield found
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    collectives, kernels = _split(profiler)
    if collectives or kernels:
        found.share = min(1.0, exposed(collectives, kernels) / seconds)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep torch's profiler from writing when it starts and stops; it reads this once."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = before or "9"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _split(profiler: Any) -> tuple[list[Interval], list[Interval]]:
    """Return the times of collectives and of other work, in seconds."""
    # `events()` makes a tree of them, which takes seconds for a step of a small model.
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    collectives, others = list[Interval](), list[Interval]()
    for event in results.events() if results is not None else ():
        start = event.start_ns() / 1e9
        span = (start, start + event.duration_ns() / 1e9)
        name = event.name().lower()
        if name.startswith(_COLLECTIVES):
            collectives.append(span)
        elif name.startswith("aten::") or "CUDA" in str(event.device_type()):
            others.append(span)
    return collectives, others


def exposed(collectives: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the time in which a collective runs and nothing else.

    >>> exposed([(0, 4), (3, 6), (10, 11)], [(2, 5), (10, 12)])
    3

    Collective: none.
    """
    others = list(others)
    return _length([*collectives, *others]) - _length(others)


def _length(spans: Iterable[Interval]) -> float:
    total: float = 0
    end = float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total
