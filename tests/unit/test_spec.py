"""Tensors from configurations and from built models, and the checks of a workload."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
import transformers

from distft.formulas.families import FAMILIES
from distft.presets import PRESETS
from distft.spec import ModelSpec, TensorSpec, UnitSpec, Workload, sharding_units

SMALL = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE = SMALL | {
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
LATENT = SMALL | {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
MODELS = {
    "llama": ("Llama", SMALL),
    "llama tied": ("Llama", SMALL | {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama all heads": ("Llama", SMALL | {"num_key_value_heads": None}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 8}),
    "qwen3 default head": ("Qwen3", SMALL | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "qwen3_moe mixed": (
        "Qwen3Moe",
        MOE | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "mistral": ("Mistral", SMALL | {"head_dim": 16}),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 3}),
    "mixtral tied": ("Mixtral", SMALL | {"tie_word_embeddings": True, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 24}),
    "gpt_oss": ("GptOss", SMALL | {"head_dim": 8, "num_local_experts": 4}),
    "deepseek_v2": ("DeepseekV2", LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v3": ("DeepseekV3", LATENT | {"q_lora_rank": 12}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | {"q_lora_rank": 12}),
    "glm4_moe": ("Glm4Moe", LATENT | {"head_dim": 8, "use_qk_norm": True}),
    "gemma": ("Gemma", SMALL | {"head_dim": 16}),
    "gemma2": ("Gemma2", SMALL | {"head_dim": 16}),
    "gemma3": ("Gemma3Text", SMALL | {"head_dim": 16}),
    "phi": ("Phi", SMALL),
    "phi3": ("Phi3", SMALL | {"pad_token_id": 0}),
    "glm": ("Glm", SMALL | {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", SMALL | {"head_dim": 16, "pad_token_id": 0}),
    "olmo2": ("Olmo2", SMALL),
    "granite": ("Granite", SMALL | {"mlp_bias": True}),
    "smollm3": ("SmolLM3", SMALL | {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2", SMALL | {"use_bias": False}),
    "gpt_neox": ("GPTNeoX", SMALL | {"attention_bias": False}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 131}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 131}),
    "falcon": (
        "Falcon",
        {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
}


def config_of(case: str) -> transformers.PreTrainedConfig:
    name, values = MODELS[case]
    return getattr(transformers, f"{name}Config")(**values)


def build(config: transformers.PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("case", MODELS)
def test_the_spec_from_a_config_equals_the_spec_of_the_built_model(case):
    config = config_of(case)
    assert ModelSpec.from_config(config) == ModelSpec.from_model(build(config))


@pytest.mark.parametrize("case", MODELS)
def test_config_object_its_dict_and_its_folder_give_the_same_spec(case, tmp_path):
    config = config_of(case)
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_config(config)
    assert ModelSpec.from_config(config.to_dict()) == spec
    assert ModelSpec.from_config(tmp_path) == spec


@pytest.mark.parametrize("name", FAMILIES)
def test_values_a_config_leaves_out_are_the_defaults_of_transformers(name):
    config = transformers.AutoConfig.for_model(name)
    assert ModelSpec.from_config({"model_type": name}) == ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("case", "total", "active"),
    [
        ("llama", 23_904, 23_904),
        ("llama tied", 19_712, 19_712),
        ("qwen3_moe", 33_536, 21_248),
    ],
)
def test_small_models_have_the_known_counts(case, total, active):
    spec = ModelSpec.from_config(config_of(case))
    assert (spec.total_params, spec.active_params) == (total, active)


def test_experts_of_the_small_mixture_hold_18432_parameters():
    spec = ModelSpec.from_config(config_of("qwen3_moe"))
    assert sum(tensor.numel for tensor in spec.tensors if tensor.is_expert) == 18_432


def test_qwen3_30b_a3b_has_30_5_billion_parameters_and_3_4_billion_active():
    spec = ModelSpec.from_config(QWEN3_30B_A3B)
    assert spec.total_params == 30_532_122_624
    assert spec.active_params == 3_353_032_704
    assert round(2 * spec.total_params / 1e9, 1) == 61.1
    assert round(2 * spec.active_params / 1e9, 1) == 6.7


def test_a_70b_spec_takes_a_fraction_of_a_second():
    values = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672}
    values |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    start = time.perf_counter()
    spec = ModelSpec.from_config(values | {"vocab_size": 128256})
    assert spec.total_params == 70_553_706_496
    assert time.perf_counter() - start < 0.5


def test_units_are_the_layers_and_then_the_rest():
    spec = ModelSpec.from_config(config_of("llama"))
    assert [unit.name for unit in spec.units] == ["model.layers.0", "model.layers.1", ""]
    assert spec.units[-1].numel == 2 * 4_192 + 32


def test_a_tied_head_is_one_tensor_and_one_tie():
    spec = ModelSpec.from_config(config_of("llama tied"))
    assert len(spec.tensors) == 20
    assert spec.ties == (("lm_head.weight", "model.embed_tokens.weight"),)


def test_frozen_parameters_of_a_model_are_not_trainable():
    model = build(config_of("llama"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    spec = ModelSpec.from_model(model)
    assert spec.total_params - spec.trainable_params == 2 * 3 * 32 * 48


def test_a_built_model_of_another_architecture_counts_its_active_experts():
    config = transformers.GptOssConfig(
        **SMALL | {"num_hidden_layers": 1, "head_dim": 8, "num_local_experts": 4},
        num_experts_per_tok=2,
    )
    model = build(config)
    spec = ModelSpec.from_model(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert spec.total_params == sum(p.numel() for p in model.parameters())
    assert spec.active_params == spec.total_params - experts // 2


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.head = torch.nn.Linear(4, 2)


def test_a_model_that_names_no_blocks_is_cut_at_its_largest_module_list():
    assert sharding_units(Stack()) == ("blocks.0", "blocks.1")
    units = ModelSpec.from_model(Stack()).units
    assert units[0] == UnitSpec(
        "blocks.0",
        (
            TensorSpec("blocks.0.weight", (4, 4), "blocks.0"),
            TensorSpec("blocks.0.bias", (4,), "blocks.0"),
        ),
    )
    assert [tensor.name for tensor in units[-1].tensors] == [
        "small.0.weight",
        "small.0.bias",
        "head.weight",
        "head.bias",
    ]


def test_a_model_without_lists_is_one_unit():
    assert [unit.name for unit in ModelSpec.from_model(torch.nn.Linear(2, 2)).units] == [""]


def test_an_unknown_architecture_points_to_from_model():
    with pytest.raises(ValueError, match=r"'opt'.*qwen3_moe.*ModelSpec\.from_model"):
        ModelSpec.from_config({"model_type": "opt"})


def test_a_configuration_of_an_unknown_architecture_is_built_on_the_meta_device_and_says_so():
    config = transformers.OPTConfig(
        vocab_size=131, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.warns(UserWarning, match=r"'opt'.*OPTForCausalLM.*meta device"):
        spec = ModelSpec.from_config(config)
    assert spec == ModelSpec.from_model(build(config))


def test_an_option_that_means_other_tensors_is_refused():
    with pytest.raises(ValueError, match=r"'falcon' with new_decoder_architecture=True"):
        ModelSpec.from_config({"model_type": "falcon", "new_decoder_architecture": True})


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704),
        ("Llama-3.1-405B", 405_853_388_800, 405_853_388_800),
        ("Mistral-7B-v0.1", 7_241_732_096, 7_241_732_096),
        ("Qwen2.5-1.5B-Instruct", 1_543_714_304, 1_543_714_304),
        ("DeepSeek-V3", 671_026_404_352, 37_552_282_624),
        ("facebook/dinov2-base", 86_580_480, 86_580_480),
        ("facebook/dinov2-large", 304_368_640, 304_368_640),
    ],
)
def test_a_preset_has_the_published_counts(name, total, active):
    spec = ModelSpec.from_config(name)
    assert (spec.total_params, spec.active_params) == (total, active)


def test_every_preset_is_known_by_the_architecture_it_names():
    for name in PRESETS:
        assert ModelSpec.from_config(name).total_params > 80e6


def test_an_unknown_preset_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"'Qwen3-9B'.*nearest are Qwen3-"):
        ModelSpec.from_config("Qwen3-9B")


def test_the_parts_of_a_mixture_of_experts_are_counted_apart():
    spec = ModelSpec.from_config("Qwen3-30B-A3B")
    assert spec.embedding_params == 2 * 151_936 * 2048
    assert spec.expert_params == 48 * 128 * 3 * 2048 * 768
    assert spec.embedding_params + spec.expert_params + spec.dense_params == spec.total_params


def test_another_head_than_a_language_model_points_to_from_model():
    values = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification.*from_model"):
        ModelSpec.from_config(values)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        ModelSpec.from_config(tmp_path)


def test_an_object_that_is_no_config_is_refused():
    with pytest.raises(ValueError, match="config is a int"):
        ModelSpec.from_config(3)


def test_a_size_below_one_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 0}))
    with pytest.raises(ValueError, match="hidden_size is 0"):
        ModelSpec.from_config(tmp_path)


def test_key_value_heads_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads is 4, which num_key_value_heads=3"):
        ModelSpec.from_config(SMALL | {"model_type": "llama", "num_key_value_heads": 3})


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="0 parameters"):
        ModelSpec.from_model(torch.nn.Identity())


@pytest.mark.parametrize("name", ["micro_batch", "seq_len", "grad_accum", "lora_rank"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_workload_refuses_counts_below_one(name, value):
    with pytest.raises(ValueError, match=rf"Workload\({name}="):
        Workload(**{name: value})


def test_a_workload_refuses_an_unknown_tuning_and_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"full, lora, qlora\. Did you mean 'qlora'"):
        Workload(tuning="qlorra")


def test_a_workload_counts_the_tokens_of_a_step():
    assert Workload(micro_batch=2, seq_len=128, grad_accum=3).tokens == 768


def test_the_module_imports_no_torch():
    code = "import sys, distft.spec; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
