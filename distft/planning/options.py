"""One candidate judged: memory, time, what binds it, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from distft.adapted import adapter_params, readers_of
from distft.formulas import MemoryReport
from distft.formulas.eager import Readers
from distft.formulas.peak import Run, predicted_memory
from distft.formulas.shape import Shape
from distft.formulas.speed import StepTime, hidden_micro_batch, step_time
from distft.formulas.working import Kept
from distft.planning.candidates import Candidate
from distft.planning.fits import needed_bytes
from distft.planning.machine import chip_of, wires_of
from distft.spec import ModelSpec, Workload
from distft.topology import Cluster

# nf4 with a scale for every 64 weights, the scales quantized again (Dettmers et al. 2023).
NF4_BYTES = 0.516


@dataclass(frozen=True)
class Setting:
    """What all candidates of a plan share.

    Args:
        spec: The model.
        shape: Its widths and counts.
        load: The load of a step.
        cluster: The machine.
        num_ranks: GPUs that train.
        precision: Precision of every strategy.
        checkpointing: Whether blocks are computed again.
        compile: Whether blocks are compiled.
        offload: "", "optimizer" or "params".
        memory_factor: Measured over predicted of what lies beside model state, by `calibrate`.
        time_factor: Measured over predicted seconds of a step.
    """

    spec: ModelSpec
    shape: Shape
    load: Workload
    cluster: Cluster
    num_ranks: int
    precision: str = "bf16-mixed"
    checkpointing: bool = False
    compile: bool = False
    offload: str = ""
    memory_factor: float = 1.0
    time_factor: float = 1.0
    # Counts of adapters and what keeps its input, shared with settings that are made of this one.
    _counted: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def capacity(self) -> int:
        """Bytes of one GPU."""
        assert self.cluster.gpu is not None
        return self.cluster.gpu.memory_bytes

    @cached_property
    def readers(self) -> Readers:
        """Which layers of a block keep what they read."""
        load = self.load
        key = ("readers", load.tuning, load.lora_rank, load.lora_targets, load.expert_lora_rank)
        if key not in self._counted:
            self._counted[key] = readers_of(self.spec, load)
        found: Readers = self._counted[key]
        return found

    @cached_property
    def adapters(self) -> int | None:
        """Parameters of adapters; None where all is trained."""
        load = self.load
        if load.tuning == "full":
            return None
        key = (load.lora_rank, load.lora_targets, load.expert_lora_rank)
        if key not in self._counted:
            self._counted[key] = adapter_params(self.spec, load)
        number: int = self._counted[key]
        return number


@dataclass(frozen=True)
class Change:
    """A change to a run that makes it fit, what it needs then, and what it costs in speed.

    Args:
        what: The change, in words.
        size: Its place in the order from the smallest change.
        option: The changed run.
    """

    what: str
    size: int
    option: Option

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second, after the change."""
        return self.option.tokens_per_second


@dataclass(frozen=True)
class Option:
    """One strategy on the machine, predicted.

    Args:
        candidate: The strategy and its degrees.
        setting: What it shares with the others.
    """

    candidate: Candidate
    setting: Setting

    @property
    def label(self) -> str:
        """Short name."""
        return self.candidate.label

    @cached_property
    def run(self) -> Run:
        """What the formulas work on."""
        setting, load = self.setting, self.setting.load
        held = self.candidate.held(setting.precision)
        if load.optimizer == "sgd":
            held = replace(held, optimizer=held.optimizer - _MOMENTS[setting.precision])
        if load.tuning == "qlora":
            held = replace(held, frozen=NF4_BYTES, frozen_root=2)
        adapters = None
        if load.tuning != "full":
            adapters = "all" if load.lora_targets == "all-linear" else "attention"
        return Run(
            setting.shape,
            self.candidate.layout,
            held,
            load.micro_batch,
            load.seq_len,
            Kept(
                "compiled" if setting.compile else "eager",
                adapters,
                dropout=False,
                inputs=load.tuning == "qlora",
            ),
            "full" if setting.checkpointing else "none",
            load.loss,
            flash=load.attention != "eager",
            adapters=setting.adapters,
            accumulates=load.grad_accum > 1,
            offload=setting.offload,
            element=4 if setting.precision == "fp32" else 2,
            splits_rows=False,
            readers=None if setting.compile else setting.readers,
            autocasts=self.candidate.name == "DDP" and setting.precision == "bf16-mixed",
        )

    @cached_property
    def memory(self) -> MemoryReport:
        """Memory of the heaviest rank by phase."""
        report = predicted_memory(self.run)
        factor = self.setting.memory_factor
        if factor == 1.0:
            return report
        states = ("parameters", "gradients", "optimizer")
        lines = tuple(
            line
            if line.kind in states
            else replace(line, per_rank=tuple(round(factor * size) for size in line.per_rank))
            for line in report.lines
        )
        return replace(report, lines=lines)

    @cached_property
    def time(self) -> StepTime:
        """Seconds of a step."""
        setting = self.setting
        assert setting.cluster.gpu is not None
        chip = chip_of(setting.cluster.gpu, self.run.kept.kernels)
        if setting.precision == "fp32":
            # TF32 or fp32 products: half of bf16's speed at best.
            chip = replace(chip, peak_flops=chip.peak_flops / 2)
        wires = wires_of(setting.cluster, self.candidate.layout)
        found = step_time(self.run, chip, wires, setting.load.grad_accum)
        return found.scaled(setting.time_factor)

    @property
    def peak_bytes(self) -> int:
        """Live tensors of the fullest phase, on the heaviest rank."""
        return self.memory.peak_bytes

    @property
    def needed_bytes(self) -> float:
        """Bytes that a GPU must have: the peak with its margin, and the context."""
        return needed_bytes(self.memory)

    @property
    def fits(self) -> bool:
        """Whether it fits the GPU with the margin."""
        return self.needed_bytes <= self.setting.capacity

    @property
    def free_bytes(self) -> float:
        """Bytes of the GPU that are left, below 0 where some are missing."""
        return self.setting.capacity - self.needed_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second."""
        return self.time.tokens_per_second * self.setting.num_ranks

    @property
    def mfu(self) -> float:
        """Share of the GPUs' peak that the model's FLOPs are."""
        assert self.setting.cluster.gpu is not None
        return self.time.mfu(chip_of(self.setting.cluster.gpu))

    @property
    def host_bytes(self) -> int:
        """Host memory of one node: what is offloaded by its ranks."""
        held = sum(line.num_bytes for line in self.memory.lines if line.on_host)
        return held * min(self.setting.num_ranks, self.setting.cluster.gpus_per_node)

    @cached_property
    def hidden_at(self) -> int | None:
        """Smallest micro-batch whose compute hides the data axes' communication."""
        assert self.setting.cluster.gpu is not None
        chip = chip_of(self.setting.cluster.gpu, self.run.kept.kernels)
        wires = wires_of(self.setting.cluster, self.candidate.layout)
        return hidden_micro_batch(self.run, chip, wires)

    @cached_property
    def binds(self) -> str:
        """What limits it: memory and its largest line, launches, communication or compute."""
        if not self.fits:
            phase = self.memory.peak_phase
            moment = self.memory.peak_moment
            lines = [x for x in self.memory.lines if x.is_held(moment) and not x.on_host]
            largest = max(lines, key=lambda line: line.num_bytes)
            return f"memory: {largest.name} in {phase}"
        time = self.time
        if time.exposed + time.bubble > time.compute:
            return "communication"
        return "launches" if time.launch_bound else "compute"

    @cached_property
    def change(self) -> Change | None:
        """The smallest change that makes it fit, None where it fits or where none does."""
        if self.fits:
            return None
        for size, what, candidate, setting in changes(self.candidate, self.setting):
            option = Option(candidate, setting)
            if option.fits:
                return Change(what, size, option)
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return its numbers as plain values, for JSON."""
        time, change = self.time, self.change
        return {
            "strategy": self.candidate.name,
            "degrees": dict(self.candidate.fields),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.memory.peak_phase,
            "reserved_bytes": self.memory.reserved_bytes,
            "process_bytes": self.memory.process_bytes,
            "model_state_bytes": self.memory.model_state_bytes,
            "needed_bytes": round(self.needed_bytes),
            "free_bytes": round(self.free_bytes),
            "host_bytes_per_node": self.host_bytes,
            "step_seconds": time.seconds,
            "compute_seconds": time.compute,
            "communication_seconds": time.communication,
            "exposed_seconds": time.exposed,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hidden_at_micro_batch": self.hidden_at,
            "binds": self.binds,
            "change": None if change is None else change.what,
            "lines": [
                {
                    "name": line.name,
                    "kind": line.kind,
                    "phases": list(line.phases),
                    "bytes": line.num_bytes,
                    "on_host": line.on_host,
                }
                for line in self.memory.lines
            ],
        }


# Bytes of both moments of Adam by precision.
_MOMENTS = {"fp32": 8, "bf16-mixed": 8, "bf16": 4}


def changes(
    candidate: Candidate, setting: Setting
) -> Iterator[tuple[int, str, Candidate, Setting]]:
    """Yield changes from the smallest, with their places in that order.

    What keeps the training as it is comes first, then the host's memory, adapters, more GPUs.

    Collective: none.
    """
    load = setting.load
    least, parts = replace(setting, checkpointing=True), []
    if not setting.checkpointing:
        parts.append("activation checkpointing")
        yield 0, parts[0], candidate, least
    if load.loss in ("eager", "compiled"):
        chunked = replace(load, loss="chunked")
        yield 1, "chunked loss", candidate, replace(setting, load=chunked)
        parts.append("chunked loss")
        least = replace(least, load=chunked)
        yield 2, _joined(parts), candidate, least
    rows = load.micro_batch
    while rows > 1:
        rows //= 2
        accumulated = load.grad_accum * load.micro_batch // rows
        least = replace(least, load=replace(least.load, micro_batch=rows, grad_accum=accumulated))
        yield 3, _joined([*parts, f"micro_batch={rows}"]), candidate, least
    if load.micro_batch > 1:
        parts.append("micro_batch=1")
    offload = candidate.offload(setting.precision)
    if offload and not setting.offload:
        offloaded = replace(least, offload=offload)
        yield 4, _joined([*parts, f'offload="{offload}"']), candidate, offloaded
    for place, (tuning, what) in enumerate((("lora", "LoRA"), ("qlora", "QLoRA"))):
        if _TUNINGS.index(tuning) > _TUNINGS.index(load.tuning):
            adapted = replace(least.load, tuning=tuning)
            changed = replace(least, load=adapted, precision="bf16")
            yield 5 + place, _joined([*parts, f"{what} in bf16"]), candidate, changed
    for times in (2, 4, 8, 16, 32):
        ranks = times * setting.num_ranks
        grown = _grown(setting.cluster, ranks)
        if grown is not None:
            more = replace(least, num_ranks=ranks, cluster=grown)
            yield 7, _joined([*parts, f"{ranks} GPUs"]), candidate.on_more(times), more


def _joined(parts: list[str]) -> str:
    return ", ".join(parts)


_TUNINGS = ("full", "lora", "qlora")


def _grown(cluster: Cluster, ranks: int) -> Cluster | None:
    """Return the machine with as many nodes as the ranks need; None where no wire joins nodes."""
    nodes = max(cluster.nodes, -(-ranks // cluster.gpus_per_node))
    if nodes > cluster.nvlink_nodes and cluster.internode_gbps is None:
        return None
    return replace(cluster, nodes=nodes)
