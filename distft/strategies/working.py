"""What a micro-step holds beside model state under a strategy: activations, logits, files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from distft.adapted import readers_of, shape_of, with_adapters
from distft.formulas.packed import scale_bytes
from distft.formulas.peak import Layout, Run, working_lines
from distft.formulas.reports import ALWAYS, MemoryLine, MemoryReport
from distft.formulas.working import Kept

if TYPE_CHECKING:
    from distft.mesh import Mesh
    from distft.spec import ModelSpec, Workload
    from distft.strategies.value import StrategyValue

# What `consolidate` holds at most unless told otherwise (its `max_ram`).
_CONSOLIDATION = 2_000_000_000


def with_scales(report: MemoryReport, spec: ModelSpec) -> MemoryReport:
    """Return a report of model state with the scales of packed weights, whole on every rank.

    Collective: none.
    """
    size = sum(
        scale_bytes(tensor.numel, tensor.scales == "nested")
        for tensor in spec.tensors
        if tensor.scales is not None
    )
    if not size:
        return report
    line = MemoryLine("scales of packed weights", "parameters", ALWAYS, (size,) * report.num_ranks)
    return replace(report, lines=(*report.lines, line))


def with_working_memory(
    report: MemoryReport, strategy: StrategyValue, spec: ModelSpec, load: Workload, mesh: Mesh
) -> MemoryReport:
    """Return a report of model state with what a micro-step holds beside it.

    Each rank holds the same of it. Without the widths of the model nothing is added but what
    reading and consolidating files holds on the host.

    Collective: none.
    """
    lines = list(report.lines)
    ranks = report.num_ranks
    weight = 4 if strategy.precision == "fp32" else 2
    if spec.shape is not None:
        run = run_of(strategy, spec, load, mesh)
        kept = working_lines(run, unit_bytes=_whole_gradient(strategy, spec, load, mesh))
        lines += [
            MemoryLine(name, kind, phases, (round(size),) * ranks)
            for name, kind, phases, size, _ in kept
            if size >= 1
        ]
    lines += _of_engine(strategy, spec, weight, ranks)
    lines += _of_files(spec, weight, ranks)
    return replace(report, lines=tuple(lines))


def _whole_gradient(strategy: StrategyValue, spec: ModelSpec, load: Workload, mesh: Mesh) -> int:
    """Return bytes of the largest block's gradient, whole, and of the one before it on its way.

    The last block to run backward fetches no other ahead, which leaves room.
    """
    if strategy.layout == "deepspeed" or mesh.dp_shard == 1:
        return 0
    blocks = [unit for unit in with_adapters(spec, load).units if unit.name]
    if not blocks:
        return 0
    size, reduced = {"fp32": (4, 4), "bf16-mixed": (2, 4), "bf16": (2, 2)}[strategy.precision]
    largest = max(sum(t.numel for t in unit.tensors if t.trainable) for unit in blocks) // mesh.tp
    return (reduced + (size if len(blocks) > 2 else 0)) * largest


def run_of(strategy: StrategyValue, spec: ModelSpec, load: Workload, mesh: Mesh) -> Run:
    """Return the numbers of a run that activations depend on.

    Raises:
        ValueError: The widths of the model are not known.

    Collective: none.
    """
    shape = shape_of(spec)
    adapters = None
    if load.tuning != "full":
        adapters = "all" if load.lora_targets == "all-linear" else "attention"
    return Run(
        shape,
        Layout(mesh.dp_replicate, mesh.dp_shard, mesh.tp, ep=mesh.ep),
        rows=load.micro_batch,
        seq_len=load.seq_len,
        kept=Kept("compiled" if strategy.compile else "eager", adapters, dropout=False),
        checkpointing="full" if strategy.activation_checkpointing else "none",
        loss=load.loss,
        flash=load.attention != "eager",
        adapters=None if adapters is None else 0,
        element=4 if strategy.precision == "fp32" else 2,
        splits_rows=False,
        readers=None if strategy.compile else readers_of(spec, load),
        autocasts=strategy.autocasts,
    )


def _of_engine(
    strategy: StrategyValue, spec: ModelSpec, weight: int, ranks: int
) -> Iterator[MemoryLine]:
    """Yield DeepSpeed's buckets: two of gradients, since the next one fills while one is reduced.

    Source: DeepSpeed's configuration, `reduce_bucket_size`, `allgather_bucket_size` and
    `overlap_comm`, which is on where there are GPUs. A bucket is no larger than what is trained.
    """
    for field, name, phase, copies in (
        ("reduce_bucket_size", "buckets of gradients to reduce", "backward", 2),
        ("allgather_bucket_size", "bucket of weights to gather", "step", 1),
    ):
        elements = getattr(strategy, field, 0)
        size = copies * weight * min(elements, spec.trainable_params)
        if size and ranks > 1:
            yield MemoryLine(name, "buffer", (phase,), (size,) * ranks)


def _of_files(spec: ModelSpec, weight: int, ranks: int) -> Iterator[MemoryLine]:
    largest = weight * max(tensor.numel for tensor in spec.tensors)
    name = "largest tensor of the files, read or written"
    yield MemoryLine(name, "buffer", ("load", "save"), (largest,) * ranks, on_host=True)
    # One process consolidates, within `max_ram`.
    held = min(_CONSOLIDATION, weight * spec.total_params)
    one = (held, *(0,) * (ranks - 1))
    yield MemoryLine("buffers of consolidate", "buffer", ("consolidate",), one, on_host=True)
