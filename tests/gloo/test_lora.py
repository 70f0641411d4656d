"""LoRA under the six strategies: parity, initial values, checkpoints, adapters, costs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.dcp import OPTIMIZER
from distft.peft import attach_adapters, load_adapter
from distft.spec import Workload
from distft.testing import tiny_model
from distft.testing.runs import TrainingRecord, differences, train_alone, train_under
from tests.gloo.lora_jobs import (
    EXPERTS,
    LoraRun,
    LoraTraining,
    attach_late,
    initial_values,
    load_and_step,
    load_other,
    logits_of,
    lora_config,
    measure,
    resize_late,
    save_without_network,
    train_and_save,
)
from tests.reading import read_by_torch

# PEFT reads a property by a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

FIVE = (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2())
HSDP_2X2 = HSDP(dp_replicate=2, dp_shard=2)
WORLDS = [
    *[(strategy, ranks) for ranks in (2, 3) for strategy in FIVE],
    (HSDP(dp_replicate=2, dp_shard=1), 2),
    (HSDP(dp_replicate=1, dp_shard=3), 3),
    (HSDP_2X2, 4),
]
SIX = [*[(strategy, 2) for strategy in FIVE], (HSDP_2X2, 4)]
LORAS = {
    "all": ("L", {"target_modules": "all-linear"}),
    "tied": ("Lt", {"modules_to_save": ["norm"]}),
    "experts": ("M", {"target_parameters": EXPERTS}),
    "last block": ("L", {"layers_to_transform": [1]}),
}
Q_AND_V = {"target_modules": ["q_proj", "v_proj"], "r": 4}


def ids(worlds: list) -> list[str]:
    return [f"{strategy}@{ranks}" for strategy, ranks in worlds]


def live_on_fresh_base(folder: Path, base: torch.nn.Module) -> torch.Tensor:
    """Return the logits of a saved adapter put on a base by PEFT itself."""
    from peft import PeftModel

    return logits_of(PeftModel.from_pretrained(base, str(folder)).eval())


def load_clean(folder: Path) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


# ---- training -----------------------------------------------------------------------------------


@cache
def reference(lora: str, num_micro_batches: int) -> TrainingRecord:
    model, changes = LORAS[lora]
    return train_alone(LoraTraining(model, 3, num_micro_batches, 0.1, lora=changes))


# Three ranks divide no expert: shown by what shards, in every run; the rest in the slow ones.
PARITY = [
    *[(strategy, ranks, "all") for strategy, ranks in WORLDS],
    *[
        pytest.param(
            strategy,
            ranks,
            "experts",
            marks=[pytest.mark.slow] if ranks == 3 and strategy in FIVE[:3] else [],
        )
        for strategy, ranks in WORLDS
    ],
    *[(strategy, 2, "tied") for strategy in FIVE],
    *[(kind(activation_checkpointing=True), 3, "all") for kind in (DDP, ZeRO3, FSDP2)],
]


@pytest.mark.parametrize(("strategy", "ranks", "lora"), PARITY, ids=str)
def test_three_steps_of_adapters_equal_one_process(pools, strategy, ranks, lora):
    model, changes = LORAS[lora]
    training = LoraTraining(model, 3, 2 * ranks, 0.1, lora=changes)
    expected = reference(lora, 2 * ranks)
    assert all(float(gradient.norm()) for gradient in expected.gradients.values())
    for rank, found in enumerate(pools(ranks).run(train_under, strategy, training)):
        assert differences(found, expected) == [], f"rank {rank}"
        assert len(found.gradients) == len(expected.gradients)


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_adapters_start_from_the_same_values_at_any_number_of_ranks(pools, init):
    lora = {**Q_AND_V, "init_lora_weights": init}
    expected = dict(
        attach_adapters(tiny_model("L"), lora_config(**lora), seed=3).named_parameters()
    )
    worlds = [(FSDP2(), ranks) for ranks in (1, 2, 3)]
    worlds += [*SIX, (ZeRO3(), 3)] if init is False else []
    for strategy, ranks in worlds:
        for found in pools(ranks).run(initial_values, strategy, lora):
            assert set(found) == set(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected), strategy


def test_another_seed_of_the_run_draws_other_adapters():
    values = [
        attach_adapters(tiny_model("L"), lora_config(), seed=seed).state_dict() for seed in (0, 1)
    ]
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(values[0][name.format(0)], values[1][name.format(0)])
    assert not torch.equal(values[0][name.format(0)], values[0][name.format(1)])


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=ids(SIX))
def test_a_lora_run_trains_adapters_only_resumes_to_the_bit_and_leaves_peft_files(
    pools, tmp_path, strategy, ranks
):
    # Cases ADPT-02 and CONS-07
    run = LoraRun()
    live = pools(ranks).run(train_and_save, strategy, run, tmp_path / "saved", 2)
    assert all(".lora_" in name for name in live[0]["trained"])
    assert live[0]["trained"] == live[0]["optimized"]
    assert len(live[0]["trained"]) == 4
    assert live[0]["class"].endswith("PeftModel")
    start = attach_adapters(run.build(), lora_config(), seed=3).state_dict()
    for name, weight in live[0]["weights"].items():
        assert torch.equal(weight, start[name]) == (".lora_" not in name), name

    resumed = pools(ranks).run(load_and_step, strategy, LoraRun(seed=9), tmp_path / "saved")
    for before, after in zip(live, resumed, strict=True):
        assert before["losses"] == after["losses"]
        assert all(
            torch.equal(before["last"][name], after["last"][name]) for name in before["last"]
        )

    adapter = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    assert {name: tuple(tensor.shape) for name, tensor in adapter.items()} == {
        layer.format(i, side): shape
        for i in (0, 1)
        for side, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    logits = live_on_fresh_base(tmp_path / "saved" / "adapter", run.build())
    torch.testing.assert_close(logits, live[0]["logits"], rtol=0, atol=1e-5)

    out = distft.consolidate(tmp_path / "saved", tmp_path / "out", exclude_frozen=True)
    assert [path.name for path in out.iterdir()] == ["adapter"]
    assert (
        sum(t.numel() for t in load_file(out / "adapter" / "adapter_model.safetensors").values())
        == 256
    )
    out = distft.consolidate(tmp_path / "saved", tmp_path / "whole", exclude_frozen=False)
    base = load_file(out / "model.safetensors")
    assert len(base) == 21
    assert min(tensor.numel() for tensor in base.values()) > 0
    assert len(load_file(out / "adapter" / "adapter_model.safetensors")) == 4
    merged = load_clean(distft.consolidate(tmp_path / "saved", tmp_path / "one", adapter="merge"))
    torch.testing.assert_close(logits_of(merged), live[0]["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("strategy", "ranks"), [(FSDP2(), 2), (ZeRO3(), 2)], ids=str)
def test_base_adapter_and_merged_model_come_out_under_plain_names(pools, tmp_path, strategy, ranks):
    # Case ADPT-03
    run = LoraRun({"target_modules": "all-linear"})
    live = pools(ranks).run(train_and_save, strategy, run, tmp_path / "saved", 2)[0]
    base = load_clean(distft.consolidate(tmp_path / "saved", tmp_path / "keep", adapter="keep"))
    start = run.build()
    assert set(base.state_dict()) == set(start.state_dict())
    assert all(torch.equal(base.state_dict()[n], p) for n, p in start.state_dict().items())
    logits = live_on_fresh_base(tmp_path / "keep" / "adapter", base)
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)

    out = distft.consolidate(tmp_path / "saved", tmp_path / "only", adapter="only")
    assert json.loads((out / "adapter_config.json").read_text())["lora_alpha"] == 7
    logits = live_on_fresh_base(out, run.build())
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)

    merged = load_clean(
        distft.consolidate(tmp_path / "saved", tmp_path / "merged", adapter="merge")
    )
    assert set(merged.state_dict()) == set(start.state_dict())
    torch.testing.assert_close(logits_of(merged), live["logits"], rtol=0, atol=1e-5)
    assert not (tmp_path / "merged" / "adapter").exists()


@pytest.mark.parametrize("model", ["Lt", "M"])
def test_tied_weights_and_experts_merge_too(pools, tmp_path, model):
    lora = {"target_parameters": EXPERTS} if model == "M" else {"modules_to_save": ["norm"]}
    run = LoraRun(lora, model)
    live = pools(2).run(train_and_save, FSDP2(), run, tmp_path / "saved", 2)[0]
    merged = load_clean(
        distft.consolidate(tmp_path / "saved", tmp_path / "merged", adapter="merge")
    )
    torch.testing.assert_close(logits_of(merged), live["logits"], rtol=0, atol=1e-5)
    base = load_clean(distft.consolidate(tmp_path / "saved", tmp_path / "keep"))
    logits = live_on_fresh_base(tmp_path / "keep" / "adapter", base)
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", [DDP(), FSDP2()], ids=str)
@pytest.mark.parametrize("rows", [None, 137])
def test_an_adapter_is_saved_without_asking_the_hub(pools, tmp_path, strategy, rows):
    # Case ADPT-05
    run = LoraRun(source="org/not-there", rows=rows)
    tried = pools(2).run(save_without_network, strategy, run, tmp_path / "saved")
    assert tried == [[], []]
    adapter = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    embeddings = {name: len(t) for name, t in adapter.items() if ".lora_" not in name}
    prefix = "base_model.model."
    expected = {f"{prefix}model.embed_tokens.weight": 137, f"{prefix}lm_head.weight": 137}
    assert embeddings == (expected if rows else {})


@pytest.mark.parametrize("strategy", [ZeRO3(), FSDP2()], ids=str)
def test_an_adapter_with_a_resized_vocabulary_goes_onto_the_untouched_base(
    pools, tmp_path, strategy
):
    # Case ADPT-04
    run = LoraRun({"modules_to_save": ["embed_tokens", "lm_head"]}, rows=137)
    live = pools(2).run(train_and_save, strategy, run, tmp_path / "saved", 2)[0]
    loaded = load_adapter(tiny_model("L"), tmp_path / "saved").eval()
    assert loaded.config.vocab_size == 137
    for name in ("model.embed_tokens", "lm_head"):
        full = f"base_model.model.{name}.modules_to_save.default.weight"
        assert torch.equal(loaded.state_dict()[full][131:], live["weights"][full][131:])
    torch.testing.assert_close(logits_of(loaded), live["logits"], rtol=0, atol=1e-5)
    for said in pools(2).run(resize_late, strategy):
        assert "The order is resize_token_embeddings(), then adapters, then apply()" in said


# ---- optimizer state ----------------------------------------------------------------------------


def adapter_moments(path: Path) -> dict[str, torch.Tensor]:
    return read_by_torch(path / "dcp", f"{OPTIMIZER}.")


@pytest.mark.parametrize("strategy", [DDP(), FSDP2()], ids=str)
def test_moments_of_adapters_follow_their_names(pools, tmp_path, strategy):
    # Case RESH-08
    saved = pools(2).run(train_and_save, strategy, LoraRun(Q_AND_V), tmp_path / "saved", 3)[0]
    before = adapter_moments(tmp_path / "saved")
    assert all(".lora_" in name for name in before)
    assert len(before) == 8 * 3
    other_order = LoraRun({**Q_AND_V, "target_modules": ["v_proj", "q_proj"]}, seed=9)
    half_frozen = LoraRun(Q_AND_V, seed=9, frozen="v_proj.lora_")
    for run, ranks in ((other_order, 2), (half_frozen, 2), (other_order, 3)):
        again = tmp_path / f"again-{ranks}-{run.frozen}"
        result = pools(ranks).run(load_and_step, strategy, run, tmp_path / "saved", again)[0]
        after = adapter_moments(again)
        assert set(after) == set(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        if run.frozen is None:
            assert result["losses"] == pytest.approx(saved["losses"], rel=1e-6)
    # Adapters that rested go on with the moments they had.
    back = tmp_path / "again-2-v_proj.lora_"
    result = pools(2).run(load_and_step, strategy, other_order, back)[0]
    assert result["losses"] == pytest.approx(saved["losses"], rel=1e-6)


# ---- what is refused ----------------------------------------------------------------------------


LATE = [
    *[(strategy, "around") for strategy in (*FIVE, HSDP(dp_shard=1))],
    *[(strategy, "inside") for strategy in (DDP(), ZeRO3(), FSDP2())],
]


@pytest.mark.parametrize(("strategy", "how"), LATE, ids=str)
def test_adapters_attached_after_apply_are_refused(pools, tmp_path, strategy, how):
    for said in pools(2).run(attach_late, strategy, how, tmp_path / "saved"):
        assert len(said) == 2
        assert all("4 trainable adapter tensors that came after apply()" in text for text in said)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("strategy", [ZeRO3(), FSDP2()], ids=str)
def test_a_checkpoint_of_another_rank_is_refused_with_both_shapes(pools, tmp_path, strategy):
    pools(2).run(train_and_save, strategy, LoraRun(), tmp_path / "saved", 1)
    for said in pools(2).run(load_other, strategy, LoraRun({"r": 4}), tmp_path / "saved"):
        assert "lora_A.default.weight with [2, 32] saved and [4, 32] in the model" in said


def test_an_adapter_of_another_base_is_refused_with_both_shapes(pools, tmp_path):
    pools(2).run(train_and_save, FSDP2(), LoraRun(), tmp_path / "saved", 1)
    wide = tiny_model("L", hidden_size=48)
    with pytest.raises(ValueError, match=r"4 of 4 tensors.*\[2, 32\].*\[48, 48\]"):
        load_adapter(wide, tmp_path / "saved")
    short = tiny_model("L", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"2 of 4 tensors.*has no such layer"):
        load_adapter(short, tmp_path / "saved")


# ---- costs --------------------------------------------------------------------------------------


SMALL_PREFETCH = ZeRO3(prefetch_bucket_size=500)
COSTS = [
    *[(strategy, 3, "all") for strategy in FIVE],
    (HSDP_2X2, 4, "all"),
    *[(kind(precision="bf16-mixed"), 3, "all") for kind in (DDP, ZeRO1, ZeRO3, FSDP2)],
    *[(strategy, 3, "tied") for strategy in (SMALL_PREFETCH, FSDP2())],
    *[(strategy, 3, "experts") for strategy in (SMALL_PREFETCH, FSDP2())],
    # What recomputing has used of the frozen base is freed with the module that asked for it.
    *[
        (ZeRO3(activation_checkpointing=True, **limits), 3, lora)
        for limits, lora in (
            ({}, "all"),
            ({"prefetch_bucket_size": 2_000}, "tied"),
            ({"prefetch_bucket_size": 0}, "all"),
            ({"prefetch_bucket_size": 0}, "last block"),
        )
    ],
]


@pytest.mark.parametrize(("strategy", "ranks", "lora"), COSTS, ids=str)
def test_both_reports_hold_to_the_byte_for_adapters(pools, strategy, ranks, lora):
    results = pools(ranks).run(measure, strategy, *LORAS[lora])
    spec = results[0]["spec"]
    memory = strategy.memory(spec, Workload(), world_size=ranks)
    for kind in ("parameters", "gradients", "optimizer"):
        held = tuple(getattr(result["state"], kind) for result in results)
        assert held == memory.kind_bytes(kind), kind
    traffic = strategy.traffic(spec, Workload(grad_accum=3), world_size=ranks)
    for result in results:
        payloads: dict[tuple[str, int], int] = {}
        for op, num_bytes, group_size in result["records"]:
            payloads[op, group_size] = payloads.get((op, group_size), 0) + num_bytes
        assert payloads == traffic.payload_per_step()
        assert result["wire_bytes"] == traffic.bytes_per_step
