"""What ranks run in the tests of runs that are interrupted: the interruption drawn from a seed."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gloo.trainer_jobs import trainer

STEPS, EVERY = 10, 3
MOMENTS = ("on_step_begin", "on_substep_end", "on_optimizer_step", "on_step_end")
KINDS = ("saves", "SIGKILL", "SIGTERM")


@dataclass(frozen=True)
class Interruption:
    """When which rank gets which signal.

    ``saves`` is SIGTERM to a run that was asked to save on it.
    """

    kind: str
    step: int
    moment: str
    rank: int

    @classmethod
    def of_seed(cls, seed: int, ranks: int) -> Interruption:
        """Return the one of a seed."""
        draw = random.Random(seed)
        return cls(
            KINDS[seed % len(KINDS)],
            draw.randrange(STEPS),
            draw.choice(MOMENTS),
            draw.randrange(ranks),
        )


def changes(kind: str = "") -> dict[str, Any]:
    """Return the arguments of the run."""
    return {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": EVERY,
        "enable_jit_checkpoint": kind == "saves",
    }


def adapter() -> Any:
    """Return an adapter with dropout, so that each step depends on the random state."""
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=7, lora_dropout=0.3, target_modules=["q_proj", "o_proj"])


def run(folder: Path, strategy: Any, interruption: Interruption | None) -> list[dict[str, Any]]:
    """Return the log of a run, begun or gone on with; it may be ended by a signal."""
    from transformers import TrainerCallback

    import distft

    kind = "" if interruption is None else interruption.kind
    running = trainer(folder, strategy, "L", changes(kind), adapter())
    if interruption is not None and interruption.rank == int(os.environ["RANK"]):
        number = signal.SIGKILL if kind == "SIGKILL" else signal.SIGTERM

        class Ends(TrainerCallback):
            pass

        def end(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
            # A step is counted at its end.
            if state.global_step == interruption.step + (interruption.moment == "on_step_end"):
                os.kill(os.getpid(), number)

        setattr(Ends, interruption.moment, end)
        running.add_callback(Ends())
    running.train(resume_from_checkpoint=distft.latest(folder))
    return running.state.log_history
