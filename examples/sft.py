"""Supervised fine-tuning of a model under a strategy, in full or with LoRA.

torchrun --nproc-per-node 8 examples/sft.py --model Qwen/Qwen3-8B --dataset trl-lib/Capybara
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset, load_from_disk
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import distft


def main() -> None:
    """Train, go on where an earlier run stopped, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="name or folder, tokenizer included")
    parser.add_argument("--dataset", required=True, help="name, or folder of a dataset")
    parser.add_argument("--strategy", default="fsdp2", help="such as ddp, zero3, fsdp2")
    parser.add_argument("--out", default="runs/sft")
    parser.add_argument("--steps", type=int, default=-1, help="default one epoch")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--resume", action="store_true", help="from the latest in --out")
    options = parser.parse_args()

    lora = LoraConfig(r=options.lora_rank or 1, target_modules="all-linear")
    trainer = distft.Trainer(
        AutoModelForCausalLM.from_pretrained(options.model),
        SFTConfig(
            options.out,
            num_train_epochs=1,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            save_steps=100,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        strategy=options.strategy,
        train_dataset=_dataset(options.dataset),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=lora if options.lora_rank else None,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.out}/model")


def _dataset(name: str):
    try:
        return load_from_disk(name)
    except FileNotFoundError:
        return load_dataset(name, split="train")


if __name__ == "__main__":
    main()
