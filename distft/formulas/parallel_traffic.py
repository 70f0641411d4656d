"""What is sent where layers are split over `tp` and experts over `ep`, to the byte.

Weights move as under `fully_shard`, of the part that a rank holds after the split. Activations move
over `tp` and `ep`, for every module that a rule names. Which way a gradient takes is told from
what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Protocol

from distft.formulas._numbers import exact, whole
from distft.formulas.activations import MicroStep, Split, recomputed
from distft.formulas.native import bytes_of_tensor, padded_numel
from distft.formulas.reports import Collective, TrafficReport
from distft.formulas.split_rules import Named, Rules, part_of, placement_of
from distft.formulas.traffic import expert_parallel_bytes, tensor_parallel_bytes
from distft.formulas.visits import Work, works

AXES = ("dp_replicate", "dp_shard", "tp", "ep")


class Unit(Protocol):
    """Parameters that are gathered together, with their names."""

    @property
    def name(self) -> str:
        """Path of the module; empty for the root, which has what is in no block."""

    @property
    def tensors(self) -> Sequence[Named]:
        """The parameters."""


def parallel_traffic(
    units: Sequence[Unit],
    ties: Sequence[tuple[str, str]],
    axes: Mapping[str, int],
    rules: tuple[Rules, Rules],
    precision: str,
    micro_step: MicroStep,
    grad_accum: int = 1,
    reshard_after_forward: bool = True,
    defer_reduce: bool = False,
) -> TrafficReport:
    """Traffic of `dp_replicate x dp_shard x tp`, experts over `efsdp x ep`.

    Over `tp`: an all-reduce of what a layer split by rows returns, forward; one of what a layer
    split by columns read, backward; a gather of the logits. Over `ep`: counts, dispatch and combine
    forward, two exchanges backward. The rest as `sharded_traffic`, experts over `efsdp`.

    How many rows an exchange brings a rank depends on the router: the combine and the last exchange
    backward are those of even routing. Over the ranks of an `ep` group all four add up to this
    whatever the routing, where `tp` divides the tokens; else a rank has those of the first slice.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Lepikhin et al. 2020 (GShard), section
    3.2; transformers 5.24, `distributed/tensor_parallel.py` and `expert_parallel.py`.

    Args:
        units: Sharding units of the model, before any split.
        ties: Pairs of names that share one parameter, the one in `units` second.
        axes: Sizes of "dp_replicate", "dp_shard", "tp" and "ep".
        rules: Rules for tensors, and for experts.
        precision: Name of the precision.
        micro_step: What one micro-step works on.
        grad_accum: Micro-steps of one step.
        reshard_after_forward: Whether blocks are freed after forward and gathered again.
        defer_reduce: Whether gradients are reduced in the last micro-step only.

    Raises:
        ValueError: A size is out of range, a split does not fit, or nobody has measured what a
            style sends.

    Collective: none.
    """
    sizes = {axis: whole(axis, axes[axis], 1) for axis in AXES}
    sizes["efsdp"] = sizes["dp_shard"] * sizes["tp"] // sizes["ep"]
    sizes["world"] = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"]
    tensors = [tensor for unit in units for tensor in unit.tensors]
    split = Split(tensors, sizes, rules, precision, micro_step)
    sent = _weights(units, split, reshard_after_forward, defer_reduce)
    modules = works(tensors, ties)
    activations = [each for work in modules for each in split.sent(work)]
    if micro_step.recompute:
        activations += recomputed(activations, _blocks_with_gradients(tensors, modules))
    for each in activations:
        _add(sent, (each.op, each.axis, "micro_step", each.what), each.payload)
    for key, payload in _control(split):
        _add(sent, key, payload)
    collectives = tuple(
        Collective.of(op, axis, payload, sizes[axis], per, what)
        for (op, axis, per, what), payload in sent.items()
        if sizes[axis] > 1 and payload
    )
    paper, formula = _paper(split, modules, whole("grad_accum", grad_accum, 1))
    return TrafficReport(collectives, grad_accum, paper, formula)


_Key = tuple[str, str, str, str]


def _add(sent: dict[_Key, int], key: _Key, payload: int) -> None:
    sent[key] = sent.get(key, 0) + payload


# ---- weights ------------------------------------------------------------------------------------


def _weights(
    units: Sequence[Unit], split: Split, reshard_after_forward: bool, defer_reduce: bool
) -> dict[_Key, int]:
    """Return what `fully_shard` sends of the parts that are left by the split."""
    sent: dict[_Key, int] = {}
    per = "step" if defer_reduce else "micro_step"
    for unit in units:
        for tensor in unit.tensors:
            expert = split.is_spread(tensor)
            axis, ranks = ("efsdp", "ep") if expert else ("dp_shard", "tp")
            shards = split.sizes[axis]
            part = part_of(tensor, split.style_of(tensor), split.sizes[ranks], 0)
            numel, size = padded_numel([part], shards), bytes_of_tensor(part, split.precision)
            # The root stays whole until its backward pass; experts are a unit of their own.
            passes = 2 if reshard_after_forward and (unit.name or expert) else 1
            _add(
                sent,
                ("all_gather", axis, "micro_step", "parameters"),
                passes * numel * size.gathered,
            )
            if tensor.trainable:
                reduced = numel * size.reduced
                _add(sent, ("reduce_scatter", axis, per, "gradients"), reduced)
                key = ("all_reduce", "dp_replicate", "step", "reduced shards")
                _add(sent, key, reduced // shards)
    return sent


def _blocks_with_gradients(tensors: Sequence[Named], modules: Sequence[Work]) -> set[str]:
    """Return the blocks that the backward pass comes by: others are not computed again."""
    found = {tensor.unit for tensor in tensors if tensor.trainable}
    return (found | {tensors[w.own[0]].unit for w in modules if w.grad_in}) - {""}


def _control(split: Split) -> Iterator[tuple[_Key, int]]:
    """Yield the small messages of a step; see `native.control_traffic`."""
    yield ("all_gather", "world", "step", "counts"), 24 * split.sizes["world"]
    # One sum for each placement of gradients, over every axis that cuts it.
    placements = dict.fromkeys(
        (split.is_spread(tensor), placement_of(split.style_of(tensor), len(tensor.shape)))
        for tensor in split.tensors
        if tensor.trainable
    )
    for expert, (_, dim) in placements:
        cut, rows = ("ep", "efsdp") if expert else ("tp", "dp_shard")
        if dim is not None:
            yield ("all_reduce", cut, "step", "gradient norm"), 4
        yield ("all_reduce", rows, "step", "gradient norm"), 4
    yield ("all_reduce", "world", "step", "losses"), 16


def _paper(split: Split, works: Sequence[Work], grad_accum: int) -> tuple[int | float, str]:
    """Return the papers' bytes of a step: even parts, no padding, no control messages."""
    sizes, step, first = split.sizes, split.micro_step, split.tensors[0]
    element = bytes_of_tensor(first, split.precision).gathered
    hidden = next((t.shape[1] for t in split.tensors if len(t.shape) == 2), 1)
    layers = len({tensor.unit for tensor in split.tensors} - {""})
    exchanges = sum(split.is_dispatched(work) for work in works)
    tp, ep = sizes["tp"], sizes["ep"]
    each = Fraction(0)
    if tp > 1 and layers:
        each += Fraction(tensor_parallel_bytes(layers, 1, step.tokens, hidden, tp, element))
    if exchanges and step.experts_per_token:
        rows = -(-step.tokens // tp)
        each += Fraction(
            expert_parallel_bytes(exchanges, rows, step.experts_per_token, hidden, ep, element)
        )
    once = Fraction(0)
    for tensor in split.tensors:
        axis, cut = ("efsdp", "ep") if split.is_spread(tensor) else ("dp_shard", "tp")
        is_cut = placement_of(split.style_of(tensor), len(tensor.shape))[1] is not None
        numel = Fraction(tensor.numel, sizes[cut] if is_cut else 1)
        size, shards = bytes_of_tensor(tensor, split.precision), sizes[axis]
        reduced = numel * size.reduced if tensor.trainable else Fraction(0)
        each += (2 * numel * size.gathered + reduced) * (shards - 1) / shards
        copies = sizes["dp_replicate"]
        once += 2 * reduced / shards * (copies - 1) / copies
    terms = {
        "3 P (N-1)/N": sizes["world"] > tp * sizes["dp_replicate"],
        "8 B T d L (t-1)/t": tp > 1,
        "4 B T k d L (e-1)/e": exchanges > 0,
    }
    text = " + ".join(term for term, is_there in terms.items() if is_there)
    return exact(grad_accum * each + once), f"{text or 0} elements a micro-step"
