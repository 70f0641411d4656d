"""What `accelerate launch` says to the processes that it starts, in their environment."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from distft.interop.accelerate import from_deepspeed_section, from_fsdp_sections
from distft.interop.files import read
from distft.interop.recipe import Recipe

# What turns on a part of Accelerate; each is "true" or not there.
_FSDP = "ACCELERATE_USE_FSDP"
_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_SIZES = "ACCELERATE_USE_PARALLELISM_CONFIG"
FLAGS = (_FSDP, _DEEPSPEED, _SIZES)
_ZERO = "ACCELERATE_DEEPSPEED_"


def from_environment(env: Mapping[str, str]) -> Recipe | None:
    """Return the recipe of the file that `accelerate launch` was given, or None.

    None where it names no way to spread a model, as for several GPUs without FSDP or DeepSpeed,
    and under other launchers.

    Args:
        env: Environment of this process.

    Raises:
        ValueError: It says what no strategy here stands for.

    Collective: none.
    """
    on = {flag for flag in FLAGS if env.get(flag, "").lower() in ("true", "1", "yes")}
    ranks = int(env.get("WORLD_SIZE") or 0)
    if _DEEPSPEED in on:
        file = env.get(_ZERO + "CONFIG_FILE", "")
        if file not in ("", "none", "None"):
            return read(Path(file))
        section = {
            "zero_stage": env.get(_ZERO + "ZERO_STAGE", "2"),
            "offload_optimizer_device": env.get(_ZERO + "OFFLOAD_OPTIMIZER_DEVICE"),
            "offload_param_device": env.get(_ZERO + "OFFLOAD_PARAM_DEVICE"),
            "gradient_accumulation_steps": _number(env, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        }
        return from_deepspeed_section(section, {}, {"num_ranks": ranks})
    if not on:
        return None
    fsdp = {
        "fsdp_version": env.get("FSDP_VERSION", "1"),
        "fsdp_sharding_strategy": env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
        "fsdp_reshard_after_forward": env.get("FSDP_RESHARD_AFTER_FORWARD", "true"),
        "fsdp_activation_checkpointing": env.get("FSDP_ACTIVATION_CHECKPOINTING") == "true",
        "fsdp_offload_params": env.get("FSDP_OFFLOAD_PARAMS") == "true",
    }
    sizes = {
        f"parallelism_config_{name}_size": _number(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE")
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    for name in ("cp", "sp"):
        size = sizes.pop(f"parallelism_config_{name}_size")
        if _SIZES in on and size > 1:
            raise ValueError(
                f"accelerate launch says {name}_size={size}, and the strategies here split "
                "sequences over 1 rank. Leave it out."
            )
    sections = {"fsdp_config": fsdp, "parallelism_config": sizes if _SIZES in on else {}}
    if _FSDP not in on and sizes["parallelism_config_dp_shard_size"] <= 1:
        sections["fsdp_config"] = {"fsdp_version": "1", "fsdp_sharding_strategy": "NO_SHARD"}
    return from_fsdp_sections(sections, {}, {"num_ranks": ranks})


def take_over(env: MutableMapping[str, str]) -> None:
    """Clear what would make Accelerate spread the model by itself.

    Collective: none.
    """
    for flag in FLAGS:
        env.pop(flag, None)


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "1")
    return int(value) if value.isdecimal() else 1
