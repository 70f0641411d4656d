"""The numbers of a transformer that memory and time depend on beside its parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields

from distft.formulas._numbers import whole


@dataclass(frozen=True)
class Shape:
    """Widths and counts of a transformer.

    Args:
        layers: Number of blocks.
        hidden: Width of the hidden states.
        heads: Attention heads.
        kv_heads: Key-value heads.
        head_dim: Width of one head.
        width: Width of a dense feed-forward layer.
        vocab: Rows of the output head, 0 where there is none.
        total: Parameters, a tied one counted once.
        active: Parameters that one token uses.
        embedding: Parameters of the embedding and of the head, where it is another tensor.
        gated: Whether the feed-forward layer has a gate beside its up projection.
        layer_norm: Whether norms are LayerNorm, which keeps no fp32 copy, and not RMSNorm.
        parallel: Whether attention and feed-forward share one norm.
        head_norms: Whether queries and keys are normed.
        experts: Experts of a sparse layer, 0 for a dense model.
        experts_per_token: Experts that a token visits.
        expert_width: Width of one expert.
        shared_width: Width of the experts that every token visits.
        sparse_layers: Blocks with experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    total: int
    active: int
    embedding: int
    gated: bool = True
    layer_norm: bool = False
    parallel: bool = False
    head_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    sparse_layers: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, bool):
                whole(each.name, value)

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts."""
        return self.sparse_layers * self.experts * 3 * self.hidden * self.expert_width

    @property
    def block_params(self) -> int:
        """Parameters of the largest block, its experts included."""
        return (self.total - self.embedding) // self.layers if self.layers else 0
