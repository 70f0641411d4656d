"""Bytes of model state on each rank under TP, EP and products: predicted and measured.

What they send is in `test_traffic_parallel`.
"""

from __future__ import annotations

from functools import partial

import pytest

import distft
from distft import EP, FSDP2, TP, ModelSpec, NDParallel, Workload
from distft.peft import attach_adapters
from distft.testing import tiny_batches, tiny_config, tiny_model
from tests.gloo.lora_jobs import EXPERTS, lora_config

FOUR_KV = {"num_key_value_heads": 4}
BIASED = {"attention_bias": True, "mlp_bias": True}
CASES = [
    *[(TP(tp=2), 2, model, {}) for model in ("L", "Lt", "Q", "M", "X", "G")],
    (TP(tp=2, precision="bf16-mixed"), 2, "Q", {}),
    (TP(tp=2, precision="bf16"), 2, "L", BIASED),
    (TP(tp=4), 4, "Lt", FOUR_KV),
    (EP(ep=2), 2, "M", {}),
    (EP(ep=3), 3, "X", {}),
    (EP(ep=2), 4, "M", {}),
    (NDParallel(tp=2), 4, "Lt", {}),
    (NDParallel(tp=2), 4, "M", {}),
    (NDParallel(dp_replicate=2, tp=2), 4, "Q", {}),
    (NDParallel(dp_replicate=2, ep=2), 4, "M", {}),
    (NDParallel(tp=2, ep=2), 4, "M", {}),
    (NDParallel(tp=2, ep=4), 4, "G", {}),
    (NDParallel(tp=2, ep=2, plan={}), 2, "M", {}),
]
DENSE = {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}
OF_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": list(EXPERTS)}
ADAPTED = [
    (TP(tp=2), 2, "L", DENSE),
    (NDParallel(tp=2), 4, "L", {**DENSE, "modules_to_save": ["lm_head"]}),
    (NDParallel(tp=2, ep=2), 4, "M", OF_EXPERTS),
    (EP(ep=2), 4, "M", OF_EXPERTS),
    (TP(tp=2), 2, "M", OF_EXPERTS),
    (NDParallel(tp=2), 4, "G", OF_EXPERTS),
]


def kept_gates():
    """Return M in bf16 with its gates, a split layer and a norm in fp32."""
    model = tiny_model("M").bfloat16()
    for layer in model.model.layers:
        layer.mlp.gate.float()
        layer.input_layernorm.float()
    model.model.layers[0].self_attn.o_proj.float()
    return model


def held(strategy, model_name, changes, lora=None):
    """Return bytes of model state with gradients and moments there."""
    from torch.optim import AdamW

    from distft.measure import model_state_bytes
    from distft.training.loss import next_token_loss

    distft.init(seed=0)
    plain = kept_gates() if model_name == "kept gates" else tiny_model(model_name, **changes)
    model, optimizer = strategy.apply(
        plain,
        partial(AdamW, lr=1e-3),
        peft_config=None if lora is None else lora_config(**lora),
    )
    # Long enough that the tokens of every rank go to experts of every rank.
    rows = tiny_batches([15] * 8, seed=0)[strategy.dp_rank :: strategy.dp_size]
    strategy.train_step(model, optimizer, rows)
    optimizer.zero_grad()
    strategy.backward(next_token_loss(model, rows[0]) / 10)
    total = model_state_bytes(model, optimizer).total
    optimizer.zero_grad()
    return total


@pytest.mark.parametrize(("strategy", "ranks", "model", "changes"), CASES, ids=str)
def test_bytes_on_every_rank_are_those_of_the_formula(pools, strategy, ranks, model, changes):
    spec = ModelSpec.from_model(tiny_model(model, **changes))
    report = strategy.memory(spec, Workload(seq_len=16), world_size=ranks)
    assert list(report.per_rank) == pools(ranks).run(held, strategy, model, changes)


@pytest.mark.parametrize(("strategy", "ranks", "model", "lora"), ADAPTED, ids=str)
def test_adapters_lie_on_every_rank_as_the_formula_says(pools, strategy, ranks, model, lora):
    spec = ModelSpec.from_model(attach_adapters(tiny_model(model), lora_config(**lora), seed=0))
    report = strategy.memory(spec, Workload(seq_len=16), world_size=ranks)
    assert list(report.per_rank) == pools(ranks).run(held, strategy, model, {}, lora)


KEPT = [
    (TP(tp=2, precision="bf16"), 2),
    (EP(ep=2, precision="bf16"), 2),
    (NDParallel(tp=2, ep=2, precision="bf16-mixed"), 4),
]


@pytest.mark.parametrize(("strategy", "ranks"), KEPT, ids=str)
def test_what_stays_fp32_is_counted_so_on_every_rank(pools, strategy, ranks):
    spec = ModelSpec.from_model(kept_gates())
    report = strategy.memory(spec, Workload(seq_len=16), world_size=ranks)
    assert list(report.per_rank) == pools(ranks).run(held, strategy, "kept gates", {})
    if strategy.precision == "bf16":
        plain = ModelSpec.from_model(tiny_model("M").bfloat16())
        less = strategy.memory(plain, Workload(seq_len=16), world_size=ranks)
        assert max(report.per_rank) > max(less.per_rank)


@pytest.mark.parametrize(
    ("strategy", "parameters"),
    [(NDParallel(tp=2, ep=2, plan={}), 24_320), (EP(ep=2), 16_800)],
    ids=str,
)
def test_experts_are_divided_by_ep_and_whole_tensors_by_nothing(strategy, parameters):  # case 80
    spec = ModelSpec.from_config(tiny_config("M"))
    report = strategy.memory(spec, Workload(optimizer="sgd"), world_size=2)
    line = next(line for line in report.lines if line.name == "parameters")
    assert line.num_bytes == 4 * parameters


@pytest.mark.parametrize(
    ("model", "ranks", "heaviest"), [("L", 3, 8_151), ("L", 4, 5_992), ("M", 4, 9_968)]
)
def test_the_heaviest_rank_counts_and_not_the_average(model, ranks, heaviest):  # case 81
    spec = ModelSpec.from_config(tiny_config(model))
    report = FSDP2().memory(spec, Workload(), world_size=ranks)
    line = next(line for line in report.lines if line.name == "parameters")
    assert line.num_bytes == 4 * heaviest
    root = next(unit for unit in spec.units if unit.name == "")
    assert root.numel == 2 * 4_192 + 32


@pytest.mark.parametrize("model", ["L", "Lt", "Q", "M", "X"])
@pytest.mark.parametrize(("strategy", "ranks"), [(TP(tp=2), 2), (NDParallel(tp=2), 4)], ids=str)
def test_a_configuration_says_what_the_model_says(strategy, ranks, model):
    load = Workload()
    found = strategy.memory(ModelSpec.from_config(tiny_config(model)), load, world_size=ranks)
    expected = strategy.memory(ModelSpec.from_model(tiny_model(model)), load, world_size=ranks)
    assert found.per_rank == expected.per_rank


@pytest.mark.parametrize("model", ["L", "Lt", "Q", "M", "X"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_configuration_sends_what_the_model_sends(model, precision):
    load = Workload(seq_len=16)
    ep = {"M": 2, "X": 3}.get(model, 1)
    strategies = [TP(tp=2, precision=precision)]
    strategies += [EP(ep=ep, precision=precision)] if ep > 1 else []
    for strategy in strategies:
        found, expected = (
            strategy.traffic(spec, load, world_size=6)
            for spec in (
                ModelSpec.from_config(tiny_config(model)),
                ModelSpec.from_model(tiny_model(model)),
            )
        )
        assert found == expected


def test_experts_that_do_not_divide_are_refused_with_the_numbers():
    spec = ModelSpec.from_config(tiny_config("M", num_experts=5))
    with pytest.raises(ValueError, match="5 experts, and ep is 2"):
        EP(ep=2).memory(spec, Workload(), world_size=2)
