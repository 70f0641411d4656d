"""Strategies as files of other tools: out, into the tools' own classes, and back the same."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, Workload, ZeRO1, ZeRO2, ZeRO3, plan
from distft.interop import Recipe, read, write
from distft.interop.accelerate import from_yaml

MIXED = {"precision": "bf16-mixed"}
DDP_8 = Recipe("ddp", MIXED, 8)
HSDP_2X8 = Recipe("hsdp", {"dp_replicate": 2, "dp_shard": 8, **MIXED}, 16, 2)
TP_2 = Recipe("nd", {"dp_shard": 4, "tp": 2, **MIXED}, 8)
YAML = [
    DDP_8,
    Recipe("ddp", {}, 2),
    Recipe("zero1", {**MIXED, "offload": "optimizer"}, 8, grad_accum=4),
    Recipe("zero2", MIXED, 8),
    Recipe("zero3", {**MIXED, "offload": "params"}, 8),
    Recipe("fsdp2", {**MIXED, "activation_checkpointing": True}, 8),
    Recipe("fsdp2", {"precision": "bf16", "reshard_after_forward": False}, 8),
    Recipe("fsdp2", {**MIXED, "offload": "params"}, 8),
    HSDP_2X8,
    TP_2,
    Recipe("nd", {"dp_replicate": 2, "dp_shard": 2, "tp": 2, **MIXED}, 8),
    Recipe("tp", {"tp": 4, **MIXED}, 4),
]


def made(recipe: Recipe) -> distft.Strategy:
    return distft.strategy(recipe.name, **recipe.fields)


def written(recipe: Recipe, folder: Path, name: str) -> Any:
    path = write(recipe, folder / name)
    return path, path.read_text()


@pytest.mark.parametrize("recipe", YAML, ids=lambda recipe: f"{recipe.name}-{recipe.num_ranks}")
def test_accelerates_file_reads_back_as_the_same_strategy(recipe, tmp_path):
    path, _ = written(recipe, tmp_path, "accelerate.yaml")
    back = read(path)
    assert made(back) == made(recipe)
    assert (back.num_ranks, back.nodes) == (recipe.num_ranks, recipe.nodes)


@pytest.mark.parametrize("recipe", YAML, ids=lambda recipe: f"{recipe.name}-{recipe.num_ranks}")
def test_accelerate_itself_reads_the_file(recipe, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    path, _ = written(recipe, tmp_path, "accelerate.yaml")
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes == recipe.num_ranks
    assert loaded.mixed_precision == ("bf16" if recipe.precision == "bf16-mixed" else "no")
    if recipe.name == "hsdp":
        assert loaded.parallelism_config["parallelism_config_dp_replicate_size"] == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
def test_deepspeeds_file_reads_back_as_the_same_strategy(stage, precision, tmp_path):
    fields = {} if precision == "fp32" else {"precision": precision}
    recipe = Recipe(f"zero{stage}", fields, micro_batch=2, grad_accum=4)
    path, text = written(recipe, tmp_path, "deepspeed.json")
    back = read(path)
    assert made(back) == made(recipe)
    assert (back.micro_batch, back.grad_accum) == (2, 4)
    assert json.loads(text)["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("recipe", [DDP_8, Recipe("fsdp2", {}, 8), HSDP_2X8, TP_2])
def test_accelerates_class_takes_the_sizes(recipe, tmp_path):
    from accelerate import ParallelismConfig

    path, text = written(recipe, tmp_path, "parallelism_config.json")
    config = ParallelismConfig(**json.loads(text))
    assert config.total_size == recipe.num_ranks
    back = read(path)
    assert made(back).mesh(recipe.num_ranks) == made(recipe).mesh(recipe.num_ranks)


@pytest.mark.parametrize(
    "recipe",
    [DDP_8, Recipe("fsdp2", MIXED, 8), HSDP_2X8, TP_2, Recipe("ep", {"ep": 4, **MIXED}, 8)],
    ids=lambda recipe: recipe.name,
)
def test_transformers_class_takes_the_keywords_and_reads_back(recipe, tmp_path):
    from transformers.distributed import DistributedConfig

    path, text = written(recipe, tmp_path, "distributed_config.json")
    config = DistributedConfig(**json.loads(text))
    assert (config.tp_size or 1) == recipe.degrees()["tp"]
    back = made(read(path))
    if recipe.name != "ddp":
        assert back == made(recipe)
    assert back.mesh(recipe.num_ranks) == made(recipe).mesh(recipe.num_ranks)


@pytest.mark.parametrize("recipe", [*YAML, Recipe("ep", {"ep": 4}, 8)])
def test_a_launch_file_is_a_shell_script_and_reads_back(recipe, tmp_path):
    path, text = written(recipe, tmp_path, "launch.sh")
    subprocess.run(["sh", "-n", str(path)], check=True)
    assert f"--nproc-per-node={recipe.num_ranks // recipe.nodes}" in text
    assert read(path) == recipe


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("FULL_SHARD", FSDP2(precision="bf16-mixed")),
        ("SHARD_GRAD_OP", FSDP2(precision="bf16-mixed", reshard_after_forward=False)),
        ("HYBRID_SHARD", HSDP(precision="bf16-mixed")),
        ("NO_SHARD", DDP(precision="bf16-mixed")),
    ],
)
def test_fsdp1_becomes_fsdp2_and_each_dropped_flag_is_explained(sharding, expected):
    text = (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n"
        f"  fsdp_sharding_strategy: {sharding}\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
        "  fsdp_use_orig_params: true\n  fsdp_sync_module_states: true\n"
    )
    found = from_yaml(text)
    assert made(found) == expected
    notes = " ".join(found.notes)
    for flag in ("fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states"):
        assert f"{flag} is dropped: " in notes


def test_a_plan_exports_its_best_option_and_reads_back(tmp_path):
    found = plan("Llama-3.1-8B", Workload(loss="chunked"), activation_checkpointing=True)
    path = found.export(tmp_path / "launch.sh")
    best = found.best.candidate.strategy(precision="bf16-mixed", activation_checkpointing=True)
    assert made(read(path)) == best


@pytest.mark.parametrize(
    ("strategy", "label"),
    [
        (DDP(), "DDP"),
        (ZeRO1(), "ZeRO1"),
        (ZeRO2(), "ZeRO2"),
        (ZeRO3(), "ZeRO3"),
        (FSDP2(), "FSDP2"),
        (EP(ep=4), "EP ep=4"),
        (NDParallel(dp_shard=4, tp=2), "NDParallel dp_shard=4 tp=2"),
    ],
)
def test_every_kind_of_option_goes_through_a_launch_file(strategy, label, tmp_path):
    found = plan("Qwen3-30B-A3B", Workload(), precision="fp32")
    option = next(each for each in found.options if each.label == label)
    assert made(read(found.export(tmp_path / "launch.sh", option))) == strategy


def test_tensor_parallel_alone_goes_through_a_launch_file(tmp_path):
    recipe = Recipe("tp", {"tp": 4}, 4)
    assert made(read(write(recipe, tmp_path / "launch.sh"))) == TP(tp=4)


@pytest.mark.parametrize(
    ("recipe", "name", "message"),
    [
        (Recipe("ep", {"ep": 4}, 8), "accelerate.yaml", "ep is 4.*distributed_config.json"),
        (Recipe("fsdp2", {}, 8), "deepspeed.json", "fsdp2.*zero1, zero2 and zero3"),
        (Recipe("zero3", {}, 8), "distributed_config.json", "zero3.*deepspeed.json"),
        (Recipe("zero3", {}, 8), "parallelism_config.json", "zero3"),
        (Recipe("fsdp2", {}, 8), "plan.toml", "'plan.toml'.*accelerate.yaml"),
        (Recipe("hsdp", {"dp_replicate": 3}, 8), "accelerate.yaml", "8 ranks are no multiple of"),
    ],
)
def test_what_a_tool_does_not_have_is_refused(recipe, name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write(recipe, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [", "no YAML"),
        ("a.yaml", "a: 1", "no distributed_type"),
        ("a.yaml", "distributed_type: TPU", "TPU.*MULTI_GPU"),
        ("a.yaml", "distributed_type: FSDP\nmixed_precision: fp16", "fp16.*Use bf16"),
        ("a.json", "{", "no JSON"),
        ("a.json", "[]", "is a list"),
        ("a.json", "{}", "no zero_optimization"),
        ("a.json", '{"zero_optimization": {}, "fp16": {"enabled": true}}', "Use bf16"),
        ("a.sh", "torchrun", "none of the files"),
    ],
)
def test_a_file_of_something_else_is_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)
