"""What a rank holds where layers are split over `tp` and experts over `ep`, before `fully_shard`.

Rules name modules and parameters, ``*`` for a layer's number, and say how they are split; the words
are those of transformers' plans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from distft.formulas import visits
from distft.formulas._numbers import choice, exact, whole
from distft.formulas.memory import chunk_rows
from distft.formulas.native import (
    MOMENTS,
    STEP_BYTES,
    buffer_lines,
    bytes_of_tensor,
    shard_numels,
)
from distft.formulas.reports import ALWAYS, MemoryLine, MemoryReport, Parameter

Rules = Mapping[str, str]

# What transformers 5.24 says of the decoders that `ModelSpec.from_config` knows.
TENSOR_RULES: Rules = {
    "model.embed_tokens": "embedding_rowwise",
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
EXPERT_RULES: Rules = {
    f"model.layers.*.mlp.experts.{name}_proj": "grouped_gemm" for name in ("gate_up", "down")
}
# Gate and up, say: each of two parts is split in itself.
PACKED = ("packed_colwise", "packed_rowwise")
_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")


class Named(visits.Named, Parameter, Protocol):
    """A parameter with its name, block and shape; `distft.ModelSpec` has them."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter, which `fully_shard` splits on by rows."""

    shape: tuple[int, ...]
    trainable: bool
    kept: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Size = Callable[[Part], int]


def generic_name(name: str) -> str:
    """Return a name with ``*`` for each number between dots, as rules have it.

    >>> generic_name("model.layers.3.mlp.w1")
    'model.layers.*.mlp.w1'

    Collective: none.
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def style_of(name: str, rules: Rules) -> str | None:
    """Return the style of a parameter: its own rule's, else that of its module.

    Collective: none.

    >>> style_of("model.layers.3.mlp.up_proj.weight", TENSOR_RULES)
    'colwise'
    """
    generic = generic_name(name)
    return rules.get(generic, rules.get(generic.rpartition(".")[0]))


def split_dim(style: str | None, num_dims: int) -> int | None:
    """Return the dimension that a style splits of a parameter, None where it stays whole.

    Source: transformers 5.24, `distributed/tensor_parallel.py` and `expert_parallel.py`.

    Collective: none.

    >>> split_dim("colwise", 2), split_dim("rowwise", 2), split_dim("rowwise", 1)
    (0, 1, None)
    """
    if style in _ROWS:
        return max(num_dims - 2, 0)
    if style in _COLUMNS:
        return num_dims - 1 if num_dims > 1 else None
    return {"embedding_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0}.get(style or "")


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


def parallel_memory(
    tensors: Sequence[Named],
    axes: Mapping[str, int],
    rules: tuple[Rules, Rules],
    precision: str,
    optimizer: str = "adamw",
    reshard_after_forward: bool = True,
    defer_reduce: bool = False,
) -> MemoryReport:
    """Memory of each rank of `dp_replicate x dp_shard x tp`, experts over `efsdp x ep`.

    A tensor that a rule splits is `1/tp` on each rank of a `tp` group, any other whole; experts are
    `1/ep`; then rows of the part are cut over `dp_shard`, an expert's over `efsdp = dp_shard tp /
    ep`. Buffers as in `sharded_memory`, where anything is gathered.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Lepikhin et al. 2020 (GShard), section 3.

    Args:
        tensors: Parameters, a tied one once.
        axes: Sizes of "dp_replicate", "dp_shard", "tp" and "ep".
        rules: Rules for tensors, and for experts.
        precision: Name of the precision.
        optimizer: Name of the optimizer.
        reshard_after_forward: Whether blocks are freed after the forward pass.
        defer_reduce: Whether whole gradients are kept until the last micro-step.

    Raises:
        ValueError: A size is below 1, or experts or packed halves do not divide.

    Collective: none.
    """
    replicas, shards, tp, ep = (
        whole(axis, axes[axis], 1) for axis in ("dp_replicate", "dp_shard", "tp", "ep")
    )
    efsdp = shards * tp // ep
    spread = [ep > 1 and style_of(t.name, rules[1]) == "grouped_gemm" for t in tensors]
    dense = [
        [
            part_of(tensor, style_of(tensor.name, rules[0]), tp, rank)
            for tensor, expert in zip(tensors, spread, strict=True)
            if not expert
        ]
        for rank in range(tp)
    ]
    experts = [
        [
            part_of(tensor, "grouped_gemm", ep, rank)
            for tensor, expert in zip(tensors, spread, strict=True)
            if expert
        ]
        for rank in range(ep)
    ]
    moments = MOMENTS[choice("optimizer", optimizer, MOMENTS)]

    def line(name: str, kind: str, phases: tuple[str, ...], size: Size, all_: bool) -> MemoryLine:
        one = [
            _held(dense[rank % tp], shards, rank // tp, size, all_)
            + _held(experts[rank % ep], efsdp, rank // ep, size, all_)
            for rank in range(shards * tp)
        ]
        return MemoryLine(name, kind, phases, tuple(one * replicas))

    def size_of(what: str, times: int = 1) -> Size:
        return lambda part: times * int(getattr(bytes_of_tensor(part, precision), what))

    steps = STEP_BYTES * sum(tensor.trainable for tensor in tensors) if moments else 0
    every = shards * tp * replicas
    lines = [
        line("parameters", "parameters", ALWAYS, size_of("weight"), True),
        line("gradients", "gradients", ("backward", "step"), size_of("gradient"), False),
        line("optimizer moments", "optimizer", ALWAYS, size_of("moment", moments), False),
        MemoryLine("optimizer step counts", "optimizer", ALWAYS, (steps,) * every),
        line("optimizer's temporary (foreach)", "buffer", ("step",), size_of("weight"), False),
    ]
    if shards * replicas > 1 or precision == "bf16-mixed":
        units = _units(tensors, spread, dense[0], experts[0])
        lines += [
            MemoryLine(name, "buffer", phases, (size,) * every)
            for name, phases, size in buffer_lines(
                units, precision, reshard_after_forward, defer_reduce
            )
        ]
    return MemoryReport(
        tuple(lines),
        exact(Fraction(_state(tensors, precision, moments), shards * tp)),
        "P (w + g + k) / (dp_shard tp)",
    )


def _held(parts: Iterable[Part], ranks: int, rank: int, size: Size, all_: bool) -> int:
    return sum(
        shard_numels(part, ranks)[rank] * size(part) for part in parts if all_ or part.trainable
    )


def _state(tensors: Sequence[Named], precision: str, moments: int) -> int:
    """Return bytes of model state of one copy, every tensor split over every rank of it."""
    total = 0
    for tensor in tensors:
        sizes = bytes_of_tensor(tensor, precision)
        trained = sizes.gradient + moments * sizes.moment if tensor.trainable else 0
        total += tensor.numel * (sizes.weight + trained)
    return total


def _units(
    tensors: Sequence[Named], spread: Sequence[bool], dense: list[Part], experts: list[Part]
) -> list[list[Part]]:
    """Return what a rank gathers together: blocks, the experts of a block, the rest."""
    units: dict[tuple[str, bool], list[Part]] = {}
    rest = {False: iter(dense), True: iter(experts)}
    for tensor, expert in zip(tensors, spread, strict=True):
        units.setdefault((tensor.unit, expert), []).append(next(rest[expert]))
    return list(units.values())
