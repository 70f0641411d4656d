"""Names and shapes of the tensors of decoder models, from the numbers of their configuration.

The names and the order are those of transformers 5 in memory, where the experts of a layer are two
3-D tensors. A test holds every architecture here equal to the model that transformers builds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distft.formulas._numbers import choice, whole

Named = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """What one architecture fixes, and the values its configuration may leave out."""

    defaults: Mapping[str, Any]
    query_bias: bool = False
    head_norms: bool = False
    router_first: bool = False


_DENSE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_QWEN = _DENSE | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_MISTRAL = _DENSE | {"intermediate_size": 14336, "num_key_value_heads": 8}

# A saved config.json may omit whatever equals the default of its class.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_DENSE | {"attention_bias": False, "mlp_bias": False}),
    "qwen2": Family(_QWEN, query_bias=True),
    "qwen3": Family(_QWEN | {"head_dim": 128, "attention_bias": False}, head_norms=True),
    "mistral": Family(_MISTRAL),
    "mixtral": Family(
        _MISTRAL | {"num_experts": 8, "num_experts_per_tok": 2},
        router_first=True,
    ),
    "qwen3_moe": Family(
        _QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        head_norms=True,
    ),
}
# Families whose router hands a token's weights for its experts on in fp32, not as activations are.
ROUTED_IN_FP32 = ("mixtral",)


@dataclass(frozen=True)
class Decoder:
    """Numbers of one decoder-only language model, validated.

    Raises:
        ValueError: `model_type` is unknown or a size is no whole number of at least 1.
    """

    model_type: str
    values: Mapping[str, Any]

    @classmethod
    def from_values(cls, config: Mapping[str, Any]) -> Decoder:
        """Return the decoder that a configuration describes, its defaults filled in.

        Raises:
            ValueError: The architecture is not known here, or a size is out of range.
        """
        model_type = str(config.get("model_type"))
        if model_type not in FAMILIES:
            raise ValueError(
                f"The architecture {model_type!r} is not one whose tensors are known from its "
                f"configuration ({', '.join(sorted(FAMILIES))}). "
                "Build the model, on the meta device if it is large, and use ModelSpec.from_model."
            )
        for head in config.get("architectures") or ():
            if not str(head).endswith("ForCausalLM"):
                raise ValueError(
                    f"{head} has another head than the language models known from a "
                    "configuration. Build the model and use ModelSpec.from_model."
                )
        values = dict(FAMILIES[model_type].defaults)
        for key in values:
            # transformers stores the number of experts under either name.
            for name in (key, "num_local_experts") if key == "num_experts" else (key,):
                if config.get(name) is not None:
                    values[key] = config[name]
        return cls(model_type, values)

    def __post_init__(self) -> None:
        choice("model_type", self.model_type, FAMILIES)
        for key, value in self.values.items():
            if (
                not isinstance(value, bool)
                and key not in ("mlp_only_layers",)
                and value is not None
            ):
                whole(key, value, 1)
        heads, kv_heads = self.values["num_attention_heads"], self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads is {heads}, which num_key_value_heads={kv_heads} does not "
                "divide. Choose a number of key-value heads that divides the attention heads."
            )

    @property
    def family(self) -> Family:
        """What the architecture fixes."""
        return FAMILIES[self.model_type]

    @property
    def num_key_value_heads(self) -> int:
        """Key-value heads; as many as attention heads where the configuration says none."""
        return int(self.values["num_key_value_heads"] or self.values["num_attention_heads"])

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        values = self.values
        return int(values["head_dim"] or values["hidden_size"] // values["num_attention_heads"])

    @property
    def num_experts(self) -> int:
        """Experts per layer, 0 for a dense model."""
        return int(self.values.get("num_experts", 0))

    @property
    def experts_per_token(self) -> int:
        """Experts that one token visits per layer, 0 for a dense model."""
        return int(self.values.get("num_experts_per_tok", 0))

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(self.values["tie_word_embeddings"])

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        step = self.values.get("decoder_sparse_step") or 1
        return (
            self.num_experts > 0
            and layer not in (self.values.get("mlp_only_layers") or ())
            and (layer + 1) % step == 0
        )

    def root_tensors(self) -> tuple[list[Named], list[Named]]:
        """Tensors outside the layers: those registered before the layers, and those after."""
        vocab, hidden = self.values["vocab_size"], self.values["hidden_size"]
        after: list[Named] = [("model.norm.weight", (hidden,))]
        if not self.tied:
            after.append(("lm_head.weight", (vocab, hidden)))
        return [("model.embed_tokens.weight", (vocab, hidden))], after

    def layer_tensors(self, layer: int) -> Iterator[Named]:
        """Yield the tensors of one layer in parameter order, by name inside the layer."""
        hidden = self.values["hidden_size"]
        yield from self._attention()
        yield from self._experts() if self.is_sparse(layer) else self._mlp()
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)

    def _attention(self) -> Iterator[Named]:
        hidden, dim = self.values["hidden_size"], self.head_dim
        bias = bool(self.values.get("attention_bias"))
        for name, heads in (
            ("q", self.values["num_attention_heads"]),
            ("k", self.num_key_value_heads),
            ("v", self.num_key_value_heads),
        ):
            yield f"self_attn.{name}_proj.weight", (heads * dim, hidden)
            if bias or self.family.query_bias:
                yield f"self_attn.{name}_proj.bias", (heads * dim,)
        yield "self_attn.o_proj.weight", (hidden, self.values["num_attention_heads"] * dim)
        if bias:
            yield "self_attn.o_proj.bias", (hidden,)
        if self.family.head_norms:
            yield "self_attn.q_norm.weight", (dim,)
            yield "self_attn.k_norm.weight", (dim,)

    def _mlp(self) -> Iterator[Named]:
        hidden, width = self.values["hidden_size"], self.values["intermediate_size"]
        for name, rows, columns in (
            ("gate", width, hidden),
            ("up", width, hidden),
            ("down", hidden, width),
        ):
            yield f"mlp.{name}_proj.weight", (rows, columns)
            if self.values.get("mlp_bias"):
                yield f"mlp.{name}_proj.bias", (rows,)

    def _experts(self) -> Iterator[Named]:
        experts, hidden = self.num_experts, self.values["hidden_size"]
        width = self.values.get("moe_intermediate_size") or self.values["intermediate_size"]
        router: Named = ("mlp.gate.weight", (experts, hidden))
        if self.family.router_first:
            yield router
        yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, width)
        if not self.family.router_first:
            yield router


def expert_numbers(config: Any) -> tuple[int, int]:
    """Return experts of a layer and experts of a token by a configuration, 0 and 0 if dense.

    Collective: none.
    """
    counts = (_first_number(config, names) for names in (_EXPERTS, _EXPERTS_PER_TOKEN))
    num_experts, per_token = counts
    return (num_experts, per_token) if num_experts and per_token else (0, 0)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token")


def _first_number(config: Any, names: Iterable[str]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0
