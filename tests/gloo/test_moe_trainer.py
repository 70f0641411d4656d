"""MoE-LoRA in the Trainer: TRL's own numbers under every strategy, router and experts included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO3
from distft.testing import tiny_model
from tests.gloo import moe_jobs as jobs

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:The following rank_pattern keys did not match",
)
# Strategy, ranks, data ranks, whether the router trains.
CELLS = [
    (FSDP2(), 2, 2, True),
    (ZeRO3(), 2, 2, True),
    (EP(ep=2), 2, 2, False),
    (NDParallel(dp_shard=4, ep=2), 4, 4, True),
    (HSDP(dp_replicate=2), 4, 4, False),
]
MORE = [
    (FSDP2(), 4, 4, False),
    (ZeRO3(), 4, 4, False),
    (EP(ep=2), 2, 2, True),
    (EP(ep=2), 4, 4, False),
    (HSDP(dp_replicate=2), 4, 4, True),
    (NDParallel(tp=2, ep=2), 4, 2, True),
    (TP(tp=2), 2, 1, False),
]
LOGGED = ("loss", "grad_norm", "aux_loss", "learning_rate", "num_tokens")


def logged(history):
    return [{key: entry[key] for key in LOGGED} for entry in history if "loss" in entry]


def evaluated(history):
    return next(entry for entry in history if "eval_loss" in entry)


def check(pools, folder, strategy, ranks, data_ranks, router):
    # A router's loss depends on which rows are one micro-batch: the same ones on one process.
    size = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    ours = {**size, "gradient_accumulation_steps": 4 // data_ranks}
    alone = {**size, "gradient_accumulation_steps": 4}
    expected, weights = pools(1).run(jobs.train_plainly, folder, "M", router, alone)[0]
    assert len(logged(expected)) == 10
    for history, found in pools(ranks).run(jobs.train, folder, strategy, "M", router, ours):
        for mine, theirs in zip(logged(history), logged(expected), strict=True):
            for key in ("loss", "grad_norm", "aux_loss"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-6), (key, mine, theirs)
            assert mine == pytest.approx(theirs, rel=1e-5)
        key = "eval_aux_loss"
        assert evaluated(history)[key] == pytest.approx(evaluated(expected)[key], rel=1e-6)
        assert set(found) == set(weights)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-5, msg=name)
    moved = {name.split(".lora_")[0] for name, w in weights.items() if "lora_B" in name and w.any()}
    # Four layers of attention and two tensors of experts in each of two layers.
    assert len(moved) == 2 * (4 + 2)
    assert any("mlp.gate.modules_to_save" in name for name in weights) == router


@pytest.mark.parametrize(("strategy", "ranks", "data_ranks", "router"), CELLS, ids=str)
def test_ten_steps_of_adapters_on_experts_log_what_trl_logs_on_one_process(
    pools, tmp_path, strategy, ranks, data_ranks, router
):
    check(pools, tmp_path, strategy, ranks, data_ranks, router)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "data_ranks", "router"), MORE, ids=str)
def test_so_do_other_meshes(pools, tmp_path, strategy, ranks, data_ranks, router):
    check(pools, tmp_path, strategy, ranks, data_ranks, router)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3(), EP(ep=2)], ids=str)
def test_in_bf16_ten_steps_are_near_those_of_one_process(pools, tmp_path, strategy):
    changes = {"bf16": True, "eval_strategy": "no"}
    alone = {**changes, "gradient_accumulation_steps": 4}
    expected, _ = pools(1).run(jobs.train_plainly, tmp_path, "M", False, alone)[0]
    mixed = replace(strategy, precision="bf16-mixed")
    for history, _ in pools(2).run(jobs.train, tmp_path, mixed, "M", False, changes):
        for mine, theirs in zip(logged(history), logged(expected), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)


EP_FSDP = NDParallel(dp_shard=4, ep=2)
CHAINS = [
    (FSDP2(), EP(ep=2), 2),
    (EP(ep=2), ZeRO3(), 2),
    pytest.param(ZeRO3(), FSDP2(), 2, marks=pytest.mark.slow),
    pytest.param(HSDP(dp_replicate=2), EP_FSDP, 4, marks=pytest.mark.slow),
    pytest.param(EP_FSDP, HSDP(dp_replicate=2), 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("first", "second", "ranks"), CHAINS, ids=str)
def test_a_run_goes_on_is_resharded_and_merged(pools, tmp_path, first, second, ranks):
    changes = {"gradient_accumulation_steps": 4 // ranks}
    whole = logged(pools(ranks).run(jobs.saved, tmp_path / "whole", first, changes)[0])
    halfway = tmp_path / "whole" / "checkpoint-2"
    resharded = distft.reshard(halfway, tmp_path / "resharded", second, world_size=ranks)
    for strategy, path in ((first, halfway), (second, halfway), (second, resharded)):
        folder = tmp_path / f"{type(strategy).__name__}-{path.name}"
        found = pools(ranks).run(jobs.resumed, folder, strategy, changes, path)[0]
        for mine, theirs in zip(logged(found), whole, strict=True):
            if strategy == first:
                assert mine == theirs
            assert mine == pytest.approx(theirs, rel=1e-5)
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    distft.verify(checkpoint, require="proven")
    merged = distft.consolidate(checkpoint, tmp_path / "merged", adapter="merge")
    adapter = distft.consolidate(checkpoint, tmp_path / "adapter", adapter="only")
    expected = distft.load_adapter(tiny_model("M"), adapter).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(merged)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", [DDP(), FSDP2(), EP(ep=2)], ids=str)
def test_a_router_moves_alike_on_any_ranks_and_micro_steps(pools, tmp_path, strategy):  # case 64
    expected = pools(1).run(jobs.router_update, tmp_path, DDP(), 1)[0]
    gates = [update for name, update in expected.items() if "gate" in name]
    assert len(gates) == 2
    assert all(update.norm() > 0.01 for update in gates)
    for accumulation in (1, 2):
        for found in pools(2).run(jobs.router_update, tmp_path, strategy, accumulation):
            for name, update in expected.items():
                assert (found[name] - update).norm() <= 1e-5 * update.norm(), name
