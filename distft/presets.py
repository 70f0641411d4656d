"""Configurations of well-known models by name, so that planning needs no download.

Numbers are those of each model's published config.json. Models whose code is not part of
transformers stand as the architecture there that has the same tensors: Qwen (the first), ChatGLM3
and InternLM as `qwen2`, Baichuan2 and Yi as `llama`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _dense(
    kind: str, layers: int, hidden: int, heads: int, kv: int, width: int, vocab: int, **more: Any
) -> Config:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
        **more,
    }


def _mpt(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"n_layers": layers, "d_model": hidden, "n_heads": heads, "vocab_size": 50368}
    return {"model_type": "mpt", **sizes}


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads}


_TIED = {"tie_word_embeddings": True}
_DEEPSEEK: Config = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}


def _qwen3_moe(
    layers: int, hidden: int, heads: int, experts: int, width: int, **more: Any
) -> Config:
    sparse = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": width}
    return _dense(
        "qwen3_moe", layers, hidden, heads, 4, 6144, 151936, head_dim=128, **sparse, **more
    )


def _gpt_oss(layers: int, experts: int) -> Config:
    sparse = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64}
    return _dense("gpt_oss", layers, 2880, 64, 8, 2880, 201088, **sparse)


PRESETS: Mapping[str, Config] = {
    "Llama-2-7B": _dense("llama", 32, 4096, 32, 32, 11008, 32000),
    "Llama-2-13B": _dense("llama", 40, 5120, 40, 40, 13824, 32000),
    "Llama-2-70B": _dense("llama", 80, 8192, 64, 8, 28672, 32000),
    "CodeLlama-34B": _dense("llama", 48, 8192, 64, 8, 22016, 32000),
    "TinyLlama-1.1B": _dense("llama", 22, 2048, 32, 4, 5632, 32000),
    "Llama-3-8B": _dense("llama", 32, 4096, 32, 8, 14336, 128256),
    "Llama-3-70B": _dense("llama", 80, 8192, 64, 8, 28672, 128256),
    "Llama-3.1-8B": _dense("llama", 32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _dense("llama", 80, 8192, 64, 8, 28672, 128256),
    "Llama-3.3-70B": _dense("llama", 80, 8192, 64, 8, 28672, 128256),
    "Llama-3.1-405B": _dense("llama", 126, 16384, 128, 8, 53248, 128256),
    "Llama-3.2-1B": _dense("llama", 16, 2048, 32, 8, 8192, 128256, **_TIED),
    "Llama-3.2-3B": _dense("llama", 28, 3072, 24, 8, 8192, 128256, **_TIED),
    "Mistral-7B": _dense("mistral", 32, 4096, 32, 8, 14336, 32000),
    "Zephyr-7B": _dense("mistral", 32, 4096, 32, 8, 14336, 32000),
    "Mistral-Nemo-12B": _dense("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128),
    "Mistral-Small-24B": _dense("mistral", 40, 5120, 32, 8, 32768, 131072, head_dim=128),
    "Mixtral-8x7B": _dense("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8),
    "Mixtral-8x22B": _dense("mixtral", 56, 6144, 48, 8, 16384, 32768, num_local_experts=8),
    "Yi-6B": _dense("llama", 32, 4096, 32, 4, 11008, 64000),
    "Yi-9B": _dense("llama", 48, 4096, 32, 4, 11008, 64000),
    "Yi-34B": _dense("llama", 60, 7168, 56, 8, 20480, 64000),
    "Baichuan2-7B": _dense("llama", 32, 4096, 32, 32, 11008, 125696),
    "Baichuan2-13B": _dense("llama", 40, 5120, 40, 40, 13696, 125696),
    "ChatGLM2-6B": _dense("qwen2", 28, 4096, 32, 2, 13696, 65024),
    "ChatGLM3-6B": _dense("qwen2", 28, 4096, 32, 2, 13696, 65024),
    "InternLM-7B": _dense("qwen2", 32, 4096, 32, 32, 11008, 103168),
    "InternLM-20B": _dense("llama", 60, 5120, 40, 40, 13824, 103168),
    "XVERSE-7B": _dense("llama", 32, 4096, 32, 32, 11008, 100534),
    "XVERSE-13B": _dense("llama", 40, 5120, 40, 40, 13824, 100534),
    "DeepSeek-7B": _dense("llama", 30, 4096, 32, 32, 11008, 102400),
    "DeepSeek-67B": _dense("llama", 95, 8192, 64, 8, 22016, 102400),
    "Qwen-1.8B": _dense("qwen2", 24, 2048, 16, 16, 5504, 151936),
    "Qwen-7B": _dense("qwen2", 32, 4096, 32, 32, 11008, 151936),
    "Qwen-14B": _dense("qwen2", 40, 5120, 40, 40, 13696, 152064),
    "Qwen-72B": _dense("qwen2", 80, 8192, 64, 64, 24576, 152064),
    "Qwen1.5-0.5B": _dense("qwen2", 24, 1024, 16, 16, 2816, 151936, **_TIED),
    "Qwen1.5-1.8B": _dense("qwen2", 24, 2048, 16, 16, 5504, 151936),
    "Qwen1.5-4B": _dense("qwen2", 40, 2560, 20, 20, 6912, 151936),
    "Qwen1.5-7B": _dense("qwen2", 32, 4096, 32, 32, 11008, 151936),
    "Qwen1.5-14B": _dense("qwen2", 40, 5120, 40, 40, 13696, 152064),
    "Qwen2-0.5B": _dense("qwen2", 24, 896, 14, 2, 4864, 151936, **_TIED),
    "Qwen2-1.5B": _dense("qwen2", 28, 1536, 12, 2, 8960, 151936, **_TIED),
    "Qwen2-7B": _dense("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "Qwen2-72B": _dense("qwen2", 80, 8192, 64, 8, 29568, 152064),
    "Qwen2.5-0.5B": _dense("qwen2", 24, 896, 14, 2, 4864, 151936, **_TIED),
    "Qwen2.5-1.5B": _dense("qwen2", 28, 1536, 12, 2, 8960, 151936, **_TIED),
    "Qwen2.5-3B": _dense("qwen2", 36, 2048, 16, 2, 11008, 151936, **_TIED),
    "Qwen2.5-7B": _dense("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _dense("qwen2", 48, 5120, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _dense("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _dense("qwen2", 80, 8192, 64, 8, 29568, 152064),
    "Qwen3-0.6B": _dense("qwen3", 28, 1024, 16, 8, 3072, 151936, **_TIED),
    "Qwen3-1.7B": _dense("qwen3", 28, 2048, 16, 8, 6144, 151936, **_TIED),
    "Qwen3-4B": _dense("qwen3", 36, 2560, 32, 8, 9728, 151936, **_TIED),
    "Qwen3-8B": _dense("qwen3", 36, 4096, 32, 8, 12288, 151936),
    "Qwen3-14B": _dense("qwen3", 40, 5120, 40, 8, 17408, 151936),
    "Qwen3-32B": _dense("qwen3", 64, 5120, 64, 8, 25600, 151936),
    "Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 128, 768),
    "Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 128, 1536),
    "GPT-OSS-20B": _gpt_oss(24, 32),
    "GPT-OSS-120B": _gpt_oss(36, 128),
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-R1": _DEEPSEEK,
    "Kimi-K2": {
        **_DEEPSEEK,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
    "Gemma-2B": _dense("gemma", 18, 2048, 8, 1, 16384, 256000, head_dim=256),
    "Gemma-7B": _dense("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256),
    "Gemma-2-2B": _dense("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256),
    "Gemma-2-9B": _dense("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256),
    "Gemma-2-27B": _dense("gemma2", 46, 4608, 32, 16, 36864, 256000, head_dim=128),
    "Gemma-3-1B": _dense("gemma3_text", 26, 1152, 4, 1, 6912, 262144, head_dim=256),
    "Gemma-3-4B": _dense("gemma3_text", 34, 2560, 8, 4, 10240, 262208, head_dim=256),
    "Gemma-3-12B": _dense("gemma3_text", 48, 3840, 16, 8, 15360, 262208, head_dim=256),
    "Gemma-3-27B": _dense("gemma3_text", 62, 5376, 32, 16, 21504, 262208, head_dim=128),
    "Phi-1.5": _dense("phi", 24, 2048, 32, 32, 8192, 51200),
    "Phi-2": _dense("phi", 32, 2560, 32, 32, 10240, 51200),
    "Phi-3-mini": _dense("phi3", 32, 3072, 32, 32, 8192, 32064),
    "Phi-4": _dense("phi3", 40, 5120, 40, 10, 17920, 100352),
    "StableLM-3B-alpha": _dense("gpt_neox", 16, 4096, 32, 32, 16384, 50432),
    "StableLM-7B-alpha": _dense("gpt_neox", 16, 6144, 48, 48, 24576, 50432),
    "Pythia-1B": _dense("gpt_neox", 16, 2048, 8, 8, 8192, 50304),
    "Pythia-6.9B": _dense("gpt_neox", 32, 4096, 32, 32, 16384, 50432),
    "SmolLM3-3B": {"model_type": "smollm3"},
    "OLMo-2-7B": _dense("olmo2", 32, 4096, 32, 32, 11008, 100352),
    "OLMo-2-13B": _dense("olmo2", 40, 5120, 40, 40, 13824, 100352),
    "StarCoder2-3B": {"model_type": "starcoder2"},
    "StarCoder2-7B": _dense("starcoder2", 32, 4608, 36, 4, 18432, 49152),
    "GLM-4-9B": {"model_type": "glm", "intermediate_size": 13696},
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite"},
    "Vicuna-7B": _dense("llama", 32, 4096, 32, 32, 11008, 32000),
    "Vicuna-13B": _dense("llama", 40, 5120, 40, 40, 13824, 32000),
    "Falcon-7B": {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "vocab_size": 65024,
    },
    "GPT-2": _gpt2(12, 768, 12),
    "GPT-2-medium": _gpt2(24, 1024, 16),
    "GPT-2-large": _gpt2(36, 1280, 20),
    "GPT-2-XL": _gpt2(48, 1600, 25),
    "MPT-125M": _mpt(12, 768, 12),
    "MPT-350M": _mpt(24, 1024, 16),
    "MPT-760M": _mpt(24, 1536, 12),
    "MPT-1B": _mpt(24, 2048, 16),
    "MPT-3B": _mpt(32, 2560, 20),
    "MPT-7B": _mpt(32, 4096, 32),
    "MPT-13B": _mpt(40, 5120, 40),
    "MPT-30B": _mpt(48, 7168, 64),
    "MPT-70B": _mpt(80, 8192, 64),
    "DINOv2-base": {"model_type": "dinov2", "hidden_size": 768, "image_size": 518},
    "DINOv2-large": {
        "model_type": "dinov2",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "image_size": 518,
    },
}

_ENDINGS = re.compile(r"(instruct|chat|base|hf|it|meta|v0\d|\d{4}|(?<=[a-z])\d+k)$")


def preset(name: str) -> Config:
    """Return the configuration of a well-known model.

    The owner before a slash, case, signs and endings such as "-Instruct" are ignored.

    Raises:
        ValueError: The model is not among them; the nearest names are said.

    Collective: none.

    >>> preset("Qwen/Qwen3-30B-A3B")["num_experts"]
    128
    """
    found = _BY_KEY.get(_key(name))
    if found is None:
        near = difflib.get_close_matches(name.rpartition("/")[2], PRESETS, n=3, cutoff=0.5)
        hint = f" The nearest are {', '.join(near)}." if near else ""
        raise ValueError(
            f"{name!r} is none of the {len(PRESETS)} models whose configuration is known.{hint} "
            "Pass a folder with its config.json, or the configuration as a dict."
        )
    return PRESETS[found]


def _key(name: str) -> str:
    """Return a name without owner, case, signs and endings."""
    key = re.sub(r"\(.*?\)", "", name.rpartition("/")[2].lower())
    key = re.sub(r"[^a-z0-9]", "", key.replace("meta-", ""))
    shorter = _ENDINGS.sub("", key)
    while shorter != key:
        key, shorter = shorter, _ENDINGS.sub("", shorter)
    return key


_BY_KEY = {_key(name): name for name in PRESETS}
