"""What torch 2.13 holds and sends: DistributedDataParallel, and `fully_shard` on one or two axes.

Tensors are cut along their first dimension by `torch.chunk`; on the wire every shard is padded to
the size of the first, since a collective moves equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from distft.formulas._numbers import choice, exact
from distft.formulas.memory import chunk_rows, model_state_bytes
from distft.formulas.reports import (
    ALWAYS,
    BACKWARD,
    FORWARD,
    Collective,
    MemoryLine,
    MemoryReport,
    Parameter,
    TrafficReport,
    Unit,
)
from distft.formulas.traffic import ring_fraction, zero_traffic_bytes

# torch's AdamW keeps the step count of every parameter as one fp32 scalar tensor.
STEP_BYTES = 4
# Name, phases and bytes of something held for a while.
Buffer = tuple[str, tuple[str, ...], int]
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0}


@dataclass(frozen=True)
class Bytes:
    """Bytes per element of what is held and of what is sent."""

    weight: int
    gradient: int
    moment: int
    gathered: int
    reduced: int


# bf16-mixed keeps fp32 weights and reduces in fp32; only gathered weights are bf16.
PRECISIONS = {
    "fp32": Bytes(4, 4, 4, 4, 4),
    "bf16-mixed": Bytes(4, 4, 4, 2, 4),
    "bf16": Bytes(2, 2, 2, 2, 2),
}


def ddp_memory(
    tensors: Sequence[Parameter],
    ranks: int,
    precision: str,
    optimizer: str = "adamw",
    blocks: Sequence[Sequence[Parameter]] | None = None,
) -> MemoryReport:
    """Memory of DistributedDataParallel: every rank holds all of it.

    Source: Li et al. 2020 (PyTorch Distributed). Assumes: torch 2.13, `gradient_as_bucket_view`,
    so that buckets are the gradients.

    Args:
        tensors: The parameters.
        ranks: Ranks.
        precision: Name of the precision.
        optimizer: Name of the optimizer.
        blocks: The parameters of each block that is computed again; None where none is.

    Raises:
        ValueError: The precision or the optimizer is unknown.

    Collective: none.
    """
    trained = [tensor for tensor in tensors if tensor.trainable]
    largest = max((t.numel * bytes_of_tensor(t, precision).gradient for t in trained), default=0)
    buffers: list[Buffer] = [("gradient on its way to its bucket", BACKWARD[2:], largest)]
    if precision == "bf16-mixed":
        buffers += _cast_weights(tensors, blocks)
    # Buckets are there from the first step on, whether they hold gradients or not.
    return _report(tensors, 1, ranks, precision, optimizer, 0, buffers, ALWAYS)


def _cast_weights(
    tensors: Sequence[Parameter], blocks: Sequence[Sequence[Parameter]] | None
) -> list[Buffer]:
    """Return the weights that autocast has cast, which are held until a backward pass used them.

    Of blocks that are computed again nothing is kept for it: autocast itself remembers casts of
    trained weights until the forward pass is over, and makes one block's again in the backward.
    """

    def cast(some: Iterable[Parameter]) -> int:
        return sum(2 * t.numel for t in some if len(t.shape) > 1 and not _is_embedding(t))

    name, all_ = "weights that autocast has cast", cast(tensors)
    if blocks is None:
        return [(name, ("forward", "loss", *BACKWARD[:2]), all_)]
    one = max((cast(block) for block in blocks), default=0)
    rest = all_ - sum(cast(block) for block in blocks)
    remembered = rest + sum(cast(t for t in block if t.trainable) for block in blocks)
    return [
        (name, ("forward",), max(remembered, rest + one)),
        ("cast weights of the head", ("loss", BACKWARD[0]), rest),
        ("cast weights of one block", (BACKWARD[1],), one),
    ]


def _is_embedding(tensor: Parameter) -> bool:
    """Return whether a tensor is looked up by rows, which autocast leaves alone."""
    return getattr(tensor, "name", "").endswith(("embed_tokens.weight", "wte.weight"))


def sharded_memory(
    units: Sequence[Unit],
    dp_shard: int,
    dp_replicate: int,
    precision: str,
    optimizer: str = "adamw",
    reshard_after_forward: bool = True,
    defer_reduce: bool = False,
    offload: str | None = None,
    accumulates: bool = False,
) -> MemoryReport:
    """Memory of `fully_shard`: every tensor is cut along its first dimension over `dp_shard`.

    Rank r holds `ceil(d0 / N)` rows, the last ranks fewer or none. Buffers: the unit at work and
    the one fetched ahead in the forward pass; in the backward pass also a whole gradient and the
    input of its reduce-scatter. `defer_reduce` keeps whole gradients until the last micro-step.
    Offload of "params" has shards, gradients and moments on the host, and updates them there.
    A step of several micro-steps (`accumulates`) holds the gradients of those before all the time.

    Source: Zhao et al. 2023 (FSDP), section 3; torch 2.13 `_fully_shard`.

    Raises:
        ValueError: A degree is below 1, or the offload, the precision or the optimizer is unknown.

    Collective: none.
    """
    tensors = [tensor for unit in units for tensor in unit.tensors]
    gathered = [unit.tensors for unit in units]
    buffers = buffer_lines(
        gathered, precision, reshard_after_forward, defer_reduce, dp_shard, accumulates
    )
    phases = gradient_phases(accumulates and not defer_reduce)
    report = _report(tensors, dp_shard, dp_replicate, precision, optimizer, 3, buffers, phases)
    if offload is None:
        return report
    choice("offload", offload, ("params",))
    temporary = "optimizer's temporary (foreach)"
    lines = [
        replace(line, on_host=line.kind != "buffer" or line.name == temporary)
        for line in report.lines
    ]
    return replace(report, lines=tuple(lines))


def gradient_phases(accumulates: bool) -> tuple[str, ...]:
    """Return when sharded gradients are held, with those of earlier micro-steps or without.

    Collective: none.
    """
    return ("forward", "loss", "backward", "step") if accumulates else (BACKWARD[2], "step")


def buffer_lines(
    units: Sequence[Sequence[Parameter]],
    precision: str,
    reshard_after_forward: bool,
    defer_reduce: bool,
    shards: int,
    accumulates: bool = False,
) -> list[Buffer]:
    """Return what gathering holds beside the shards of `shards` ranks: name, phases and bytes.

    The last unit is the root, which has the embedding and the head: it stays whole from its
    forward pass, the first, to its backward pass, the last, and so does the gradient of the head
    until the root's are reduced.

    Raises:
        ValueError: The precision is unknown.

    Collective: none.
    """

    def size(unit: Sequence[Parameter], what: str) -> int:
        return sum(t.numel * int(getattr(bytes_of_tensor(t, precision), what)) for t in unit)

    def padded(unit: Sequence[Parameter], what: str) -> int:
        # Every rank's part is as large as the first's.
        parts = ((padded_numel([t], shards), bytes_of_tensor(t, precision)) for t in unit)
        return sum(numel * int(getattr(sizes, what)) for numel, sizes in parts)

    *blocks, root = units
    block = max((padded(unit, "gathered") for unit in blocks), default=0)
    whole = padded(root, "gathered")
    trained = [tensor for tensor in root if tensor.trainable]
    # Of deferred gradients the root's are some.
    own = [] if defer_reduce and accumulates else trained
    head = max((size([tensor], "gathered") for tensor in own), default=0)
    last = padded(trained, "reduced")
    start, middle, end = BACKWARD
    begin, inside, _ = FORWARD
    buffers: list[Buffer] = [
        ("gathered root", ("forward", "loss", start, middle), whole),
        # In one piece, until it was copied out into tensors.
        ("root as it arrives", (begin,), whole if shards > 1 else 0),
        ("whole gradient of the head", (middle,), head),
        ("whole gradients of the root", (end,), size(own, "gathered")),
        # Its shards, which the gradients have too, are not there yet.
        ("input of the root's reduce-scatter, less its shard", (end,), last - last // shards),
    ]
    if reshard_after_forward:
        held = (begin, inside, middle)
        buffers.append(("gathered blocks: at work, fetched ahead", held, 2 * block))
    else:
        # Every unit stays whole until its backward pass is done.
        kept = sum(padded(unit, "gathered") for unit in blocks)
        buffers.append(("gathered blocks", (*FORWARD[1:], "loss", start, middle), kept))
    if defer_reduce:
        deferred = sum(size([t], "reduced") for unit in units for t in unit if t.trainable)
        phases = ("forward", "loss", "backward") if accumulates else ("backward",)
        buffers.append(("whole gradients until the last micro-step", phases, deferred))
    elif accumulates:
        # Nobody waits for it before the next backward pass.
        before = ("forward", "loss", start, middle)
        buffers.append(("input of the root's reduce-scatter before", before, last))
    return buffers


@dataclass(frozen=True)
class Shards:
    """Elements on each rank of one group, and the number of trained tensors."""

    held: tuple[int, ...]
    trained: tuple[int, ...]
    num_trained: int

    @classmethod
    def of(cls, tensors: Iterable[Parameter], ranks: int) -> Shards:
        """Return the shards of some tensors over `ranks` ranks."""
        held, trained, num_trained = [0] * ranks, [0] * ranks, 0
        for tensor in tensors:
            num_trained += tensor.trainable
            for rank, numel in enumerate(shard_numels(tensor, ranks)):
                held[rank] += numel
                trained[rank] += numel if tensor.trainable else 0
        return cls(tuple(held), tuple(trained), num_trained)


def shard_numels(tensor: Parameter, ranks: int) -> tuple[int, ...]:
    """Elements of a tensor that each of `ranks` ranks holds, cut along its first dimension.

    Collective: none.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    row = tensor.numel // rows if rows else 0
    return tuple(row * number for number in chunk_rows(rows, ranks))


def padded_numel(tensors: Iterable[Parameter], ranks: int) -> int:
    """Elements of the full buffer on the wire: every shard as large as the first.

    Collective: none.
    """
    return sum(ranks * shard_numels(tensor, ranks)[0] for tensor in tensors)


def ddp_traffic(
    tensors: Sequence[Parameter],
    ranks: int,
    precision: str,
    grad_accum: int,
    find_unused: bool = False,
) -> TrafficReport:
    """Traffic of DistributedDataParallel: one all-reduce of the gradients per step.

    With `find_unused` also one int32 for each trained parameter, which says where it was used.

    Source: Li et al. 2020, section 3.2. Assumes: buckets already rebuilt, buffers not broadcast.

    Raises:
        ValueError: A count is below 1 or the precision is unknown.

    Collective: none.
    """
    size = _sizes(precision).gradient
    trained = [tensor for tensor in tensors if tensor.trainable]
    reduced = sum(tensor.numel * bytes_of_tensor(tensor, precision).gradient for tensor in trained)
    sent = [Collective.of("all_reduce", "dp", reduced, ranks, "step", "gradients")]
    if find_unused:
        used = 4 * len(trained)
        sent.append(Collective.of("all_reduce", "dp", used, ranks, "step", "used parameters"))
    return TrafficReport(
        (*sent, *control_traffic(ranks, ())),
        grad_accum,
        zero_traffic_bytes(sum(t.numel for t in trained), ranks, 0, grad_accum, size),
        "2 P (N-1)/N a step",
    )


def sharded_traffic(
    units: Sequence[Unit],
    dp_shard: int,
    dp_replicate: int,
    precision: str,
    grad_accum: int,
    reshard_after_forward: bool = True,
    defer_reduce: bool = False,
) -> TrafficReport:
    """Traffic of `fully_shard`: gathers forward and backward, a reduce-scatter, each per unit.

    The root unit is gathered once: its backward pass begins where its forward pass ends.
    HSDP (`dp_replicate` above 1) also all-reduces the reduced shard over the replicas once a step.

    Source: Zhao et al. 2023 (FSDP), section 3.2; torch 2.13 `_fsdp_collectives`.

    Args:
        units: Sharding units.
        dp_shard: Ranks that share one copy.
        dp_replicate: Copies.
        precision: Name of the precision.
        grad_accum: Micro-steps of one step.
        reshard_after_forward: Whether blocks are freed after forward and gathered again.
        defer_reduce: Whether gradients are reduced in the last micro-step only.

    Raises:
        ValueError: A count is below 1 or the precision is unknown.

    Collective: none.
    """
    sizes = _sizes(precision)
    # The root, which has the head, stays whole between its forward and its backward pass.
    gathered = sum(
        (2 if reshard_after_forward and unit.name else 1)
        * padded_numel([tensor], dp_shard)
        * bytes_of_tensor(tensor, precision).gathered
        for unit in units
        for tensor in unit.tensors
    )
    trained = [tensor for unit in units for tensor in unit.tensors if tensor.trainable]
    reduced = sum(
        padded_numel([t], dp_shard) * bytes_of_tensor(t, precision).reduced for t in trained
    )
    per = "step" if defer_reduce else "micro_step"
    shard, replica = "dp_shard", "dp_replicate"
    sent = [
        Collective.of("all_gather", shard, gathered, dp_shard, "micro_step", "parameters"),
        Collective.of("reduce_scatter", shard, reduced, dp_shard, per, "gradients"),
    ]
    if dp_replicate > 1:
        part = reduced // dp_shard
        sent.append(
            Collective.of("all_reduce", replica, part, dp_replicate, "step", "reduced shards")
        )
    sent += control_traffic(dp_shard * dp_replicate, (("dp_shard", dp_shard),))
    numel = sum(tensor.numel for unit in units for tensor in unit.tensors)
    trained_numel = sum(tensor.numel for tensor in trained)
    return TrafficReport(
        tuple(sent),
        grad_accum,
        _paper_bytes(numel, trained_numel, dp_shard, dp_replicate, sizes, grad_accum),
        "3 P (N-1)/N a micro-step"
        + (" + 2 P/N (R-1)/R over replicas a step" if dp_replicate > 1 else ""),
    )


def _paper_bytes(
    numel: int,
    trained: int,
    dp_shard: int,
    dp_replicate: int,
    sizes: Bytes,
    grad_accum: int,
) -> int | float:
    """Return two gathers and a reduction of unpadded tensors each micro-step, then replicas."""
    total = 2 * ring_fraction("all_gather", numel * sizes.gathered, dp_shard)
    total += ring_fraction("reduce_scatter", trained * sizes.reduced, dp_shard)
    total *= grad_accum
    replicas = ring_fraction("all_reduce", trained * sizes.reduced, dp_replicate)
    return exact(total + replicas / dp_shard)


def control_traffic(ranks: int, norm_groups: Iterable[tuple[str, int]]) -> list[Collective]:
    """Small messages that every step of distft sends beside the data.

    The counts of loss tokens, tokens and micro-batches (three int64 of every rank), the square of
    the gradient norm (one fp32 per group over which gradients are split), both losses (two fp64).

    Collective: none.
    """
    counts = Collective.of("all_gather", "dp", 24 * ranks, ranks, "step", "counts")
    losses = Collective.of("all_reduce", "dp", 16, ranks, "step", "losses")
    norms = [
        Collective.of("all_reduce", axis, 4, size, "step", "gradient norm")
        for axis, size in norm_groups
    ]
    return [counts, *norms, losses]


def _sizes(precision: str) -> Bytes:
    return PRECISIONS[choice("precision", precision, PRECISIONS)]


def bytes_of_tensor(tensor: Parameter, precision: str) -> Bytes:
    """Return the bytes of one tensor's elements: fp32 throughout where it is kept so.

    Packed bytes have no master of another dtype.

    Raises:
        ValueError: The precision is unknown.

    Collective: none.
    """
    return _sizes(_kind(tensor, precision))


def _kind(tensor: Parameter, precision: str) -> str:
    """Return the precision whose bytes a tensor has."""
    if tensor.packed:
        return "fp32" if precision == "fp32" else "bf16"
    return "fp32" if tensor.kept else precision


def _report(
    tensors: Sequence[Parameter],
    shards: int,
    copies: int,
    precision: str,
    optimizer: str,
    stage: int,
    buffers: Iterable[tuple[str, tuple[str, ...], int]],
    gradient_held: tuple[str, ...] = gradient_phases(False),
) -> MemoryReport:
    """Return the report of groups of ranks, each of which holds one whole copy."""
    moments = MOMENTS[choice("optimizer", optimizer, MOMENTS)]
    # Of one dtype each: what the precision says, and what stays fp32.
    kinds = [
        (_sizes(kind), Shards.of([t for t in tensors if _kind(t, precision) == kind], shards))
        for kind in dict.fromkeys((precision, "fp32", "bf16"))
    ]

    def held(bytes_of: Callable[[Bytes], int], trained: bool = True) -> tuple[int, ...]:
        one = [
            sum(
                (part.trained if trained else part.held)[rank] * bytes_of(sizes)
                for sizes, part in kinds
            )
            for rank in range(shards)
        ]
        return tuple(one * copies)

    ranks = shards * copies
    steps = sum(part.num_trained for _, part in kinds) * STEP_BYTES if moments else 0
    weights = held(lambda sizes: sizes.weight, trained=False)
    gradients = held(lambda sizes: sizes.gradient)
    both = held(lambda sizes: moments * sizes.moment)
    temporary = held(lambda sizes: sizes.weight)
    lines = [
        MemoryLine("parameters", "parameters", ALWAYS, weights),
        MemoryLine("gradients", "gradients", gradient_held, gradients),
        MemoryLine("optimizer moments", "optimizer", ALWAYS, both),
        MemoryLine("optimizer step counts", "optimizer", ALWAYS, (steps,) * ranks),
        MemoryLine("optimizer's temporary (foreach)", "buffer", ("step",), temporary),
    ]
    lines += [MemoryLine(name, "buffer", when, (size,) * ranks) for name, when, size in buffers]
    paper_bytes: int | float = 0
    for sizes, part in kinds:
        learnt, frozen = sum(part.trained), sum(part.held) - sum(part.trained)
        optimizer_bytes = moments * sizes.moment
        paper_bytes += model_state_bytes(frozen, shards, stage, sizes.weight, 0, 0)
        paper_bytes += model_state_bytes(
            learnt, shards, stage, sizes.weight, sizes.gradient, optimizer_bytes
        )
    paper = "P (w + g + k)" if stage == 0 else "P (w + g + k) / N"
    return MemoryReport(tuple(lines), paper_bytes, paper)
