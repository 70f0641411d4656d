"""Runs of other tools that save in the middle, and the same runs going on here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distft
from distft.checkpoint.foreign_run import decay_groups
from distft.testing import tiny_batches, tiny_model

# Rows in the order in which a run read them, and the loss of each step.
Steps = list[tuple[list[dict[str, torch.Tensor]], float]]
SAVED, ALL = 2, 4


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    tokens = [3 + (5 * i) % 12 for i in range(count)]
    return [{key: value[0] for key, value in b.items()} for b in tiny_batches(tokens)]


def one_by_one(inputs: Any) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a batch as batches of one row."""
    kept = {key: inputs[key] for key in ("input_ids", "labels")}
    count = len(kept["input_ids"])
    return [{key: value[i : i + 1].clone() for key, value in kept.items()} for i in range(count)]


def arguments_of(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "max_steps": ALL,
        "save_steps": SAVED,
        "save_strategy": "steps",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }


def recording(base: type) -> Any:
    """Return a class of trainers that keeps the rows and the loss of every step."""

    class Recording(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            self.kept = getattr(self, "kept", [])
            batches = one_by_one(inputs)
            loss = super().training_step(model, inputs, *more, **options)
            self.kept.append((batches, float(loss)))
            return loss

    return Recording


def run_trainer(out: Path, deepspeed: Any = None) -> Steps:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**arguments_of(out), deepspeed=deepspeed)
    trainer = recording(Trainer)(model=tiny_model("L"), args=arguments, train_dataset=rows())
    trainer.train()
    steps: Steps = trainer.kept[SAVED:]
    return steps


def run_trl(out: Path) -> Steps:
    """Train LoRA adapters with TRL."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"a": 0, "<e>": 1, "<p>": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", pad_token="<p>")
    data = Dataset.from_dict({"input_ids": [[int(t) for t in row["input_ids"]] for row in rows()]})
    trainer = recording(SFTTrainer)(
        model=tiny_model("L"),
        args=SFTConfig(**arguments_of(out), bf16=False, gradient_checkpointing=False),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "down_proj"]),
    )
    trainer.train()
    steps: Steps = trainer.kept[SAVED:]
    return steps


def run_accelerate(out: Path) -> Steps:
    """Train with Accelerate's own loop; the optimizer has one group in the model's order."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = tiny_model("Lt")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    kept: Steps = []
    for step in range(ALL):
        if step == SAVED:
            accelerator.save_state(str(out))
        batches = tiny_batches([5, 5], seed=step)
        loss = sum(model(**batch).loss for batch in batches) / 2
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        kept.append((batches, float(loss)))
    return kept[SAVED:]


def run_dcp(out: Path, flatten: bool) -> Steps:
    """Train with fully_shard and save with torch's distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    distft.init()
    model: Any = tiny_model("L")
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: Steps = []
    for step in range(ALL):
        if step == SAVED:
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            weights, moments = get_state_dict(model, optimizer, options=options)
            key = "optimizer" if flatten else "optim"
            state = {**weights, key: moments} if flatten else {"model": weights, key: moments}
            dcp.save(state, checkpoint_id=out)
        batches = tiny_batches([5] * dist.get_world_size(), seed=step)
        loss = model(**batches[dist.get_rank()]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        kept.append((batches, float(mean) / dist.get_world_size()))
    return kept[SAVED:]


def go_on(
    strategies: Sequence[Any], path: Path, kind: str, steps: Steps
) -> dict[str, tuple[int, list[float]]]:
    """Load a run under each strategy; return the steps it had made and the next losses."""
    from transformers import get_scheduler

    distft.init()
    found = {}
    for strategy in strategies:
        model: Any = tiny_model("Lt" if kind == "accelerate" else "L", seed=9)
        if kind == "trl":
            model = distft.load_adapter(tiny_model("L"), path)
        groups = None
        if kind in ("trainer", "trl"):
            names = [n for n, p in model.named_parameters() if p.requires_grad]
            decayed, rest = decay_groups(model, names)
            groups = [
                {"params": members, "weight_decay": decay}
                for members, decay in ((decayed, 0.1), (rest, 0.0))
            ]
        factory = partial(torch.optim.AdamW, lr=1e-2)
        model, optimizer = strategy.apply(model, factory, groups)
        scheduler: Any = None
        if kind == "accelerate":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        elif kind != "dcp":
            scheduler = get_scheduler("linear", optimizer, 1, ALL)
        state = strategy.load(path, model, optimizer, scheduler=scheduler)
        losses = []
        for batches, _ in steps:
            mine = batches[strategy.dp_rank :: strategy.dp_size]
            losses.append(strategy.train_step(model, optimizer, mine, max_grad_norm=1.0).loss)
            if scheduler is not None:
                scheduler.step()
        found[repr(strategy)] = (state.step, losses)
    return found


def run_trainer_with_deepspeed(out: Path, stage: int) -> Steps:
    """Train with Trainer on DeepSpeed's engine, on every rank."""
    from distft.strategies._deepspeed import load_deepspeed

    load_deepspeed()
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**62,
    }
    return run_trainer(out, config)
