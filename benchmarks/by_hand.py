"""The steps that `benchmarks/step.py` holds distft against: what a careful person writes by hand.

Nothing here uses distft. Each step takes the mean over the loss tokens of all ranks and
micro-batches, clips the global norm at 1.0 and applies AdamW. The reducers of torch and DeepSpeed
average over ranks, so every loss is multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-3
MAX_NORM = 1.0

# What decides how much is sent and when: written as distft has it, so that the two sides move the
# same bytes and the ratio is the cost of the layer between.
ZERO_SETTINGS = {
    "overlap_comm": False,
    "use_multi_rank_bucket_allreduce": False,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}

Batch = dict[str, Tensor]
Step = Callable[[list[Batch]], float]


def build(strategy: str, model: nn.Module, micro_steps: int) -> Step:
    """Return a step of ``model`` under ``strategy`` that returns the loss of the global batch."""
    if strategy == "ddp":
        return _ddp(model)
    if strategy in ("fsdp2", "hsdp"):
        return _fully_shard(model, replicas=2 if strategy == "hsdp" else 1)
    return _deepspeed(model, stage=int(strategy.removeprefix("zero")), micro_steps=micro_steps)


def _ddp(model: nn.Module) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LEARNING_RATE)

    def step(batches: list[Batch]) -> float:
        num_loss_tokens = _count(batches)
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            more = index < len(batches) - 1
            with wrapped.no_sync() if more else nullcontext():
                loss = _sum_of_losses(wrapped, batch)
                (loss * dist.get_world_size() / num_loss_tokens).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _mean(total, num_loss_tokens)

    return step


def _fully_shard(model: Any, replicas: int) -> Step:
    ranks = dist.get_world_size()
    if replicas == 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    else:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    sharded: FSDPModule = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(batches: list[Batch]) -> float:
        num_loss_tokens = _count(batches)
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            # Shards are reduced in every micro-step, which is what keeps gradients sharded;
            # replicas are reduced once.
            sharded.set_is_last_backward(last)
            sharded.set_requires_all_reduce(last)
            loss = _sum_of_losses(model, batch)
            (loss * ranks / num_loss_tokens).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return _mean(total, num_loss_tokens)

    return step


def _deepspeed(model: nn.Module, stage: int, micro_steps: int) -> Step:
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": stage, **ZERO_SETTINGS},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batches: list[Batch]) -> float:
        num_loss_tokens = _count(batches)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = _sum_of_losses(engine, batch)
            # The mean over micro-steps is already in the number of loss tokens.
            engine.backward(loss * dist.get_world_size() / num_loss_tokens, scale_wrt_gas=False)
            engine.step()
            total += loss.detach()
        return _mean(total, num_loss_tokens)

    return step


def _sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    return cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def _count(batches: list[Batch]) -> int:
    count = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches))
    dist.all_reduce(count)
    return int(count)


def _mean(total: Tensor, num_loss_tokens: int) -> float:
    dist.all_reduce(total)
    return float(total) / num_loss_tokens
