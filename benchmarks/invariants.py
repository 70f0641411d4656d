"""Measure what invariants cost: seconds spent in their code over seconds of all steps.

Ranks train a model whose step takes 50 ms or more, with invariants at their default. Their seconds
are counted inside each hook, waiting for other ranks included, from the first step on. The slowest
rank counts. Exit code 1: the share is above the bound, or a step is too short to tell.

    python benchmarks/invariants.py --strategy ddp fsdp2 tp --steps 200 --out result.md
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import machine

import distft
from distft.testing import WorkerPool

BOUND = 0.005
SHORTEST_STEP = 0.05
ROWS, TOKENS = 2, 128
HEAD = (
    "| strategy | ranks | steps | looked at | a step, ms | in invariants, ms a step | share, % | "
    f"at most {100 * BOUND:g} % |\n|---|---|---|---|---|---|---|---|"
)


def model() -> Any:
    """Return a Llama of 4.3 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def measure(name: str, num_steps: int) -> tuple[float, float, int]:
    """Return seconds of all steps, seconds in invariants, and steps that were looked at."""
    import torch
    from torch.optim import AdamW

    distft.init(seed=0)
    strategy = distft.strategy(name)
    wrapped, optimizer = strategy.apply(model().train(), partial(AdamW, lr=1e-4))
    generator = torch.Generator().manual_seed(strategy.dp_rank)

    def batch() -> dict[str, Any]:
        ids = torch.randint(0, 4096, (ROWS, TOKENS), generator=generator)
        return {"input_ids": ids, "labels": ids}

    with distft.hold_invariants(strategy, wrapped, optimizer) as held:
        began = time.perf_counter()
        for _ in range(num_steps):
            strategy.train_step(wrapped, optimizer, [batch()])
        seconds = time.perf_counter() - began
    return seconds, held.seconds, held.looks


def main() -> int:
    """Run the strategies asked for, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", nargs="+", default=["ddp", "zero3", "fsdp2", "tp"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    rows, shares, steps = [], [], []
    for name in arguments.strategy:
        with WorkerPool(2, timeout=1800) as pool:
            found = pool.run(measure, name, arguments.steps)
        seconds, inside = max(s for s, _, _ in found), max(i for _, i, _ in found)
        shares.append(inside / seconds)
        steps.append(seconds / arguments.steps)
        verdict = "yes" if shares[-1] <= BOUND else "no"
        rows.append(
            f"| {name} | 2 | {arguments.steps} | {found[0][2]} | {1e3 * steps[-1]:.1f} "
            f"| {1e3 * inside / arguments.steps:.3f} | {100 * shares[-1]:.3f} | {verdict} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    num_params = sum(p.numel() for p in model().parameters())
    lines = [
        "# What invariants cost",
        "",
        *machine.describe(),
        f"- Model: Llama, {num_params:,} parameters, fp32; {ROWS} rows of {TOKENS} tokens on each "
        "rank; AdamW; gloo; invariants looked at in steps 1, 2, 50, 100, ... and set up included",
        "",
        HEAD,
        *rows,
    ]
    machine.publish(lines, arguments.out)
    return int(max(shares) > BOUND or min(steps) < SHORTEST_STEP)


if __name__ == "__main__":
    sys.exit(main())
