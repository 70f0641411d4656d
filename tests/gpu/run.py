"""A run on the ranks of a launcher: speed, memory and traffic beside what was predicted.

python -m distft launch --nproc 2 tests/gpu/run.py --strategy fsdp2 --out result.json
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

import distft
from distft.measure import count_collectives, model_state_bytes

ROWS, LEARNING_RATE = 2, 1e-4


def model_of(blocks: int, hidden: int) -> Any:
    """Return a Qwen3 with random weights, the same on every rank."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
    )
    return AutoModelForCausalLM.from_config(config)


def batches_of(tokens: int, steps: int, rank: int) -> list[list[dict[str, torch.Tensor]]]:
    """Return one micro-batch a step, of this rank's own rows."""
    drawn = torch.Generator().manual_seed(rank)
    rows = torch.randint(8192, (steps, ROWS, tokens), generator=drawn)
    return [[{"input_ids": row, "labels": row}] for row in rows]


def main() -> None:
    """Train, measure and let the first rank write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    device = distft.init(seed=0)
    strategy = distft.strategy(options.strategy, precision="bf16-mixed")
    model = model_of(options.blocks, options.hidden)
    spec = distft.ModelSpec.from_model(model)
    wrapped, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=LEARNING_RATE))
    batches = batches_of(options.tokens, options.steps, strategy.dp_rank)
    on_gpu = device.type == "cuda"
    losses, seconds = [], []
    for micro_batches in batches:
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        losses.append(strategy.train_step(wrapped, optimizer, micro_batches).loss)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    with count_collectives() as counted:
        strategy.train_step(wrapped, optimizer, batches[0])
    world_size = dist.get_world_size()
    load = distft.Workload(micro_batch=ROWS, seq_len=options.tokens)
    median = sorted(seconds[2:])[len(seconds[2:]) // 2]
    report = strategy.memory(spec, load, world_size=world_size)
    held = model_state_bytes(wrapped, optimizer)
    found = {
        "strategy": repr(strategy),
        "ranks": world_size,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "backend": dist.get_backend(),
        "losses": losses,
        "tokens_per_second": ROWS * options.tokens * strategy.dp_size / median,
        # Between steps: gradients are there or not, as the engine likes.
        "state_bytes": held.parameters + held.optimizer,
        "predicted_state_bytes": sum(
            report.kind_bytes(kind)[dist.get_rank()] for kind in ("parameters", "optimizer")
        ),
        "peak_bytes": peak,
        "predicted_peak_bytes": report.peak_bytes,
        "sent_bytes": counted.wire_bytes,
        "predicted_sent_bytes": strategy.traffic(spec, load, world_size=world_size).bytes_per_step,
    }
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
