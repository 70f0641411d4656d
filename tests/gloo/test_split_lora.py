"""LoRA on layers and experts that are split: parity with one process, adapters, refusals."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import distft
from distft import DDP, EP, FSDP2, TP, NDParallel, ZeRO3
from distft.testing import tiny_model
from distft.testing.runs import TrainingRecord, differences, train_alone
from tests.gloo.lora_jobs import (
    EXPERTS,
    LoraRun,
    load_and_step,
    logits_of,
    train_and_save,
)
from tests.gloo.split_lora_jobs import (
    FromFolder,
    LoraAlone,
    dtypes,
    held_factors,
    masks,
    refusal,
    train_from_folder,
    train_lora,
    write_adapter_folder,
)

# PEFT reads a property by a name that transformers has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    # One of the runs adapts a tied head on purpose.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

ALL = (("target_modules", "all-linear"),)
DENSE = (("target_modules", ("q_proj", "o_proj")),)
HEADS = (("target_modules", ("q_proj", "o_proj", "down_proj", "lm_head", "embed_tokens")),)
SAVED = (
    ("target_modules", ("q_proj", "o_proj")),
    ("modules_to_save", ("lm_head", "norm", "q_norm")),
)
OF_EXPERTS = (("target_parameters", EXPERTS), ("target_modules", ("q_proj", "o_proj")))
ODD = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}

# Strategy, ranks, model, changes, adapters, micro-batches over all data ranks, clipping bound.
CASES = [
    (TP(tp=2), 2, "L", {}, ALL, 4, 0.1),
    (TP(tp=2), 2, "Q", {"attention_bias": True}, HEADS, 2, None),
    (TP(tp=2), 2, "Lt", {}, HEADS, 2, None),
    (TP(tp=2), 2, "Q", {}, SAVED, 2, 0.1),
    (TP(tp=3), 3, "L", ODD, HEADS, 2, None),
    (TP(tp=4), 4, "Q", {"num_key_value_heads": 4}, ALL, 2, 0.1),
    (NDParallel(tp=2), 4, "Q", {}, ALL, 4, 0.1),
    (NDParallel(tp=2), 4, "Q", {}, SAVED, 4, None),
    (EP(ep=2), 2, "M", {}, DENSE, 4, 0.1),
    (EP(ep=2), 2, "M", {}, OF_EXPERTS, 4, 0.1),
    (EP(ep=2), 2, "G", {}, OF_EXPERTS, 2, None),
    (EP(ep=3), 3, "M", {}, OF_EXPERTS, 6, None),
    (EP(ep=2), 4, "M", {}, OF_EXPERTS, 4, 0.1),
    (NDParallel(tp=2, ep=2), 2, "M", {}, OF_EXPERTS, 2, None),
    (NDParallel(tp=2, ep=2), 4, "M", {}, OF_EXPERTS, 4, 0.1),
    (NDParallel(tp=2, ep=4), 4, "G", {}, OF_EXPERTS, 2, None),
    (TP(tp=2), 2, "M", {}, OF_EXPERTS, 2, None),
    (TP(tp=2), 2, "G", {}, OF_EXPERTS, 2, None),
    (TP(tp=3), 3, "X", ODD, OF_EXPERTS, 2, 0.1),
    (NDParallel(tp=2), 4, "M", {}, OF_EXPERTS, 4, 0.1),
]
# Others of these show the same twice: G's experts, a copy that is trained whole, efsdp of 2.
SLOW_CASES = {7, 12, 15}
CASES_BY_NUMBER = [
    pytest.param(
        *case,
        id=f"{case[0]}@{case[1]}-{case[2]}-{index}",
        marks=pytest.mark.slow if index in SLOW_CASES else (),
    )
    for index, case in enumerate(CASES)
]
# Rows other than the first ones, by model and adapters: no gradient is near AdamW's eps, see
# `test_rounding_moves_no_weight_of_these_rows_far`.
SEEDS = {("Q", SAVED): 20}


def training_of(model, changes, lora, num_micro_batches, max_norm) -> LoraAlone:
    return LoraAlone(
        model,
        3,
        num_micro_batches,
        max_norm,
        changes=dict(changes),
        seed=SEEDS.get((model, lora), 0),
        lora=dict(lora),
    )


@cache
def reference(model, changes, lora, num_micro_batches, max_norm) -> TrainingRecord:
    return train_alone(training_of(model, changes, lora, num_micro_batches, max_norm))


@pytest.mark.parametrize(
    ("strategy", "ranks", "model", "changes", "lora", "micro", "clip"), CASES_BY_NUMBER
)
def test_three_steps_of_adapters_equal_one_process(
    pools, strategy, ranks, model, changes, lora, micro, clip
):
    training = training_of(model, changes, lora, micro, clip)
    expected = reference(model, tuple(changes.items()), lora, micro, clip)
    assert all(float(gradient.norm()) for gradient in expected.gradients.values())
    for rank, found in enumerate(pools(ranks).run(train_lora, strategy, training)):
        assert differences(found, expected) == [], f"rank {rank}"
        assert len(found.gradients) == len(expected.gradients)


def test_expert_adapters_of_one_rank_each_train_under_uneven_shards(pools):  # case 72
    lora = (("target_parameters", EXPERTS), ("r", 1))
    training = LoraAlone("M", 2, 4, lora=dict(lora))
    expected = train_alone(training)
    for found in pools(4).run(train_lora, FSDP2(), training):
        assert differences(found, expected) == []
    shapes = {name: tuple(p.shape) for name, p in expected.weights.items() if ".lora_" in name}
    first = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_{}.default.weight"
    assert shapes[first.format("A")] == (6, 32)
    assert shapes[first.format("B")] == (32, 6)
    rows = [
        shapes[first.format("A")][0] for shapes in pools(4).run(held_factors, FSDP2(), dict(lora))
    ]
    assert rows == [2, 2, 2, 0]
    for found in pools(2).run(train_lora, ZeRO3(), training):
        assert differences(found, expected) == []


# Strategy, ranks, model, adapters, whether `load_adapter` reads them, seed of the rows.
FOLDERS = [
    (TP(tp=2), 2, "Q", HEADS, False, 0),
    (EP(ep=2), 2, "M", OF_EXPERTS, False, 0),
    pytest.param(NDParallel(tp=2), 4, "M", OF_EXPERTS, False, 0, marks=pytest.mark.slow),
    (NDParallel(tp=2, ep=2), 4, "M", OF_EXPERTS, False, 0),
    (TP(tp=2), 2, "Q", SAVED, True, 0),
    pytest.param(EP(ep=2), 2, "M", OF_EXPERTS, True, 10, marks=pytest.mark.slow),
    (NDParallel(tp=2), 4, "M", OF_EXPERTS, True, 10),
    (NDParallel(tp=2, ep=2), 4, "M", OF_EXPERTS, True, 10),
]


@pytest.mark.parametrize(("strategy", "ranks", "model", "lora", "saved", "seed"), FOLDERS, ids=str)
def test_adapters_on_a_loaded_model_and_loaded_adapters_train_as_on_one_process(
    pools, tmp_path, strategy, ranks, model, lora, saved, seed
):
    folder, out = str(tmp_path / "source"), str(tmp_path / "out") if saved else ""
    training = FromFolder(model, 3, 4, 0.1, seed=seed, lora=dict(lora), folder=folder, saved=saved)
    if saved:
        write_adapter_folder(training, folder)
    else:
        tiny_model(model).save_pretrained(folder)
    expected = train_alone(training)
    for rank, found in enumerate(pools(ranks).run(train_from_folder, strategy, training, out)):
        assert differences(found, expected) == [], f"rank {rank}"
        assert len(found.gradients) == len(expected.gradients)
    if saved:
        mine, source = (
            load_file(path / "adapter_model.safetensors")
            for path in (tmp_path / "out" / "adapter", tmp_path / "source")
        )
        assert mine.keys() == source.keys()
        assert all(torch.equal(mine[name], source[name]) for name in source)


def test_each_rank_holds_the_factors_of_its_own_experts(pools):
    for found in pools(4).run(held_factors, EP(ep=2), dict(OF_EXPERTS)):
        a, b = (
            found[f"base_model.model.model.layers.0.mlp.experts.lora_{side}.default.weight"]
            for side in "AB"
        )
        # Rank 2, 6 experts, half of them; rows again halved over efsdp.
        assert (a, b) == ((3, 16), (16, 6))
    for found in pools(2).run(held_factors, TP(tp=2), dict(OF_EXPERTS)):
        name = "base_model.model.model.layers.0.mlp.experts.{}lora_{}.default.weight"
        # Of gate and up the factor of outputs is split, of down that of inputs.
        assert [found[name.format("base_layer.", side)] for side in "AB"] == [(12, 32), (16, 12)]
        assert [found[name.format("", side)] for side in "AB"] == [(12, 8), (32, 12)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_adapters_have_the_dtype_of_training_on_split_models(pools, precision):
    expected = train_alone(LoraAlone("M", 2, 4, lora=dict(OF_EXPERTS))).losses
    strategy = NDParallel(tp=2, ep=2, precision=precision)
    kind = {"torch.bfloat16" if precision == "bf16" else "torch.float32"}
    for losses, held, local in pools(4).run(dtypes, strategy, dict(OF_EXPERTS)):
        assert losses == pytest.approx(expected, rel=5e-3)
        assert held == local == kind


# ---- checkpoints --------------------------------------------------------------------------------


def logits_on_fresh_base(folder: Path, base: torch.nn.Module) -> torch.Tensor:
    from peft import PeftModel

    return logits_of(PeftModel.from_pretrained(base, str(folder)).eval())


def test_an_adapter_of_a_tp_run_is_whole_and_loads_on_one_rank(pools, tmp_path):  # case 30
    run = LoraRun({"target_modules": ["q_proj", "o_proj"]}, "Q")
    live = pools(2).run(train_and_save, TP(tp=2), run, tmp_path / "saved", 2)[0]
    alone = pools(1).run(train_and_save, DDP(), run, tmp_path / "alone", 2)[0]
    assert live["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    adapter = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.{}.weight"
    assert adapter[name.format("o_proj.lora_A")].shape == (2, 32)
    assert adapter[name.format("q_proj.lora_B")].shape == (32, 2)
    logits = logits_on_fresh_base(tmp_path / "saved" / "adapter", run.build())
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)
    other = LoraRun(run.lora, "Q", seed=9)
    back = pools(1).run(load_and_step, DDP(), other, tmp_path / "saved")[0]
    assert back["losses"] == pytest.approx(live["losses"], rel=1e-6)


def test_adapters_of_experts_go_on_at_any_mesh_and_merge(pools, tmp_path):
    run, other = LoraRun(dict(OF_EXPERTS), "M"), LoraRun(dict(OF_EXPERTS), "M", seed=9)
    strategy = NDParallel(tp=2, ep=2)
    live = pools(4).run(train_and_save, strategy, run, tmp_path / "saved", 2)[0]
    logits = logits_on_fresh_base(tmp_path / "saved" / "adapter", run.build())
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)
    for target, ranks in ((strategy, 4), (EP(ep=3), 3), (FSDP2(), 2)):
        again = pools(ranks).run(load_and_step, target, other, tmp_path / "saved")[0]
        exact = target == strategy
        assert again["losses"] == (
            live["losses"] if exact else pytest.approx(live["losses"], rel=1e-6)
        )
    out = distft.consolidate(tmp_path / "saved", tmp_path / "merged", adapter="merge")
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(logits_of(merged), live["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [EXPERTS, EXPERTS[::-1]], ids=["first", "reversed"])
def test_an_adapter_of_experts_is_the_same_file_whatever_the_degree(pools, tmp_path, order):
    # Case MLORA-04
    lora = {"target_parameters": order, "target_modules": []}
    run, other = LoraRun(lora, "M"), LoraRun(lora, "M", seed=9)
    live = pools(2).run(train_and_save, EP(ep=2), run, tmp_path / "saved", 2)[0]
    file = Path("adapter") / "adapter_model.safetensors"
    first = load_file(tmp_path / "saved" / file)
    head = "base_model.model.model.layers.0.mlp.experts."
    # The outer pair changes what comes last in the module, whatever the config names first.
    assert first[f"{head}base_layer.lora_A.weight"].shape == (2 * 6, 32)
    assert first[f"{head}lora_A.weight"].shape == (2 * 6, 16)
    assert all(tensor.abs().max() > 0 for tensor in first.values())
    logits = logits_on_fresh_base(tmp_path / "saved" / "adapter", run.build())
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)
    for strategy, ranks in ((EP(ep=3), 3), (FSDP2(), 2)):
        again = tmp_path / f"{ranks}"
        found = pools(ranks).run(load_and_step, strategy, other, tmp_path / "saved", again)[0]
        assert found["losses"] == pytest.approx(live["losses"], rel=1e-6)
        second = load_file(again / file)
        assert set(second) == set(first)
        assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    out = distft.consolidate(tmp_path / "saved", tmp_path / "merged", adapter="merge")
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(logits_of(merged), live["logits"], rtol=0, atol=1e-5)


# ---- what is refused ----------------------------------------------------------------------------

PACKED = {"model.layers.*.mlp.gate_proj": "packed_colwise"}
TOKENS = {"trainable_token_indices": [1, 2]}
REFUSED = [
    (TP(tp=2), "L", {"target_parameters": ("o_proj.weight",)}, False, ["o_proj", "'rowwise'"]),
    (TP(tp=2, plan=PACKED), "L", dict(ALL), False, ["mlp.gate_proj", "packed_colwise"]),
    (TP(tp=2), "L", {"use_dora": True}, False, ["use_dora", "tp is 2"]),
    (TP(tp=2), "L", {"init_lora_weights": "pissa"}, False, ["'pissa'", "tp is 2"]),
    (TP(tp=2), "L", {"use_dora": True}, True, ["use_dora", "tp is 2"]),
    (EP(ep=2), "M", {"target_parameters": EXPERTS, **TOKENS}, True, [*TOKENS, "ep is 2"]),
    (TP(tp=2), "L", {}, "IA3", ["IA3Config", "tp is 2"]),
]


@pytest.mark.parametrize(("strategy", "model", "lora", "attached", "words"), REFUSED, ids=str)
def test_adapters_without_a_right_split_are_refused(pools, strategy, model, lora, attached, words):
    found = pools(2).run(refusal, strategy, model, lora, attached)
    assert found[0] == found[1]
    for word in words:
        assert word in found[0]


# ---- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_masks_are_shared_where_activations_are_whole_and_differ_where_they_are_split(
    pools, tmp_path, checkpointing
):  # case 58
    strategy = NDParallel(dp_shard=2, tp=2, activation_checkpointing=checkpointing)
    found = pools(4).run(masks, strategy, str(tmp_path / "saved"))
    places = set(found[0]["first"])
    assert len(places) == 5
    for place in places:
        split = "o_proj" in place or place == "attention"
        for a, b in ((0, 1), (2, 3)):
            for mine, theirs in zip(
                found[a]["first"][place], found[b]["first"][place], strict=True
            ):
                assert torch.equal(mine, theirs) != split, place
        for mine, theirs in zip(found[0]["first"][place], found[2]["first"][place], strict=True):
            assert not torch.equal(mine, theirs), place
    for rank in found:
        for place in places:
            draws = rank["first"][place]
            # Three steps of two micro-steps; a block that is run again draws the same once more.
            per_place = 2 if place == "attention" else 1
            assert len(draws) == 6 * per_place * (2 if checkpointing else 1)
            for one, other in zip(rank["after"][place], rank["resumed"][place], strict=True):
                assert torch.equal(one, other), place
            if checkpointing and place != "attention":
                assert all(map(torch.equal, draws[::2], draws[1::2])), place
            assert not torch.equal(draws[0], draws[-1])
        assert rank["losses"][0] == rank["losses"][1]
    for a, b in ((0, 1), (2, 3)):
        assert found[a]["whole"]
        for name, tensor in found[a]["whole"].items():
            assert torch.equal(tensor, found[b]["whole"][name]), name
