"""What ranks run in the tests of updates that are left out, and of arguments that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gloo.trainer_jobs import arguments, rows, tokenizer, trainer


def with_a_bad_loss(folder: Path, strategy: Any, value: float, at: int) -> dict[str, Any]:
    """Return the log of a run whose loss is spoiled on the last rank in one step, and its weights.

    Weights after each step, of one matrix.
    """
    import os

    from transformers import TrainerCallback

    running = trainer(folder, strategy, "L", {"max_steps": 4}, None)
    original = running.compute_loss
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        return loss * value if last and running.state.global_step == at else loss

    running.compute_loss = spoiled
    name = "model.layers.0.mlp.up_proj.weight"
    weights: list[Any] = []

    class Keeps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            found = running.strategy.gather_weights(running.model_wrapped, {name})
            weights.append(next(iter(found.values())).clone())

    running.add_callback(Keeps())
    running.train()
    return {"log": running.state.log_history, "weights": weights}


def without_loss_tokens(folder: Path, every: bool) -> float:
    """Return the last loss of a run in which some rows, or all, have no loss tokens."""
    from datasets import Dataset

    import distft
    from distft.testing import tiny_model

    found = rows().to_list()
    for number, row in enumerate(found):
        if every or number % 3 == 0:
            row["completion_mask"] = [0] * len(row["input_ids"])
    running = distft.Trainer(
        tiny_model("L"),
        arguments(folder, max_steps=2),
        strategy="fsdp2",
        train_dataset=Dataset.from_list(found),
        processing_class=tokenizer(),
    )
    running.train()
    return float(running.state.log_history[0]["loss"])


def resume_of_another_model(folder: Path) -> None:
    """Save a run of one model, and go on with another one."""
    trainer(folder, "ddp", "L", {"max_steps": 1, "save_strategy": "steps"}, None).train()
    other = trainer(folder / "other", "ddp", "Q", {"max_steps": 2}, None)
    other.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
