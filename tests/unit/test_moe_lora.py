"""The config of adapters for attention and experts."""

from __future__ import annotations

import pytest

import distft
from distft.adapted import adapter_params
from distft.formulas import expert_lora_params
from distft.peft import attach_adapters
from distft.testing import tiny_config, tiny_model

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def in_experts(model):
    return sum(
        p.numel() for name, p in model.named_parameters() if "experts" in name and p.requires_grad
    )


@pytest.mark.parametrize(("r", "per_expert"), [(1, 1), (4, 1), (6, 1), (16, 2), (64, 10)])
def test_pattern_model_and_formula_agree_on_the_rank_of_an_expert(r, per_expert):  # case 73
    model = tiny_model("M", num_hidden_layers=1)
    config = distft.moe_lora(model, r=r)
    made = attach_adapters(model, config, seed=0)
    assert set(config.rank_pattern.values()) == {per_expert}
    expected = expert_lora_params(1, 6, per_expert, 32, 16, fused=True)
    assert in_experts(made) == expected == 672 * per_expert
    load = distft.Workload(
        tuning="lora", lora_rank=r, expert_lora_rank=per_expert,
        lora_targets=tuple(config.target_modules),
    )  # fmt: skip
    spec = distft.ModelSpec.from_config(tiny_config("M", num_hidden_layers=1))
    trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert adapter_params(spec, load) == trained


@pytest.mark.parametrize(("family", "router"), [("M", "gate"), ("X", "gate"), ("G", "router")])
def test_experts_attention_and_router_are_found_in_every_family(family, router):
    config = distft.moe_lora(tiny_model(family), r=8, train_router=True)
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert config.target_parameters == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config.modules_to_save == [f"mlp.{router}"]
    assert distft.moe_lora(tiny_model(family)).modules_to_save is None


def test_what_the_caller_says_replaces_what_is_chosen():
    config = distft.moe_lora(tiny_model("M"), lora_alpha=3, target_modules=["q_proj"])
    assert config.lora_alpha == 3
    assert config.target_modules == {"q_proj"}


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match=r"0 modules in LlamaForCausalLM.*LoraConfig of your own"):
        distft.moe_lora(tiny_model("L"))


def test_dropout_on_parameters_is_refused_by_name_before_anything():  # case 73
    from peft import LoraConfig

    from distft.trainer.arguments import check_objects

    with pytest.raises(ValueError, match=r"lora_dropout=0.1, target_parameters=.*Set lora_dropout"):
        distft.moe_lora(tiny_model("M"), lora_dropout=0.1)
    config = LoraConfig(lora_dropout=0.1, target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="folded into the weight"):
        check_objects((None, None), None, config)
    model = tiny_model("M")
    with pytest.raises(ValueError, match="folded into the weight"):
        attach_adapters(model, config, seed=0)
    assert all("lora" not in name for name, _ in model.named_parameters())
