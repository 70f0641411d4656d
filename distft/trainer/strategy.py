"""The Trainer's strategy where the launcher says one, and ``strategy="auto"``."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distft.interop import Recipe
from distft.interop.launcher import from_environment, take_over
from distft.process_group import from_rank0
from distft.strategies.base import Strategy
from distft.strategies.by_name import strategy as by_name
from distft.topology import Cluster

logger = logging.getLogger("distft")

AUTO = "auto"
# Where Accelerate has only the first rank read the weights of a model.
_FIRST_READS = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def chosen_strategy(
    asked: str | Strategy, args: Any, model: Any, peft_config: Any
) -> str | Strategy:
    """Return what the launcher and the argument say together.

    "auto" is what `accelerate launch` says; without a word of it, the planner's best for this
    model, load and machine, and DDP on a machine without a GPU.

    Args:
        asked: The argument: a name, a strategy, or "auto".
        args: The training arguments.
        model: The model, or its name.
        peft_config: The configuration of adapters, or None.

    Raises:
        ValueError: The launcher says another one than the argument, or nothing can be planned.

    Collective: every rank, for "auto" without a launcher's word; else none.
    """
    said = from_environment(os.environ)
    if said is None:
        return _planned(args, model, peft_config) if asked == AUTO else asked
    for note in said.notes:
        logger.warning("accelerate launch: %s", note)
    _check_accumulation(said, args)
    fields = {key: value for key, value in said.fields.items() if key != "precision"}
    precision = getattr(asked, "precision", "bf16-mixed" if args.bf16 else "fp32")
    launched = by_name(said.name, **fields, precision=precision)
    if asked != AUTO:
        mine = by_name(asked, precision=precision) if isinstance(asked, str) else asked
        if _spreading(mine) != _spreading(launched):
            raise ValueError(
                f"accelerate launch says {launched}, and distft.Trainer(strategy=...) says {mine}. "
                "Pass strategy='auto' to take the launcher's, or launch with torchrun."
            )
    _adopt(args, model)
    return launched


def _spreading(strategy: Strategy) -> tuple[Any, ...]:
    """Return what two strategies must share to spread a model alike, on these ranks."""
    mesh = strategy.mesh(int(os.environ.get("WORLD_SIZE", "1")))
    again = getattr(strategy, "reshard_after_forward", None)
    return type(strategy).name, mesh, strategy.offload, again


def _check_accumulation(said: Recipe, args: Any) -> None:
    if said.grad_accum not in (1, args.gradient_accumulation_steps):
        raise ValueError(
            f"accelerate launch says gradient_accumulation_steps={said.grad_accum}, and the "
            f"training arguments say {args.gradient_accumulation_steps}. Give both the same."
        )


def _adopt(args: Any, model: Any) -> None:
    """Take from Accelerate what it was told, and give each rank the weights."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    first_reads = os.environ.get(_FIRST_READS, "").lower() == "true"
    spread_by_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    take_over(os.environ)
    if any(hasattr(p, "ds_id") for p in getattr(model, "parameters", lambda: ())()):
        raise ValueError(
            "accelerate launch says ZeRO-3, and transformers partitioned the model as it was "
            "loaded: 1 engine would spread what another one has spread. Build the model before the "
            "training arguments, or launch with zero3_init_flag: false."
        )
    # Nor does transformers partition what it loads from here on.
    args.deepspeed_plugin = None
    if PartialState._shared_state.get("distributed_type") == DistributedType.DEEPSPEED:
        kind = DistributedType.MULTI_GPU if torch.cuda.is_available() else DistributedType.MULTI_CPU
        PartialState._shared_state["distributed_type"] = kind
    if first_reads and spread_by_fsdp and isinstance(model, nn.Module) and dist.is_initialized():
        # transformers left the other ranks' weights empty if the group was there before.
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)


def _planned(args: Any, model: Any, peft_config: Any) -> str | Strategy:
    if not torch.cuda.is_available() or args.use_cpu:
        logger.warning("strategy='auto' on a machine without a GPU: DDP.")
        return "ddp"
    # Ranks may see other GPUs; one of them plans.
    recipe = from_rank0(_best(args, model, peft_config))
    logger.warning("strategy='auto': the planner's best is %s with %s.", recipe[0], recipe[1])
    return by_name(recipe[0], **recipe[1])


def _best(args: Any, model: Any, peft_config: Any) -> tuple[str, dict[str, Any]]:
    from distft.planner import plan, recipe_of
    from distft.spec import ModelSpec, Workload

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    if nodes > 1:
        raise ValueError(
            f"strategy='auto' plans for 1 machine, and there are {nodes}: the speed between them "
            "is not known. Pass the strategy that distft.plan says for your cluster."
        )
    config = getattr(model, "config", model)
    load = Workload(
        micro_batch=args.per_device_train_batch_size,
        seq_len=args.max_length or 4096,
        grad_accum=args.gradient_accumulation_steps,
        tuning="full" if peft_config is None else "lora",
        lora_rank=getattr(peft_config, "r", 16),
        loss="chunked",
    )
    best = plan(
        ModelSpec.from_config(config),
        load,
        Cluster.detect(),
        num_gpus=ranks,
        precision="bf16-mixed" if args.bf16 else "fp32",
        activation_checkpointing=bool(args.activation_checkpointing),
    ).best
    found = recipe_of(best)
    return found.name, dict(found.fields)
