"""What ranks run in the tests of the Trainer's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distft import FSDP2
from tests.gloo.trainer_jobs import trainer

SAVING = {"max_steps": 12, "save_strategy": "steps", "save_steps": 100, "logging_steps": 2}


class Forgetful(FSDP2):  # type: ignore[misc]
    """Reads nothing back."""

    def _read_state(self, *_: Any) -> None:
        """Do nothing."""


def run(
    folder: Path, strategy: Any, model: str, changes: dict[str, Any], **more: Any
) -> tuple[list[dict[str, Any]], str]:
    """Return the log of a run and what it wrote as a report."""
    running = trainer(folder, strategy, model, {**SAVING, **changes}, None, **more)
    running.train()
    page = running.report(folder / "run.html")
    return running.state.log_history, page.read_text()


def refused(folder: Path, strategy: Any) -> tuple[str, int]:
    """Return what a run raises, and after how many steps."""
    running = trainer(folder, strategy, "L", SAVING, None)
    try:
        running.train()
    except RuntimeError as error:
        return str(error), running.state.global_step
    return "", running.state.global_step


def continued(folder: Path, strategy: Any) -> dict[str, str]:
    """Return what a run says of itself that goes on with half of the rows in a step."""
    changes = {"max_steps": 2, "save_steps": 2}
    trainer(folder, strategy, "L", {**SAVING, **changes}, None).train()
    changes = {"max_steps": 3, "gradient_accumulation_steps": 1, "ignore_data_skip": True}
    running = trainer(folder, strategy, "L", {**SAVING, **changes}, None)
    running.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    facts: dict[str, str] = running.run_metrics.facts
    return facts
