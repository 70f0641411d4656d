"""DeepSpeed's JSON and the keywords of transformers' and accelerate's configuration classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distft.interop.recipe import Recipe


def to_deepspeed(recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe of ZeRO or DDP.

    Raises:
        ValueError: The strategy is none of DeepSpeed's.

    Collective: none.
    """
    if recipe.stage is None and recipe.name != "ddp":
        raise ValueError(
            f"The strategy is {recipe.name}, and DeepSpeed's file is for zero1, zero2 and zero3. "
            "Export accelerate.yaml or launch.sh."
        )
    zero: dict[str, Any] = {"stage": recipe.stage or 0}
    offload = recipe.fields.get("offload")
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload == "params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.grad_accum,
        "bf16": {"enabled": recipe.precision != "fp32"},
        "zero_optimization": zero,
    }
    if recipe.precision == "bf16":
        # Without a master copy in fp32, as distft's "bf16".
        config["bf16"]["bf16_master_weights_and_grads"] = True
        config["bf16"]["bf16_optimizer_states"] = True
    return config


def from_deepspeed(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of DeepSpeed's configuration; "auto" stands for 1.

    Raises:
        ValueError: It is none of DeepSpeed's, or it says fp16 or NVMe.

    Collective: none.
    """
    zero = values.get("zero_optimization")
    if not isinstance(zero, Mapping):
        raise ValueError(
            "This JSON has no zero_optimization, which says DeepSpeed's stage. "
            "Pass the configuration that DeepSpeed reads."
        )
    if (values.get("fp16") or {}).get("enabled") is True:
        raise ValueError("fp16.enabled is true, which distft does not train in. Use bf16.")
    bf16 = values.get("bf16") or {}
    fields: dict[str, Any] = {}
    if bf16.get("enabled") in (True, "auto"):
        fields["precision"] = "bf16" if bf16.get("bf16_master_weights_and_grads") else "bf16-mixed"
    for key, place in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
        device = (zero.get(key) or {}).get("device", "none")
        if device == "nvme":
            raise ValueError(f"{key} is on nvme, which this reads no path of. Use cpu.")
        if device == "cpu":
            fields["offload"] = place
    stage = int(zero.get("stage") or 0)
    return Recipe(
        f"zero{stage}" if stage else "ddp",
        fields,
        micro_batch=_number(values.get("train_micro_batch_size_per_gpu")),
        grad_accum=_number(values.get("gradient_accumulation_steps")),
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def to_parallelism(recipe: Recipe) -> dict[str, int]:
    """Return the keywords of `accelerate.ParallelismConfig`.

    Raises:
        ValueError: The strategy is ZeRO, or has experts over ranks.

    Collective: none.
    """
    degrees = recipe.degrees()
    if recipe.stage is not None or degrees["ep"] > 1:
        raise ValueError(
            f"The strategy is {recipe.name} with ep={degrees['ep']}, and ParallelismConfig has "
            "dp_replicate, dp_shard and tp. Export another file."
        )
    if recipe.name == "ddp":
        degrees["dp_replicate"] = max(recipe.num_ranks, 1)
    return {f"{name}_size": degrees[name] for name in ("dp_replicate", "dp_shard", "tp")}


def to_distributed(recipe: Recipe) -> dict[str, Any]:
    """Return the keywords of transformers' `DistributedConfig`.

    Raises:
        ValueError: The strategy is ZeRO.

    Collective: none.
    """
    if recipe.stage is not None:
        raise ValueError(
            f"The strategy is {recipe.name}, and DistributedConfig has no ZeRO. "
            "Export deepspeed.json."
        )
    degrees = recipe.degrees()
    copies = max(recipe.num_ranks, 1) if recipe.name == "ddp" else degrees["dp_replicate"]
    return {
        "dp_replicate_size": copies,
        "fsdp_size": degrees["dp_shard"],
        "tp_size": degrees["tp"],
        "ep_size": degrees["ep"],
        "enable_expert_parallel": degrees["ep"] > 1,
        "fsdp_cpu_offload": recipe.fields.get("offload") == "params",
        "fsdp_mixed_precision": recipe.precision == "bf16-mixed",
    }


def from_sizes(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the keywords of `ParallelismConfig` or `DistributedConfig`.

    Raises:
        ValueError: A size is below 1.

    Collective: none.
    """

    def size(*names: str) -> int:
        return next((int(values[name]) for name in names if values.get(name)), 1)

    copies, shard = size("dp_replicate_size"), size("fsdp_size", "dp_shard_size")
    tp, ep = size("tp_size"), size("ep_size")
    fields: dict[str, Any] = {}
    if values.get("fsdp_mixed_precision"):
        fields["precision"] = "bf16-mixed"
    if values.get("fsdp_cpu_offload"):
        fields["offload"] = "params"
    ranks = copies * shard * tp
    if tp > 1 or ep > 1:
        given = {"dp_replicate": copies, "dp_shard": shard, "tp": tp, "ep": ep}
        if ep == 1 and copies == 1 and shard == 1:
            return Recipe("tp", {**fields, "tp": tp}, ranks)
        if tp == 1 and copies == 1:
            return Recipe("ep", {**fields, "ep": ep}, ranks)
        chosen = {key: value for key, value in given.items() if value > 1 or key == "dp_shard"}
        return Recipe("nd", {**fields, **chosen}, ranks)
    if shard == 1:
        return Recipe("ddp", fields, ranks)
    if copies > 1:
        return Recipe("hsdp", {**fields, "dp_replicate": copies, "dp_shard": shard}, ranks)
    return Recipe("fsdp2", fields, ranks)


def load_json(text: str) -> Recipe:
    """Return the recipe of one of these files, by its keys.

    Raises:
        ValueError: It is no JSON object, or none of these.

    Collective: none.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"This is no JSON: {error}. Pass a configuration file.") from error
    if isinstance(values, dict) and any(str(key).endswith("_size") for key in values):
        return from_sizes(values)
    if not isinstance(values, dict):
        raise ValueError(f"This JSON is a {type(values).__name__}, and a configuration an object.")
    return from_deepspeed(values)
