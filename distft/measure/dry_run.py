"""`dry_run`: a strategy's real code on a real model class, without weights, values or ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.adapted import with_adapters
from distft.formulas.architectures import expert_numbers
from distft.formulas.reports import MemoryReport, TrafficReport, table
from distft.measure.collectives import CollectiveRecords, count_collectives
from distft.measure.fake import FakeTensors, fake_group, modules_stay, settle_buckets
from distft.measure.live import LiveBytes
from distft.measure.memory import ModelStateBytes, model_state_bytes
from distft.mesh import Mesh
from distft.process_group import local_device
from distft.spec import ModelSpec, Workload, config_values
from distft.training.loss import next_token_loss
from distft.training.step import LossFunction, run_step
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

# Phases of a step that are measured, by the names of a memory report.
MEASURED = ("forward", "loss", "backward", "step")


@dataclass(frozen=True)
class MeasuredCollective:
    """Collectives of one kind over one group of ranks in one step.

    Attributes:
        op: NCCL's name.
        axis: Axis of the mesh; of several with the same ranks the first.
        ranks: Ranks of the group.
        calls: How many were made.
        num_bytes: Bytes of their full buffers.
        predicted: What `strategy.traffic` says of these bytes.
    """

    op: str
    axis: str
    ranks: int
    calls: int
    num_bytes: int
    predicted: int


@dataclass(frozen=True)
class DryRun:
    """What one rank holds and sends in a step, measured without hardware, beside the formulas.

    Attributes:
        strategy: The strategy's constructor.
        rank: The rank that was run.
        world_size: Ranks that there are.
        phase_bytes: Most bytes of live tensors in each phase of a step.
        state: Bytes of parameters, gradients and optimizer after a step.
        collectives: What was sent in a step, by kind and axis.
        bytes_per_step: Bytes that the rank puts on the wire in a step.
        memory: What `strategy.memory` predicts.
        traffic: What `strategy.traffic` predicts.
    """

    strategy: str
    rank: int
    world_size: int
    phase_bytes: Mapping[str, int]
    state: ModelStateBytes
    collectives: tuple[MeasuredCollective, ...]
    bytes_per_step: float
    memory: MemoryReport
    traffic: TrafficReport

    @property
    def peak_bytes(self) -> int:
        """Most bytes of live tensors in a step."""
        return max(self.phase_bytes.values())

    @property
    def peak_phase(self) -> str:
        """The phase in which they are alive."""
        return max(self.phase_bytes, key=lambda phase: self.phase_bytes[phase])

    @property
    def predicted_phase_bytes(self) -> dict[str, int]:
        """What the formulas say of each phase on this rank."""
        return {
            phase: self.memory.phase_bytes(phase, self.rank)
            for phase in MEASURED
            if phase in self.phase_bytes
        }

    @property
    def predicted_peak_bytes(self) -> int:
        """What the formulas say of the peak of a step on this rank."""
        return max(self.predicted_phase_bytes.values())

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak, less 1."""
        return self.predicted_peak_bytes / self.peak_bytes - 1

    def __str__(self) -> str:
        """Tables of memory and of traffic: measured, by the formulas, and the difference."""
        head = ("held in", "measured bytes", "by the formulas", "difference")
        predicted = self.predicted_phase_bytes
        rows = [_row(phase, size, predicted[phase]) for phase, size in self.phase_bytes.items()]
        of_state = [
            _row(kind, getattr(self.state, kind), self.memory.kind_bytes(kind)[self.rank])
            for kind in ("parameters", "gradients", "optimizer")
        ]
        sent = [
            (each.op, each.axis, f"{each.ranks:,}", f"{each.calls:,}", *_row("", *sizes)[1:])
            for each in self.collectives
            for sizes in [(each.num_bytes, each.predicted)]
        ]
        sent_head = ("collective", "axis", "ranks", "calls", "bytes of full buffers", *head[2:])
        return "\n".join(
            (
                f"{self.strategy}, rank {self.rank} of {self.world_size}, one step",
                table(head, rows),
                f"peak: {self.peak_bytes:,} bytes ({self.peak_phase}), by the formulas "
                f"{self.predicted_peak_bytes:,} ({self.peak_error:+.1%})",
                "",
                table(("model state", *head[1:]), of_state),
                "",
                table(sent_head, sent),
                f"in a step: {self.bytes_per_step:,.0f} bytes sent by the rank, by the formulas "
                f"{self.traffic.bytes_per_step:,.0f}",
            )
        )


def _row(name: str, measured: int, predicted: int) -> tuple[str, str, str, str]:
    difference = f"{predicted / measured - 1:+.1%}" if measured else ""
    return name, f"{measured:,}", f"{predicted:,}", "equal" if measured == predicted else difference


def dry_run(
    strategy: Any,
    config: Any,
    load: Workload,
    *,
    world_size: int,
    rank: int = 0,
    model_class: Any = None,
    loss_fn: LossFunction | None = None,
) -> DryRun:
    """Return what a rank holds and sends in a step, from running it without hardware.

    The strategy shards a model of the real class, and a training step runs: all operations are
    made on tensors that have a size and no values, in a process group of ``world_size`` ranks
    that sends nothing. Bytes are those of torch's tensors, as on a GPU: AdamW updates all tensors
    at once, tokens go to all experts alike, and kernels' own scratch space is not seen. It checks
    `Strategy.memory` and `Strategy.traffic`, which the result has too. With ``tuning="lora"``
    PEFT's own adapters are put on.

    Args:
        strategy: DDP, FSDP2, HSDP, TP, EP or NDParallel.
        config: A transformers configuration, its dict, a folder with ``config.json`` or the name
            of a preset.
        load: The load of a step. ``attention="eager"`` keeps scores; both others run torch's
            `scaled_dot_product_attention`. Experts run as one grouped product.
        world_size: Ranks that there are.
        rank: The rank to be.
        model_class: Class of the model, with ``from_config`` or called with the configuration;
            default ``AutoModelForCausalLM``.
        loss_fn: As for `Strategy.train_step`.

    Raises:
        ValueError: The strategy is ZeRO, whose engine works on values; it offloads; the degrees or
            the rank do not fit ``world_size``; or the load asks for quantized weights, or for a
            loss that `Strategy.train_step` does not do itself.
        RuntimeError: This process is in a process group, or the model's forward pass depends on
            values.

    Collective: none; the process must be in no process group.
    """
    mesh = _checked(strategy, load, world_size, rank, loss_fn)
    with fake_group(rank, world_size), warnings.catch_warnings():
        # What a run warns of, it will warn of when it is made.
        warnings.simplefilter("ignore")
        run = _Run(strategy, load, mesh, rank, loss_fn or next_token_loss)
        spec = run.build(config, model_class)
        memory = strategy.memory(spec, load, world_size=world_size)
        traffic = strategy.traffic(spec, load, world_size=world_size)
        with _explained():
            run.spread()
            # The first step makes the optimizer's state and DDP's last buckets.
            run.step()
            run.settle()
            found = run.step()
        return DryRun(
            repr(strategy),
            rank,
            world_size,
            {phase: run.live.peaks[phase] for phase in MEASURED if phase in run.live.peaks},
            model_state_bytes(run.model, run.optimizer),
            _by_axis(found, traffic, mesh, rank),
            found.wire_bytes,
            memory,
            traffic,
        )


def _checked(
    strategy: Any, load: Workload, world_size: int, rank: int, loss_fn: LossFunction | None
) -> Mesh:
    """Return the axis sizes after checking that the run can be made."""
    mesh: Mesh = strategy.mesh(world_size)
    if strategy.layout == "deepspeed":
        raise ValueError(
            f"dry_run({strategy!r}) would run DeepSpeed's engine, of which 0 parts work on tensors "
            "without values. Use strategy.memory and strategy.traffic, which are exact for it."
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(
            f"dry_run(rank={rank!r}) is no rank of {world_size}. Pass one from 0 to "
            f"{world_size - 1}."
        )
    for field in ("offload", "compile"):
        if getattr(strategy, field) is not None:
            raise ValueError(
                f"dry_run({strategy!r}): {field} needs a device, and a dry run has 0. Leave it out."
            )
    if load.tuning == "qlora":
        raise ValueError(
            "dry_run runs tuning='full' or 'lora', and the load has tuning='qlora', whose kernels "
            "need 4-bit values. Use strategy.memory and strategy.traffic."
        )
    if loss_fn is None and load.loss != "eager":
        raise ValueError(
            f"dry_run runs the loss of train_step, which is loss='eager', and the load has "
            f"loss={load.loss!r}. Pass a loss_fn that computes it so."
        )
    return mesh


class _Run:
    """One rank's model and optimizer, and the steps that are made with them."""

    def __init__(
        self, strategy: Any, load: Workload, mesh: Mesh, rank: int, loss_fn: LossFunction
    ) -> None:
        self.strategy, self.load, self.mesh, self.rank = strategy, load, mesh, rank
        self.loss_fn = loss_fn
        self.live = LiveBytes()
        self.fake = FakeTensors(self._rows_for)
        self.rows_sent = 0
        self.model: Any = None
        self.optimizer: Any = None
        self.adapters: Any = None

    def build(self, config: Any, model_class: Any) -> ModelSpec:
        """Build the model without values, and return its spec."""
        import torch

        attention = "eager" if self.load.attention == "eager" else "sdpa"
        made = _configuration(config, attention)
        with self.fake.everywhere(), torch.device(local_device()):
            model = _built(made, model_class)
        self.model = model
        spec = ModelSpec.from_model(model)
        tokens = self.load.micro_batch * self.load.seq_len
        tp = self.mesh.tp
        mine = min(-(-tokens // tp), tokens - self.rank % tp * -(-tokens // tp))
        self.rows_sent = mine * spec.experts_per_token
        self.adapters = _adapters(spec, self.load)
        return spec

    def spread(self) -> None:
        """Shard the model and build its optimizer."""
        with self.fake.for_floats(), self.live.tracking(), modules_stay():
            self.model, self.optimizer = self.strategy._spread_checked(
                self.model, _optimizer(self.load.optimizer), None, self.adapters, self.mesh
            )
        unwrap(self.model).register_forward_hook(lambda *_: self.live.enter("loss"))
        self.live.add([*self.model.parameters(), *self.model.buffers()])

    def step(self) -> CollectiveRecords:
        """Make one optimizer step, and return what was sent."""
        import torch

        shape = (self.load.micro_batch, self.load.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        batches = [{"input_ids": tokens, "labels": tokens}] * self.load.grad_accum
        with ExitStack() as inside, count_collectives() as found:
            pieces = _Pieces(self.strategy, self.live)

            def loss_fn(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
                if pieces.begun is False:
                    # What ranks tell each other before has values.
                    inside.enter_context(self.fake.everywhere())
                    inside.enter_context(self.live.tracking())
                    pieces.begun = True
                self.live.enter("forward")
                return self.loss_fn(model, batch)

            run_step(pieces, self.model, self.optimizer, batches, None, loss_fn, None)
        return found

    def settle(self) -> None:
        """Do once what comes between the first step and the second."""
        with self.fake.for_floats(), self.live.tracking():
            settle_buckets(self.model)
        self.live.forget_peaks()

    def _rows_for(self, size: Tensor) -> int:
        """Return what a program reads of the rows for each rank of ep: tokens go to all alike."""
        ep = self.mesh.ep
        if ep == 1:
            raise _reads_values("a whole number")
        place = size.storage_offset() % ep
        return self.rows_sent * (place + 1) // ep - self.rows_sent * place // ep


class _Pieces:
    """The pieces of a strategy that a step is made of, which say where in the step it is."""

    def __init__(self, strategy: Any, live: LiveBytes) -> None:
        self.strategy, self.live = strategy, live
        self.begun = False

    def mesh(self) -> Mesh:
        return self.strategy.mesh()  # type: ignore[no-any-return]

    def no_sync(self, model: nn.Module) -> Any:
        return self.strategy.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        self.live.enter("backward")
        self.strategy.backward(loss)

    def _gradients(self, model: nn.Module) -> Sequence[Any]:
        self.live.enter("step")
        return self.strategy._gradients(model)  # type: ignore[no-any-return]


def _configuration(config: Any, attention: str) -> Any:
    """Return a configuration object of one's own, with the kernels that a dry run can follow."""
    import transformers

    if hasattr(config, "to_dict"):
        made = copy.deepcopy(config)
    else:
        made = transformers.AutoConfig.for_model(**config_values(config))
    made._attn_implementation = attention
    if expert_numbers(made)[0]:
        # One that loops over the experts that got a token asks which did.
        made._experts_implementation = "grouped_mm"
    return made


def _built(config: Any, model_class: Any) -> nn.Module:
    import transformers

    if model_class is None:
        model_class = transformers.AutoModelForCausalLM
    build = getattr(model_class, "from_config", model_class)
    made: nn.Module = build(config)
    return made


def _adapters(spec: ModelSpec, load: Workload) -> Any:
    """Return PEFT's configuration of a load's adapters, None for full tuning."""
    if load.tuning == "full":
        return None
    from peft import LoraConfig

    # By name: of a model with experts PEFT's own "all-linear" adapts experts and router too.
    layers = {
        tensor.name.partition(".lora_A.")[0].removeprefix(f"{tensor.unit}.")
        for tensor in with_adapters(spec, load).tensors
        if ".lora_A." in tensor.name and not tensor.is_expert
    }
    experts: set[str] = set()
    if load.expert_lora_rank is not None:
        stacked = [t for t in spec.tensors if t.is_expert and len(t.shape) == 3]
        experts = {tensor.name.removeprefix(f"{tensor.unit}.") for tensor in stacked}
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=load.lora_rank,
        target_modules=sorted(layers),
        target_parameters=sorted(experts) or None,
        rank_pattern=dict.fromkeys(sorted(experts), load.expert_lora_rank),
    )


def _optimizer(name: str) -> Any:
    import torch

    # As on a GPU, where it is the default: all tensors at once.
    if name == "sgd":
        return partial(torch.optim.SGD, lr=1e-3, foreach=True)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return partial(kind, lr=1e-3, foreach=True)


def _reads_values(what: str) -> RuntimeError:
    return RuntimeError(
        f"The forward pass reads {what} out of a tensor, and a dry run has 0 values. Use "
        "strategy.memory and strategy.traffic for this model."
    )


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where something wants values."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _reads_values(str(error.func)) from error


def _by_axis(
    found: CollectiveRecords, traffic: TrafficReport, mesh: Mesh, rank: int
) -> tuple[MeasuredCollective, ...]:
    """Return what was sent by kind and group of ranks, beside what was predicted."""
    predicted: dict[tuple[str, tuple[int, ...]], int] = {}
    axes: dict[tuple[int, ...], str] = {}
    for (op, axis), size in traffic.payload_by_axis().items():
        ranks = mesh.group(axis, rank)
        axes.setdefault(ranks, axis)
        predicted[op, ranks] = predicted.get((op, ranks), 0) + size
    measured = found.payloads()
    calls = {key: sum((each.op, each.ranks) == key for each in found.records) for key in measured}
    return tuple(
        MeasuredCollective(
            op,
            axes.get(ranks, "?"),
            len(ranks),
            calls.get((op, ranks), 0),
            measured.get((op, ranks), 0),
            predicted.get((op, ranks), 0),
        )
        for op, ranks in sorted({*measured, *predicted})
    )
