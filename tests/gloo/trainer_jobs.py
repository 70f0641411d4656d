"""What ranks run in the tests of the Trainer: TRL's, and ours under a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROWS = 22


def rows(number: int = ROWS, seed: int = 0, stream: int = 0) -> Any:
    """Return tokenized rows of unequal length, some without many loss tokens.

    As a stream of so many files, where there is a number of them.
    """
    import torch
    from datasets import Dataset

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 15, (number,), generator=generator).tolist()
    ids = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in lengths]
    masks = [[0] * (i % 4) + [1] * (n - i % 4) for i, n in enumerate(lengths)]
    made = Dataset.from_dict({"input_ids": ids, "completion_mask": masks})
    return made.to_iterable_dataset(num_shards=stream) if stream else made


def tokenizer() -> Any:
    """Return a tokenizer of 131 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{str(i): i for i in range(2, 131)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="2")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def arguments(folder: Path, **changes: Any) -> Any:
    """Return arguments of a short run in fp32."""
    from trl import SFTConfig

    return SFTConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            # Without it the rows' masks are not read.
            "completion_only_loss": True,
            "disable_tqdm": True,
            "seed": 3,
            **changes,
        }
    )


def train_plainly(
    folder: Path,
    model: str,
    changes: dict[str, Any],
    lora: Any = None,
    data: dict[str, Any] | None = None,
) -> Any:
    """Return the log of TRL's own trainer in one process."""
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    from trl import SFTTrainer

    from distft.testing import tiny_model

    trainer = SFTTrainer(
        tiny_model(model),
        arguments(folder, **changes),
        train_dataset=rows(**data or {}),
        eval_dataset=rows(11, seed=1),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    trainer.train()
    return trainer.state.log_history


def trainer(
    folder: Path,
    strategy: Any,
    model: str,
    changes: dict[str, Any],
    config: Any,
    data: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Return a trainer under a strategy."""
    import distft
    from distft.testing import tiny_model

    return distft.Trainer(
        tiny_model(model),
        arguments(folder, **changes),
        strategy=strategy,
        train_dataset=rows(**data or {}),
        eval_dataset=rows(11, seed=1),
        processing_class=tokenizer(),
        peft_config=config,
        **more,
    )


def train(
    folder: Path,
    strategy: Any,
    model: str,
    changes: dict[str, Any],
    config: Any = None,
    data: dict[str, Any] | None = None,
) -> Any:
    """Return the log of a run under a strategy."""
    running = trainer(folder, strategy, model, changes, config, data)
    running.train()
    return running.state.log_history


def lora() -> Any:
    """Return a config of rank 2 without dropout."""
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj", "o_proj"])


def train_loaded(folder: Path, strategy: Any, changes: dict[str, Any]) -> Any:
    """Return the log of a run whose model each rank read its part of."""
    import distft
    from distft.process_group import group_rank, rendezvous
    from distft.testing import tiny_model

    distft.init(seed=3)
    if group_rank() == 0:
        tiny_model("L").save_pretrained(folder / "model")
    rendezvous("the test")
    running = distft.Trainer(
        distft.load_model(folder / "model", strategy),
        arguments(folder, **changes),
        strategy=strategy,
        train_dataset=rows(),
        eval_dataset=rows(11, seed=1),
        processing_class=tokenizer(),
    )
    running.train()
    return running.state.log_history


def evaluate_alone(folder: Path, changes: dict[str, Any]) -> float:
    """Return the loss of an evaluation without training."""
    return float(trainer(folder, "ddp", "L", changes, None).evaluate()["eval_loss"])


TEN = {"max_steps": 10, "save_strategy": "steps", "save_steps": 5}


def interrupted(folder: Path, strategy: Any, config: Any) -> dict[str, Any]:
    """Return log and published model of a run of ten steps that saves after five."""
    running = trainer(folder, strategy, "L", TEN, config)
    running.train()
    running.save_model(str(folder / "published"))
    return {"log": running.state.log_history, "published": published(folder / "published")}


def resumed(folder: Path, strategy: Any, config: Any) -> dict[str, Any]:
    """Return the same of a run that goes on after five steps."""
    copies = getattr(strategy, "tp", 1)
    changes = {**TEN, "per_device_train_batch_size": 2 * copies}
    running = trainer(folder / "on", strategy, "L", changes, config)
    running.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    running.save_model(str(folder / "on" / "published"))
    return {"log": running.state.log_history, "published": published(folder / "on" / "published")}


def published(folder: Path) -> dict[str, Any]:
    """Return the weights that `from_pretrained` finds, adapter and base, by name."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from distft.testing import tiny_model

    if (folder / "adapter_config.json").is_file():
        model: Any = PeftModel.from_pretrained(tiny_model("L"), str(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(str(folder))
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}
