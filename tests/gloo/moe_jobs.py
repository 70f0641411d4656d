"""What ranks run in the tests of mixtures of experts under the Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.gloo.trainer_jobs import arguments, rows, tokenizer

# Rows of a step are whole micro-batches of one process too, the last step of an epoch included.
STEPS = {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 10, "router_aux_loss_coef": 0.1}


def pieces(model: str, experts: str, router: bool) -> tuple[Any, Any]:
    """Return a model and a config of adapters on attention and experts."""
    import distft
    from distft.testing import tiny_model

    built = tiny_model(model, experts_implementation=experts)
    return built, distft.moe_lora(built, r=8, lora_alpha=8, train_router=router)


def train_plainly(folder: Path, model: str, router: bool, changes: dict[str, Any]) -> Any:
    """Return log and adapter of TRL's own trainer in one process, experts one after another."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    from trl import SFTTrainer

    built, config = pieces(model, "eager", router)
    trainer = SFTTrainer(
        built,
        arguments(folder, **{**STEPS, **changes}),
        train_dataset=rows(),
        eval_dataset=rows(11, seed=1),
        processing_class=tokenizer(),
        peft_config=config,
    )
    trainer.train()
    return trainer.state.log_history, trained(trainer.model)


def trained(model: Any) -> dict[str, Any]:
    """Return copies of the parameters that train."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def train(
    folder: Path, strategy: Any, model: str, router: bool, changes: dict[str, Any], **more: Any
) -> Any:
    """Return log and adapter of a run under a strategy, experts as one grouped product."""
    running = trainer(folder, strategy, model, router, changes, **more)
    running.train()
    names = [n for n, p in running.model.named_parameters() if p.requires_grad]
    weights = strategy.gather_weights(running.model_wrapped, names)
    running.save_model(str(folder / "published"))
    return running.state.log_history, weights


def trainer(
    folder: Path, strategy: Any, model: str, router: bool, changes: dict[str, Any], **more: Any
) -> Any:
    """Return a trainer under a strategy."""
    import distft

    built, config = pieces(model, "grouped_mm", router)
    return distft.Trainer(
        built,
        arguments(folder, **{**STEPS, **changes}),
        strategy=strategy,
        train_dataset=rows(),
        eval_dataset=rows(11, seed=1),
        processing_class=tokenizer(),
        peft_config=config,
        **more,
    )


FOUR = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 2}


def saved(folder: Path, strategy: Any, changes: dict[str, Any]) -> Any:
    """Return the log of four steps, saved after two and four."""
    running = trainer(folder, strategy, "M", True, {**FOUR, **changes})
    running.train()
    return running.state.log_history


def resumed(folder: Path, strategy: Any, changes: dict[str, Any], path: Path) -> Any:
    """Return the log of a run that goes on from a checkpoint."""
    running = trainer(folder, strategy, "M", True, {**FOUR, **changes})
    running.train(resume_from_checkpoint=str(path))
    return running.state.log_history


def router_update(folder: Path, strategy: Any, accumulation: int) -> dict[str, Any]:
    """Return what one step of SGD does to routers and head, every row being the same."""
    from datasets import Dataset

    import distft
    from distft.testing import tiny_model

    row = {"input_ids": list(range(3, 15)), "completion_mask": [0, 0] + [1] * 10}
    changes = {
        "max_steps": 1, "per_device_train_batch_size": 1, "max_grad_norm": 0.0, "optim": "sgd",
        "gradient_accumulation_steps": accumulation, "learning_rate": 1.0, "weight_decay": 0.0,
        "lr_scheduler_type": "constant", "router_aux_loss_coef": 5.0,
    }  # fmt: skip
    # With as many chosen as there are, the loss has no gradient.
    sizes = {"num_experts": 4, "num_experts_per_tok": 1}
    before = dict(tiny_model("M", **sizes).named_parameters())
    running = distft.Trainer(
        tiny_model("M", **sizes),
        arguments(folder, **changes),
        strategy=strategy,
        train_dataset=Dataset.from_list([row] * 8),
        processing_class=tokenizer(),
    )
    running.train()
    names = [name for name in before if "mlp.gate" in name or "lm_head" in name]
    after = strategy.gather_weights(running.model_wrapped, names)
    return {name: after[name] - before[name].detach() for name in names}
