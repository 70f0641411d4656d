"""What ranks run in the tests of runs that go on with the rest of an epoch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distft import DDP
from tests.gloo.trainer_jobs import arguments, lora, rows, tokenizer, trainer


def rows_of_steps(
    folder: Path, strategy: Any, changes: dict[str, Any], resume: Path | None = None
) -> dict[str, Any]:
    """Return the log of a run, and this rank's rows of each micro-step as their tokens."""
    running = trainer(folder, strategy, "L", {"save_strategy": "steps", **changes}, None)
    seen = _rows_seen(running.model)
    running.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {"log": running.state.log_history, "rows": seen, "last": running.state.max_steps}


def streams_after_resume(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank that goes on trains, what it draws next, and what the log says."""
    import logging

    import torch

    said: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("distft"), Listens()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    running = trainer(folder / "on", DDP(), "L", changes, None)
    seen = _rows_seen(running.model)
    running.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    logger.removeHandler(listener)
    logger.setLevel(level)
    return {"rows": seen, "drawn": float(torch.rand(())), "said": "\n".join(said)}


def evaluation_of_nine_rows(folder: Path, size: int) -> dict[str, float]:
    """Return what an evaluation says of nine rows in batches of a size."""
    running = trainer(folder, "ddp", "L", {"per_device_eval_batch_size": size}, None)
    metrics = running.evaluate(running.eval_dataset.select(range(9)))
    logged = running.state.log_history[-1]
    keys = ("eval_mean_token_accuracy", "eval_entropy")
    return {"eval_loss": metrics["eval_loss"], **{key: logged[key] for key in keys}}


def train_attached(folder: Path, strategy: Any, size: int, config: Any = None) -> Any:
    """Return the log of a run whose model came with an adapter; without a strategy TRL's own."""
    import torch
    from peft import get_peft_model
    from trl import SFTTrainer

    import distft
    from distft.testing import tiny_model

    if strategy is None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    torch.manual_seed(7)
    model = get_peft_model(tiny_model("L"), lora())
    running = (SFTTrainer if strategy is None else distft.Trainer)(
        model,
        arguments(folder, per_device_train_batch_size=size),
        train_dataset=rows(),
        processing_class=tokenizer(),
        peft_config=config,
        **({} if strategy is None else {"strategy": strategy}),
    )
    running.train()
    return running.state.log_history


def _rows_seen(model: Any) -> list[list[tuple[int, ...]]]:
    """Return a list that gets the rows of each forward pass as their tokens."""
    seen: list[list[tuple[int, ...]]] = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(_rows(inputs)), with_kwargs=True
    )
    return seen


def _rows(inputs: dict[str, Any]) -> list[tuple[int, ...]]:
    found = []
    for ids, mask, labels in zip(
        inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True
    ):
        if (labels != -100).any():
            found.append(tuple(ids[mask.bool()].tolist()))
    return found
