"""Names and shapes of the tensors of models, from the numbers of their configuration.

The names and the order are those of transformers 5 in memory, where the experts of a layer are two
3-D tensors. A test holds every architecture here equal to the model that transformers builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distft.formulas._numbers import choice, whole
from distft.formulas.families import FAMILIES, Family
from distft.formulas.shape import Shape

Named = tuple[str, tuple[int, ...]]

# Keys of a configuration under which transformers stores the number of experts.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# What may be zero, or is no number at all.
_FREE = ("mlp_only_layers", "first_k_dense_replace")


@dataclass(frozen=True)
class Decoder:
    """Numbers of one model, validated.

    Raises:
        ValueError: `model_type` is unknown or a size is no whole number of at least 1.
    """

    model_type: str
    values: Mapping[str, Any]

    @classmethod
    def from_values(cls, config: Mapping[str, Any]) -> Decoder:
        """Return the model that a configuration describes, its defaults filled in.

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
        family = FAMILIES[model_type]
        for head in config.get("architectures") or ():
            if family.head and not str(head).endswith(("ForCausalLM", "LMHeadModel")):
                raise ValueError(
                    f"{head} has another head than the language models known from a "
                    "configuration. Build the model and use ModelSpec.from_model."
                )
        for key in family.refused:
            if config.get(key):
                raise ValueError(
                    f"{model_type!r} with {key}={config[key]!r} has other tensors than those known "
                    "from a configuration. Build the model and use ModelSpec.from_model."
                )
        values = dict(family.defaults)
        for key in values:
            names: Iterable[str] = _EXPERT_KEYS[::-1] if key == "num_experts" else (key,)
            if key in family.aliases:
                names = (family.aliases[key], key) if family.aliases[key] else ()
            for name in names:
                # None is an answer for the rank of latent queries: there is none.
                if config.get(name) is not None or (key == "q_lora_rank" and name in config):
                    values[key] = config[name]
                    break
        return cls(model_type, values)

    def __post_init__(self) -> None:
        choice("model_type", self.model_type, FAMILIES)
        for key, value in self.values.items():
            if not isinstance(value, bool) and key not in _FREE and value is not None:
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
        return int(self.values.get("num_experts_per_tok") or 0)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return bool(self.values["tie_word_embeddings"])

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        step = self.values.get("decoder_sparse_step") or 1
        return (
            self.num_experts > 0
            and layer >= (self.values.get("first_k_dense_replace") or 0)
            and layer not in (self.values.get("mlp_only_layers") or ())
            and (layer + 1) % step == 0
        )

    def layer_path(self, layer: int) -> str:
        """Return the path of a block."""
        return f"{self.family.blocks}.{layer}"

    def root_tensors(self) -> tuple[list[Named], list[Named]]:
        """Tensors outside the layers: those registered before the layers, and those after."""
        after = [
            (name, shape)
            for name, shape in self._filled(self.family.after)
            if not (self.tied and name == self.family.head)
        ]
        return self._filled(self.family.before), after

    def layer_tensors(self, layer: int) -> Iterator[Named]:
        """Yield the tensors of one layer in parameter order, by name inside the layer."""
        yield from self._sparse_layer if self.is_sparse(layer) else self._dense_layer

    @cached_property
    def _dense_layer(self) -> list[Named]:
        family = self.family
        return self._filled(family.first, family.attention, family.feed_forward, family.norms)

    @cached_property
    def _sparse_layer(self) -> list[Named]:
        family = self.family
        return self._filled(family.first, family.attention, family.experts, family.norms)

    @cached_property
    def widths(self) -> Mapping[str, int]:
        """What the letters of the templates stand for."""
        values, heads = self.values, self.values["num_attention_heads"]
        hidden = values["hidden_size"]
        width = values["intermediate_size"] or 4 * hidden
        expert = values.get("moe_intermediate_size") or width
        shared = values.get("shared_expert_intermediate_size") or expert * (
            values.get("n_shared_experts") or 0
        )
        nope, rope = values.get("qk_nope_head_dim") or 0, values.get("qk_rope_head_dim") or 0
        value_dim = values.get("v_head_dim") or 0
        side = (values.get("image_size") or 0) // (values.get("patch_size") or 1)
        return {
            "h": hidden,
            "a": heads,
            "d": self.head_dim,
            "q": heads * self.head_dim,
            "k": self.num_key_value_heads * self.head_dim,
            "f": width,
            "x": expert,
            "s": shared,
            "e": self.num_experts,
            "V": values.get("vocab_size") or 0,
            "P": values.get("n_positions") or 0,
            "Q": values.get("q_lora_rank") or 0,
            "K": values.get("kv_lora_rank") or 0,
            "R": rope,
            "L": heads * (nope + rope),
            "N": heads * (nope + value_dim),
            "O": heads * value_dim,
            "G": side * side + 1,
            "c": values.get("num_channels") or 0,
            "p": values.get("patch_size") or 0,
        }

    def _filled(self, *templates: str) -> list[Named]:
        """Return the tensors of templates, without those whose condition does not hold."""
        found = []
        for line in "\n".join(each for each in templates if each).splitlines():
            name, *dims = line.split()
            if dims and dims[-1].startswith("?"):
                key = dims.pop()[1:]
                is_there = bool(self.values.get(key.lstrip("!")))
                if is_there == key.startswith("!"):
                    continue
            found.append((name, tuple(self._dimension(dim) for dim in dims)))
        return found

    def _dimension(self, written: str) -> int:
        """Return the size of a sum such as `q+2k`."""
        total = 0
        for factor, letter in re.findall(r"(\d*)([A-Za-z]?)", written):
            if factor or letter:
                total += int(factor or 1) * (self.widths[letter] if letter else 1)
        return total

    def shape(self, total: int, active: int) -> Shape:
        """Return what memory and time depend on, for a model of so many parameters."""
        widths, layers = self.widths, self.values["num_hidden_layers"]
        sparse = sum(self.is_sparse(layer) for layer in range(layers))
        heads, kv_heads, head_dim = widths["a"], self.num_key_value_heads, self.head_dim
        if widths["K"]:
            # Latent attention works on whole heads, whose values are narrower than their keys.
            kv_heads, head_dim = heads, (widths["L"] + widths["O"]) // (2 * heads)
        return Shape(
            layers,
            widths["h"],
            heads,
            kv_heads,
            head_dim,
            widths["f"],
            widths["V"],
            total,
            active,
            widths["V"] * widths["h"] * (1 if self.tied else 2),
            self.family.gated,
            self.family.layer_norm,
            self.family.parallel,
            self.family.head_norms,
            self.num_experts,
            self.experts_per_token,
            widths["x"] if self.num_experts else 0,
            widths["s"] if self.num_experts else 0,
            sparse,
        )


def expert_numbers(config: Any) -> tuple[int, int]:
    """Return experts of a layer and experts of a token by a configuration, 0 and 0 if dense.

    Collective: none.
    """
    counts = (_first_number(config, names) for names in (_EXPERT_KEYS, _EXPERTS_PER_TOKEN))
    num_experts, per_token = counts
    return (num_experts, per_token) if num_experts and per_token else (0, 0)


_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token")


def _first_number(config: Any, names: Iterable[str]) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0
