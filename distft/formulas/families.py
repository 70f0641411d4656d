"""Tensors of model families as templates: a name, the letters of its shape, when it is there.

A line of a template is `name, dimensions, condition`. A dimension is a sum of letters with
factors: `h` hidden, `q` and `k` the width of all query and all key-value heads, `d` of one head,
`f` of the feed-forward layer, `x` of one expert, `s` of shared experts, `e` experts, `a` heads.
`?key` keeps a line where the configuration has a true value for `key`, `?!key` where it has none.

The names and the order are those of transformers 5 in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What one architecture fixes, and the values its configuration may leave out.

    Args:
        defaults: Values of a configuration that says nothing.
        attention: Template of the attention, as all that follow.
        feed_forward: Of a dense feed-forward layer.
        norms: Of what follows the feed-forward layer.
        first: Of what precedes the attention.
        experts: Of a layer with experts.
        before: Of what is registered before the blocks.
        after: Of what is registered after them; the head is left out where it is tied.
        blocks: Path of the list of blocks.
        embedding: Name of the embedding, which a tied head is.
        head: Name of the output head.
        aliases: Other names of keys of the configuration.
        gated: Whether a feed-forward layer has a gate.
        layer_norm: Whether norms are LayerNorm.
        parallel: Whether attention and feed-forward share a norm.
        head_norms: Whether queries and keys are normed.
        refused: Keys whose true value means other tensors than these.
        kept: Modules of a block that stay fp32 in bf16 training.
    """

    defaults: Mapping[str, Any]
    attention: str
    feed_forward: str
    norms: str
    first: str = ""
    experts: str = ""
    before: str = "model.embed_tokens.weight V h"
    after: str = "model.norm.weight h\nlm_head.weight V h"
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    aliases: Mapping[str, str] = field(default_factory=dict)
    gated: bool = True
    layer_norm: bool = False
    parallel: bool = False
    head_norms: bool = False
    refused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


_DENSE: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_BIAS = {"attention_bias": False}
_QWEN = {
    **_DENSE,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
}
_MISTRAL = {**_DENSE, "intermediate_size": 14336, "num_key_value_heads": 8}


def _projections(when: str = " ?attention_bias", output: str | None = None) -> str:
    """Return query, key, value and output layers, whose biases are there under a condition."""
    output = when if output is None else output
    lines = []
    for name, rows in (("q", "q"), ("k", "k"), ("v", "k")):
        lines.append(f"self_attn.{name}_proj.weight {rows} h")
        if when != "never":
            lines.append(f"self_attn.{name}_proj.bias {rows}{when}")
    lines.append("self_attn.o_proj.weight h q")
    if output != "never":
        lines.append(f"self_attn.o_proj.bias h{output}")
    return "\n".join(lines)


_PLAIN = _projections("never")
_OPTIONAL = _projections()
_HEAD_NORMS = "\nself_attn.q_norm.weight d\nself_attn.k_norm.weight d"
_GATED = "mlp.gate_proj.weight f h\nmlp.up_proj.weight f h\nmlp.down_proj.weight h f"
_GATED_BIAS = """mlp.gate_proj.weight f h
mlp.gate_proj.bias f ?mlp_bias
mlp.up_proj.weight f h
mlp.up_proj.bias f ?mlp_bias
mlp.down_proj.weight h f
mlp.down_proj.bias h ?mlp_bias"""
_PACKED = "mlp.gate_up_proj.weight 2f h\nmlp.down_proj.weight h f"
_NORMS = "input_layernorm.weight h\npost_attention_layernorm.weight h"
_NORMS_BIAS = """input_layernorm.weight h
input_layernorm.bias h
post_attention_layernorm.weight h
post_attention_layernorm.bias h"""
_GEMMA_NORMS = f"""{_NORMS}
pre_feedforward_layernorm.weight h
post_feedforward_layernorm.weight h"""
_ROUTER = "mlp.gate.weight e h"
_EXPERTS = "mlp.experts.gate_up_proj e 2x h\nmlp.experts.down_proj e h x"
_SHARED = """mlp.shared_experts.gate_proj.weight s h
mlp.shared_experts.up_proj.weight s h
mlp.shared_experts.down_proj.weight h s"""
_LATENT = """self_attn.q_proj.weight L h ?!q_lora_rank
self_attn.q_a_proj.weight Q h ?q_lora_rank
self_attn.q_a_layernorm.weight Q ?q_lora_rank
self_attn.q_b_proj.weight L Q ?q_lora_rank
self_attn.kv_a_proj_with_mqa.weight K+R h
self_attn.kv_a_layernorm.weight K
self_attn.kv_b_proj.weight N K
self_attn.o_proj.weight h O"""
_DEEPSEEK = {
    **_DENSE,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_TIED = {"tie_word_embeddings": True}
_GEMMA2 = {
    **_DENSE,
    **_TIED,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_GLM4 = {
    **_DENSE,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
}

# A saved config.json may omit whatever equals the default of its class.
FAMILIES: Mapping[str, Family] = {
    "llama": Family({**_DENSE, **_BIAS, "mlp_bias": False}, _OPTIONAL, _GATED_BIAS, _NORMS),
    "qwen2": Family(_QWEN, _projections("", "never"), _GATED, _NORMS),
    "qwen3": Family(
        {**_QWEN, **_BIAS, "head_dim": 128},
        _OPTIONAL + _HEAD_NORMS,
        _GATED,
        _NORMS,
        head_norms=True,
    ),
    "mistral": Family(_MISTRAL, _PLAIN, _GATED, _NORMS),
    "mixtral": Family(
        {**_MISTRAL, "num_experts": 8, "num_experts_per_tok": 2},
        _PLAIN,
        _GATED,
        _NORMS,
        experts=f"{_ROUTER}\n{_EXPERTS}",
    ),
    "qwen3_moe": Family(
        {
            **_QWEN,
            **_BIAS,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        _OPTIONAL + _HEAD_NORMS,
        _GATED,
        _NORMS,
        experts=f"{_EXPERTS}\n{_ROUTER}",
        head_norms=True,
    ),
    "qwen2_moe": Family(
        {
            **_QWEN,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "qkv_bias": True,
        },
        _projections(" ?qkv_bias", "never"),
        _GATED,
        _NORMS,
        experts=f"""{_ROUTER}
{_EXPERTS}
{_SHARED.replace("shared_experts", "shared_expert")}
mlp.shared_expert_gate.weight 1 h""",
    ),
    "gpt_oss": Family(
        {
            **_DENSE,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
        },
        "self_attn.sinks a\n" + _OPTIONAL,
        _GATED,
        _NORMS,
        experts="""mlp.router.weight e h
mlp.router.bias e
mlp.experts.gate_up_proj e h 2x
mlp.experts.gate_up_proj_bias e 2x
mlp.experts.down_proj e x h
mlp.experts.down_proj_bias e h""",
    ),
    "deepseek_v3": Family(
        _DEEPSEEK,
        _LATENT,
        _GATED,
        _NORMS,
        experts=f"{_EXPERTS}\n{_ROUTER}\n{_SHARED}",
        kept=("mlp.gate",),
    ),
    "deepseek_v2": Family(
        {
            **_DEEPSEEK,
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "moe_intermediate_size": 1407,
            "num_experts": 64,
            "num_experts_per_tok": None,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
        _LATENT,
        _GATED,
        _NORMS,
        experts=f"{_EXPERTS}\n{_ROUTER}\n{_SHARED}",
        kept=("mlp.gate",),
    ),
    "glm4_moe_lite": Family(
        {
            **_DEEPSEEK,
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        _LATENT,
        _GATED,
        _NORMS,
        experts=f"{_EXPERTS}\n{_ROUTER}\n{_SHARED}",
        kept=("mlp.gate",),
    ),
    "glm4_moe": Family(
        {
            **_DENSE,
            **_BIAS,
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "moe_intermediate_size": 1408,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        _projections(" ?attention_bias", "never")
        + "\nself_attn.q_norm.weight d ?use_qk_norm\nself_attn.k_norm.weight d ?use_qk_norm",
        _GATED,
        _NORMS,
        experts=f"{_EXPERTS}\n{_ROUTER}\n{_SHARED}",
        kept=("mlp.gate",),
    ),
    "gemma": Family(
        {
            **_DENSE,
            **_BIAS,
            **_TIED,
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "head_dim": 256,
        },
        _OPTIONAL,
        _GATED,
        _NORMS,
    ),
    "gemma2": Family({**_GEMMA2, **_BIAS}, _OPTIONAL, _GATED, _GEMMA_NORMS),
    "gemma3_text": Family(
        {**_GEMMA2, **_BIAS, "vocab_size": 262208},
        _OPTIONAL + _HEAD_NORMS,
        _GATED,
        _GEMMA_NORMS,
        head_norms=True,
    ),
    "phi": Family(
        {
            **_DENSE,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
        },
        _projections("", "never").replace("o_proj", "dense") + "\nself_attn.dense.bias h",
        "mlp.fc1.weight f h\nmlp.fc1.bias f\nmlp.fc2.weight h f\nmlp.fc2.bias h",
        "input_layernorm.weight h\ninput_layernorm.bias h",
        after="""model.final_layernorm.weight h
model.final_layernorm.bias h
lm_head.weight V h
lm_head.bias V""",
        gated=False,
        layer_norm=True,
        parallel=True,
        refused=("qk_layernorm",),
    ),
    "phi3": Family(
        {**_DENSE, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
        "self_attn.o_proj.weight h q\nself_attn.qkv_proj.weight q+2k h",
        _PACKED,
        _NORMS,
    ),
    "glm": Family(_GLM4, _projections(" ?attention_bias", "never"), _PACKED, _NORMS),
    "glm4": Family(
        _GLM4,
        _projections(" ?attention_bias", "never"),
        _PACKED,
        _NORMS + "\npost_self_attn_layernorm.weight h\npost_mlp_layernorm.weight h",
    ),
    "olmo2": Family(
        {**_DENSE, **_BIAS, "vocab_size": 50304},
        _OPTIONAL + "\nself_attn.q_norm.weight q\nself_attn.k_norm.weight k",
        _GATED,
        "post_attention_layernorm.weight h\npost_feedforward_layernorm.weight h",
        head_norms=True,
    ),
    "granite": Family({**_DENSE, **_BIAS, "mlp_bias": False}, _OPTIONAL, _GATED_BIAS, _NORMS),
    "smollm3": Family(
        {
            **_DENSE,
            **_BIAS,
            **_TIED,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "mlp_bias": False,
        },
        _OPTIONAL,
        _GATED_BIAS,
        _NORMS,
    ),
    "starcoder2": Family(
        {
            **_DENSE,
            **_TIED,
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "use_bias": True,
        },
        _projections(" ?use_bias"),
        """mlp.c_fc.weight f h
mlp.c_fc.bias f ?use_bias
mlp.c_proj.weight h f
mlp.c_proj.bias h ?use_bias""",
        _NORMS_BIAS,
        after="model.norm.weight h\nmodel.norm.bias h\nlm_head.weight V h",
        gated=False,
        layer_norm=True,
    ),
    "gpt2": Family(
        {
            **_DENSE,
            **_TIED,
            "vocab_size": 50257,
            "hidden_size": 768,
            "intermediate_size": None,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "n_positions": 1024,
        },
        """attn.c_attn.weight h 3h
attn.c_attn.bias 3h
attn.c_proj.weight h h
attn.c_proj.bias h
ln_2.weight h
ln_2.bias h""",
        "mlp.c_fc.weight h f\nmlp.c_fc.bias f\nmlp.c_proj.weight f h\nmlp.c_proj.bias h",
        "",
        first="ln_1.weight h\nln_1.bias h",
        before="transformer.wte.weight V h\ntransformer.wpe.weight P h",
        after="transformer.ln_f.weight h\ntransformer.ln_f.bias h\nlm_head.weight V h",
        blocks="transformer.h",
        embedding="transformer.wte.weight",
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
        },
        gated=False,
        layer_norm=True,
    ),
    "gpt_neox": Family(
        {
            **_DENSE,
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "attention_bias": True,
        },
        """attention.query_key_value.weight 3h h
attention.query_key_value.bias 3h ?attention_bias
attention.dense.weight h h
attention.dense.bias h ?attention_bias""",
        """mlp.dense_h_to_4h.weight f h
mlp.dense_h_to_4h.bias f
mlp.dense_4h_to_h.weight h f
mlp.dense_4h_to_h.bias h""",
        "",
        first=_NORMS_BIAS,
        before="gpt_neox.embed_in.weight V h",
        after="""gpt_neox.final_layer_norm.weight h
gpt_neox.final_layer_norm.bias h
lm_head.weight V h""",
        blocks="gpt_neox.layers",
        embedding="gpt_neox.embed_in.weight",
        gated=False,
        layer_norm=True,
    ),
    "mpt": Family(
        {
            **_DENSE,
            **_TIED,
            "vocab_size": 50368,
            "hidden_size": 2048,
            "intermediate_size": None,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        """attn.Wqkv.weight 3h h
attn.out_proj.weight h h
norm_2.weight h""",
        "ffn.up_proj.weight f h\nffn.down_proj.weight h f",
        "",
        first="norm_1.weight h",
        before="transformer.wte.weight V h",
        after="transformer.norm_f.weight h\nlm_head.weight V h",
        blocks="transformer.blocks",
        embedding="transformer.wte.weight",
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        },
        gated=False,
        layer_norm=True,
    ),
    "falcon": Family(
        {
            **_DENSE,
            **_TIED,
            "vocab_size": 65024,
            "hidden_size": 4544,
            "intermediate_size": None,
            "num_attention_heads": 71,
            "num_key_value_heads": 1,
        },
        "self_attention.query_key_value.weight q+2k h\nself_attention.dense.weight h h",
        "mlp.dense_h_to_4h.weight f h\nmlp.dense_4h_to_h.weight h f",
        "input_layernorm.weight h\ninput_layernorm.bias h",
        before="transformer.word_embeddings.weight V h",
        after="transformer.ln_f.weight h\ntransformer.ln_f.bias h\nlm_head.weight V h",
        blocks="transformer.h",
        embedding="transformer.word_embeddings.weight",
        # What falcon's configuration says of key-value heads holds for another layout only.
        aliases={"intermediate_size": "ffn_hidden_size", "num_key_value_heads": ""},
        gated=False,
        layer_norm=True,
        parallel=True,
        refused=("new_decoder_architecture", "bias"),
    ),
    "dinov2": Family(
        {
            "vocab_size": None,
            "hidden_size": 768,
            "intermediate_size": None,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": None,
            "head_dim": None,
            "tie_word_embeddings": False,
            "image_size": 224,
            "patch_size": 14,
            "num_channels": 3,
        },
        _projections("").replace("self_attn", "attention")
        + "\nlayer_scale1.lambda1 h\nnorm2.weight h\nnorm2.bias h",
        "mlp.fc1.weight f h\nmlp.fc1.bias f\nmlp.fc2.weight h f\nmlp.fc2.bias h",
        "layer_scale2.lambda1 h",
        first="norm1.weight h\nnorm1.bias h",
        before="""embeddings.cls_token 1 1 h
embeddings.mask_token 1 h
embeddings.position_embeddings 1 G h
embeddings.patch_embeddings.projection.weight h c p p
embeddings.patch_embeddings.projection.bias h""",
        after="layernorm.weight h\nlayernorm.bias h",
        blocks="encoder.layer",
        embedding="embeddings.patch_embeddings.projection.weight",
        head="",
        gated=False,
        layer_norm=True,
        refused=("use_swiglu_ffn",),
    ),
}
# Families whose router hands a token's weights for its experts on in fp32, not as activations are.
ROUTED_IN_FP32 = ("mixtral",)
