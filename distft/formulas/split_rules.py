"""How rules split a model's tensors over `tp`, and its experts over `ep`: which part a rank has.

Rules name modules and parameters, ``*`` for a layer's number, and say how they are split; the words
are those of transformers' plans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from distft.formulas import visits
from distft.formulas.memory import chunk_rows
from distft.formulas.reports import Parameter

Rules = Mapping[str, str]

# What sends tokens to their experts, and a norm over heads of which each rank has some.
DISPATCH, NORM = "ep_dispatch_experts", "replicated_with_grad_allreduce"
# Experts of which each rank has a part of every one.
SHARED_EXPERTS = "moe_tp_experts"
# Gate and up, say: each of two parts is split in itself.
PACKED = ("packed_colwise", "packed_rowwise")
# What is spread over `ep`: experts, and of an adapter on them the columns of B, in strides.
_SPREAD = ("grouped_gemm", "expert_columns")
# What PEFT puts into the name of a module that it wraps, and the factors of an adapter.
_WRAPPERS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_FACTOR = re.compile(r"(.*)\.lora_([AB])\.[^.]+(?:\.\w*)?")
# A weight of a linear layer is cut by its rows, which are columns of what it returns, or by its
# columns.
ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
_DIMS = {"embedding_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0, "expert_columns": 1}

# What transformers 5.24 says of the decoders that `ModelSpec.from_config` knows.
TENSOR_RULES: Rules = {
    "model.embed_tokens": "embedding_rowwise",
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"model.layers.*.self_attn.{name}_norm": NORM for name in "qk"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
    "model.layers.*.mlp.experts": SHARED_EXPERTS,
    "lm_head": "colwise_gather_output",
}
EXPERT_RULES: Rules = {
    **{f"model.layers.*.mlp.experts.{name}_proj": "grouped_gemm" for name in ("gate_up", "down")},
    "model.layers.*.mlp.experts": DISPATCH,
}


class Named(visits.Named, Parameter, Protocol):
    """A parameter with its name, block and shape; `distft.ModelSpec` has them."""

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to experts."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter, which `fully_shard` splits on by rows."""

    shape: tuple[int, ...]
    trainable: bool
    kept: bool
    # Packed weights are not split further than by rows.
    packed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def generic_name(name: str) -> str:
    """Return a name with ``*`` for each number between dots, as rules have it.

    >>> generic_name("model.layers.3.mlp.w1")
    'model.layers.*.mlp.w1'

    Collective: none.
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plain_name(name: str) -> str:
    """Return the name that a module or parameter had before PEFT wrapped it.

    >>> plain_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'

    Collective: none.
    """
    return _WRAPPERS.sub("", name.removeprefix("base_model.model."))


def style_of(name: str, rules: Rules) -> str | None:
    """Return the style of a parameter: its own rule's, else that of its module.

    Of an adapter, B is split as the rows of its layer's weight are, A as the columns, and each
    expert keeps its own part of both.

    Collective: none.

    >>> style_of("model.layers.3.mlp.up_proj.weight", TENSOR_RULES)
    'colwise'
    >>> style_of("base_model.model.lm_head.lora_A.default.weight", TENSOR_RULES)
    """
    # What `with_factors` says has the whole name: several adapters have one plain name.
    if generic_name(name) in rules:
        return rules[generic_name(name)]
    generic = generic_name(plain_name(name))
    factor = _FACTOR.fullmatch(generic)
    if factor is None:
        return rules.get(generic, rules.get(generic.rpartition(".")[0]))
    layer, side = factor.groups()
    style = rules.get(layer)
    if style == DISPATCH:
        return "grouped_gemm" if side == "A" else "expert_columns"
    return style if style in (COLUMNS if side == "A" else ROWS) else None


def with_factors(tensors: Sequence[Named], rules: Rules) -> Rules:
    """Return rules that also say how adapters lie on experts that are split over `tp`.

    B of (out, rank * experts) has the rows, or A of (experts * rank, in) the columns, of the rank's
    part of the weight; the other factor is whole. Both factors' shapes say which weight they adapt:
    gate and up have (2 i, h) where down has (h, i), which no two widths make the same.

    Collective: none.

    >>> with_factors([], TENSOR_RULES) == TENSOR_RULES
    True
    """
    layers: dict[str, list[Named]] = {}
    factors: dict[str, dict[str, Named]] = {}
    for tensor in tensors:
        name = generic_name(plain_name(tensor.name))
        layer = name.rpartition(".")[0]
        factor = _FACTOR.fullmatch(name)
        if factor is not None and rules.get(factor.group(1)) == SHARED_EXPERTS:
            wrapper = generic_name(tensor.name).rpartition(f".lora_{factor.group(2)}.")[0]
            factors.setdefault(wrapper, {})[factor.group(2)] = tensor
        elif rules.get(layer) == SHARED_EXPERTS and name in rules:
            layers.setdefault(layer, []).append(tensor)
    found = dict(rules)
    for wrapper, pair in factors.items():
        weights = layers[plain_name(wrapper)]
        widths = pair["B"].shape[0], pair["A"].shape[1]
        outputs = 1 if stores_outputs_first([weight.shape for weight in weights]) else 2
        for weight in weights:
            style = style_of(weight.name, rules)
            dim = split_dim(style, 3)
            if dim is None or widths != (weight.shape[outputs], weight.shape[3 - outputs]):
                continue
            packed = "packed_" if style in PACKED else ""
            side, split = ("B", "colwise") if dim == outputs else ("A", "rowwise")
            found[generic_name(pair[side].name)] = packed + split
    return found


def stores_outputs_first(experts: Sequence[tuple[int, ...]]) -> bool:
    """Return whether experts are (experts, out, in) rather than (experts, in, out).

    What goes into the first of their weights comes out of the last.

    Collective: none.

    >>> stores_outputs_first([(4, 64, 32), (4, 32, 32)]), stores_outputs_first([(4, 32, 64)] * 2)
    (True, False)
    """
    return experts[0][2] == experts[-1][1]


def module_style(path: str, rules: Rules) -> str | None:
    """Return the style that fits a module's forward pass: its rule's, or that of its adapter.

    Collective: none.

    >>> module_style("base_model.model.lm_head.lora_B.default", TENSOR_RULES)
    'colwise_gather_output'
    """
    return style_of(f"{path}.", rules)


def is_spread(name: str, rules: Rules) -> bool:
    """Return whether the rules for experts spread a parameter over `ep`.

    Collective: none.

    >>> is_spread("model.layers.3.mlp.experts.down_proj", EXPERT_RULES)
    True
    """
    return style_of(name, rules) in _SPREAD


def split_dim(style: str | None, num_dims: int) -> int | None:
    """Return the dimension that a style splits of a parameter, None where it stays whole.

    Source: transformers 5.24, `distributed/tensor_parallel.py` and `expert_parallel.py`.

    Collective: none.

    >>> split_dim("colwise", 2), split_dim("rowwise", 2), split_dim("rowwise", 1)
    (0, 1, None)
    """
    if style in ROWS:
        return max(num_dims - 2, 0)
    if style in COLUMNS:
        return num_dims - 1 if num_dims > 1 else None
    return _DIMS.get(style or "")


def placement_of(style: str | None, num_dims: int) -> tuple[str, int | None]:
    """Return how a part lies in the whole: "whole", "block" or "strided", and the dimension.

    A bias that a style knows and does not split is no plain tensor: "copied". Tensors of one
    placement are summed together in the gradient norm.

    Collective: none.

    >>> placement_of("colwise", 2), placement_of("rowwise", 1), placement_of(None, 2)
    (('block', 0), ('copied', None), ('whole', None))
    """
    dim = split_dim(style, num_dims)
    if dim is None:
        return ("copied" if style in COLUMNS and num_dims == 1 else "whole"), None
    strided = style == "expert_columns" or (style in PACKED and num_dims > 1)
    return ("strided" if strided else "block"), dim


def why_not(name: str, shape: Sequence[int], style: str | None, ranks: int) -> str | None:
    """Return why a style cannot split a parameter over some ranks, with the numbers, or None.

    Experts stay whole, and the two parts of a packed matrix are split alike.

    Collective: none.

    >>> why_not("experts", (5, 8, 8), "grouped_gemm", 2)
    'experts has 5 experts, and ep is 2, which must divide them. Choose an ep that does.'
    """
    if style == "grouped_gemm" and shape[0] % ranks:
        return (
            f"{name} has {shape[0]} experts, and ep is {ranks}, which must divide them. "
            "Choose an ep that does."
        )
    dim = split_dim(style, len(shape))
    if style in PACKED and len(shape) > 1 and dim is not None and (shape[dim] // 2) % ranks:
        return (
            f"{name} packs two parts of {shape[dim] // 2}, and tp is {ranks}, which must divide "
            "each. Choose a tp that does, or spread the experts with ep."
        )
    return None


def part_of(tensor: Named, style: str | None, ranks: int, rank: int) -> Part:
    """Return one rank's part of a parameter, cut as `torch.chunk` cuts.

    Raises:
        ValueError: Experts, or the halves of a packed tensor, do not divide by `ranks`.

    Collective: none.
    """
    dim = split_dim(style, len(tensor.shape))
    if dim is None or ranks == 1:
        return Part(tensor.shape, tensor.trainable, tensor.kept)
    reason = why_not(tensor.name, tensor.shape, style, ranks)
    if reason:
        raise ValueError(reason)
    shape = list(tensor.shape)
    shape[dim] = chunk_rows(shape[dim], ranks)[rank]
    return Part(tuple(shape), tensor.trainable, tensor.kept)
