"""LoRA on attention and experts of a mixture of experts, and an adapter for serving.

torchrun --nproc-per-node 8 examples/moe_lora.py --model Qwen/Qwen3-30B-A3B
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import distft
from distft.process_group import group_rank


def main() -> None:
    """Train, and write the adapter in PEFT's layout, per expert, and a report of the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="name or folder, tokenizer included")
    parser.add_argument("--dataset", default="trl-lib/Capybara", help="name, or folder")
    parser.add_argument("--strategy", default="ep", help="such as ep, fsdp2, hsdp, zero3")
    parser.add_argument("--out", default="runs/moe_lora")
    parser.add_argument("--steps", type=int, default=-1, help="default three epochs")
    parser.add_argument("--rank", type=int, default=64, help="an expert's is max(1, rank // E)")
    parser.add_argument("--train-router", action="store_true")
    options = parser.parse_args()
    data, is_here = options.dataset, Path(options.dataset).exists()
    model = AutoModelForCausalLM.from_pretrained(options.model)
    trainer = distft.Trainer(
        model,
        SFTConfig(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            save_steps=100,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        strategy=options.strategy,
        train_dataset=load_from_disk(data) if is_here else load_dataset(data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=distft.moe_lora(model, options.rank, train_router=options.train_router),
    )
    trainer.train()
    trainer.save_model(f"{options.out}/adapter")
    trainer.report(f"{options.out}/run.html")
    if group_rank() == 0:
        distft.export_adapter(options.out, f"{options.out}/per-expert")


if __name__ == "__main__":
    main()
