"""What a micro-step keeps for its backward pass: activations, scores, logits."""

from __future__ import annotations

from dataclasses import dataclass

from distft.formulas._numbers import choice
from distft.formulas.shape import Shape

KERNELS = ("eager", "compiled", "fused")
CHECKPOINTING = ("none", "selective", "full")

# Bytes of all that a loss keeps of one logit. Eager: bf16 logits 2, fp32 copy 4, log-softmax 4,
# gradient 4 (Wijmans et al. 2024, Cut Your Losses, table 1: 24.0 GB forward and 16.0 backward for
# 2.1e9 logits, the peak 28.0). Trainer: Hugging Face's trainers under autocast hold beside it a
# shifted copy 2, the bf16 gradient 2 and the fp32 copy that accelerate makes of outputs 4.
# bf16: losses of code that skips the fp32 copy: logits, log-softmax, gradient, one copy, 2 each.
# Compiled: logits 2, gradient 2, one fp32 intermediate 4. Chunked: eager on one of 8 chunks.
# Fused: nothing in the size of the logits.
LOGIT_BYTES = {
    "eager": 14.0,
    "trainer": 22.0,
    "bf16": 8.0,
    "compiled": 8.0,
    "chunked": 14 / 8,
    "fused": 0.0,
}


@dataclass(frozen=True)
class Kept:
    """What layers keep, by how they are run.

    Args:
        kernels: "eager" (one kernel an operation, keys and values expanded to all heads),
            "compiled" (norms and activations fused) or "fused" (also the product of the
            feed-forward layer computed again).
        adapters: Where adapters are: "" (on no linear layer), "attention" (queries and values) or
            "all" linear layers; None trains the layers themselves. Frozen ones keep no input.
        dropout: Whether adapters drop out their input: they keep a copy and a mask.
        inputs: Whether frozen layers keep their inputs all the same, as bitsandbytes does.
        outputs: Whether adapters also keep the output of every linear layer.
    """

    kernels: str = "eager"
    adapters: str | None = None
    dropout: bool = True
    inputs: bool = False
    outputs: bool = False

    @property
    def keeps_all_inputs(self) -> bool:
        """Whether every linear layer keeps its input."""
        return self.inputs or self.adapters in (None, "all")

    def __post_init__(self) -> None:
        choice("kernels", self.kernels, KERNELS)


def layer_copies(shape: Shape, kept: Kept = Kept()) -> float:
    """Tensors of tokens x hidden, 2 bytes an element, that one dense layer keeps for backward.

    Each norm keeps its output and its input, which eager RMSNorm holds in fp32 beside the
    normalized values; attention its queries, keys, values and output; a gated feed-forward layer
    gate, activated gate, up and product.

    Source: counted from the code of transformers 5; measured by stas00/ml-engineering in copies:
    Llama-3.1-8B 28, Qwen3-8B 29.8, Gemma-2b 48; derived from litgpt, ms-swift, torchtune 19-22.

    Collective: none.

    >>> llama = Shape(32, 4096, 32, 8, 128, 14336, 128256, 8030261248, 8030261248, 1050673152)
    >>> layer_copies(llama)
    28.0
    """
    return _around(shape, kept) + _feed_forward(shape, kept, shape.width / shape.hidden)


def _around(shape: Shape, kept: Kept) -> float:
    """Return the copies of norms and attention."""
    eager = kept.kernels == "eager"
    q = shape.heads * shape.head_dim / shape.hidden
    k = shape.kv_heads * shape.head_dim / shape.hidden
    norms = 1 if shape.parallel else 2
    inside = 3 if eager and not shape.layer_norm else 1
    outputs = norms if kept.keeps_all_inputs else norms - (0 if shape.parallel else 1)
    attention = (3 * q if eager else q + 2 * k) + q
    if eager and kept.keeps_all_inputs:
        attention += q
    copies = norms * inside + outputs + attention + (1 if eager else 0)
    if shape.head_norms:
        copies += (3 if eager else 1) * (q + k)
    if kept.outputs:
        copies += 2 * q + 2 * k
    if not kept.dropout or not kept.adapters:
        return copies
    # A copy of the input and a mask of 1 byte.
    return copies + (3.0 if kept.adapters == "attention" else 1.5 * (3 + q))


def norm_copies(shape: Shape, kept: Kept = Kept()) -> float:
    """Copies of a layer that tensor parallelism alone does not split: norms and the residual.

    Collective: none.
    """
    eager = kept.kernels == "eager"
    norms = 1 if shape.parallel else 2
    inside = 3 if eager and not shape.layer_norm else 1
    return norms * (inside + 1) + (1 if eager else 0)


def _feed_forward(shape: Shape, kept: Kept, width: float) -> float:
    """Return the copies of a feed-forward layer of a width, in units of the hidden width."""
    inner = {"eager": 4, "compiled": 3, "fused": 2}[kept.kernels] if shape.gated else 2
    if not kept.keeps_all_inputs and kept.kernels != "fused":
        # That of the down projection.
        inner -= 1
    if kept.outputs:
        inner += 2 if shape.gated else 1
    copies = inner * width
    if kept.adapters == "all" and kept.dropout:
        copies += 1.5 * (2 + width)
    if kept.outputs:
        copies += 1
    return copies


def expert_copies(shape: Shape, kept: Kept = Kept(), imbalance: float = 1.0) -> float:
    """Tensors of tokens x hidden that a layer of experts keeps: rows times experts per token.

    Beside what a dense layer keeps around it: the sorted rows in, the inner tensors, the rows out.

    Args:
        shape: The model.
        kept: How layers are run.
        imbalance: Rows of the busiest rank over those of the mean one.

    Collective: none.
    """
    width, shared = shape.expert_width / shape.hidden, shape.shared_width / shape.hidden
    routed = shape.experts_per_token * (2 + _feed_forward(shape, kept, width)) * imbalance
    inner = _feed_forward(shape, kept, shared) if shared else 0.0
    return _around(shape, kept) + routed + inner


def selective_copies(shape: Shape, kept: Kept = Kept()) -> float:
    """Tensors of tokens x hidden that a layer keeps where every second matrix product is kept.

    The layer's input, queries, values, the output of attention, the gate, and, where it is not
    compiled, the layer's last product.

    Source: torchtitan, "op" of selective activation checkpointing.

    Collective: none.
    """
    q = shape.heads * shape.head_dim / shape.hidden
    k = shape.kv_heads * shape.head_dim / shape.hidden
    last = 1 if kept.kernels == "eager" else 0
    return 1 + q + k + q + shape.width / shape.hidden + last


def mean_copies(shape: Shape, kept: Kept, checkpointing: str, imbalance: float = 1.0) -> float:
    """Copies that a layer keeps on average over dense layers and those with experts.

    Raises:
        ValueError: `checkpointing` is unknown.

    Collective: none.
    """
    choice("checkpointing", checkpointing, CHECKPOINTING)
    if checkpointing == "full":
        return 1.0
    if checkpointing == "selective":
        return selective_copies(shape, kept)
    return whole_copies(shape, kept, imbalance)


def whole_copies(shape: Shape, kept: Kept, imbalance: float = 1.0) -> float:
    """Copies that a layer keeps without checkpointing, on average over the kinds of layers.

    Collective: none.
    """
    if not shape.layers:
        return 0.0
    sparse = shape.sparse_layers / shape.layers
    dense = layer_copies(shape, kept) if sparse < 1 else 0.0
    experts = expert_copies(shape, kept, imbalance) if sparse else 0.0
    return (1 - sparse) * dense + sparse * experts


def score_bytes(heads: int, seq_len: int, rows: int) -> int:
    """Bytes of the attention scores of one layer without flash attention: 5 a s^2 a row.

    Scores and softmax in bf16 and the mask of dropout.

    Source: Korthikanti et al. 2022, section 4.1; ms-swift measured 19.97 GiB where it says 20.0.

    Collective: none.

    >>> score_bytes(32, 2048, 1) * 32 / 2**30
    20.0
    """
    return 5 * heads * seq_len * seq_len * rows


def logit_bytes(tokens: int, vocab: int, loss: str, tp: int = 1, element: int = 2) -> int:
    """Bytes of the logits, of what the loss makes of them and of their gradient.

    Source: see `LOGIT_BYTES`.

    Args:
        tokens: Tokens of one micro-step of one rank.
        vocab: Rows of the output head.
        loss: "eager", "trainer", "compiled", "chunked" or "fused".
        tp: Ranks over which the vocabulary is split in the loss.
        element: Bytes of a logit as the head gives it; fp32 ones need no fp32 copy.

    Raises:
        ValueError: `loss` is unknown.

    Collective: none.

    >>> logit_bytes(8192, 256000, "eager") / 2**30
    27.34375
    """
    size = LOGIT_BYTES[choice("loss", loss, LOGIT_BYTES)]
    if element == 4:
        size = {"eager": 12.0, "compiled": 12.0, "chunked": 12 / 8}.get(loss, size)
    return round(tokens * vocab * size / tp)
