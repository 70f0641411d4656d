"""The demo's model: a Qwen3 small enough for a laptop and large enough to learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The configuration: 2 layers of width 256, tied embeddings, 2.1 million parameters.

    Collective: none
    """
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # 1 / sqrt(256): the usual 0.02 is for wide models and learns little in 80 steps.
        initializer_range=0.0625,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def build_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised fp32 model; the same weights for the same seed, on every rank.

    Collective: none
    """
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)
