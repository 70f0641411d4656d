"""QLoRA of a model whose weights are quantized to 4 bits as each rank reads them.

torchrun --nproc-per-node 4 examples/qlora.py --model Qwen/Qwen3-32B --dataset trl-lib/Capybara
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig

import distft


def main() -> None:
    """Train adapters beside packed weights, go on where an earlier run stopped, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="name or folder, tokenizer included")
    parser.add_argument("--dataset", required=True, help="name, or folder of a dataset")
    parser.add_argument("--strategy", default="fsdp2", help="such as ddp, zero3, fsdp2")
    parser.add_argument("--out", default="runs/qlora")
    parser.add_argument("--steps", type=int, default=-1, help="default 3 epochs")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--resume", action="store_true", help="from the latest in --out")
    options = parser.parse_args()

    distft.init(seed=0)
    data, gpu = options.dataset, torch.cuda.is_available()
    folder = options.model if Path(options.model).is_dir() else snapshot_download(options.model)
    mixed = "bf16-mixed" if gpu else "fp32"
    strategy = distft.strategy(options.strategy, precision=mixed, activation_checkpointing=True)
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    dtype = torch.bfloat16 if gpu else torch.float32
    model = distft.load_model(
        folder,
        strategy,
        peft_config=LoraConfig(r=options.rank, target_modules="all-linear"),
        quantization_config=BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **nf4),
    )
    rows = load_from_disk(data) if Path(data).is_dir() else load_dataset(data, split="train")
    sft = {"per_device_train_batch_size": 1, "save_steps": 100, "report_to": []}
    trainer = distft.Trainer(
        model,
        SFTConfig(options.out, max_steps=options.steps, bf16=gpu, use_cpu=not gpu, **sft),
        strategy=strategy,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.out}/model")


if __name__ == "__main__":
    main()
