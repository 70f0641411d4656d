"""Parameter counts of adapters."""

from __future__ import annotations

from distft.formulas._numbers import whole


def lora_params(rank: int, in_features: int, out_features: int) -> int:
    """Number of parameters of one LoRA adapter on a linear layer: r (in + out).

    Source: Hu et al. 2021 (LoRA), section 4.1: A is (r, in), B is (out, r).

    Raises:
        ValueError: An argument is not a whole number of at least 1.

    Collective: none.

    >>> lora_params(2, 32, 32)
    128
    """
    rank = whole("rank", rank, 1)
    return rank * (whole("in_features", in_features, 1) + whole("out_features", out_features, 1))


def expert_lora_params(
    layers: int, experts: int, rank: int, hidden: int, expert_width: int, fused: bool = False
) -> int:
    """Number of LoRA parameters on the gate, up and down projections of every expert.

    Separate: `L E 3 r (d + f)`, one pair (A, B) per projection. Fused gate and up, one
    `(2 f, d)` matrix as transformers 5 stores it: `L E r (2 d + 3 f)`, since gate and up share A.

    Source: PEFT, `target_parameters`; Hu et al. 2021, section 4.1.

    Args:
        layers: Number of layers that have experts.
        experts: Experts per layer.
        rank: Rank of each adapter.
        hidden: Model width d.
        expert_width: Width f of one expert.
        fused: Whether gate and up are one matrix.

    Raises:
        ValueError: A count is not a whole number of at least 1.

    Collective: none.

    >>> expert_lora_params(48, 128, 16, 2048, 768)
    830472192
    """
    layers, experts = whole("layers", layers, 1), whole("experts", experts, 1)
    rank, hidden = whole("rank", rank, 1), whole("hidden", hidden, 1)
    width = whole("expert_width", expert_width, 1)
    if fused:
        per_expert = lora_params(rank, hidden, 2 * width) + lora_params(rank, width, hidden)
    else:
        per_expert = 3 * lora_params(rank, hidden, width)
    return layers * experts * per_expert
