"""What a launcher says, beside what the Trainer's argument says."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

import distft
from distft.interop import Recipe
from distft.interop.launcher import FLAGS, from_environment, take_over
from distft.trainer.strategy import chosen_strategy

pytest.importorskip("accelerate")
# As `accelerate launch` sets them for files that `distft.interop.write` wrote.
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false", "WORLD_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "no",
}  # fmt: skip
SIZES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1", "PARALLELISM_CONFIG_SP_SIZE": "1",
}  # fmt: skip
ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "WORLD_SIZE": "4",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WORLD_SIZE": "4"}, None),
        (FSDP, Recipe("fsdp2", {}, 4)),
        (
            {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"},
            Recipe("fsdp2", {"reshard_after_forward": False, "offload": "params"}, 4),
        ),
        ({**FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, Recipe("ddp", {}, 4)),
        ({**FSDP, **SIZES}, Recipe("hsdp", {"dp_replicate": 2, "dp_shard": 2}, 4)),
        (
            {**FSDP, **SIZES, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
             "PARALLELISM_CONFIG_TP_SIZE": "2"},
            Recipe("nd", {"dp_shard": 2, "tp": 2}, 4),
        ),
        (ZERO, Recipe("zero2", {"offload": "optimizer"}, 4)),
    ],
)  # fmt: skip
def test_the_environment_of_accelerate_launch_is_a_recipe(env, expected):
    assert from_environment(env) == expected


def test_sequences_over_ranks_are_refused():
    with pytest.raises(ValueError, match="cp_size=2"):
        from_environment({**FSDP, **SIZES, "PARALLELISM_CONFIG_CP_SIZE": "2"})


@pytest.fixture
def launched():
    before = dict(os.environ)

    def set_to(env):
        os.environ.update(env)

    yield set_to
    os.environ.clear()
    os.environ.update(before)


def arguments(**changes):
    return SimpleNamespace(
        bf16=False, use_cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=None, **changes
    )


def test_auto_is_what_the_launcher_says_and_accelerate_is_told_nothing_more(launched):
    launched({**FSDP, **SIZES})
    assert chosen_strategy("auto", arguments(), None, None) == distft.HSDP(
        dp_replicate=2, dp_shard=2
    )
    assert not any(flag in os.environ for flag in FLAGS)


def test_an_argument_that_says_the_same_is_no_conflict(launched):
    launched(FSDP)
    assert chosen_strategy("fsdp2", arguments(), None, None) == distft.FSDP2()


@pytest.mark.parametrize("asked", ["zero3", distft.HSDP(dp_replicate=2), "ddp"])
def test_a_conflict_with_the_argument_shows_both(launched, asked):
    launched(FSDP)
    name = "ZeRO3" if asked == "zero3" else "DDP" if asked == "ddp" else "HSDP"
    with pytest.raises(ValueError, match=rf"says FSDP2\(\), and .* says {name}\("):
        chosen_strategy(asked, arguments(), None, None)


def test_accumulation_is_part_of_a_conflict(launched):
    launched({**ZERO, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"})
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=8.*say 2"):
        chosen_strategy("auto", arguments(), None, None)


def test_auto_without_a_launchers_word_and_without_a_gpu_is_ddp():
    assert chosen_strategy("auto", arguments(), None, None) == "ddp"
    assert chosen_strategy("zero2", arguments(), None, None) == "zero2"
    env = dict.fromkeys(FLAGS, "true")
    take_over(env)
    assert env == {}


def test_auto_on_gpus_is_the_planners_best_for_model_and_load(monkeypatch, launched):
    from transformers import LlamaConfig

    from distft.topology import Cluster
    from distft.trainer.strategy import _best

    launched({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"})
    monkeypatch.setattr(Cluster, "detect", lambda: Cluster.preset("8xH100-SXM"))
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    args = arguments(per_device_train_batch_size=1, max_length=4096, activation_checkpointing=True)
    args.bf16 = True
    name, fields = _best(args, SimpleNamespace(config=config), None)
    # 8 billion parameters with AdamW are 128 GB of state, more than one GPU has.
    assert name in ("zero3", "fsdp2", "zero2")
    assert fields["precision"] == "bf16-mixed"
    assert distft.strategy(name, **fields).activation_checkpointing
    launched({"WORLD_SIZE": "16"})
    with pytest.raises(ValueError, match="plans for 1 machine, and there are 2"):
        _best(args, SimpleNamespace(config=config), None)
