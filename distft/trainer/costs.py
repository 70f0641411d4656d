"""What a run of the Trainer was predicted to hold and to send, from its model and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distft.formulas.architectures import expert_numbers
from distft.spec import ModelSpec, Workload

if TYPE_CHECKING:
    from torch import nn

    from distft.strategies.base import Strategy


def flops_per_token(model: nn.Module) -> float:
    """Return the arithmetic of training on one token: ``4 A + 2 T`` FLOPs.

    A are the parameters that a token uses, two FLOPs each forward and two for the gradient of
    what goes in; T those of them that train, two each for their own gradient. With all trained it
    is ``6 A``. Attention's scores are left out.

    Source: Kaplan et al. 2020, section 2.1; frozen weights have no gradient of their own.

    Collective: none.
    """
    experts, per_token = expert_numbers(getattr(model, "config", None))
    used = trained = 0.0
    for name, parameter in model.named_parameters():
        number = float(getattr(parameter, "ds_numel", parameter.numel()))
        if experts and ".experts." in name:
            number *= per_token / experts
        used += number
        trained += number if parameter.requires_grad else 0.0
    return 4 * used + 2 * trained


def workload_of(config: Any, args: Any, peft_config: Any, seq_len: int) -> Workload:
    """Return the load of a step, as the formulas take it.

    Raises:
        ValueError: The optimizer is one that they do not know.

    Collective: none.
    """
    optimizer = str(getattr(args.optim, "value", args.optim)).partition("_")[0]
    common = {
        "micro_batch": args.per_device_train_batch_size,
        "seq_len": seq_len,
        "grad_accum": args.gradient_accumulation_steps,
        "optimizer": optimizer,
        "attention": _attention(getattr(config, "_attn_implementation", None)),
        # TRL computes it in parts, without all logits at once.
        "loss": "fused",
    }
    if peft_config is None:
        return Workload(**common)
    patterns: Mapping[str, int] = peft_config.rank_pattern or {}
    parameters = peft_config.target_parameters or ()
    targets = peft_config.target_modules
    return Workload(
        **common,
        tuning="qlora" if getattr(config, "quantization_config", None) else "lora",
        lora_rank=peft_config.r,
        lora_targets=targets if isinstance(targets, str) else tuple(sorted(targets or ())),
        expert_lora_rank=patterns.get(parameters[0], peft_config.r) if parameters else None,
    )


def _attention(implementation: str | None) -> str:
    name = implementation or "sdpa"
    return name if name in ("eager", "sdpa") else "flash"


def predicted(strategy: Strategy, config: Any, load: Workload, world_size: int) -> dict[str, float]:
    """Return bytes by name: model state and peak of the heaviest rank, sent by a rank in a step.

    Model state counts in host memory too, where it is offloaded; the peak is the device's.

    Raises:
        ValueError: The formulas do not know the model, or not this load.

    Collective: none.
    """
    spec = ModelSpec.from_config(config)
    memory = strategy.memory(spec, load, world_size=world_size)
    traffic = strategy.traffic(spec, load, world_size=world_size)
    return {
        "model_state": max(map(sum, zip(memory.per_rank, memory.host_per_rank, strict=True))),
        "peak_memory": memory.peak_bytes,
        "sent_per_step": float(traffic.bytes_per_step),
    }
