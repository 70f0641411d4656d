"""Counting collectives to the byte, on any backend and any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of this rank: NCCL's name, bytes of the full buffer, ranks of the group."""

    op: str
    num_bytes: int
    group_size: int

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


@contextmanager
def count_collectives() -> Iterator[CollectiveRecords]:
    """Record every collective that this rank makes inside the context.

    It listens to torch's dispatcher, through which Python, DDP's reducer, FSDP2 and DeepSpeed all
    go. Object collectives count as the tensors that they send. Barriers move no data and are left
    out, and so is a group of one rank.

    Collective: none of its own.
    """
    found = CollectiveRecords()
    with _recording_mode(found):
        yield found


def _recording_mode(found: CollectiveRecords) -> TorchDispatchMode:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                known = _FULL_BUFFER.get(func._schema.name.split("::")[1])
                if known is not None:
                    op, position = known
                    ranks = _group_size(args)
                    if ranks > 1:
                        num_bytes = _num_bytes(args[position])
                        found.records.append(CollectiveRecord(op, num_bytes, ranks))
            return func(*args, **(kwargs or {}))

    def _num_bytes(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(_num_bytes(item) for item in value)

    def _group_size(args: Any) -> int:
        for value in args:
            if isinstance(value, torch.ScriptObject):
                group = torch.distributed.ProcessGroup.unbox(value)
                if isinstance(group, torch.distributed.ProcessGroup):
                    return int(group.size())
        return 0

    return Recorder()  # type: ignore[no-untyped-call]
