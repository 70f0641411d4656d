"""QLoRA under every strategy that shards packed weights: parity, bytes, checkpoints, costs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.quantize import check_config
from distft.peft import attach_adapters
from distft.quantized import packed_in
from distft.spec import ModelSpec, Workload
from distft.testing import tiny_config, tiny_model
from distft.testing.runs import TrainingRecord, differences, train_alone
from tests.gloo.lora_jobs import fix_values, lora_config
from tests.gloo.qlora_jobs import (
    LORA,
    QloraTraining,
    as_bytes,
    config,
    load_and_step,
    load_patterns,
    logits_of,
    logits_under,
    measure,
    quantized,
    read_quantized,
    refusals,
    refuse_full_tuning,
    refused_loads,
    save_patterns,
    switch_adapters,
    train,
    train_and_save,
    train_loaded,
    train_plainly,
    train_prepared,
    train_under,
    with_nan_patterns,
)

# PEFT reads a property by a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

ROOT = Path(__file__).parents[2]
FIVE = (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2())
HSDP_2X2 = HSDP(dp_replicate=2, dp_shard=2)
SIX = [*[(strategy, 2) for strategy in FIVE], (HSDP_2X2, 4)]


# ---- training -----------------------------------------------------------------------------------


@cache
def reference(num_micro_batches: int, nested: bool) -> TrainingRecord:
    found = train_alone(QloraTraining("L", 3, num_micro_batches, 0.1, nested=nested))
    return replace(found, weights=as_bytes(found.weights))


PARITY = [
    *[(strategy, 2, True) for strategy in FIVE],
    (ZeRO3(), 3, False),
    (FSDP2(), 3, False),
    (HSDP_2X2, 4, True),
    (FSDP2(offload="params", activation_checkpointing=True), 2, False),
    pytest.param(ZeRO3(offload="params", activation_checkpointing=True), 2, True),
    *[pytest.param(kind(), 3, False, marks=pytest.mark.slow) for kind in (DDP, ZeRO1, ZeRO2)],
]


@pytest.mark.parametrize(("strategy", "ranks", "nested"), PARITY, ids=str)
def test_three_steps_on_packed_weights_equal_one_process(pools, strategy, ranks, nested):
    training = QloraTraining("L", 3, 2 * ranks, 0.1, nested=nested)
    expected = reference(2 * ranks, nested)
    assert all(float(gradient.norm()) for gradient in expected.gradients.values())
    for rank, found in enumerate(pools(ranks).run(train_under, strategy, training)):
        assert differences(found, expected) == [], f"rank {rank}"
        assert len(found.gradients) == len(expected.gradients)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bf16_storage_gives_the_logits_of_one_process_to_the_bit(pools, ranks):
    # Case QLORA-01
    alone = fix_values(attach_adapters(quantized(dtype="bfloat16"), lora_config(**LORA), seed=5))
    for parameter in alone.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for logits, loss in pools(ranks).run(logits_under, FSDP2(precision="bf16"), "bfloat16"):
        assert torch.equal(logits, logits_of(alone))
        assert torch.isfinite(torch.tensor(loss))


def test_what_would_be_cast_or_not_split_is_refused_by_name_on_every_rank(pools):
    # Case QLORA-01
    cases = {
        "uint8": {"dtype": "bfloat16", "storage": "uint8"},
        "float32": {"dtype": "bfloat16", "storage": "float32"},
        "int8": {"quantization": BitsAndBytesConfig(load_in_8bit=True)},
    }
    for strategy in (FSDP2(precision="bf16"), FSDP2(precision="bf16-mixed"), ZeRO3(), DDP()):
        for said in pools(2).run(refusals, strategy, cases, True):
            wanted = "float32" if strategy.precision == "fp32" else "bfloat16"
            for name in ("uint8", "float32"):
                assert f"bnb_4bit_quant_storage=torch.{wanted}" in said[name], said
                assert f"quantized from bfloat16 and has its bytes stored as {name}" in said[name]
            assert "LLM.int8" in said["int8"]
            assert "load_in_4bit=True" in said["int8"]


def test_full_tuning_and_split_layers_are_refused_with_one_sentence_each(pools):
    cases = {"model": {}}
    for strategy in FIVE:
        for said in pools(2).run(refusals, strategy, cases, False):
            assert "14 layers of 4 bits and no adapters to train" in said["model"]
    for strategy, word in (
        (TP(tp=2), "tp=2"),
        (EP(ep=2), "ep=2"),
        (FSDP2(compile="block"), "compile"),
    ):
        for said in pools(2).run(refusals, strategy, cases, True):
            assert word in said["model"]
            assert "14 layers of 4 bits" in said["model"]


def test_k_bit_preparation_changes_no_byte_and_the_precision_rules_the_rest(pools):
    # Case QLORA-02
    strategy = FSDP2(precision="bf16-mixed")
    results = pools(2).run(train_prepared, strategy)
    report = strategy.memory(results[0]["spec"], Workload(), world_size=2)
    assert tuple(result["held"] for result in results) == report.kind_bytes("parameters")
    assert "scales of packed weights" in {line.name for line in report.lines}
    for found in results:
        assert found["lifted"] > 0
        assert all(torch.isfinite(torch.tensor(found["losses"])))
        packed = {n for n in found["before"] if found["before"][n].dtype == torch.uint8}
        assert len(packed) == 14
        for name, dtype in found["dtypes"].items():
            if name in packed:
                assert torch.equal(found["before"][name], found["after"][name]), name
                assert dtype == torch.bfloat16, name
            else:
                assert dtype == torch.float32, name
    for found in pools(2).run(train_prepared, FSDP2(precision="bf16")):
        assert set(found["dtypes"].values()) == {torch.bfloat16}


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3(), DDP()], ids=str)
def test_adapters_are_switched_and_left_out_under_sharding(pools, strategy):
    alone = logits_of(quantized())
    for found in pools(2).run(switch_adapters, strategy):
        torch.testing.assert_close(found["none"], alone, rtol=0, atol=1e-6)
        assert torch.equal(*found["both"])
        assert not torch.allclose(found["both"][0], alone, atol=1e-2)
        assert not torch.allclose(found["both"][0], found["other"], atol=1e-2)


# ---- reading ------------------------------------------------------------------------------------


READ = [
    (DDP(), 2, "float32", True),
    (ZeRO3(precision="bf16-mixed"), 2, "bfloat16", True),
    (FSDP2(), 3, "float32", False),
    (FSDP2(precision="bf16-mixed"), 2, "bfloat16", True),
]


@pytest.mark.parametrize(("strategy", "ranks", "dtype", "nested"), READ, ids=str)
def test_weights_quantized_as_they_are_read_are_those_of_from_pretrained(
    pools, tmp_path, strategy, ranks, dtype, nested
):
    tiny_model("L").save_pretrained(tmp_path)
    expected = quantized(dtype=dtype, nested=nested)
    layers = dict(expected.named_modules())
    for found in pools(ranks).run(read_quantized, strategy, tmp_path, dtype, nested):
        held = found["held"]
        assert len(packed_in(held)) == 14 * (7 if nested else 4)
        for name, tensor in held.items():
            path, _, own = name.removeprefix("base_model.model.").rpartition(".")
            layer = layers[path.replace(".base_layer", "")]
            state = layer.weight.quant_state
            if own == "weight":
                raw = layer.weight.data.view(torch.uint8)
                assert torch.equal(tensor.view(torch.uint8).view(-1), raw.view(-1)), name
            elif own in ("absmax", "nested_absmax"):
                source = state if own == "absmax" else state.state2
                assert torch.equal(tensor, source.absmax), name
        assert torch.isfinite(torch.tensor(found["loss"]))


MEASURE = """
import re, sys
import torch
from pathlib import Path
from peft import LoraConfig
from transformers import BitsAndBytesConfig
import distft

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(folder):
    return distft.load_model(
        folder, strategy,
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )

distft.init()
strategy = distft.FSDP2(precision="bf16")
load(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load(sys.argv[2])
held = [*(p.to_local() for p in model.parameters()), *model.buffers()]
print(status("VmHWM") - before, sum(t.numel() * t.element_size() for t in held))
"""


@pytest.mark.parametrize(
    ("layers", "width"), [(6, 768), pytest.param(16, 1024, marks=pytest.mark.slow)]
)
def test_quantizing_as_it_reads_holds_the_packed_model_and_little_more(tmp_path, layers, width):
    tiny_model("L").save_pretrained(tmp_path / "small")
    changes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    model = tiny_model("L", **changes)
    model.save_pretrained(tmp_path / "large")
    sixteen = 2 * sum(parameter.numel() for parameter in model.parameters())
    del model
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    peak, held = map(int, done.stdout.split()[-2:])
    assert held < 0.3 * sixteen
    assert peak < held + 40e6
    assert peak < 0.75 * sixteen


# ---- checkpoints --------------------------------------------------------------------------------


def test_patterns_of_nan_keep_every_bit_through_saves_reshards_and_publishing(pools, tmp_path):
    # Case QLORA-03
    first = FSDP2(precision="bf16")
    live = pools(2).run(save_patterns, first, tmp_path / "two")
    start = with_nan_patterns(quantized(dtype="bfloat16"))
    held = live[0]["held"]
    for name, tensor in start.named_parameters():
        mine = f"base_model.model.{name.removesuffix('.weight')}"
        mine = next((n for n in held if n in (f"{mine}.weight", f"{mine}.base_layer.weight")), None)
        if mine is not None:
            assert torch.equal(held[mine].view(-1), tensor.data.view(torch.uint8).view(-1)), name
    assert len(held) == 14 * 7

    distft.reshard(tmp_path / "two", tmp_path / "three", first, world_size=3)
    for found in pools(3).run(load_patterns, first, tmp_path / "three", tmp_path / "again"):
        assert set(found["held"]) == set(held)
        assert all(torch.equal(found["held"][name], held[name]) for name in held)
        assert torch.equal(found["logits"], live[0]["logits"])
    assert distft.verify(tmp_path / "again", require="proven")

    # A dtype that the caller asks for is that of the other tensors.
    for dtype in ("float32", None):
        out = distft.consolidate(tmp_path / "again", tmp_path / str(dtype), dtype=dtype)
        base = AutoModelForCausalLM.from_pretrained(out, device_map={"": "cpu"})
        for name, tensor in start.named_parameters():
            there = base.get_parameter(name)
            if name.endswith("proj.weight"):
                one, other = there.quant_state, tensor.quant_state
                raw = tensor.data.view(torch.uint8)
                assert torch.equal(there.data.view(torch.uint8), raw), name
                assert torch.equal(one.absmax, other.absmax)
                assert torch.equal(one.state2.absmax, other.state2.absmax)
                assert torch.equal(one.offset, other.offset)
    assert torch.equal(logits_of(base.train()), logits_of(start))


@pytest.mark.parametrize(
    ("saver", "others"),
    [
        (DDP(), [(FSDP2(), 3)]),
        (ZeRO1(), [(ZeRO3(), 3)]),
        (ZeRO2(), [(DDP(), 2)]),
        (ZeRO3(), [(HSDP_2X2, 4), (ZeRO3(), 3)]),
        (FSDP2(), [(ZeRO2(), 3)]),
        (HSDP_2X2, [(ZeRO1(), 2)]),
    ],
    ids=str,
)
def test_a_run_goes_on_to_the_bit_and_under_other_strategies(pools, tmp_path, saver, others):
    ranks = 4 if saver == HSDP_2X2 else 2
    live = pools(ranks).run(train_and_save, saver, tmp_path / "saved")
    for before, after in zip(
        live, pools(ranks).run(load_and_step, saver, tmp_path / "saved"), strict=True
    ):
        assert before["losses"] == after["losses"]
        assert all(torch.equal(before["last"][n], after["last"][n]) for n in before["last"])
    for index, (strategy, number) in enumerate(others):
        path = tmp_path / "saved"
        if index == 0:
            path = distft.reshard(path, tmp_path / "other", strategy, world_size=number)
        for found in pools(number).run(load_and_step, strategy, path):
            assert found["losses"] == pytest.approx(live[0]["losses"], rel=1e-6)
            for name, tensor in live[0]["last"].items():
                if tensor.dtype == torch.uint8:
                    assert torch.equal(found["last"][name], tensor), name


def test_packed_weights_of_another_kind_or_precision_are_not_loaded(pools, tmp_path):
    pools(2).run(train_and_save, FSDP2(), tmp_path / "saved")
    for said in pools(2).run(refused_loads, FSDP2(), tmp_path / "saved"):
        assert "14 packed weights of type nf4, and this model has 14 of fp4" in said[0]
        assert "14 packed weights of a run with precision 'fp32'" in said[1]
        assert "this run has 'bf16-mixed'" in said[1]


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3(), ZeRO1()], ids=str)
def test_a_run_publishes_its_adapter_and_merges_into_the_base_that_the_caller_names(
    pools, tmp_path, strategy
):
    live = pools(2).run(train_and_save, strategy, tmp_path / "saved")[0]
    out = distft.consolidate(tmp_path / "saved", tmp_path / "only", adapter="only")
    alone = PeftModel.from_pretrained(quantized(), str(out))
    torch.testing.assert_close(logits_of(alone.train()), live["logits"], rtol=0, atol=1e-5)
    keep = distft.consolidate(tmp_path / "saved", tmp_path / "keep")
    base = AutoModelForCausalLM.from_pretrained(keep, device_map={"": "cpu"})
    alone = PeftModel.from_pretrained(base, str(keep / "adapter"))
    torch.testing.assert_close(logits_of(alone.train()), live["logits"], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"quantized \(nf4\).*Pass base="):
        distft.consolidate(tmp_path / "saved", tmp_path / "merged", adapter="merge")
    tiny_model("L").save_pretrained(tmp_path / "base")
    distft.consolidate(
        tmp_path / "saved", tmp_path / "merged", adapter="merge", base=tmp_path / "base"
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = PeftModel.from_pretrained(tiny_model("L"), str(out)).train()
    torch.testing.assert_close(logits_of(whole), logits_of(expected), rtol=0, atol=1e-5)


# ---- costs --------------------------------------------------------------------------------------


COSTS = [
    *[(strategy, 3, True) for strategy in FIVE],
    (HSDP_2X2, 4, False),
    (FSDP2(precision="bf16-mixed"), 3, False),
    (ZeRO3(precision="bf16-mixed"), 2, True),
    *[
        pytest.param(kind(precision=precision), 3, False, marks=pytest.mark.slow)
        for kind, precision in (
            (DDP, "bf16-mixed"),
            (ZeRO1, "bf16-mixed"),
            (ZeRO2, "bf16"),
            (FSDP2, "bf16"),
        )
    ],
]


@pytest.mark.parametrize(("strategy", "ranks", "nested"), COSTS, ids=str)
def test_both_reports_hold_to_the_byte_and_packed_bytes_are_divided(pools, strategy, ranks, nested):
    results = pools(ranks).run(measure, strategy, nested)
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
    # Every matrix of the tiny model has a number of rows that parts of 2 divide; of 3, within one.
    total = sum(tensor.numel for tensor in spec.tensors if tensor.scales) // 2
    shards = {"fsdp2": ranks, "zero3": ranks, "hsdp": 2}.get(strategy.name, 1)
    rounding = 4 * 14
    for result in results:
        assert abs(result["packed"] - total / shards) <= rounding


def test_the_costs_from_a_config_are_those_of_the_quantized_model():
    made = attach_adapters(quantized("Q"), lora_config(target_modules="all-linear"), seed=0)
    load = Workload(tuning="qlora", lora_rank=2)
    of_config, of_model = ModelSpec.from_config(tiny_config("Q")), ModelSpec.from_model(made)
    for strategy in (DDP(), ZeRO3(), FSDP2(precision="bf16-mixed")):
        one = strategy.state_memory(of_config, load, world_size=3)
        other = strategy.state_memory(of_model, Workload(), world_size=3)
        assert one.per_rank == other.per_rank
    with pytest.raises(ValueError, match=r"tp=2.*14 tensors are packed"):
        TP(tp=2).memory(of_config, load, world_size=2)


def test_the_config_of_a_quantization_is_checked_before_anything_is_read():
    lora = lora_config(**LORA)
    with pytest.raises(ValueError, match=r"8 bits"):
        check_config(BitsAndBytesConfig(load_in_8bit=True), lora, torch.float32)
    with pytest.raises(ValueError, match=r"got a dict"):
        check_config({"load_in_4bit": True}, lora, torch.float32)
    with pytest.raises(ValueError, match=r"0 adapters"):
        check_config(config(), None, torch.float32)
    with pytest.raises(ValueError, match=r"stores packed bytes as torch.float32"):
        check_config(config(), lora, torch.bfloat16)


# ---- the Trainer --------------------------------------------------------------------------------


TEN = {"max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def logged(history):
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def plain(pools, tmp_path_factory):
    changes = {**TEN, "per_device_train_batch_size": 4}
    return logged(pools(1).run(train_plainly, tmp_path_factory.mktemp("plain"), changes)[0])


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (FSDP2(), 2),
        (ZeRO3(), 2),
        *[
            pytest.param(s, r, marks=pytest.mark.slow)
            for s, r in SIX
            if s not in (FSDP2(), ZeRO3())
        ],
    ],
    ids=str,
)
def test_ten_steps_of_the_trainer_are_those_of_trl_and_another_strategy_goes_on(
    pools, tmp_path, plain, strategy, ranks
):
    changes = {**TEN, "per_device_train_batch_size": 4 // ranks, "save_steps": 5}
    changes["save_strategy"] = "steps"
    found = pools(ranks).run(train, tmp_path, strategy, changes)
    assert len(plain) == 10
    for history, _ in found:
        for ours, theirs in zip(logged(history), plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    other = ZeRO2() if strategy == FSDP2() else FSDP2()
    changes = {**changes, "per_device_train_batch_size": 2}
    checkpoint = str(tmp_path / "checkpoint-5")
    for history, published in pools(2).run(train, tmp_path / "on", other, changes, checkpoint):
        for ours, theirs in zip(logged(history)[-5:], plain[-5:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        for name, tensor in published.items():
            torch.testing.assert_close(tensor, found[0][1][name], rtol=0, atol=1e-5)


def test_the_trainer_takes_a_model_that_was_quantized_as_it_was_read(pools, tmp_path):
    tiny_model("L").save_pretrained(tmp_path / "model")
    strategy = FSDP2(activation_checkpointing=True)
    for history, dtypes in pools(2).run(train_loaded, tmp_path, strategy, TEN):
        assert dtypes == {"torch.float32"}
        assert len(logged(history)) == 10
        assert logged(history)[-1][0] < 5


def test_the_trainer_refuses_full_tuning_of_quantized_weights(pools, tmp_path):
    for said in pools(2).run(refuse_full_tuning, tmp_path, ZeRO3()):
        assert "14 layers of 4 bits and no adapters to train" in said
