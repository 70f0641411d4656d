"""Models made small by the code that builds them."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from distft.diagnose.recipe import FromConfig, Recipe
from distft.diagnose.shrink import Shrink, alike, smaller_models
from distft.presets import preset
from distft.testing import tiny_config


def small(name, ranks=4, **changes):
    with smaller_models(Shrink(ranks)) as cut:
        model = FromConfig({**preset(name), **changes})()
    return model, cut


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.1-8B",
        "Qwen2.5-7B",
        "Gemma-2-9B",
        "Phi-3-mini",
        "GPT-2-XL",
        "Mixtral-8x7B",
        "Qwen3-30B-A3B",
        "GPT-OSS-20B",
        "DeepSeek-V3",
        "Pythia-6.9B",
        "OLMo-2-7B",
    ],
)
def test_a_model_of_every_family_becomes_small_and_still_runs(name):
    model, cut = small(name)
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    layers = cut.get("num_hidden_layers") or cut["n_layer"]
    assert layers[1] == 2
    logits = model(input_ids=torch.tensor([[3, 5, 7, 9]])).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("ranks", [2, 4, 3])
def test_what_ranks_divide_stays_divisible_and_the_rest_stays_not(ranks):
    values = dict(preset("Qwen3-30B-A3B"))
    for name, changes in (("8 groups", {}), ("2 groups", {"num_key_value_heads": 2})):
        before = {**values, **changes}
        config = AutoConfig.for_model(**before)
        Shrink(ranks)(config)
        for size in ("num_key_value_heads", "num_experts", "moe_intermediate_size", "vocab_size"):
            divided = before[size] % ranks == 0
            assert (getattr(config, size) % ranks == 0) == divided, (name, size)
        assert config.num_experts_per_tok == values["num_experts_per_tok"]


def test_cutting_twice_changes_nothing_more():
    for name in ("Llama-2-7B", "Qwen3-0.6B", "GPT-2-XL", "DeepSeek-V3"):
        config = AutoConfig.for_model(**preset(name))
        Shrink(4)(config)
        once = json.dumps(config.to_dict(), default=str)
        Shrink(4)(config)
        assert json.dumps(config.to_dict(), default=str) == once


def test_a_small_config_is_left_alone():
    config = tiny_config("M")
    before = config.to_dict()
    Shrink(4)(config)
    assert config.to_dict() == before


def test_from_pretrained_reads_no_weights_and_keeps_its_own_arguments(tmp_path):
    AutoConfig.for_model(**preset("Qwen3-8B")).save_pretrained(tmp_path)
    with smaller_models(Shrink(4)) as cut:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, attn_implementation="eager", device_map=None
        )
    assert cut["hidden_size"] == (4096, 128)
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained.__func__.__module__.startswith("transformers")


def test_a_model_too_large_to_keep_its_widths_is_refused():
    config = AutoConfig.for_model(**preset("Qwen3-8B"))
    with pytest.raises(ValueError, match=r"hidden_size=4096, above 1024"):
        Shrink(4, widths=False)(config)


def test_sizes_keep_what_they_leave_over():
    assert [alike(size, 256, 4) for size in (151936, 50257, 131)] == [256, 257, 131]


def test_a_quantized_model_is_small_quantized_and_its_other_weights_are_fp32(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    AutoConfig.for_model(**preset("Qwen3-8B")).save_pretrained(tmp_path)
    recipe = Recipe(pickle.dumps(FourBit(str(tmp_path))), Shrink(4), 8)
    model, _ = recipe.build()
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, bitsandbytes.nn.Linear4bit)
    assert layer.compute_dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.uint8}
    logits = model(input_ids=torch.tensor([[3, 5, 7, 9]])).logits
    assert torch.isfinite(logits).all()


@dataclass(frozen=True)
class FourBit:
    """Loads a model as a QLoRA script does."""

    folder: str

    def __call__(self):
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return AutoModelForCausalLM.from_pretrained(self.folder, quantization_config=config)
