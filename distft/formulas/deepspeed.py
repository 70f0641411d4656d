"""What DeepSpeed 0.19 holds and sends under ZeRO-1, ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distft.formulas._numbers import choice, exact
from distft.formulas.disk import DiskState, disk_state, sub_groups
from distft.formulas.fetch import FetchLimits, Visit, fetch_counts
from distft.formulas.memory import model_state_bytes
from distft.formulas.native import MOMENTS, STEP_BYTES, control_traffic
from distft.formulas.reports import (
    ALWAYS,
    Collective,
    MemoryLine,
    MemoryReport,
    Parameter,
    TrafficReport,
)
from distft.formulas.traffic import zero_traffic_bytes
from distft.formulas.zero_plus import ZeROPlus, gathers, reductions, ring_with_zero_plus

# Kinds of offload, and DeepSpeed's own size of what one optimizer call updates.
OFFLOADS = {1: ("optimizer",), 2: ("optimizer",), 3: ("optimizer", "params", "nvme")}
SUB_GROUP_SIZE = 1_000_000_000

# Flat groups end at a multiple of this many elements per rank, so that the parts of bf16 weights
# start at 4 bytes.
ALIGNMENT = 2


@dataclass(frozen=True)
class EngineBytes:
    """Bytes per element of what the engine holds and sends."""

    weight: int
    gradient: int
    master: int
    moment: int
    reduced: int


# The master copy exists even where the weights are fp32 themselves.
PRECISIONS = {
    "fp32": EngineBytes(4, 4, 4, 4, 4),
    "bf16-mixed": EngineBytes(2, 4, 4, 4, 4),
    "bf16": EngineBytes(2, 2, 2, 2, 2),
}


def flat_numel(trained: int, ranks: int) -> int:
    """Elements of the flat group of all trained parameters, padded to equal aligned parts.

    Source: DeepSpeed 0.19 `stage_1_and_2.py`, `flatten_dense_tensors_aligned`.

    Collective: none.

    >>> flat_numel(23904, 3)
    23904
    >>> flat_numel(23905, 3)
    23910
    """
    alignment = ALIGNMENT * ranks
    return -(-trained // alignment) * alignment


def part_numel(numel: int, ranks: int) -> int:
    """Elements of one rank's part of one parameter under ZeRO-3: `ceil(n / N)`, padded.

    Source: DeepSpeed 0.19 `partition_parameters.py`, `_partition_param`.

    Collective: none.

    >>> part_numel(32, 3)
    11
    """
    return -(-numel // ranks)


def zero_memory(
    tensors: Sequence[Parameter],
    ranks: int,
    stage: int,
    precision: str,
    optimizer: str = "adamw",
    limits: FetchLimits | None = None,
    offload: str | None = None,
    secondary: int | None = None,
    sub_group_size: int = SUB_GROUP_SIZE,
) -> MemoryReport:
    """Memory of DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3, as it holds it after a backward pass.

    Stages 1 and 2 keep one flat buffer of all trained weights, padded to `2 N` elements, and of
    gradients, master weights and moments one N-th of it. Stage 3 cuts each parameter into
    `ceil(n / N)` elements. A master copy exists even where weights are fp32. Stage 1 too keeps only
    its part of the reduced gradients; the whole ones, which the paper counts, exist during the
    backward pass. Offload of "optimizer" has master weights, moments and the
    reduced gradients on the host; "params" (stage 3) the parts of the weights too; "nvme" (stage 3)
    has these and the gradients there, master weights and moments on a disk, but for sub-groups
    below 1 MiB. A secondary copy over h ranks (stage 3) adds `P w / h`, without what persists.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5; Ren et al. 2021 (ZeRO-Offload); Rajbhandari
    et al. 2021 (ZeRO-Infinity), section 5; Wang et al. 2023 (ZeRO++), section 3.2; DeepSpeed 0.19
    `stage_1_and_2.py`, `stage3.py`. Assumes: one parameter group, and a second one of what stays
    fp32.

    Raises:
        ValueError: The precision, the optimizer or the offload is unknown, or no parameter is
            trainable.

    Collective: none.
    """
    if offload is not None:
        choice("offload", offload, OFFLOADS.get(stage, ()))
    sizes = _sizes(precision)
    moments = MOMENTS[choice("optimizer", optimizer, MOMENTS)]
    trained = _trained(tensors)
    frozen = sum(tensor.numel for tensor in tensors if not tensor.trainable)
    buffers: list[tuple[str, tuple[str, ...], int]] = []
    groups = _groups(tensors)
    num_updated = len(groups) if stage < 3 else _num_updated(tensors, ranks, sub_group_size)
    if stage == 3:
        part = sum(part_numel(tensor.numel, ranks) for tensor in tensors if tensor.trainable)
        held = sum(part_numel(t.numel, ranks) * _weight(t, precision) for t in tensors)
        held += sum(t.numel * _weight(t, precision) for t in _persistent(tensors, limits))
        largest = max(tensor.numel for tensor in tensors)
        buffers.append(
            ("gathered weights of a module", ("forward", "loss"), largest * sizes.weight)
        )
        buffers.append(
            (
                "gathered weights of a module and its whole gradient",
                ("backward",),
                largest * (sizes.weight + sizes.gradient),
            )
        )
    else:
        flats = [(flat_numel(sum(t.numel for t in group), ranks), group[0]) for group in groups]
        part = sum(flat for flat, _ in flats) // ranks
        held = sum(flat * _weight(first, precision) for flat, first in flats)
        held += sum(t.numel * _weight(t, precision) for t in tensors if not t.trainable)
        if stage == 1:
            buffers.append(("whole gradients", ("backward",), trained * sizes.gradient))
    lines = [
        ("weights", "parameters", ALWAYS, held),
        ("gradients, own part", "gradients", ("backward", "step"), part * sizes.gradient),
        ("master weights, own part", "optimizer", ALWAYS, part * sizes.master),
        ("moments, own part", "optimizer", ALWAYS, part * moments * sizes.moment),
        ("step count", "optimizer", ALWAYS, STEP_BYTES * num_updated if moments else 0),
    ]
    if secondary is not None:
        lines += _secondary_lines(tensors, ranks, precision, limits, secondary)
    lines += [(name, "buffer", when, size) for name, when, size in buffers]
    lines.append(("optimizer's temporary (foreach)", "buffer", ("step",), part * sizes.master))
    state = model_state_bytes(
        trained,
        ranks,
        stage,
        sizes.weight,
        sizes.gradient,
        moments * sizes.moment + sizes.master,
    )
    whole = sum(tensor.numel for tensor in _persistent(tensors, limits)) if stage == 3 else 0
    if offload in ("params", "nvme") and whole:
        # What persists is whole on the device beside its part on the host.
        lines[0] = ("weights", "parameters", ALWAYS, (held - whole) * sizes.weight)
        lines.append(("persistent weights", "parameters", ALWAYS, whole * sizes.weight))
    on_host: set[str] = set()
    if offload is not None:
        on_host = {name for name, *_ in lines if "own part" in name}
        on_host |= {"step count", "optimizer's temporary (foreach)"}
    if offload in ("params", "nvme"):
        on_host.add("weights")
    on_disk: set[str] = set()
    if offload == "nvme":
        disk = _disk_state(tensors, ranks, sub_group_size)
        lines = _disk_lines(lines, disk, moments)
        on_host |= {name for name, *_ in lines if name.endswith(("small sub-groups", "the disk"))}
        on_disk = {"master weights, own part", "moments, own part"}
        on_host -= on_disk
    paper = {1: "P (w + g) + P k / N", 2: "P w + P (g + k) / N", 3: "P (w + g + k) / N"}[stage]
    state += model_state_bytes(frozen, ranks, stage, sizes.weight, 0, 0)
    if secondary is not None:
        state += model_state_bytes(trained + frozen, secondary, 3, sizes.weight, 0, 0)
        paper += " + P w / h"
    return MemoryReport(
        tuple(
            MemoryLine(name, kind, when, (size,) * ranks, name in on_host, name in on_disk)
            for name, kind, when, size in lines
        ),
        state,
        paper,
    )


def zero_traffic(
    tensors: Sequence[Parameter],
    ranks: int,
    stage: int,
    precision: str,
    grad_accum: int,
    visits: Sequence[Visit] = (),
    limits: FetchLimits | None = None,
    offload: str | None = None,
    plus: ZeROPlus | None = None,
    optimizer: str = "adamw",
    sub_group_size: int = SUB_GROUP_SIZE,
) -> TrafficReport:
    """Traffic of DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3 in its steady state.

    Stages 1 and 2 reduce each part of the gradients to its owner, stage 1 once a step and stage 2
    every micro-step, and gather the flat weights once a step. Stage 3 reduce-scatters gradients
    padded to N equal parts, and gathers parameters as often as `fetch_counts` says; what ZeRO++
    changes in that, `gathers` and `reductions` of `zero_plus` say.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7; DeepSpeed 0.19. Assumes:
    `use_multi_rank_bucket_allreduce` false, one parameter group.

    Args:
        tensors: Parameters.
        ranks: Ranks N.
        stage: 1, 2 or 3.
        precision: Name of the precision.
        grad_accum: Micro-steps of one step.
        visits: Stage 3: the modules in the order of work, forward and then backward.
        limits: Stage 3: the engine's limits; None is its defaults.
        offload: What lies on the host or a disk; then the engine's own norms are fp32.
        plus: Stage 3: what there is of ZeRO++.
        optimizer: Name of the optimizer, whose moments go to a disk and back ("nvme").
        sub_group_size: Elements that one optimizer call updates.

    Raises:
        ValueError: A count is below 1, the precision is unknown, no parameter is trainable, or
            weights to quantize have parts that are no multiple of 8.

    Collective: none.
    """
    sizes = _sizes(precision)
    trained = _trained(tensors)
    axis = "dp_shard"
    plus = plus or ZeROPlus()
    if stage == 3:
        sent = _stage3_traffic(
            tensors, ranks, precision, visits, limits or FetchLimits(), grad_accum, plus
        )
        # Stage 3 has no switch for its own norm, one fp64 for each sub-group beside ours, or fp32
        # if offloaded.
        norm_bytes = (8 if offload is None else 4) * _num_updated(tensors, ranks, sub_group_size)
    else:
        per = "step" if stage == 1 else "micro_step"
        gathered = sum(
            flat_numel(sum(t.numel for t in group), ranks) * _weight(group[0], precision)
            for group in _groups(tensors)
        )
        sent = [
            Collective.of("reduce", axis, trained * sizes.reduced, ranks, per, "gradients"),
            Collective.of("all_gather", axis, gathered, ranks, "step", "parameters"),
        ]
        if precision != "fp32":
            # DeepSpeed looks for infinities only where the weights are bf16: one byte.
            sent.append(Collective.of("all_reduce", axis, 1, ranks, "step", "overflow flag"))
        norm_bytes = 0 if offload is None else 4
    if norm_bytes:
        sent.append(
            Collective.of("all_reduce", axis, norm_bytes, ranks, "step", "DeepSpeed's own norm")
        )
    sent += control_traffic(ranks, ((axis, ranks),))
    paper_bytes = zero_traffic_bytes(trained, ranks, stage, grad_accum, sizes.weight)
    paper = {
        1: "2 P (N-1)/N a step",
        2: "P (N-1)/N a micro-step + P (N-1)/N a step",
        3: "3 P (N-1)/N a micro-step",
    }[stage]
    if plus != ZeROPlus():
        paper_bytes = exact(grad_accum * ring_with_zero_plus(trained, ranks, sizes.weight, plus))
        paper = "P (N-1)/N + P (h-1)/h + P (N-1)/N a micro-step, in the bytes of what travels"
    moved = 0
    if offload == "nvme":
        moments = MOMENTS[choice("optimizer", optimizer, MOMENTS)]
        moved = _disk_state(tensors, ranks, sub_group_size).moved_bytes(moments)
    return TrafficReport(tuple(sent), grad_accum, paper_bytes, paper, moved)


def _sizes(precision: str) -> EngineBytes:
    return PRECISIONS[choice("precision", precision, PRECISIONS)]


def _stage3_traffic(
    tensors: Sequence[Parameter],
    ranks: int,
    precision: str,
    visits: Sequence[Visit],
    limits: FetchLimits,
    grad_accum: int,
    plus: ZeROPlus,
) -> list[Collective]:
    parts = [part_numel(tensor.numel, ranks) for tensor in tensors]
    weights = [_weight(tensor, precision) for tensor in tensors]
    counts = fetch_counts([tensor.numel for tensor in tensors], visits, limits)
    sent = gathers(tensors, parts, weights, counts, ranks, grad_accum, plus)
    sent += reductions(tensors, parts, _sizes(precision).reduced, ranks, plus)
    kept = [
        ranks * part_numel(tensor.numel, ranks) * _weight(tensor, precision)
        for tensor in _persistent(tensors, limits)
    ]
    if kept:
        sent.append(
            Collective.of(
                "all_gather", "dp_shard", sum(kept), ranks, "step", "persistent parameters"
            )
        )
    return sent


def _secondary_lines(
    tensors: Sequence[Parameter],
    ranks: int,
    precision: str,
    limits: FetchLimits | None,
    secondary: int,
) -> list[tuple[str, str, tuple[str, ...], int]]:
    """Return the lines of the secondary copy: that of trained weights lasts until the update.

    What persists is never gathered, so it gets no new copy; a frozen one keeps its first.
    """
    persistent = _persistent(tensors, limits)
    held = {True: 0, False: 0}
    for tensor in tensors:
        if not tensor.trainable or tensor not in persistent:
            copy = ranks * part_numel(tensor.numel, ranks) // secondary
            held[tensor.trainable] += copy * _weight(tensor, precision)
    until_update = tuple(phase for phase in ALWAYS if phase != "save")
    lines = [("secondary copy of the weights", "parameters", until_update, held[True])]
    if held[False]:
        lines.append(("secondary copy of frozen weights", "parameters", ALWAYS, held[False]))
    return lines


def _disk_state(tensors: Sequence[Parameter], ranks: int, sub_group_size: int) -> DiskState:
    return disk_state(_parts([t for t in tensors if t.trainable], ranks), sub_group_size)


def _num_updated(tensors: Sequence[Parameter], ranks: int, sub_group_size: int) -> int:
    """Return the number of optimizer calls of a step of stage 3, one for each sub-group."""
    groups = _groups(tensors)
    return sum(len(sub_groups(_parts(group, ranks), sub_group_size)) for group in groups)


def _parts(tensors: Sequence[Parameter], ranks: int) -> list[int]:
    return [part_numel(tensor.numel, ranks) for tensor in tensors]


def _disk_lines(
    lines: list[tuple[str, str, tuple[str, ...], int]], disk: DiskState, moments: int
) -> list[tuple[str, str, tuple[str, ...], int]]:
    """Return the lines with optimizer state divided by where it lies, one sub-group at work."""
    fp32 = PRECISIONS["fp32"]
    new = {
        "master weights, own part": disk.on_disk * fp32.master,
        "moments, own part": disk.on_disk * moments * fp32.moment,
        "optimizer's temporary (foreach)": disk.largest * fp32.master,
    }
    kept = [(name, kind, when, new.get(name, size)) for name, kind, when, size in lines]
    if disk.in_memory:
        small = disk.in_memory * fp32.master
        kept.append(("master weights of small sub-groups", "optimizer", ALWAYS, small))
        kept.append(("moments of small sub-groups", "optimizer", ALWAYS, small * moments))
    through = disk.buffer_bytes(moments)
    return [*kept, ("buffers to and from the disk", "buffer", ALWAYS, through)]


def _weight(tensor: Parameter, precision: str) -> int:
    """Return the bytes of an element of a tensor's weights."""
    return _sizes("fp32" if tensor.kept and not tensor.packed else precision).weight


def _groups(tensors: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return the trained tensors by parameter group: the engine's groups have one dtype each."""
    trained = [tensor for tensor in tensors if tensor.trainable]
    parts = ([t for t in trained if t.kept is kept] for kept in (False, True))
    return [part for part in parts if part]


def _trained(tensors: Sequence[Parameter]) -> int:
    trained = sum(tensor.numel for tensor in tensors if tensor.trainable)
    if not trained:
        raise ValueError(
            f"0 of {len(tensors)} parameters are trainable, so ZeRO has nothing to partition. "
            "Set requires_grad on what should be trained."
        )
    return trained


def _persistent(tensors: Sequence[Parameter], limits: FetchLimits | None) -> list[Parameter]:
    """Return the parameters that stay whole on every rank beside their parts."""
    threshold = (limits or FetchLimits()).persistence
    return [tensor for tensor in tensors if tensor.numel <= threshold]
