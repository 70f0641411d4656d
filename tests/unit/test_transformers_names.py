"""transformers' names that `distft.strategies._transformers` uses: fails first when they move."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from distft.formulas.split_rules import DISPATCH, NORM, PACKED
from distft.strategies import _transformers as names
from distft.testing import tiny_model


def test_every_style_that_a_plan_here_names_is_registered():
    styles = names.require_styles()
    for style in ("colwise", "rowwise", "embedding_rowwise", "colwise_gather_output"):
        assert hasattr(styles[style], "shard_param")
    for style in (NORM, DISPATCH, names.EXPERTS, *PACKED, "moe_tp_experts"):
        assert hasattr(styles[style], "install_forward")


def test_a_style_splits_one_parameter_of_a_module_on_a_mesh():
    style = names.require_styles()["colwise"]
    assert list(inspect.signature(style.shard_param).parameters) == ["module", "param", "mesh"]
    assert list(inspect.signature(style.install_forward).parameters) == ["module", "mesh"]


def test_dispatched_experts_take_both_meshes():
    parameters = inspect.signature(names.require_styles()[DISPATCH].install_forward).parameters
    assert {"ep_mesh", "tp_mesh"} <= set(parameters)


def test_the_sum_in_the_backward_pass_is_there():
    from transformers.distributed.parallel_utils import _AllReduceBackward

    assert list(inspect.signature(_AllReduceBackward.forward).parameters) == [
        "ctx",
        "x",
        "process_group",
    ]


@pytest.mark.parametrize("model", ["L", "Q", "M", "X"])
def test_models_say_how_their_layers_split(model):
    tensors, experts = names.model_plans(tiny_model(model))
    assert tensors["model.layers.*.self_attn.q_proj"] == "colwise"
    assert tensors["model.embed_tokens"] == "embedding_rowwise"
    assert tensors["lm_head"] == "colwise_gather_output"
    assert (DISPATCH in experts.values()) == (model in "MX")


@pytest.mark.parametrize("model", ["M", "X", "G"])
def test_experts_are_called_with_what_the_router_chose(model):
    from distft.training.experts import is_experts

    found = [module for module in tiny_model(model).modules() if is_experts(module)]
    assert len(found) == (1 if model == "G" else 2)


def test_heads_norms_still_sum_their_gradient_after_each_backward_pass_upstream():
    """Their sum over a window counts its first micro-steps twice, so ours is in the graph."""
    style = names.require_styles()[NORM]
    assert "register_post_accumulate_grad_hook" in inspect.getsource(type(style))


def test_trainer_names_the_parameters_with_weight_decay_without_being_built():
    from torch import nn
    from transformers import Trainer

    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    rule: Any = Trainer.get_decay_parameter_names
    assert rule(None, model) == ["0.weight"]


def test_a_model_says_what_it_keeps_in_fp32_beside_bf16():
    from distft.kept import bf16_plan

    model = tiny_model("M")
    assert bf16_plan(model) is None
    model._keep_in_fp32_modules_strict = {"layers.*.gate.weight"}
    found = bf16_plan(model)
    assert found is not None
    assert found.search("model.layers.1.mlp.gate.weight")
