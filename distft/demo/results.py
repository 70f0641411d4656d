"""What the demo compares: one row per strategy, and whether it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.demo.plan import TOLERANCE, Job
from distft.demo.training import Run
from distft.measure import ModelStateBytes

# In the folder of the demo.
RESULTS = "results.json"


@dataclass(frozen=True)
class Result:
    """One strategy's row of the table.

    Attributes:
        name: The strategy's name.
        call: Its constructor call.
        ranks: Number of ranks.
        losses: Loss of every step, in nats per answer token.
        grad_norm: Gradient norm of the last step.
        difference: Largest relative difference of a step's loss from one process.
        worst_step: The step of that difference, from 1.
        state: Bytes of model state on the heaviest rank, measured.
        state_formula: The same by ``strategy.memory``.
        wire: Bytes that one rank sends in one step, counted.
        wire_formula: The same by ``strategy.traffic``.
        resumed_from: The step whose checkpoint the run was resumed from.
        resumed_steps: Steps made again after the resume.
        resumed_equal: Whether all their losses came out bit-equal.
        seconds: Wall time of the training steps.
        answers: What the consolidated model answers, by question.
    """

    name: str
    call: str
    ranks: int
    losses: tuple[float, ...]
    grad_norm: float
    difference: float
    worst_step: int
    state: ModelStateBytes
    state_formula: int
    wire: float | None
    wire_formula: float
    resumed_from: int
    resumed_steps: int
    resumed_equal: bool
    seconds: float
    answers: dict[str, str]

    @classmethod
    def of(
        cls,
        job: Job,
        runs: Sequence[Run],
        reference: Run,
        formulas: tuple[int, float],
        answers: dict[str, str],
    ) -> Result:
        """The row of a strategy from what its ranks brought back and what one process did."""
        assert job.strategy is not None
        first = runs[0]
        differences = [
            _difference(loss, alone)
            for loss, alone in zip(first.losses, reference.losses, strict=True)
        ]
        again = first.losses[job.middle : job.middle + job.resumed_steps]
        wires = [run.wire_bytes for run in runs if run.wire_bytes is not None]
        return cls(
            name=job.name,
            call=repr(job.strategy),
            ranks=job.ranks,
            losses=first.losses,
            grad_norm=first.grad_norms[-1],
            difference=max(differences),
            worst_step=differences.index(max(differences)) + 1,
            state=max((run.state for run in runs if run.state), key=lambda state: state.total),
            state_formula=formulas[0],
            wire=max(wires, default=None),
            wire_formula=formulas[1],
            resumed_from=job.middle,
            resumed_steps=job.resumed_steps,
            resumed_equal=all(run.resumed == again for run in runs),
            seconds=max(run.seconds for run in runs),
            answers=answers,
        )

    def faults(self) -> list[str]:
        """A sentence for each promise that this run breaks; none is a pass."""
        found = []
        if self.difference > TOLERANCE:
            found.append(
                f"{self.name}: the loss of step {self.worst_step} differs from one process by "
                f"{self.difference:.1e} of its value, more than the tolerance {TOLERANCE:.0e}."
            )
        if not self.resumed_equal:
            found.append(
                f"{self.name}: {self.resumed_steps} steps after resuming from step "
                f"{self.resumed_from} do not repeat the losses of the run that went on."
            )
        return found

    def misses(self) -> list[str]:
        """A sentence for each formula that is off, by how many bytes."""
        found = []
        if self.state.total != self.state_formula:
            found.append(
                f"{self.name}: a rank holds {self.state.total:,} bytes of model state, and the "
                f"formula says {self.state_formula:,}."
            )
        if self.wire is not None and self.wire != self.wire_formula:
            found.append(
                f"{self.name}: a rank sends {self.wire:,.0f} bytes in a step, and the formula says "
                f"{self.wire_formula:,.0f}."
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Every number, for ``results.json``."""
        return {**self.__dict__, "state": self.state.__dict__, "state_total": self.state.total}


def _difference(loss: float, alone: float) -> float:
    # NaN would slip through max() and every comparison.
    return abs(loss - alone) / abs(alone) if math.isfinite(loss) else math.inf


def write_json(path: Path, reference: Run, results: Sequence[Result]) -> None:
    """Write all numbers of the run to ``path``.

    Collective: none
    """
    content = {
        "one_process": {"losses": reference.losses, "seconds": reference.seconds},
        "strategies": {result.name: result.as_json() for result in results},
        "tolerance": TOLERANCE,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
