"""distft.reshard: which layout a strategy resumes is known here, copying is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distft.checkpoint.resharding import Source, reshard_checkpoint
from distft.strategies.base import Strategy
from distft.strategies.by_name import strategy as by_name
from distft.strategies.zero3 import ZeRO3


def reshard(
    path: str | Path,
    out: str | Path,
    strategy: str | Strategy,
    world_size: int,
    max_ram: str | int = "2GB",
    advance: Callable[[int], None] | None = None,
    native: bool = False,
    check: bool = False,
) -> Path:
    """Write a checkpoint of any layout as one that a strategy resumes, and return the folder.

    Weights, every moment, the counters and settings of every parameter group, the scheduler and
    the position in the data go with it. Works in this process alone, through a few small buffers.
    No mesh is baked into the new folder: its rows are dealt out to ``world_size`` files, and any
    number of ranks loads it.

    Args:
        path: A checkpoint of distft, DeepSpeed, torch or Accelerate, or a run's root.
        out: New folder.
        strategy: A strategy or its name; by name it has the precision of the run.
        world_size: Number of ranks that will go on.
        max_ram: Most memory that this call may add to the process.
        advance: Called with the number of bytes after each window, from any thread.
        native: For ZeRO-3: the files that its engine itself writes on ``world_size`` ranks, which
            it reads with all settings of all groups, in place of DeepSpeed's universal layout.
        check: As in `distft.consolidate`.

    Raises:
        ValueError: ``path`` is no checkpoint, a broken one or one without an optimizer, ``out``
            holds something or lies inside it, the strategy trains in another precision or does not
            run on that many ranks, ``native`` is asked for another strategy than ZeRO-3, or memory
            or disk are too small.

    Collective: none.
    """
    source = Source.read(path)
    if not isinstance(strategy, Strategy):
        strategy = by_name(strategy, precision=source.precision)
    sub_group_size = None
    if native:
        if not isinstance(strategy, ZeRO3):
            raise ValueError(
                f"reshard(native=True) writes the files of the engine of ZeRO-3, 1 of the "
                f"strategies, and {strategy!r} is another. Leave native out: any number of ranks "
                "loads what is written then."
            )
        sub_group_size = strategy.sub_group_size
    return reshard_checkpoint(
        source, out, strategy, world_size, max_ram, advance, sub_group_size, check
    )
