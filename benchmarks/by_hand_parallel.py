"""The TP, EP and N-D steps that `benchmarks/step.py` holds distft against: transformers' own path.

Nothing here uses distft. transformers splits the model as its documentation says; the norm over
plain and split tensors is written out, since torch's raises on them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from by_hand import LEARNING_RATE, MAX_NORM, Batch, Step, _sum_of_losses
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

# Sizes of dp_shard, tp and ep.
SIZES = {"tp": (1, 2, 1), "ep": (2, 1, 2), "nd": (2, 2, 1)}


def build(name: str, model: nn.Module) -> Step:
    """Return a step of ``model`` that returns the loss of the global batch."""
    shard, tp, ep = SIZES[name]
    config = DistributedConfig(dp_replicate_size=1, fsdp_size=shard, tp_size=tp, ep_size=ep)
    dense = init_device_mesh(
        "cpu", (1, 1, shard, tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    expert = init_device_mesh(
        "cpu", (1, 1, shard * tp // ep, ep), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
    )
    type(model).maybe_distribute_model(model, config, TransformersDeviceMesh(dense, expert))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data = dense["fsdp"].get_group()

    def step(batches: list[Batch]) -> float:
        count = torch.tensor(sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches))
        dist.all_reduce(count, group=data)
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(index == len(batches) - 1)
            loss = _sum_of_losses(model, batch)
            # fully_shard divides by the number of data ranks.
            (loss * shard / int(count)).backward()
            total += loss.detach()
        _clip(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=data)
        return float(total) / int(count)

    return step


def _clip(model: nn.Module) -> None:
    """Clip one norm over tensors of several meshes."""
    by_layout: dict[object, list[Tensor]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            key = (gradient.device_mesh, gradient.placements)
            by_layout.setdefault(key, []).append(gradient.to_local())
        elif gradient is not None:
            by_layout.setdefault(None, []).append(gradient)
    total = torch.zeros(())
    for key, tensors in by_layout.items():
        square = torch.stack(torch._foreach_norm(tensors)).square().sum()
        if key is not None:
            mesh, placements = key
            for axis, placement in enumerate(placements):
                if not placement.is_replicate():
                    dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    factor = min(1.0, MAX_NORM / (math.sqrt(float(total)) + 1e-6))
    for tensors in by_layout.values():
        torch._foreach_mul_(tensors, factor)
