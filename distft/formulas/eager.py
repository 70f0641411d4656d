"""What a micro-step of transformers' own modules keeps, one kernel an operation, byte for byte.

`distft.formulas.working` fits what others measured, whose code and versions differ; this counts
the tensors that transformers 5, PEFT 0.21 and torch 2.13 save under the loss of `train_step`, and
`distft.dry_run` finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distft.formulas.reports import BACKWARD, FORWARD
from distft.formulas.shape import Shape
from distft.formulas.working import logit_bytes

if TYPE_CHECKING:
    from distft.formulas.peak import Run

_Line = tuple[str, str, tuple[str, ...], float, bool]
# Until the first block's backward pass has begun; no gradients are there yet.
_KEPT = (*FORWARD[1:], "loss", *BACKWARD[:2])


@dataclass(frozen=True)
class Readers:
    """Which linear layers of a block keep what they read, for the gradient of a weight.

    Trained layers all do. A frozen one keeps nothing, and an adapter on it keeps its input.

    Args:
        attention: How many of queries, keys and values, which read a norm's output.
        output: Whether attention's last layer, which reads what attention returns.
        inner: How many of gate and up, which read a norm's output.
        down: Whether the feed-forward layer's last one.
        experts: Whether the experts.
        between: Numbers of a token between the two factors of all adapters of a block.
        frozen: Whether norms and the head are frozen, and keep nothing for their weights.
    """

    attention: int = 3
    output: bool = True
    inner: int = 2
    down: bool = True
    experts: bool = True
    between: float = 0
    frozen: bool = False

    @classmethod
    def of_all(cls, shape: Shape) -> Readers:
        """Return those of a model that is trained whole."""
        return cls(inner=2 if shape.gated else 1)


def eager_lines(run: Run, unit_bytes: float, readers: Readers) -> Iterator[_Line]:
    """Yield what a micro-step keeps on one rank: name, kind, phases, bytes, on host.

    A norm keeps its input in fp32, the normalized values and its output; attention its rotated
    queries and keys, its values, its output and one fp32 a head; a gated layer gate, activated
    gate, up and product. The loss keeps fp32 logits and their softmax; its backward pass has three
    fp32 tensors of their size: the softmax, the gradient of it, and that of the logits.

    Source: counted from transformers 5, modeling_llama, PEFT 0.21 and torch 2.13;
    `distft.dry_run`.

    Args:
        run: The run.
        unit_bytes: Bytes of gradients that lie whole when the backward pass of one block ends;
            where they are more than what the block keeps, they count in its place.
        readers: What keeps its input.

    Collective: none.
    """
    shape, tokens, autocast = run.shape, run.tokens, run.autocasts
    tp = run.layout.tp
    whole, split = layer_bytes(run, autocast, readers)
    experts = _adapted_expert_bytes(run, autocast, readers)
    layer = tokens * (whole + split / tp) + experts
    scores = 0
    if not run.flash:
        scores = attention_score_bytes(run) // tp
    element = 4 if autocast else run.element
    last = tokens * _norm(run, autocast, readers, 0 if readers.frozen else 1)
    if run.checkpointing == "none":
        kept = shape.layers * (layer + scores) + last
        if readers.frozen:
            # Nothing below the first adapters is trained, so the first norm keeps nothing of it.
            kept -= tokens * _norm(run, autocast, readers, 0)
    else:
        kept = shape.layers * tokens * shape.hidden * element + last
        yield "one block computed again", "activations", BACKWARD[1:2], layer + scores, False
    yield "activations", "activations", _KEPT, kept, False
    # Of gate, activated gate and up, or of one inner tensor and the other.
    inner = run.element * (3 if shape.gated else 2) * tokens * shape.width / tp
    yield "gradients of activations in one block", "activations", BACKWARD[1:2], inner, False
    if experts:
        name = "gradient of one block's adapted experts"
        yield name, "buffer", BACKWARD[1:2], experts, False
    more = unit_bytes - (layer + scores)
    if more > 0:
        name = "gradients of one block, over its activations"
        yield name, "buffer", BACKWARD[1:2], more, False
    if shape.vocab:
        yield from _logit_lines(run)


def _logit_lines(run: Run) -> Iterator[_Line]:
    """Yield what the loss makes: of all logits, or of one chunk of eight of them."""
    numel: float = run.tokens * run.shape.vocab
    if run.loss not in ("eager", "chunked"):
        size = logit_bytes(run.tokens, run.shape.vocab, run.loss, element=run.element)
        yield "logits and loss", "logits", ("loss", BACKWARD[0]), size, False
        return
    if run.loss == "chunked":
        numel /= 8
    copies = run.element + 4 + (4 if run.element == 2 or run.rows > 1 else 0)
    yield "softmax and two gradients of it", "logits", BACKWARD[:1], 12 * numel, False
    yield "logits and loss", "logits", ("loss",), copies * numel, False
    # Ranks of a tp group each have some columns: what is gathered lies there twice more.
    made = run.element * (1 if run.layout.tp == 1 else 3) * numel
    yield "logits", "logits", FORWARD[2:], made, False


def layer_bytes(run: Run, autocast: bool, readers: Readers) -> tuple[float, float]:
    """Return bytes a token of one layer: of what a `tp` group's ranks hold whole, and of the rest.

    Collective: none.
    """
    shape, element = run.shape, run.element
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    share = shape.sparse_layers / shape.layers
    # Experts read rows that were sorted for them; the router reads the norm's output.
    inner = readers.inner if not (readers.frozen and share) else readers.inner * (1 - share)
    if shape.parallel:
        whole = _norm(run, autocast, readers, readers.attention + readers.inner)
    else:
        whole = _norm(run, autocast, readers, readers.attention)
        whole += _norm(run, autocast, readers, inner)
    whole += element * readers.between
    expanded = k if run.flash else q
    split = element * (q + expanded + expanded) + 4 * shape.heads
    if run.flash or readers.output:
        split += element * q
    if autocast and readers.frozen and readers.output:
        # PEFT casts what it reads to the adapter's fp32, and autocast that to a copy.
        split += element * q
    if shape.head_norms:
        # Their input in fp32 and the normalized values; what comes out is rotated, and not kept.
        split += (4 + (0 if readers.frozen else element)) * (q + k)
    dense = element * ((3 if shape.gated else 1) + readers.down) * shape.width
    return whole, split + (1 - share) * dense + share * _expert_bytes(run, readers)


def _expert_bytes(run: Run, readers: Readers) -> float:
    """Return bytes a token of a layer of experts: of the routed ones and those of every token."""
    shape, element = run.shape, run.element
    inner = 3 if shape.gated else 1
    # Sorted rows in, inner tensors, and rows out, which are weighed.
    routed = 1 * shape.hidden + inner * shape.expert_width
    if readers.experts:
        routed += shape.hidden + shape.expert_width
    shared = (inner + readers.down) * shape.shared_width
    return element * (shape.experts_per_token * routed * run.imbalance + shared)


def _adapted_expert_bytes(run: Run, autocast: bool, readers: Readers) -> float:
    """Return bytes of the experts' weights of a layer with their adapters folded in.

    PEFT adds `B A` to all experts at once, and the products keep the sum, which autocast does not
    cast. 0 without adapters.
    """
    shape, layout = run.shape, run.layout
    if not (readers.frozen and readers.experts and shape.sparse_layers):
        return 0.0
    element = 4 if autocast else run.element
    return element * shape.expert_params / shape.layers / max(layout.ep, layout.tp)


def attention_score_bytes(run: Run) -> int:
    """Bytes of the scores of one layer without flash attention: softmax in fp32, and as computed.

    Collective: none.
    """
    size = 4 if run.element == 4 else 4 + run.element
    return size * run.shape.heads * run.seq_len**2 * run.rows


def _norm(run: Run, autocast: bool, readers: Readers, number: float) -> float:
    """Return bytes a token that a norm keeps, with its output where a `number` of layers keep it.

    Under autocast each of these keeps a cast copy of its own.
    """
    hidden, element = run.shape.hidden, run.element
    if autocast:
        normalized = 0 if run.shape.layer_norm or readers.frozen else 4
        return (4 + normalized + 2 * number) * hidden + 4
    output = element * min(number, 1)
    if run.shape.layer_norm:
        return (element + output) * hidden + 8
    # The input in fp32, which is the input itself in fp32, what is normalized, and the output.
    return (4 + (0 if readers.frozen else element) + output) * hidden + 4
