"""Tiny models built from configs, with the sizes that every test knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

# 131 is a prime and 6 experts do not divide by 4, so shards come out uneven and empty.
_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "L": ("llama", {}),
    "Lt": ("llama", {"tie_word_embeddings": True}),
    "Q": ("qwen3", {"head_dim": 8}),
    "M": (
        "qwen3_moe",
        {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
        },
    ),
    # 1.16 million elements: a part of two has more than the 1 MiB that DeepSpeed leaves in memory.
    "W": ("llama", {"hidden_size": 192, "intermediate_size": 768}),
    "X": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "G": (
        "gpt_oss",
        {
            "num_hidden_layers": 1,
            "intermediate_size": 16,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the config of a tiny model.

    L, Lt (tied), Q (q/k norms), W (wide), M (6 experts), X (Mixtral, 3 experts) or G (GPT-OSS, 4
    experts).

    >>> sorted(TINY_MODELS)
    ['G', 'L', 'Lt', 'M', 'Q', 'W', 'X']

    Raises:
        ValueError: There is no tiny model of that name.

    Collective: none.
    """
    from transformers import AutoConfig

    if name not in TINY_MODELS:
        raise ValueError(f"There is no tiny model {name!r} among {', '.join(TINY_MODELS)}.")
    family, differences = TINY_MODELS[name]
    return AutoConfig.for_model(family, **{**_COMMON, **differences, **changes})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a tiny model in fp32, its values drawn from ``seed``.

    L has 23,904 parameters, Lt 19,712, Q 23,936, M 33,536, X 42,528, G 18,184.

    Collective: none.
    """
    import torch
    from transformers import AutoModelForCausalLM

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).float()
    torch.set_rng_state(state)
    return cast("PreTrainedModel", model)


def tiny_batches(
    loss_tokens: Sequence[int], length: int = 16, seed: int = 1
) -> list[dict[str, Tensor]]:
    """Return one batch of one row for each number of loss tokens; other labels are -100.

    Collective: none.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in loss_tokens:
        ids = torch.randint(0, 131, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, : length - count] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches
