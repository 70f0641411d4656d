"""Counting collectives to the byte, on any backend and any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from distft.formulas import ring_bytes, sum_ring_bytes

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

# torch's dispatcher names, by NCCL's. The number says which argument holds the full buffer: a
# gather's output, a reduce-scatter's input.
_FULL_BUFFER = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("all_gather", 0),
    "scatter_": ("reduce_scatter", 1),
}
# The same of functional collectives, by the beginning of their names, which go on with "_out",
# "_coalesced" or "_". All take what a rank brings; only a gather's full buffer is larger.
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_FUNCTIONAL_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# What the dispatcher calls the argument that is the group.
_GROUP_ARGUMENTS = ("process_group", "group_name")


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of this rank: NCCL's name, bytes of the full buffer, ranks of the group.

    The ranks tell the axis of a mesh: `Mesh.group` names those of each.
    """

    op: str
    num_bytes: int
    ranks: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Number of ranks of the group."""
        return len(self.ranks)

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank puts on the wire in a ring; see `formulas.ring_bytes`."""
        return ring_bytes(self.op, self.num_bytes, self.group_size)


@dataclass
class CollectiveRecords:
    """The collectives of one stretch of a program, in order."""

    records: list[CollectiveRecord] = field(default_factory=list)

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank puts on the wire in all.

        Summed as fractions and rounded once, so that it equals a prediction of the same sum.
        """
        return sum_ring_bytes((each.op, each.num_bytes, each.group_size) for each in self.records)

    def count(self, op: str) -> int:
        """Return how many collectives of an op were made."""
        return sum(record.op == op for record in self.records)

    def payloads(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Return the bytes of full buffers by op and ranks of the group."""
        totals: dict[tuple[str, tuple[int, ...]], int] = {}
        for each in self.records:
            key = (each.op, each.ranks)
            totals[key] = totals.get(key, 0) + each.num_bytes
        return totals


@contextmanager
def count_collectives() -> Iterator[CollectiveRecords]:
    """Record every collective that this rank makes inside the context.

    It listens to torch's dispatcher, through which Python, DDP's reducer, FSDP2, DeepSpeed and
    DTensor all go; functional collectives count once. Object collectives count as the tensors that
    they send. Barriers move no data and are left out, and so is a group of one rank.

    Collective: none of its own.
    """
    found = CollectiveRecords()
    with _recording_mode(found):
        yield found


def _recording_mode(found: CollectiveRecords) -> TorchDispatchMode:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                # It comes back for what the DTensor makes of it: its collectives among that.
                return NotImplemented
            record = _record_of(func, args, kwargs or {})
            if record is not None and record.group_size > 1:
                found.records.append(record)
            # What the operation itself dispatches is not seen here, so nothing counts twice.
            return func(*args, **(kwargs or {}))

    def _record_of(func: Any, args: Any, keywords: Any) -> CollectiveRecord | None:
        known = _known(func)
        if known is None:
            return None
        op, position, brings_a_part = known
        ranks = _ranks(func, args, keywords)
        parts = len(ranks) if brings_a_part else 1
        return CollectiveRecord(op, parts * _num_bytes(args[position]), ranks)

    def _num_bytes(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(_num_bytes(item) for item in value)

    return Recorder()  # type: ignore[no-untyped-call]


@cache
def _known(func: Any) -> tuple[str, int, bool] | None:
    """Return of an operation of the dispatcher its op, and where its buffer is: see the tables.

    Last whether the buffer is one rank's part of the full one. None for what is no collective.
    """
    schema = getattr(func, "_schema", None)
    namespace, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    if namespace == "c10d" and name in _FULL_BUFFER:
        return (*_FULL_BUFFER[name], False)
    if namespace in _FUNCTIONAL_NAMESPACES:
        for start, op in _FUNCTIONAL.items():
            if name.startswith(start):
                return op, 0, op == "all_gather"
    return None


def _ranks(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the group that an operation of the dispatcher is called with."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    names = [argument.name for argument in func._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *keywords.items()]:
        if name in _GROUP_ARGUMENTS:
            if isinstance(value, str):
                value = _resolve_process_group(value)  # type: ignore[arg-type]
            elif isinstance(value, torch.ScriptObject):
                value = dist.ProcessGroup.unbox(value)
            return tuple(dist.get_process_group_ranks(value))
    raise RuntimeError(
        f"{func._schema.name} has none of the {len(_GROUP_ARGUMENTS)} arguments "
        f"{' and '.join(_GROUP_ARGUMENTS)}, so its ranks are not known. Count with a torch whose "
        "collectives have one."
    )
