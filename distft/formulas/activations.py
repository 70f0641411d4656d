"""What modules send in a micro-step where layers are split over `tp` and experts over `ep`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from distft.formulas._numbers import whole
from distft.formulas.native import bytes_of_tensor
from distft.formulas.split_rules import (
    DISPATCH,
    NORM,
    SHARED_EXPERTS,
    Named,
    Rules,
    is_spread,
    module_style,
    plain_name,
    split_dim,
    stores_outputs_first,
    style_of,
)
from distft.formulas.visits import Work

# An index of an expert, and so a count of tokens, is an int64.
COUNT_BYTES = 8
# Styles with which a module sends nothing.
_SILENT = ("replicate", "local_params", "packed_rowwise", "grouped_gemm")


@dataclass(frozen=True)
class MicroStep:
    """What one micro-step of one rank works on.

    Args:
        tokens: Rows times their length.
        experts_per_token: Experts that a token goes to in each layer of experts.
        routing_bytes: Bytes of a token's weight for one of them; 0 is as other activations.
        recompute: Whether blocks run forward again in the backward pass.
    """

    tokens: int
    experts_per_token: int = 0
    routing_bytes: int = 0
    recompute: bool = False

    def __post_init__(self) -> None:
        whole("tokens", self.tokens, 1)
        whole("experts_per_token", self.experts_per_token)


@dataclass(frozen=True)
class Sent:
    """One collective of a micro-step, its bytes those of the full buffer."""

    op: str
    axis: str
    payload: int
    what: str
    backward: bool = False
    block: str = ""
    # Whether the backward pass works on what it brings.
    is_kept: bool = False


@dataclass(frozen=True)
class Split:
    """A model's tensors, and how they are split."""

    tensors: Sequence[Named]
    sizes: Mapping[str, int]
    rules: tuple[Rules, Rules]
    precision: str
    micro_step: MicroStep

    def is_spread(self, tensor: Named) -> bool:
        """Return whether a tensor is spread over `ep`."""
        return self.sizes["ep"] > 1 and is_spread(tensor.name, self.rules[1])

    def style_of(self, tensor: Named) -> str | None:
        """Return the style of a tensor, None where its axis has one rank."""
        if self.is_spread(tensor):
            return style_of(tensor.name, self.rules[1])
        return style_of(tensor.name, self.rules[0]) if self.sizes["tp"] > 1 else None

    def is_dispatched(self, work: Work) -> bool:
        """Return whether a module's experts are spread over `ep`."""
        return self.sizes["ep"] > 1 and module_style(work.path, self.rules[1]) == DISPATCH

    def sent(self, work: Work) -> Iterator[Sent]:
        """Yield what one module sends in a micro-step."""
        own = [self.tensors[index] for index in work.own]
        if self.is_dispatched(work):
            yield from self._exchanged(work, own)
        elif self.sizes["tp"] > 1:
            yield from self._layer(module_style(work.path, self.rules[0]), work, own)

    def _layer(self, style: str | None, work: Work, own: Sequence[Named]) -> Iterator[Sent]:
        """Yield what a module sends over `tp`."""
        if style is None or style in _SILENT:
            return
        tp, matrix = self.sizes["tp"], _matrix(own)
        element, block = self._element(matrix), matrix.unit
        row = self.micro_step.tokens * element
        if style == NORM:
            numel = sum(tensor.numel for tensor in own if tensor.trainable)
            yield Sent("all_reduce", "tp", numel * element, "gradients of norms", True, block)
            return
        if style == SHARED_EXPERTS:
            yield Sent("all_reduce", "tp", row * _hidden(own), "activations", False, block)
            yield from self._sums_of_gradients("tp", work, own)
            yield from self._sums_of_factors(work, block)
            return
        moved = _moved(style, matrix.shape, tp)
        if moved is None:
            raise ValueError(
                f"What {work.path} sends as {style!r} over {tp} ranks is not covered by this "
                "version. distft.measure.count_collectives counts it in a run."
            )
        forward, backward = moved
        if forward is not None:
            # B of an adapter needs what its A returned for its own gradient.
            kept = ".lora_A." in work.path
            yield Sent(forward[0], "tp", row * forward[1], "activations", False, block, kept)
        if backward is not None and work.grad_in:
            what = "gradients of activations"
            yield Sent(backward[0], "tp", row * backward[1], what, True, block)

    def _exchanged(self, work: Work, own: Sequence[Named]) -> Iterator[Sent]:
        """Yield what experts that are spread over `ep` send, and `tp` around them."""
        tp, step, matrix = self.sizes["tp"], self.micro_step, _matrix(own)
        element, width, block = self._element(matrix), _hidden(own), matrix.unit
        if self.sizes["ep"] == tp and not work.grad_in:
            # Every rank of the group has all rows, and none wants their gradient back.
            payload = step.tokens * width * element
            yield Sent("all_reduce", "ep", payload, "activations", False, block)
            yield from self._sums_of_gradients("ep", work, own)
            return
        # The ranks of a tp group each send a slice of the rows that they share.
        rows = -(-step.tokens // tp)
        payload = rows * step.experts_per_token * width * element
        counts = COUNT_BYTES * matrix.shape[0]
        yield Sent("all_to_all", "ep", counts, "tokens of each expert", False, block)
        yield Sent("all_to_all", "ep", payload, "dispatch", False, block)
        yield Sent("all_to_all", "ep", payload, "combine", False, block, is_kept=True)
        if work.grad_in or self._trains(work.path):
            yield Sent("all_to_all", "ep", payload, "gradients of combine", True, block)
        if work.grad_in:
            yield Sent("all_to_all", "ep", payload, "gradients of dispatch", True, block)
        if tp > 1:
            routing = self._routing_bytes(work, element)
            # Outputs are weighed first, which makes them as wide as the weights.
            slices = tp * rows * width * max(element, routing)
            yield Sent("all_gather", "tp", slices, "activations", False, block)
            if work.grad_in:
                payload = tp * rows * width * element
                yield Sent("all_gather", "tp", payload, "gradients of activations", True, block)
            if work.grad_beside:
                payload = tp * rows * step.experts_per_token * routing
                yield Sent("all_gather", "tp", payload, "gradients of routing", True, block)

    def _sums_of_gradients(self, axis: str, work: Work, own: Sequence[Named]) -> Iterator[Sent]:
        """Yield the sums of what each rank's part of all experts gives back."""
        tokens, matrix = self.micro_step.tokens, _matrix(own)
        element = self._element(matrix)
        if work.grad_in:
            payload = tokens * _hidden(own) * element
            what = "gradients of activations"
            yield Sent("all_reduce", axis, payload, what, True, matrix.unit)
        if work.grad_beside:
            weights = tokens * self.micro_step.experts_per_token
            payload = weights * self._routing_bytes(work, element)
            yield Sent("all_reduce", axis, payload, "gradients of routing", True, matrix.unit)

    def _sums_of_factors(self, work: Work, block: str) -> Iterator[Sent]:
        """Yield the sums of whole factors of adapters, of whose weight each rank has a part."""
        inside = f"{plain_name(work.path)}.lora_"
        mine = [t for t in self.tensors if t.trainable and plain_name(t.name).startswith(inside)]
        for tensor in mine:
            if split_dim(self.style_of(tensor), 2) is None:
                payload = tensor.numel * self._element(tensor)
                yield Sent("all_reduce", "tp", payload, "gradients of factors", True, block)

    def _element(self, matrix: Named) -> int:
        """Return the bytes of one number that a module computes with."""
        return bytes_of_tensor(matrix, self.precision).gathered

    def _routing_bytes(self, work: Work, element: int) -> int:
        """Return the bytes of a token's weight for one expert: fp32 where the router is kept so."""
        beside = f"{plain_name(work.path).rpartition('.')[0]}."
        router = [tensor for tensor in self.tensors if tensor.kept and not tensor.is_expert]
        if any(plain_name(tensor.name).startswith(beside) for tensor in router):
            return 4
        return self.micro_step.routing_bytes or element

    def _trains(self, path: str) -> bool:
        """Return whether anything in a module is trained, adapters on it included."""
        inside = f"{plain_name(path)}."
        return any(t.trainable and plain_name(t.name).startswith(inside) for t in self.tensors)


def _matrix(own: Sequence[Named]) -> Named:
    """Return the tensor that says a module's widths; biases lie beside it."""
    return max(own, key=lambda tensor: len(tensor.shape))


def _hidden(own: Sequence[Named]) -> int:
    """Return the width of hidden states, from (experts, out, in) and (experts, in, out) alike."""
    experts = [tensor.shape for tensor in own if len(tensor.shape) == 3]
    return experts[0][2 if stores_outputs_first(experts) else 1]


# An op, and the width of the rows that it moves.
_Move = tuple[str, int]


def _moved(style: str, shape: tuple[int, ...], tp: int) -> tuple[_Move | None, _Move | None] | None:
    """Return what a layer moves forward and backward, by the shape of its weight.

    None where the style is not known here.
    """
    out, width = shape[0], shape[-1]
    summed, gathered = ("all_reduce", width), ("all_gather", _padded(out, tp))
    known: dict[str, tuple[_Move | None, _Move | None]] = {
        "colwise": (None, summed),
        "packed_colwise": (None, summed),
        "colwise_rep": (gathered, summed),
        "colwise_gather_output": (gathered, summed),
        "rowwise": (("all_reduce", out), None),
        "rowwise_rep": (("all_reduce", out), None),
        "rowwise_split_input": (("all_reduce", out), ("all_gather", _padded(width, tp))),
        "embedding_rowwise": (summed, None),
        "embedding_colwise": (("all_gather", _padded(width, tp)), None),
    }
    return known.get(style)


def _padded(numel: int, ranks: int) -> int:
    """Return the elements of a gathered dimension, every part as large as the first."""
    return ranks * -(-numel // ranks)


def recomputed(sent: Sequence[Sent], blocks: AbstractSet[str]) -> list[Sent]:
    """Return what blocks send when they run forward again in the backward pass.

    torch stops once everything that the backward pass needs is there, which leaves out the last
    sum or gather of a block: it is added to the block's input and needed by nobody.

    Args:
        sent: What all modules send.
        blocks: The blocks through which gradients flow.

    Collective: none.
    """
    forward: dict[str, list[Sent]] = {}
    for each in sent:
        if each.block in blocks and not each.backward:
            forward.setdefault(each.block, []).append(each)
    return [each for mine in forward.values() for each in (mine if mine[-1].is_kept else mine[:-1])]
