"""What one demo run is: its sizes, its strategies, and the work of one rank as a value."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distft.demo.errors import DemoError
from distft.strategies.base import Strategy
from distft.strategies.by_name import strategy
from distft.strategies.zero import ZeRO

TOLERANCE = 1e-5  # largest relative difference of the loss from one process, fp32
RESUMED_STEPS = 5
ROWS_PER_STEP = 32
REPLICAS = 2  # of HSDP

Row = dict[str, list[int]]

# Those that give every rank rows of its own and fit any dense model.
DATA_PARALLEL = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")


@dataclass(frozen=True)
class Sizes:
    """How the rows of one optimizer step are cut; the cut is the same for every number of ranks.

    Attributes:
        micro_batch: Rows of one forward pass.
        micro_batches: Forward passes of one step, over all ranks together.
    """

    micro_batch: int
    micro_batches: int

    @classmethod
    def for_ranks(cls, ranks: int) -> Sizes:
        """The cut for runs on ``ranks`` and on twice as many: a multiple of both, at least 4.

        >>> Sizes.for_ranks(2)
        Sizes(micro_batch=8, micro_batches=4)
        """
        both = REPLICAS * ranks
        micro_batches = -(-4 // both) * both
        return cls(max(1, ROWS_PER_STEP // micro_batches), micro_batches)


@dataclass(frozen=True)
class Job:
    """The work of every rank under one strategy; ``strategy=None`` is one process, plain torch.

    Attributes:
        strategy: The one argument that changes between runs.
        ranks: Number of ranks it runs on.
        config: The model's configuration as a dict.
        rows: Training rows, the same on every rank.
        sizes: How the rows of a step are cut.
        steps: Optimizer steps.
        seed: Seed of weights and of the order of the rows.
        folder: Where checkpoints go.
        tokenizer: Folder of the tokenizer, saved into the checkpoints too.
    """

    strategy: Strategy | None
    ranks: int
    config: dict[str, Any] = field(repr=False)
    rows: list[Row] = field(repr=False)
    sizes: Sizes
    steps: int
    seed: int
    folder: Path
    tokenizer: Path

    @property
    def name(self) -> str:
        """Name in tables and file names."""
        return "one process" if self.strategy is None else self.strategy.name

    @property
    def grad_accum(self) -> int:
        """Forward passes of one step on each rank."""
        return self.sizes.micro_batches // self.ranks

    @property
    def middle(self) -> int:
        """The step after which the run is saved, to be resumed from later."""
        return max(1, min(self.steps // 2, self.steps - RESUMED_STEPS))

    @property
    def resumed_steps(self) -> int:
        """Steps that are made again after the resume."""
        return min(RESUMED_STEPS, self.steps - self.middle)


@dataclass(frozen=True)
class Choice:
    """A strategy of the demo and the number of ranks that it runs on."""

    strategy: Strategy
    ranks: int


def choose(names: list[str], ranks: int, under_launcher: bool) -> tuple[list[Choice], list[str]]:
    """The strategies to run, and a sentence for each one that is left out.

    Args:
        names: What ``--strategy`` asked for; empty is all six.
        ranks: Ranks to start, or the launcher's number of ranks.
        under_launcher: Whether the number of ranks is fixed; HSDP then needs an even one of at
            least 4, and otherwise gets twice as many ranks as the others.

    Raises:
        DemoError: A strategy that was asked for cannot run here.
        ValueError: A name does not exist.

    Collective: none
    """
    chosen, left_out = [], []
    for name in names or DATA_PARALLEL:
        choice = _choice(name, ranks, under_launcher)
        if isinstance(choice, Choice):
            chosen.append(choice)
        elif names:
            raise DemoError(choice)
        else:
            left_out.append(choice)
    return chosen, left_out


def _choice(name: str, ranks: int, under_launcher: bool) -> Choice | str:
    picked = strategy(name)
    if isinstance(picked, ZeRO) and importlib.util.find_spec("deepspeed") is None:
        return f"{name} needs DeepSpeed, which is not installed: pip install 'distft[deepspeed]'"
    if name.lower() != "hsdp":
        return Choice(picked, ranks)
    total = ranks if under_launcher else REPLICAS * ranks
    if total % REPLICAS or total < 2 * REPLICAS:
        need = "an even number of ranks, at least 4" if under_launcher else "--ranks 2 or more"
        return f"hsdp splits ranks into {REPLICAS} groups of at least 2: start {need}, not {ranks}"
    return Choice(strategy(name, dp_replicate=REPLICAS, dp_shard=total // REPLICAS), total)
