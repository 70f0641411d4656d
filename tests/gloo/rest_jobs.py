"""What ranks run in the tests of runs that go on with the rest of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gloo.trainer_jobs import trainer


def rows_of_steps(
    folder: Path, strategy: Any, changes: dict[str, Any], resume: Path | None = None
) -> dict[str, Any]:
    """Return the log of a run, and this rank's rows of each micro-step as their tokens."""
    running = trainer(folder, strategy, "L", {"save_strategy": "steps", **changes}, None)
    seen: list[list[tuple[int, ...]]] = []
    running.model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(_rows(inputs)), with_kwargs=True
    )
    running.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {"log": running.state.log_history, "rows": seen, "last": running.state.max_steps}


def _rows(inputs: dict[str, Any]) -> list[tuple[int, ...]]:
    found = []
    for ids, mask, labels in zip(
        inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True
    ):
        if (labels != -100).any():
            found.append(tuple(ids[mask.bool()].tolist()))
    return found
