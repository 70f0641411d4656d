"""ZeRO++: the same training with a secondary copy of the weights, its costs, what is refused.

What quantizes runs on GPUs alone, so here is that it is refused where it cannot run, and what the
formulas say.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import AdamW

import distft
from distft import ZeRO3
from distft.formulas import quantization_groups
from distft.measure import count_collectives, model_state_bytes
from distft.spec import ModelSpec, Workload
from distft.testing import tiny_batches, tiny_model
from distft.testing.checks import check_save_and_load
from distft.testing.runs import Training, differences, train_alone, train_under

PAIRS = ZeRO3(secondary_partition=2)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("Lt", PAIRS),
        ("M", ZeRO3(secondary_partition=2, activation_checkpointing=True, offload="optimizer")),
        ("Q", ZeRO3(secondary_partition=4, persistence_threshold=1_000, prefetch_bucket_size=0)),
    ],
    ids=str,
)
def test_training_with_a_secondary_copy_equals_one_process(pools, model, strategy):
    training = Training(model, 3, 12, max_norm=0.1)
    expected = train_alone(training)
    for rank, found in enumerate(pools(4).run(train_under, strategy, training)):
        assert differences(found, expected) == [], f"rank {rank}"


def measure(strategies: list[Any], name: str, frozen: str | None) -> list[dict[str, Any]]:
    """Return what this rank holds and sends in a step of 3 micro-steps, for each strategy."""
    distft.init()
    found = []
    for strategy in strategies:
        model = tiny_model(name)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or frozen not in key)
        spec = ModelSpec.from_model(model)
        model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3))

        def step(grad_accum: int) -> None:
            batches = tiny_batches([9, 12, 7][:grad_accum], seed=strategy.dp_rank)  # noqa: B023
            strategy.train_step(model, optimizer, batches, max_grad_norm=0.1)  # noqa: B023

        for _ in range(2):
            step(1)
        with count_collectives() as counted:
            step(3)
        sent: dict[tuple[str, int], int] = {}
        for record in counted.records:
            key = record.op, record.group_size
            sent[key] = sent.get(key, 0) + record.num_bytes
        optimizer.zero_grad()
        strategy.backward(model(**tiny_batches([9])[0]).loss)
        held = model_state_bytes(model, optimizer)
        found.append({"spec": spec, "sent": sent, "held": held, "wire": counted.wire_bytes})
    return found


ONE_AFTER_ANOTHER = [
    PAIRS,
    ZeRO3(secondary_partition=4),
    ZeRO3(),
    ZeRO3(secondary_partition=2, precision="bf16-mixed", prefetch_bucket_size=2_000),
    ZeRO3(secondary_partition=2, persistence_threshold=1_000),
    ZeRO3(secondary_partition=2, activation_checkpointing=True, prefetch_bucket_size=0),
]


@pytest.mark.parametrize(
    ("strategies", "frozen"),
    [
        (ONE_AFTER_ANOTHER[:4], None),
        (ONE_AFTER_ANOTHER[3:], "mlp"),
        pytest.param(ONE_AFTER_ANOTHER[4:], None, marks=pytest.mark.slow),
        pytest.param(ONE_AFTER_ANOTHER[:3], "mlp", marks=pytest.mark.slow),
    ],
    ids=["trained", "frozen in part", "trained, more", "frozen in part, more"],
)
def test_both_reports_hold_to_the_byte_for_one_model_after_another(pools, strategies, frozen):
    for rank in pools(4).run(measure, strategies, "L", frozen):
        for strategy, found in zip(strategies, rank, strict=True):
            load = Workload(grad_accum=3)
            traffic = strategy.traffic(found["spec"], load, world_size=4)
            assert found["sent"] == traffic.payload_per_step(), strategy
            assert found["wire"] == traffic.bytes_per_step, strategy
            memory = strategy.memory(found["spec"], load, world_size=4)
            for kind in ("parameters", "gradients", "optimizer"):
                assert getattr(found["held"], kind) == memory.kind_bytes(kind)[0], strategy


def test_a_secondary_copy_saves_and_loads(pools):
    check_save_and_load(PAIRS, pools(4))


def run_frozen(strategy: Any, path: Any, seed: int, save: bool) -> float:
    distft.init()
    model = tiny_model("L", seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3))
    if save:
        strategy.save(path, model, optimizer, step=0)
    else:
        strategy.load(path, model, optimizer)
    return strategy.train_step(model, optimizer, tiny_batches([9], seed=strategy.dp_rank)).loss


def test_a_load_replaces_the_copies_of_frozen_weights_too(pools, tmp_path):
    (saved,) = set(pools(4).run(run_frozen, PAIRS, tmp_path / "c", 0, True))
    assert pools(4).run(run_frozen, PAIRS, tmp_path / "c", 1, False) == [saved] * 4


def load_and_train(strategy: Any, path: Any) -> list[float]:
    distft.init()
    losses = []
    for _ in range(2):
        model = distft.load_model(path, strategy)
        model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3))
        batches = tiny_batches([9], seed=strategy.dp_rank)
        losses += [strategy.train_step(model, optimizer, batches).loss for _ in range(2)]
    return losses


def test_load_model_makes_the_copies_of_what_it_reads(pools, tmp_path):
    tiny_model("L").save_pretrained(tmp_path)
    (found,) = {tuple(losses) for losses in pools(4).run(load_and_train, PAIRS, tmp_path)}
    (expected,) = {tuple(losses) for losses in pools(4).run(load_and_train, ZeRO3(), tmp_path)}
    assert found == expected


def refused(strategy: Any) -> tuple[str, str, int]:
    distft.init()
    with count_collectives() as counted, pytest.raises(RuntimeError) as raised:
        strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    return type(raised.value).__name__, str(raised.value), counted.count("all_gather")


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ZeRO3(quantized_weights=True), "DeepSpeed's quantizer op, CUDA kernels"),
        (ZeRO3(quantized_gradients=True), "DeepSpeed's kernel swizzle_quant reads 2-byte fp16"),
    ],
    ids=str,
)
def test_what_quantizes_is_refused_alike_on_every_rank(pools, strategy, text):
    for name, said, _ in pools(2).run(refused, strategy):
        assert name == "RuntimeError"
        assert text in said
        assert "Leave quantized" in said


def test_a_group_that_does_not_divide_the_ranks_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"ranks that 3 divides, and there are 4"):
        ZeRO3(secondary_partition=3).mesh(4)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"secondary_partition": 1}, r"secondary_partition=1.*at least 2: it counts ranks"),
        ({"secondary_partition": 2, "offload": "params"}, r"the copy for 2 ranks"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        ZeRO3(**fields)


def test_quantized_weights_send_a_byte_for_each_and_their_scales():
    spec = ModelSpec.from_config({**tiny_model("L").config.to_dict(), "vocab_size": 64})
    plain, int8 = (
        ZeRO3(quantized_weights=quantized, prefetch_bucket_size=0)
        .traffic(spec, Workload(), world_size=2)
        .collectives[0]
        .payload_bytes
        for quantized in (False, True)
    )
    scales = [4 * 2 * 2 * quantization_groups(tensor.numel // 2) for tensor in spec.tensors]
    assert int8 - plain // 4 == sum(scales)


def test_int4_gradients_cross_between_groups_in_a_quarter_of_half_precision():
    spec = ModelSpec.from_config(tiny_model("L").config.to_dict())
    strategy = ZeRO3(secondary_partition=2, quantized_gradients=True)
    sent = strategy.traffic(spec, Workload(), world_size=4).collectives
    matrices = [t for t in spec.tensors if len(t.shape) > 1 and t.numel % 8 == 0]
    within, between = (each for each in sent if each.op == "all_to_all")
    scales = [max(*t.shape, 4) for t in matrices]
    assert within.payload_bytes == sum(t.numel for t in matrices) // 2 + 4 * sum(scales)
    assert between.payload_bytes == sum(
        t.numel // 4 + 4 * (n // 2) for t, n in zip(matrices, scales, strict=True)
    )
    assert (within.ranks, between.ranks) == (2, 2)


def test_parts_that_cannot_be_quantized_are_refused():
    spec = ModelSpec.from_config(tiny_model("L").config.to_dict())
    with pytest.raises(ValueError, match=r"elements cannot be quantized.*multiple of 8"):
        ZeRO3(quantized_weights=True).traffic(spec, Workload(), world_size=3)


def test_the_copy_is_in_the_paper_value_of_memory():
    spec = ModelSpec.from_config(tiny_model("L").config.to_dict())
    plain, copied = (s.memory(spec, Workload(), world_size=4) for s in (ZeRO3(), PAIRS))
    assert copied.paper_bytes - plain.paper_bytes == 4 * spec.total_params / 2
