"""The tensors that LoRA adds, against those that PEFT makes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from distft import DDP, FSDP2, ModelSpec, Workload
from distft.adapted import adapter_params, with_adapters
from distft.testing import tiny_config, tiny_model

peft = pytest.importorskip("peft")


def lora(**values: object) -> Workload:
    return Workload(tuning="lora", **values)  # type: ignore[arg-type]


def peft_spec(model: str, **values: object) -> ModelSpec:
    config = peft.LoraConfig(task_type="CAUSAL_LM", **values)
    with torch.device("meta"), warnings.catch_warnings():
        # PEFT asks for a property that transformers has renamed, and names patterns of no use here.
        warnings.simplefilter("ignore")
        return ModelSpec.from_model(peft.get_peft_model(tiny_model(model), config))


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        *((model, "all-linear") for model in ("L", "Lt", "Q")),
        *((model, ["q_proj", "v_proj"]) for model in ("L", "M")),
    ],
)
def test_adapters_have_the_names_shapes_and_order_of_pefts(model, targets):
    load = lora(lora_rank=2, lora_targets=targets)
    ours = with_adapters(ModelSpec.from_config(tiny_config(model)), load)
    assert ours.tensors == peft_spec(model, r=2, target_modules=targets).tensors


@pytest.mark.parametrize("model", ["M", "X", "G"])
def test_adapters_on_experts_are_nested_as_pefts(model):
    load = lora(lora_rank=2, lora_targets=["q_proj"], expert_lora_rank=2)
    ours = with_adapters(ModelSpec.from_config(tiny_config(model)), load)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    theirs = peft_spec(model, r=2, target_modules=["q_proj"], target_parameters=names)
    assert ours.tensors == theirs.tensors


@pytest.mark.parametrize("rank", [1, 4, 6, 16, 64])
def test_adapters_on_experts_count_as_pefts_at_a_rank_for_each_expert(rank):
    each = max(1, rank // 6)
    spec = ModelSpec.from_config(tiny_config("M"))
    load = lora(lora_rank=1, lora_targets="none", expert_lora_rank=each)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    theirs = peft_spec("M", r=each, target_modules=[], target_parameters=names)
    assert adapter_params(spec, load) == theirs.trainable_params == 2 * 672 * each


def test_lora_holds_states_of_the_adapters_alone_and_is_cheaper_than_full_tuning():
    spec = ModelSpec.from_config("Llama-3.1-8B")
    full, less = (
        FSDP2(precision="bf16").memory(spec, load, world_size=8) for load in (Workload(), lora())
    )
    assert max(less.kind_bytes("optimizer")) < 0.02 * max(full.kind_bytes("optimizer"))
    assert less.peak_bytes < full.peak_bytes


def test_traffic_of_lora_reduces_the_adapters_alone():
    spec = ModelSpec.from_config(tiny_config("L"))
    sent = DDP().traffic(spec, lora(lora_rank=2), world_size=2)
    gradients = next(each for each in sent.collectives if each.what == "gradients")
    assert gradients.payload_bytes == 4 * adapter_params(spec, lora(lora_rank=2))


def test_targets_that_name_nothing_are_refused():
    with pytest.raises(ValueError, match=r"\('c_attn',\).*none of the linear layers"):
        with_adapters(ModelSpec.from_config(tiny_config("L")), lora(lora_targets=("c_attn",)))


def test_experts_of_a_dense_model_are_refused():
    with pytest.raises(ValueError, match=r"expert_lora_rank=1.*0 experts"):
        with_adapters(ModelSpec.from_config(tiny_config("L")), lora(expert_lora_rank=1))


def test_qlora_quantizes_the_linear_layers_of_blocks_and_stores_them_packed():
    load = lora(lora_rank=2, lora_targets=("q_proj",))
    spec = ModelSpec.from_config(tiny_config("L"))
    made = with_adapters(spec, replace(load, tuning="qlora", double_quant=False))
    quantized = [tensor for tensor in made.tensors if tensor.scales is not None]
    assert len(quantized) == 14
    assert {tensor.scales for tensor in quantized} == {"plain"}
    assert made.total_params == with_adapters(spec, load).total_params
    matrix = next(tensor for tensor in quantized if "q_proj" in tensor.name)
    assert matrix.stored("fp32").shape == (32 * 32 // 8, 1)
    assert matrix.stored("bf16-mixed").shape == (32 * 32 // 4, 1)
