"""accelerate's YAML: written for FSDP2, DeepSpeed and DDP; read, FSDP1 included, as FSDP2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from distft.interop.recipe import Recipe

# Weights in bf16 are the model's dtype, which accelerate's file has no key for.
_PURE = "# The model is loaded with dtype=bfloat16."
# Flags of FSDP1 without a counterpart, and why none is needed.
DROPPED = {
    "fsdp_backward_prefetch": "fully_shard always gathers the next block ahead",
    "fsdp_forward_prefetch": "fully_shard gathers ahead from the second step on by itself",
    "fsdp_use_orig_params": "fully_shard has no flat parameter, so that all are original ones",
    "fsdp_sync_module_states": "each rank reads its own part of the weights",
    "fsdp_cpu_ram_efficient_loading": "load_model reads a part on each rank anyway",
    "fsdp_min_num_params": "blocks of the model are the units, by no size",
    "fsdp_auto_wrap_policy": "blocks are those that the model's class names",
    "fsdp_transformer_layer_cls_to_wrap": "blocks are those that the model's class names",
    "fsdp_state_dict_type": "saves are sharded, and consolidate makes whole files",
}
_SHARDING = {
    "FULL_SHARD": ("fsdp2", True),
    "1": ("fsdp2", True),
    "SHARD_GRAD_OP": ("fsdp2", False),
    "2": ("fsdp2", False),
    "NO_SHARD": ("ddp", True),
    "3": ("ddp", True),
    "HYBRID_SHARD": ("hsdp", True),
    "4": ("hsdp", True),
    "HYBRID_SHARD_ZERO2": ("hsdp", False),
    "5": ("hsdp", False),
}


def to_yaml(recipe: Recipe) -> str:
    """Return accelerate's configuration file for a recipe.

    Raises:
        ValueError: accelerate has no experts over ranks.

    Collective: none.
    """
    degrees = recipe.degrees()
    if degrees["ep"] > 1:
        raise ValueError(
            f"ep is {degrees['ep']}, but accelerate 1.15 spreads experts over 1 rank. "
            "Export distributed_config.json for transformers, or launch.sh."
        )
    top = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(recipe),
        "mixed_precision": "bf16" if recipe.precision == "bf16-mixed" else "'no'",
        "num_machines": recipe.nodes,
        "num_processes": recipe.num_ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": "false",
        "debug": "false",
    }
    lines = [_PURE] if recipe.precision == "bf16" else []
    lines += [f"{key}: {value}" for key, value in top.items()]
    for section, values in _sections(recipe, degrees):
        lines += [f"{section}:", *(f"  {key}: {value}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _kind(recipe: Recipe) -> str:
    if recipe.stage is not None:
        return "DEEPSPEED"
    return "MULTI_GPU" if recipe.name == "ddp" else "FSDP"


def _flag(value: Any) -> str:
    return "true" if value else "false"


def _sections(
    recipe: Recipe, degrees: Mapping[str, int]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    fields = recipe.fields
    if recipe.stage is not None:
        places = _places(fields.get("offload"))
        yield (
            "deepspeed_config",
            {
                "zero_stage": recipe.stage,
                "gradient_accumulation_steps": recipe.grad_accum,
                "offload_optimizer_device": places[0],
                "offload_param_device": places[1],
                "zero3_init_flag": _flag(recipe.stage == 3),
            },
        )
    elif recipe.name != "ddp":
        yield (
            "fsdp_config",
            {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": _flag(fields.get("reshard_after_forward", True)),
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_activation_checkpointing": _flag(fields.get("activation_checkpointing")),
                "fsdp_offload_params": _flag(fields.get("offload") == "params"),
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_cpu_ram_efficient_loading": "true",
            },
        )
        if recipe.name != "fsdp2":
            sizes = {
                f"parallelism_config_{name}_size": degrees[name]
                for name in ("dp_replicate", "dp_shard", "tp")
            }
            yield "parallelism_config", sizes


def _places(offload: Any) -> tuple[str, str]:
    return {"optimizer": ("cpu", "none"), "params": ("cpu", "cpu")}.get(offload, ("none", "none"))


def from_yaml(text: str) -> Recipe:
    """Return the recipe of accelerate's configuration file; FSDP1 becomes FSDP2.

    Raises:
        ValueError: It is none of accelerate's, or it says fp16 or a tool unknown here.

    Collective: none.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"This is no YAML: {error}. Pass accelerate's file.") from error
    if not isinstance(values, Mapping) or "distributed_type" not in values:
        raise ValueError(
            "This YAML has no distributed_type, which each of accelerate's files has. "
            "Pass the file that `accelerate config` wrote."
        )
    common: dict[str, Any] = {
        "num_ranks": int(values.get("num_processes") or 0),
        "nodes": int(values.get("num_machines") or 1),
    }
    fields = _precision(str(values.get("mixed_precision")), text)
    kind = str(values["distributed_type"])
    if kind in ("MULTI_GPU", "NO", "MULTI_CPU"):
        return Recipe("ddp", fields, **common)
    if kind == "DEEPSPEED":
        return from_deepspeed_section(values.get("deepspeed_config") or {}, fields, common)
    if kind == "FSDP":
        return from_fsdp_sections(values, fields, common)
    raise ValueError(
        f"distributed_type is {kind}, which no strategy here stands for. "
        "Known are MULTI_GPU, FSDP and DEEPSPEED."
    )


def _precision(said: str, text: str) -> dict[str, Any]:
    if said == "bf16":
        return {"precision": "bf16-mixed"}
    if said in ("fp16", "fp8"):
        raise ValueError(f"mixed_precision is {said}, which distft does not train in. Use bf16.")
    return {"precision": "bf16"} if _PURE in text else {}


def from_deepspeed_section(
    values: Mapping[str, Any], fields: dict[str, Any], common: dict[str, Any]
) -> Recipe:
    """Return the recipe of the section ``deepspeed_config``.

    Raises:
        ValueError: The settings are in a file of DeepSpeed.

    Collective: none.
    """
    if values.get("deepspeed_config_file"):
        raise ValueError(
            f"deepspeed_config_file names {values['deepspeed_config_file']}, where the settings "
            "are. Read that file."
        )
    stage = int(values.get("zero_stage", 2))
    accum = values.get("gradient_accumulation_steps", 1)
    if values.get("offload_param_device") == "cpu":
        fields["offload"] = "params"
    elif values.get("offload_optimizer_device") == "cpu":
        fields["offload"] = "optimizer"
    name = f"zero{stage}" if stage else "ddp"
    return Recipe(name, fields, grad_accum=accum if isinstance(accum, int) else 1, **common)


def from_fsdp_sections(
    values: Mapping[str, Any], fields: dict[str, Any], common: dict[str, Any]
) -> Recipe:
    """Return the recipe of the sections ``fsdp_config`` and ``parallelism_config``.

    Collective: none.
    """
    config = values.get("fsdp_config") or {}
    version = int(config.get("fsdp_version") or 1)
    name, reshard, notes = "fsdp2", True, []
    if version == 1:
        said = str(config.get("fsdp_sharding_strategy") or "FULL_SHARD")
        name, reshard = _SHARDING.get(said.upper(), ("fsdp2", True))
        notes = [
            f"fsdp_version 1 becomes FSDP2: {said} is {name} with reshard_after_forward={reshard}.",
            *(f"{key} is dropped: {DROPPED[key]}." for key in config if key in DROPPED),
        ]
    else:
        reshard = config.get("fsdp_reshard_after_forward", True) not in (False, "false", "False")
    if not reshard:
        fields["reshard_after_forward"] = False
    if config.get("fsdp_activation_checkpointing"):
        fields["activation_checkpointing"] = True
    if config.get("fsdp_offload_params"):
        fields["offload"] = "params"
    sizes = {
        found[1]: int(value)
        for key, value in (values.get("parallelism_config") or {}).items()
        if (found := re.fullmatch(r"parallelism_config_(\w+)_size", key)) and value
    }
    copies, tp = sizes.get("dp_replicate", 1), sizes.get("tp", 1)
    if tp > 1:
        name = "nd"
        fields |= {"dp_shard": sizes.get("dp_shard", 1), "tp": tp}
        if copies > 1:
            fields["dp_replicate"] = copies
        if fields["dp_shard"] == 1 and copies == 1:
            name = "tp"
            del fields["dp_shard"]
    elif copies > 1:
        name = "hsdp"
        fields |= {"dp_replicate": copies, "dp_shard": sizes.get("dp_shard", 1)}
    return Recipe(name, fields, notes=tuple(notes), **common)
