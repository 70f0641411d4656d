"""Tokens of experts, counted at the router under every strategy."""

from __future__ import annotations

from functools import partial

import pytest

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model
from tests.gloo.lora_jobs import EXPERTS, lora_config

ROWS = (3, 8, 13, 6, 11, 4)
WORLDS = [
    *[(strategy, 2) for strategy in (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2())],
    (FSDP2(activation_checkpointing=True), 2),
    (TP(tp=2), 2),
    (EP(ep=2), 2),
    (HSDP(dp_replicate=2), 4),
    (NDParallel(tp=2, ep=2), 4),
]


def job(strategy, model_name, evaluate):
    """Count one step on six rows; ranks have unequal numbers of them."""
    from torch.optim import SGD

    distft.init(seed=0)
    model, optimizer = strategy.apply(tiny_model(model_name), partial(SGD, lr=0.0))
    rows = tiny_batches(ROWS)[strategy.dp_rank :: strategy.dp_size]
    strategy.train_step(model, optimizer, rows)
    if evaluate:
        strategy.eval_step(model, rows)
    first = strategy.expert_load(model)
    return first, strategy.expert_load(model)


@pytest.mark.parametrize(("strategy", "ranks"), WORLDS, ids=str)
def test_counts_are_those_of_one_process(pools, strategy, ranks):
    (expected, _) = pools(1).run(job, DDP(), "M", False)[0]
    for found, second in pools(ranks).run(job, strategy, "M", True):
        assert [layer.counts for layer in found.layers] == [
            layer.counts for layer in expected.layers
        ]
        assert [layer.name for layer in found.layers] == [
            "model.layers.0.mlp.experts",
            "model.layers.1.mlp.experts",
        ]
        assert sum(found.layers[0].counts) == 6 * 16 * 2
        assert all(sum(layer.counts) == 0 for layer in second.layers)


@pytest.mark.parametrize("model", ["X", "G"])
def test_other_families_hand_on_what_their_router_chose(pools, model):
    for found, _ in pools(2).run(job, FSDP2(), model, False):
        assert all(sum(layer.counts) == 6 * 16 * 2 for layer in found.layers)


def test_a_busy_rank_slows_the_layer_down(pools):
    for found, _ in pools(2).run(job, EP(ep=2), "M", False):
        layer = found.layers[0]
        halves = sum(layer.counts[:3]), sum(layer.counts[3:])
        assert layer.slowdown == pytest.approx(max(halves) / (sum(halves) / 2))
        assert layer.imbalance == pytest.approx(max(layer.counts) / (sum(layer.counts) / 6))
        assert "model.layers.0.mlp.experts" in str(found)


def names_with_adapters(strategy):
    """Return the load of M with adapters on its experts."""
    from torch.optim import SGD

    distft.init(seed=0)
    lora = lora_config(target_parameters=list(EXPERTS), target_modules=["q_proj"])
    model, optimizer = strategy.apply(tiny_model("M"), partial(SGD, lr=0.0), peft_config=lora)
    strategy.train_step(model, optimizer, tiny_batches(ROWS)[strategy.dp_rank :: strategy.dp_size])
    return strategy.expert_load(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("strategy", [FSDP2(), EP(ep=2)], ids=str)
def test_layers_have_the_names_of_the_model_without_adapters(pools, strategy):
    for found in pools(2).run(names_with_adapters, strategy):
        names = [layer.name for layer in found.layers]
        assert names == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
        assert sum(found.layers[0].counts) == 6 * 16 * 2


def refusal(strategy):
    """Ask for the load of a dense model."""
    from torch.optim import SGD

    distft.init(seed=0)
    model, _ = strategy.apply(tiny_model("L"), partial(SGD, lr=0.1))
    try:
        strategy.expert_load(model)
    except ValueError as error:
        return str(error)
    return ""


def test_a_dense_model_has_no_experts_to_ask_for(pools):
    found = pools(2).run(refusal, DDP())
    assert found[0] == found[1]
    assert "0 layers of experts" in found[0]
