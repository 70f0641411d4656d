"""Which parameters stay fp32 in bf16 training."""

from __future__ import annotations

import copy

import pytest
import torch

from distft.kept import follow_adapters, kept_modules, kept_names, mark_kept
from distft.spec import ModelSpec, check_units, gathered_units
from distft.testing import tiny_model


def mixed(name: str, *parts: str) -> torch.nn.Module:
    """Return a tiny model in bf16, with what has one of the parts in its name in fp32."""
    model = tiny_model(name).bfloat16()
    for key, parameter in model.named_parameters():
        if any(part in key for part in parts):
            parameter.data = parameter.data.float()
    return model


def test_what_is_fp32_among_bf16_weights_was_kept():
    kept = kept_modules(mixed("M", "mlp.gate."))
    assert list(kept) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert all(keep.names is None and keep.logits for keep in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_model_in_one_dtype_nothing_is_kept(dtype):
    assert kept_names(tiny_model("M").to(dtype)) == frozenset()


def test_a_bf16_part_of_an_fp32_model_keeps_nothing():
    model = tiny_model("L")
    model.model.layers[0].bfloat16()
    assert kept_names(model) == frozenset()


def test_a_class_says_what_it_keeps_whatever_the_dtype_it_comes_in():
    model = tiny_model("M")
    model._keep_in_fp32_modules_strict = {"mlp.gate.weight"}
    kept = kept_modules(model)
    assert list(kept) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert all(keep.by_class for keep in kept.values())
    model._keep_in_fp32_modules = {"norm"}
    assert kept_modules(model) == kept, "that list is for fp16 alone"


def test_a_module_is_kept_as_one_where_all_of_it_is_fp32():
    model = mixed("L", "layers.1.mlp")
    assert list(kept_modules(model)) == ["model.layers.1.mlp"]
    assert len(kept_names(model)) == 3


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_adapters_are_not_what_was_kept_but_follow_what_was():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(mixed("L", "q_proj"), LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if "lora_" in n)
    mark_kept(model)
    names = kept_names(model)
    assert {name.split(".self_attn.")[1].split(".")[0] for name in names} == {"q_proj"}
    assert sum("lora_" in name for name in names) == 4
    assert all(path.endswith("q_proj") for path in kept_modules(model))


def test_marks_go_with_a_copy_and_are_followed_once():
    model = mixed("M", "mlp.gate.")
    mark_kept(model)
    model.float()
    twin = copy.deepcopy(model)
    follow_adapters(twin)
    assert kept_modules(twin) == kept_modules(model)
    assert len(kept_names(twin)) == 2


def test_a_kept_module_is_a_unit_of_its_own_in_bf16_alone():
    spec = ModelSpec.from_model(mixed("M", "mlp.gate."))
    assert [unit.name for unit in spec.units_in("fp32")] == [unit.name for unit in spec.units]
    names = {unit.name: len(unit.tensors) for unit in spec.units_in("bf16")}
    assert names["model.layers.0.mlp.gate"] == 1
    assert len(names) == len(spec.units) + 2
    assert sum(names.values()) == len(spec.tensors)


def test_children_of_a_module_with_a_kept_parameter_are_units():
    model = mixed("L")
    attention = model.model.layers[0].self_attn
    attention.sinks = torch.nn.Parameter(torch.zeros(4))
    units = gathered_units(model)
    path = "model.layers.0.self_attn"
    assert units.index(f"{path}.q_proj") < units.index(path) < units.index("model.layers.0")


def test_a_kept_parameter_beside_bf16_ones_of_its_module_is_refused():
    model = mixed("L")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(131))
    with pytest.raises(ValueError, match=r"lm_head\.bias stays fp32 and lm_head\.weight.*2 param"):
        check_units("FSDP2(precision='bf16')", model)


def test_a_kept_parameter_that_is_tied_is_refused():
    with pytest.raises(ValueError, match=r"embed_tokens\.weight stays fp32 and is tied to lm_head"):
        check_units("FSDP2(precision='bf16')", mixed("Lt", "embed_tokens"))
