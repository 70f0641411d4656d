"""What a rank holds where layers are split over `tp` and experts over `ep`, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from distft.formulas._numbers import choice, exact, whole
from distft.formulas.native import (
    MOMENTS,
    STEP_BYTES,
    buffer_lines,
    bytes_of_tensor,
    gradient_phases,
    shard_numels,
)
from distft.formulas.reports import ALWAYS, MemoryLine, MemoryReport
from distft.formulas.split_rules import Named, Part, Rules, is_spread, part_of, split_dim, style_of

Size = Callable[[Part], int]


def parallel_memory(
    tensors: Sequence[Named],
    axes: Mapping[str, int],
    rules: tuple[Rules, Rules],
    precision: str,
    optimizer: str = "adamw",
    reshard_after_forward: bool = True,
    defer_reduce: bool = False,
    accumulates: bool = False,
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
        accumulates: Whether a step has several micro-steps.

    Raises:
        ValueError: A size is below 1, or experts or packed halves do not divide.

    Collective: none.
    """
    replicas, shards, tp, ep = (
        whole(axis, axes[axis], 1) for axis in ("dp_replicate", "dp_shard", "tp", "ep")
    )
    efsdp = shards * tp // ep
    spread = [ep > 1 and is_spread(tensor.name, rules[1]) for tensor in tensors]
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
            part_of(tensor, style_of(tensor.name, rules[1]), ep, rank)
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
        line(
            "gradients",
            "gradients",
            gradient_phases(accumulates and not defer_reduce),
            size_of("gradient"),
            False,
        ),
        line("optimizer moments", "optimizer", ALWAYS, size_of("moment", moments), False),
        MemoryLine("optimizer step counts", "optimizer", ALWAYS, (steps,) * every),
        _temporary(tensors, spread, rules, (dense, experts), (shards, efsdp), replicas, precision),
    ]
    if shards * replicas > 1 or precision == "bf16-mixed":
        units = _units(tensors, spread, dense[0], experts[0])
        lines += [
            MemoryLine(name, "buffer", phases, (size,) * every)
            for name, phases, size in buffer_lines(
                units, precision, reshard_after_forward, defer_reduce, shards, accumulates
            )
        ]
    return MemoryReport(
        tuple(lines),
        exact(Fraction(_state(tensors, precision, moments), shards * tp)),
        "P (w + g + k) / (dp_shard tp)",
    )


def _temporary(
    tensors: Sequence[Named],
    spread: Sequence[bool],
    rules: tuple[Rules, Rules],
    parts: tuple[list[list[Part]], list[list[Part]]],
    shards: tuple[int, int],
    replicas: int,
    precision: str,
) -> MemoryLine:
    """Return what an update makes: a tensor of the weights, one layout after another."""
    tp, ep = (len(each) for each in parts)
    per_rank = []
    for rank in range(shards[0] * tp):
        rest = {False: iter(parts[0][rank % tp]), True: iter(parts[1][rank % ep])}
        place = {False: (shards[0], rank // tp), True: (shards[1], rank // ep)}
        totals: dict[tuple[bool, int | None], int] = {}
        for tensor, expert in zip(tensors, spread, strict=True):
            part = next(rest[expert])
            if not part.trainable:
                continue
            style = style_of(tensor.name, rules[expert]) if (ep if expert else tp) > 1 else None
            key = (expert, split_dim(style, len(tensor.shape)))
            ranks, mine = place[expert]
            held = shard_numels(part, ranks)[mine] * bytes_of_tensor(part, precision).weight
            totals[key] = totals.get(key, 0) + held
        per_rank.append(max(totals.values(), default=0))
    name = "optimizer's temporary (foreach), the largest layout's"
    return MemoryLine(name, "buffer", ("step",), tuple(per_rank * replicas))


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
    """Return what a rank gathers together: blocks, the experts of a block, last the rest."""
    units: dict[tuple[str, bool], list[Part]] = {}
    rest = {False: iter(dense), True: iter(experts)}
    for tensor, expert in zip(tensors, spread, strict=True):
        units.setdefault((tensor.unit, expert), []).append(next(rest[expert]))
    root = units.pop(("", False), None)
    return [*units.values(), *([root] if root else [])]
