"""What a strategy costs: memory by line and phase, traffic by collective, paper beside fact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

from distft.formulas._numbers import choice, exact, whole
from distft.formulas.traffic import ring_fraction

PHASES = ("load", "forward", "loss", "backward", "step", "save", "consolidate")
# All but the last, in which no run is there: model state lies in files.
ALWAYS = PHASES[:-1]
# A forward pass is fullest where it begins, while the root arrives; where all blocks have kept what
# they keep; or where it ends, with the logits. A line of "forward" is held in all three.
FORWARD = ("forward: begin", "forward: blocks", "forward: end")
# A backward pass is fullest where it begins, with the gradient of the loss; where its first block
# begins; or where it ends, with all gradients. A line of "backward" is held in all three.
BACKWARD = ("backward: loss", "backward: blocks", "backward: end")
_MOMENTS = {"forward": FORWARD, "backward": BACKWARD}
STATES = ("parameters", "gradients", "optimizer")
# Beside model state: what is gathered or reduced, what a micro-step keeps for its backward pass,
# and blocks that the allocator keeps where rows differ in length.
KINDS = (*STATES, "buffer", "activations", "logits", "cached")
# The allocator's segments over its tensors: 1.06 fits the measured peaks of torchtitan and
# ms-swift. For adapters under sharding 1.12 and 1.24 were measured (fsdp_qlora): their middle.
FRAGMENTATION = 1.06
FRAGMENTATION_OF_ADAPTERS = 1.18
# CUDA's context and kernels, 0.47 to 0.92 GiB with torch 2.1 (pytorch issues), and NCCL's
# buffers, about 1.5 GiB a process after its first barrier.
CONTEXT_BYTES = 700 * 2**20
NCCL_BYTES = 1536 * 2**20
PERIODS = ("micro_step", "step", "save")


class Parameter(Protocol):
    """What a formula needs to know of one parameter; `distft.ModelSpec` has them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient and optimizer state."""

    @property
    def kept(self) -> bool:
        """Whether it stays fp32 where others train in bf16."""

    @property
    def packed(self) -> bool:
        """Whether its elements are packed bytes, which have the dtype of compute throughout."""


class Unit(Protocol):
    """Parameters that a sharded strategy gathers together."""

    @property
    def name(self) -> str:
        """Path of the module; empty for the root, which has what is in no block."""

    @property
    def tensors(self) -> Sequence[Parameter]:
        """The parameters."""


@dataclass(frozen=True)
class MemoryLine:
    """One line of a memory report.

    Args:
        name: What is held, in words.
        kind: "parameters", "gradients" or "optimizer" (model state), "buffer", "activations",
            "logits", or "cached" (in what the allocator reserves only).
        phases: Phases of a step, or moments of a forward or backward pass, in which it is held.
        per_rank: Bytes on each rank.
        on_host: Whether it lies in host memory, offloaded, and not on the device.
        on_disk: Whether it lies on a disk, and in no memory.
    """

    name: str
    kind: str
    phases: tuple[str, ...]
    per_rank: tuple[int, ...]
    on_host: bool = False
    on_disk: bool = False

    def __post_init__(self) -> None:
        choice("kind", self.kind, KINDS)
        for phase in self.phases:
            choice("phase", phase, (*PHASES, *FORWARD, *BACKWARD))

    def is_held(self, phase: str) -> bool:
        """Return whether it is held in a phase, or in a moment of a pass."""
        return phase in self.phases or phase.partition(":")[0] in self.phases

    @property
    def phase(self) -> str:
        """Phase in which it appears."""
        return self.phases[0]

    @property
    def num_bytes(self) -> int:
        """Bytes on the rank that holds most."""
        return max(self.per_rank)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that each rank holds: model state to the byte, all else as estimates.

    Bytes are the device's, but for what `host` and `disk` name. `peak_bytes` is what torch calls
    allocated, `reserved_bytes` and `process_bytes` are what its allocator and nvidia-smi say.

    Args:
        lines: What is held, when, on which rank.
        paper_bytes: Model state of one rank by the paper, even shards, wherever it lies.
        paper: The paper's formula, in words.
        fragmentation: The allocator's segments over live tensors.
        has_peers: Whether there are other ranks, where the report is of one; None asks its lines.
    """

    lines: tuple[MemoryLine, ...]
    paper_bytes: int | float
    paper: str
    fragmentation: float = FRAGMENTATION
    has_peers: bool | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.lines[0].per_rank)

    @property
    def per_rank(self) -> tuple[int, ...]:
        """Bytes of model state (parameters, gradients, optimizer) on each rank's device."""
        return self._sum(line for line in self._on_device if line.kind in STATES)

    @property
    def host_per_rank(self) -> tuple[int, ...]:
        """Bytes of model state that each rank holds in host memory, offloaded."""
        return self._sum(line for line in self.lines if line.on_host and line.kind in STATES)

    @property
    def host_bytes(self) -> int:
        """Bytes of model state in host memory, of the rank that holds most."""
        return max(self.host_per_rank)

    @property
    def disk_per_rank(self) -> tuple[int, ...]:
        """Bytes of model state that each rank holds on a disk."""
        return self._sum(line for line in self.lines if line.on_disk)

    @property
    def disk_bytes(self) -> int:
        """Bytes of model state on a disk, of the rank that holds most."""
        return max(self.disk_per_rank)

    @property
    def _on_device(self) -> list[MemoryLine]:
        return [line for line in self.lines if not (line.on_host or line.on_disk)]

    def _sum(self, lines: Iterable[MemoryLine]) -> tuple[int, ...]:
        return _sum_ranks(lines) or (0,) * self.num_ranks

    @property
    def model_state_bytes(self) -> int:
        """Bytes of model state on the heaviest rank."""
        return max(self.per_rank)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes of live tensors in the fullest phase on the heaviest rank: torch's "allocated"."""
        return max(self.phase_bytes(phase) for phase in PHASES)

    @property
    def peak_phase(self) -> str:
        """The phase in which the heaviest rank holds most."""
        return max(PHASES, key=self.phase_bytes)

    @property
    def peak_moment(self) -> str:
        """The moment of that phase, where it has several: "backward: blocks"."""
        moments = _MOMENTS.get(self.peak_phase, (self.peak_phase,))
        return max(moments, key=self.phase_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the allocator's segments on the heaviest rank: torch's "reserved".

        `fragmentation` times the peak, and what it keeps where rows differ in length. On a full
        device the allocator gives the latter back before it fails.
        """
        cached = max(self._sum(line for line in self._on_device if line.kind == "cached"))
        return round(self.fragmentation * self.peak_bytes) + cached

    @property
    def process_bytes(self) -> int:
        """Bytes that nvidia-smi shows for the heaviest rank: reserved, CUDA's context, NCCL."""
        return self.reserved_bytes + self.context_bytes

    @property
    def context_bytes(self) -> int:
        """Bytes of a GPU's memory that a process takes beside the allocator's."""
        peers = self.num_ranks > 1 if self.has_peers is None else self.has_peers
        return CONTEXT_BYTES + (NCCL_BYTES if peers else 0)

    @property
    def _left_out(self) -> str:
        has_activations = any(line.kind == "activations" for line in self.lines)
        return "" if has_activations else "; without activations, whose widths are not known"

    def phase_bytes(self, phase: str, rank: int | None = None) -> int:
        """Return the bytes that a rank holds in a phase of a step, by default the heaviest one.

        Raises:
            ValueError: The phase does not exist.
        """
        choice("phase", phase, (*PHASES, *FORWARD, *BACKWARD))
        live = [line for line in self._on_device if line.kind != "cached"]
        moments = _MOMENTS.get(phase, (phase,))
        held = [self._sum(line for line in live if line.is_held(moment)) for moment in moments]
        return max(max(each) if rank is None else each[rank] for each in held)

    def kind_bytes(self, kind: str) -> tuple[int, ...]:
        """Return the bytes of one kind of line on each rank's device."""
        return self._sum(line for line in self._on_device if line.kind == kind)

    def __str__(self) -> str:
        """Table of the lines, the heaviest rank of each."""
        rows = [
            (
                line.phase,
                f"{line.name}{_place(line)}",
                _grouped(line.num_bytes),
                _grouped(min(line.per_rank)),
            )
            for line in self.lines
        ]
        elsewhere = [
            f"on the {place}: {_grouped(size)} bytes of model state on the heaviest rank"
            for place, size in (("host", self.host_bytes), ("disk", self.disk_bytes))
            if size
        ]
        head = ("phase", "held", "bytes, heaviest rank", "lightest")
        return "\n".join(
            (
                table(head, rows),
                f"model state: {_grouped(self.model_state_bytes)} bytes on the heaviest rank",
                *elsewhere,
                f"by the paper: {_grouped(self.paper_bytes)} bytes, {self.paper}",
                f"peak: {_grouped(self.peak_bytes)} bytes of live tensors ({self.peak_phase}), "
                f"{_grouped(self.reserved_bytes)} reserved,",
                f"{_grouped(self.process_bytes)} of the process{self._left_out}",
            )
        )


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind on one axis of the mesh: what one rank sends on the wire.

    Args:
        op: NCCL's name of the collective.
        axis: Axis of the mesh; "dp" is all data ranks, "world" all ranks.
        num_bytes: Bytes that one rank sends in a ring, for all calls of one period together.
        per: How often: "micro_step", "step" or "save".
        payload_bytes: Bytes of the full buffers of these calls.
        ranks: Ranks in the group.
        what: What is moved, in words.
        link: Slowest link that it needs on a machine; empty where none was given.
        seconds: Seconds of all calls of one period on that machine.
    """

    op: str
    axis: str
    num_bytes: int | float
    per: str
    payload_bytes: int
    ranks: int
    what: str = ""
    link: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        choice("per", self.per, PERIODS)

    @classmethod
    def of(
        cls, op: str, axis: str, payload_bytes: int, ranks: int, per: str, what: str
    ) -> Collective:
        """Return the collective that moves full buffers of `payload_bytes` over `ranks` ranks.

        Raises:
            ValueError: `op` or `per` is unknown, or a number is out of range.
        """
        wire = exact(ring_fraction(op, payload_bytes, ranks))
        return cls(op, axis, wire, per, payload_bytes, ranks, what)

    @property
    def exact_bytes(self) -> Fraction:
        """Bytes on the wire as a fraction, for sums that must not round on the way."""
        return ring_fraction(self.op, self.payload_bytes, self.ranks)


@dataclass(frozen=True)
class TrafficReport:
    """Bytes that one rank sends per optimizer step: the implementation's and the paper's.

    Args:
        collectives: What the implementation sends.
        grad_accum: Micro-steps of one step.
        paper_bytes_per_step: Bytes by the paper, without padding and control messages.
        paper: The paper's formula, in words.
        disk_bytes_per_step: Bytes that one rank reads from its disk in a step, and writes.
    """

    collectives: tuple[Collective, ...]
    grad_accum: int
    paper_bytes_per_step: int | float
    paper: str
    disk_bytes_per_step: int = 0

    def __post_init__(self) -> None:
        whole("grad_accum", self.grad_accum, 1)

    @property
    def bytes_per_step(self) -> int | float:
        """Bytes that one rank sends per optimizer step in this implementation."""
        return exact(sum((self._per_step(each) for each in self.collectives), Fraction(0)))

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of all collectives of a step, nothing hidden; None without a machine."""
        timed = [each for each in self.collectives if each.seconds is not None]
        if not timed:
            return None
        return sum(self._times(each) * (each.seconds or 0.0) for each in timed)

    def seconds_by_link(self) -> dict[str, float]:
        """Return the seconds of a step by link class, without a machine none."""
        found: dict[str, float] = {}
        for each in self.collectives:
            if each.seconds is not None:
                found[each.link] = found.get(each.link, 0.0) + self._times(each) * each.seconds
        return found

    def payload_per_step(self) -> dict[tuple[str, int], int]:
        """Return the bytes of full buffers per step, by op and number of ranks."""
        totals: dict[tuple[str, int], int] = {}
        for each in self.collectives:
            key, times = (each.op, each.ranks), self._times(each)
            if each.ranks > 1 and times:
                totals[key] = totals.get(key, 0) + times * each.payload_bytes
        return totals

    def payload_by_axis(self) -> dict[tuple[str, str], int]:
        """Return the bytes of full buffers per step, by op and axis of the mesh."""
        totals: dict[tuple[str, str], int] = {}
        for each in self.collectives:
            key, times = (each.op, each.axis), self._times(each)
            if each.ranks > 1 and times:
                totals[key] = totals.get(key, 0) + times * each.payload_bytes
        return totals

    def _times(self, collective: Collective) -> int:
        return {"micro_step": self.grad_accum, "step": 1, "save": 0}[collective.per]

    def _per_step(self, collective: Collective) -> Fraction:
        return self._times(collective) * collective.exact_bytes

    def __str__(self) -> str:
        """Table of the collectives."""
        rows: list[tuple[str, ...]] = [
            (each.op, each.axis, str(each.ranks), each.per, each.what, _grouped(each.num_bytes))
            for each in self.collectives
        ]
        head: tuple[str, ...] = ("collective", "axis", "ranks", "per", "moves")
        head = (*head, "bytes sent by a rank")
        if self.seconds_per_step is not None:
            head = (*head, "link", "s")
            rows = [
                (*row, each.link, "" if each.seconds is None else f"{each.seconds:.4f}")
                for row, each in zip(rows, self.collectives, strict=True)
            ]
        disk = _grouped(self.disk_bytes_per_step)
        return "\n".join(
            (
                table(head, rows),
                f"in a step: {_grouped(self.bytes_per_step)} bytes sent by a rank",
                *(
                    [f"in a step: {disk} bytes read from its disk, and written"]
                    if disk != "0"
                    else []
                ),
                f"by the paper: {_grouped(self.paper_bytes_per_step)} bytes, {self.paper}",
            )
        )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a plain table; the columns that hold numbers are aligned to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    numbers = [
        any(line[column] for line in lines[1:])
        and all(not line[column] or line[column][0].isdigit() for line in lines[1:])
        for column in range(len(head))
    ]
    shown = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    ]
    shown.insert(1, "-" * max(len(line) for line in shown))
    return "\n".join(shown)


def _sum_ranks(lines: Iterable[MemoryLine]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*(line.per_rank for line in lines), strict=True))


def _place(line: MemoryLine) -> str:
    return " (host)" if line.on_host else " (disk)" if line.on_disk else ""


def _grouped(number: int | float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"
