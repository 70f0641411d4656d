"""Go on with a run of examples/sft.py under another strategy, on other ranks and batches.

torchrun --nproc-per-node 4 examples/resume_elsewhere.py --checkpoints runs/sft --strategy zero3 \
    --model Qwen/Qwen3-8B --dataset trl-lib/Capybara --out runs/elsewhere
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig
from sft import _dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import distft


def main() -> None:
    """Train the rest of the epoch that the run had begun, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", required=True, help="folder of the run's checkpoints")
    parser.add_argument("--model", required=True, help="name or folder, as of the run")
    parser.add_argument("--dataset", required=True, help="name or folder, as of the run")
    parser.add_argument("--strategy", default="zero3", help="such as ddp, zero3, fsdp2, auto")
    parser.add_argument("--out", default="runs/elsewhere", help="folder of new checkpoints")
    parser.add_argument("--batch", type=int, default=1, help="rows of a rank's micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--lora-rank", type=int, default=0, help="as of the run")
    options = parser.parse_args()

    checkpoint = distft.latest(options.checkpoints)
    print(distft.inspect(checkpoint))
    lora = LoraConfig(r=options.lora_rank or 1, target_modules="all-linear")
    trainer = distft.Trainer(
        AutoModelForCausalLM.from_pretrained(options.model),
        SFTConfig(
            options.out,
            num_train_epochs=1,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            save_steps=100,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        strategy=options.strategy,
        train_dataset=_dataset(options.dataset),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=lora if options.lora_rank else None,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(f"{options.out}/model")


if __name__ == "__main__":
    main()
