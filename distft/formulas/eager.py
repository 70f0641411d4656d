"""What a micro-step of transformers' own modules keeps, one kernel an operation, byte for byte.

`distft.formulas.working` fits what others measured, whose code and versions differ; this counts
the tensors that transformers 5 and torch 2.13 save under the loss of `train_step`, and
`distft.dry_run` finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from distft.formulas.peak import Run
from distft.formulas.reports import BACKWARD
from distft.formulas.working import expert_copies

_Line = tuple[str, str, tuple[str, ...], float, bool]
# Until the first block's backward pass has begun; no gradients are there yet.
_KEPT = ("forward", "loss", *BACKWARD[:2])


def eager_lines(run: Run, autocast: bool, unit_bytes: float) -> Iterator[_Line]:
    """Yield what a micro-step keeps on one rank: name, kind, phases, bytes, on host.

    A norm keeps its input in fp32, the normalized values and its output; attention its rotated
    queries and keys, its values, its output and one fp32 a head; a gated layer gate, activated
    gate, up and product. The loss keeps fp32 logits and their softmax; its backward pass has three
    fp32 tensors of their size: the softmax, the gradient of it, and that of the logits.

    Source: counted from transformers 5, modeling_llama, and torch 2.13; `distft.dry_run`.

    Args:
        run: The run.
        autocast: Whether weights and hidden states are fp32 and each linear layer casts its input.
        unit_bytes: Bytes of gradients that lie whole when the backward pass of one block ends;
            where they are more than what the block keeps, they count in its place.

    Collective: none.
    """
    shape, tokens = run.shape, run.tokens
    tp = run.layout.tp
    whole, split = layer_bytes(run, autocast)
    layer = tokens * (whole + split / tp)
    scores = 0
    if not run.flash:
        scores = attention_score_bytes(run) // tp
    element = 4 if autocast else run.element
    last = tokens * _norm(run, autocast, 1)
    if run.checkpointing == "none":
        kept = shape.layers * (layer + scores) + last
    else:
        kept = shape.layers * tokens * shape.hidden * element + last
        yield "one block computed again", "activations", BACKWARD[1:2], layer + scores, False
    yield "activations", "activations", _KEPT, kept, False
    # Of gate, activated gate and up, or of one inner tensor and the other.
    inner = run.element * (3 if shape.gated else 2) * tokens * shape.width / tp
    yield "gradients of activations in one block", "activations", BACKWARD[1:2], inner, False
    more = unit_bytes - (layer + scores)
    if more > 0:
        name = "gradients of one block, over its activations"
        yield name, "buffer", BACKWARD[1:2], more, False
    if shape.vocab:
        numel = tokens * shape.vocab
        copies = run.element + 4 + (4 if run.element == 2 or run.rows > 1 else 0)
        yield "softmax and two gradients of it", "logits", BACKWARD[:1], 12 * numel, False
        yield "logits and loss", "logits", ("loss",), copies * numel, False
        # Ranks of a tp group each have some columns: what is gathered lies there twice more.
        made = run.element * (1 if tp == 1 else 3) * numel
        yield "logits", "logits", ("forward",), made, False


def layer_bytes(run: Run, autocast: bool) -> tuple[float, float]:
    """Return bytes a token of one layer: of what a `tp` group's ranks hold whole, and of the rest.

    Collective: none.
    """
    shape, element = run.shape, run.element
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # The layers that read a norm's output: queries, keys and values; gate and up.
    readers = (3, 2 if shape.gated else 1)
    if shape.parallel:
        whole = _norm(run, autocast, sum(readers))
    else:
        whole = sum(_norm(run, autocast, number) for number in readers)
    expanded = k if run.flash else q
    split = element * (q + expanded + expanded + q) + 4 * shape.heads
    if shape.head_norms:
        # Their input in fp32 and the normalized values; what comes out is rotated, and not kept.
        split += (4 + element) * (q + k)
    inner: float = element * (4 if shape.gated else 2) * shape.width
    if shape.sparse_layers:
        share = shape.sparse_layers / shape.layers
        around = expert_copies(shape, run.kept, 0.0) if shape.shared_width == 0 else 0.0
        routed = expert_copies(shape, run.kept, run.imbalance) - around
        inner = (1 - share) * inner + share * element * shape.hidden * routed
    return whole, split + inner


def attention_score_bytes(run: Run) -> int:
    """Bytes of the scores of one layer without flash attention: softmax in fp32, and as computed.

    Collective: none.
    """
    size = 4 if run.element == 4 else 4 + run.element
    return size * run.shape.heads * run.seq_len**2 * run.rows


def _norm(run: Run, autocast: bool, readers: int) -> float:
    """Return bytes a token that a norm keeps, and the copies that autocast makes of its output."""
    hidden, element = run.shape.hidden, run.element
    if autocast:
        return (4 + (0 if run.shape.layer_norm else 4) + 2 * readers) * hidden + 4
    if run.shape.layer_norm:
        return 2 * element * hidden + 8
    # The input in fp32, which is the input itself in fp32, what is normalized, and the output.
    return (4 + 2 * element) * hidden + 4
