"""`load_model` with adapters: the values and the training of `apply` with adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.testing import RanksFailed, tiny_batches, tiny_model
from tests.gloo.lora_jobs import EXPERTS, lora_config

SIX = (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP(dp_replicate=1))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("L", {"target_modules": "all-linear"}),
    # Both factors drawn: B of zeros would hide where A came from.
    "drawn, tied, norm": ("Lt", {"init_lora_weights": False, "modules_to_save": ["norm"]}),
    "experts": ("M", {"init_lora_weights": False, "target_parameters": list(EXPERTS)}),
}


def train(strategy: Any, model: Any, lora: Any) -> tuple[dict[str, Any], list[str], list[float]]:
    """Return the values at the start, what trains, and the losses of two steps."""
    torch.rand(1 + strategy.dp_rank)
    model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-2), peft_config=lora)
    start = strategy.gather_weights(model)
    trained = [n for n, p in distft.unwrap(model).named_parameters() if p.requires_grad]
    losses = []
    for step in range(2):
        mine = tiny_batches([5, 11, 2], seed=step)[strategy.dp_rank :: strategy.dp_size]
        losses.append(strategy.train_step(model, optimizer, mine, max_grad_norm=1.0).loss)
    return start, trained, losses


def both_ways(strategies: Any, names: Any, root: Path) -> dict[str, Any]:
    found = {}
    for name in names:
        model, lora = CASES[name]
        for strategy in strategies:
            folder = root / model
            distft.init(seed=3)
            loaded = distft.load_model(folder, strategy, peft_config=lora_config(**lora))
            answers = [train(strategy, loaded, None)]
            distft.init(seed=3)
            answers.append(train(strategy, tiny_model(model), lora_config(**lora)))
            found[f"{name} under {strategy}"] = answers
    return found


def folders(root: Path) -> Path:
    for name in ("L", "Lt", "M"):
        tiny_model(name).save_pretrained(root / name)
    return root


@pytest.mark.parametrize(
    ("ranks", "strategies", "cases"),
    [
        (2, SIX, ("linear",)),
        (3, (ZeRO3(), FSDP2()), ("drawn, tied, norm", "experts")),
        (2, (TP(tp=2), EP(ep=2), NDParallel(tp=2, ep=2)), ("experts",)),
        (4, (NDParallel(tp=2),), ("linear", "drawn, tied, norm", "experts")),
    ],
)
def test_adapters_start_and_train_as_those_of_apply(pools, tmp_path, ranks, strategies, cases):
    for rank in pools(ranks).run(both_ways, strategies, cases, folders(tmp_path)):
        for case, (here, there) in rank.items():
            assert here[0].keys() == there[0].keys(), case
            for name, value in there[0].items():
                assert torch.equal(here[0][name], value), f"{case}: {name}"
            assert here[1] == there[1], case
            assert here[2] == pytest.approx(there[2], rel=1e-6), case


def load(folder: Path, lora: dict[str, Any], strategy: Any) -> None:
    distft.init()
    distft.load_model(folder, strategy, peft_config=lora_config(**lora))


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"target_modules": ["no_such"]}, "no_such"),
    ],
)
def test_adapters_that_start_from_weights_or_fit_nothing_are_refused(pools, tmp_path, lora, says):
    tiny_model("L").save_pretrained(tmp_path)
    with pytest.raises(RanksFailed, match=says):
        pools(2).run(load, tmp_path, lora, FSDP2())


def test_adapters_without_a_right_split_are_refused_when_the_model_is_loaded(pools, tmp_path):
    tiny_model("L").save_pretrained(tmp_path)
    lora = {"target_modules": ["q_proj"], "target_parameters": ["o_proj.weight"]}
    with pytest.raises(RanksFailed, match=r"load_model\(\) of TP\(tp=2\) cannot .* 'rowwise'"):
        pools(2).run(load, tmp_path, lora, TP(tp=2))
