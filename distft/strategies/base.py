"""`Strategy`: what every way to spread a model over ranks promises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from distft.adapted import with_adapters
from distft.formulas.architectures import expert_numbers
from distft.kept import kept_names, mark_kept
from distft.mesh import Mesh
from distft.process_group import (
    base_seed,
    group_rank,
    group_size,
    rendezvous,
    seed_everything,
    together,
)
from distft.quantized import pack
from distft.strategies.blocks import check_compiler, compile_blocks
from distft.strategies.guards import (
    check_applied,
    check_loaded,
    check_offload,
    check_same_model,
    check_shapes,
    check_undistributed,
    enable_checkpointing,
    mark_applied,
)
from distft.strategies.hooks import StrategyHooks
from distft.strategies.links import on_links
from distft.strategies.out_of_memory import explained, remember_optimizer
from distft.strategies.precision import cast_parameters, compute_kept_in_fp32
from distft.strategies.working import with_scales, with_working_memory
from distft.training.clip import bounds_of, check_max_norm, clip, keep_bounds, take_bounds
from distft.training.data import Batches, Collate
from distft.training.evaluation import EvalResult, run_evaluation
from distft.training.experts import ExpertLoad, count_tokens_of_experts, read_expert_load
from distft.training.generation import run_generation
from distft.training.loss import Batch, count_next_tokens
from distft.training.optimizers import (
    OptimizerFactory,
    ParamGroup,
    check_factory,
    follow_parameters,
    name_groups,
)
from distft.training.shares import note_share
from distft.training.step import (
    CountFunction,
    LossFunction,
    StepResult,
    count_over_ranks,
    run_step,
)
from distft.training.sums import check_loss_is_a_sum
from distft.training.wrappers import unwrap
from distft.whereabouts import at

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from distft.checkpoint.load import LoadedState
    from distft.checkpoint.pending import PendingSave
    from distft.formulas import MemoryReport, TrafficReport
    from distft.spec import ModelSpec, Workload
    from distft.topology import Cluster

PRECISIONS = ("fp32", "bf16-mixed", "bf16")


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(StrategyHooks):
    """How a model is spread over ranks: a value of axis sizes and policies.

    State lives in what `apply` returns, never in the strategy, so one value serves many models,
    pickles to workers and prints as its constructor.

    Attributes:
        precision: ``"fp32"``; ``"bf16-mixed"`` (fp32 master weights, bf16 compute, fp32 reduction);
            or ``"bf16"`` (weights, gradients and moments in bf16). fp16 needs loss scaling, which
            the parts here do not share, and is refused.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping its
            activations; dropout draws the same mask again.
        offload: What lies in host memory: ``"optimizer"`` (moments and master weights) or
            ``"params"`` (all model state); or ``"nvme:PATH"``: moments and master weights in files
            below PATH, the rest in host memory. Which a strategy has, `offloads` says.
        compile: ``"block"`` runs torch.compile on each transformer block, which fuses its small
            operations and costs the time to compile in the first steps; ``generate`` runs without.
    """

    precision: str = "fp32"
    activation_checkpointing: bool = False
    offload: str | None = None
    compile: str | None = None

    def __post_init__(self) -> None:
        """Check the fields, so that a wrong one is found where it is written."""
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"{type(self).__name__}(precision={self.precision!r}) is none of the "
                f"{len(PRECISIONS)} precisions {', '.join(PRECISIONS)}. "
                "Use bf16-mixed in place of fp16."
            )
        check_offload(self)
        if self.compile not in (None, "block"):
            raise ValueError(
                f"{type(self).__name__}(compile={self.compile!r}): this version supports only "
                "None and 'block'. Leave it out."
            )
        self._check_fields()

    def __repr__(self) -> str:
        """Show the constructor call, without the fields that are at their defaults."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    # ---- the mesh ---------------------------------------------------------------------------

    def mesh(self, world_size: int | None = None) -> Mesh:
        """Return the axis sizes on ``world_size`` ranks; default those of the process group.

        Raises:
            ValueError: The degrees do not fit the number of ranks.
            RuntimeError: There is no process group and no ``world_size``.

        Collective: none.
        """
        num_ranks = group_size(f"{self!r}.mesh()") if world_size is None else world_size
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ValueError(
                f"{self!r}.mesh(world_size={num_ranks!r}) needs an integer of at least 1 rank."
            )
        return self._mesh(num_ranks)

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different rows."""
        return self.mesh().dp_size

    @property
    def dp_rank(self) -> int:
        """Which slice of the data this rank reads, from 0 to ``dp_size - 1``."""
        return self.mesh().dp_rank(group_rank())

    # ---- training ---------------------------------------------------------------------------

    def apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        param_groups: Iterable[ParamGroup] | None = None,
        peft_config: Any = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Spread a model over the ranks, then build its optimizer: what you call, and what steps.

        Rank 0's values are used everywhere. Afterwards every rank draws random numbers from
        ``seed + dp_rank``.

        Args:
            model: A model that no other tool has distributed, its weights on the host or device; or
                one that `distft.load_model` made for an equal strategy.
            optimizer: How to build the optimizer, such as ``partial(AdamW, lr=1e-4)``. It is
                called after sharding; one built before would train tensors that are gone.
            param_groups: Groups as torch takes them, over the model's parameters or their names.
                A group with ``max_grad_norm`` is clipped to that norm of its own gradient.
            peft_config: A ``peft.LoraConfig``: adapters are attached, then the model is sharded,
                then the optimizer is built. Only adapters and ``modules_to_save`` train. A PEFT
                model is taken as it is, and its adapters are split with its layers.

        Raises:
            ValueError: The model is distributed already or on the meta device, ranks do not
                fit, the optimizer or the groups are unusable, or ranks hold different models.
            RuntimeError: There is no process group, or a package is missing.
            OutOfMemory: Memory ran out; so in every call here that holds tensors. It says what
                was predicted, what is held, and the smallest change that is predicted to fit.

        Collective: every rank.
        """
        mesh = self.mesh()
        self._check_installed()
        with explained(self, "apply", model):
            wrapped, built = self._spread(model, optimizer, param_groups, peft_config, mesh)
        seed_everything(base_seed() + self.dp_rank)
        return wrapped, built

    def _spread(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        param_groups: Iterable[ParamGroup] | None,
        peft_config: Any,
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        loaded = check_loaded(self, model, peft_config)
        if not loaded:
            check_undistributed(model)
        check_factory(optimizer)
        if self.compile is not None:
            check_compiler()
        check_same_model(model)
        self._check_quantized(model, peft_config)
        if mesh.dp_shard > 1:
            check_shapes(self, model)
        self._check_model(model)
        kept = sorted(kept_names(model)) if self.compile and self.precision != "fp32" else []
        if kept:
            raise ValueError(
                f"{self!r}: {len(kept)} parameters stay fp32, such as {kept[0]}, and a compiled "
                "block has 1 dtype. Leave compile out, or hand all weights over in one dtype."
            )
        return self._spread_checked(
            model, optimizer, param_groups, peft_config, mesh, loaded, check_same_model
        )

    def _spread_checked(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        param_groups: Iterable[ParamGroup] | None,
        peft_config: Any,
        mesh: Mesh,
        loaded: bool = False,
        check_adapted: Callable[[nn.Module], None] = lambda _: None,
    ) -> tuple[nn.Module, Optimizer]:
        """Do what `apply` does after its checks, in the one right order; a dry run has no ranks."""
        # Master weights are fp32 unless all of training is bf16; buffers keep their dtypes.
        dtype = "bfloat16" if self.precision == "bf16" else "float32"
        if not loaded:
            mark_kept(model)
            cast_parameters(model, dtype)
            before = dict(model.named_parameters())
            self._split_modules(model, mesh)
            param_groups = follow_parameters(param_groups, before, model)
        if peft_config is not None:
            model = self._attach_adapters(model, peft_config)
            check_adapted(model)
            cast_parameters(model, dtype)
        pack(model)
        groups, bounds = take_bounds(name_groups(model, param_groups))
        if self.activation_checkpointing:
            enable_checkpointing(model)
        if self.precision != "fp32":
            compute_kept_in_fp32(model)
        if self.compile is not None:
            compile_blocks(model)
        wrapped, built = self._apply(model, optimizer, groups, mesh)
        mark_applied(self, wrapped, built)
        remember_optimizer(wrapped, built)
        keep_bounds(wrapped, bounds)
        num_experts, _ = expert_numbers(getattr(unwrap(wrapped), "config", None))
        if num_experts:
            count_tokens_of_experts(wrapped, num_experts)
        return wrapped, built

    def batches(
        self,
        dataset: Any,
        *,
        micro_batch: int = 1,
        grad_accum: int = 1,
        seed: int = 0,
        collate: Collate | None = None,
        shuffle: bool = True,
    ) -> Batches:
        """Return the data of this rank: lists of micro-batches, one list for each step.

        Args:
            dataset: Rows by index with a length, the same on every rank; or an iterable of this
                rank's own rows.
            micro_batch: Rows of one forward pass.
            grad_accum: Micro-steps of one step.
            seed: Seed of the shuffle.
            collate: From a list of rows to a batch; default `training.data.pad_rows`.
            shuffle: Whether to shuffle a dataset that has a length.

        Raises:
            ValueError: A size is below 1, or the dataset is empty.
            RuntimeError: There is no process group.

        Collective: none.
        """
        return Batches(
            dataset,
            micro_batch=micro_batch,
            grad_accum=grad_accum,
            seed=seed,
            collate=collate,
            shuffle=shuffle,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )

    def train_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        micro_batches: Sequence[Batch],
        max_grad_norm: float | None = None,
        loss_fn: LossFunction | None = None,
        count_fn: CountFunction | None = None,
    ) -> StepResult:
        """Return the result of one optimizer step over the micro-batches of all data ranks.

        ``g = sum over ranks and micro-batches of grad(loss_fn) / sum of count_fn``, which is one
        process's gradient of the mean over all loss tokens, however rows fall on ranks. Gradients
        are zeroed first; an update whose norm is not finite is left out; schedulers are yours.

        Args:
            model: What `apply` returned.
            optimizer: What `apply` returned.
            micro_batches: This rank's batches; ranks may have different numbers of them.
            max_grad_norm: Bound of the whole gradient's 2-norm, or None. Groups with a bound of
                their own are clipped to it first, and this one bounds what they left, so that
                both hold; `StepResult.grad_norm` and ``group_norms`` are those before either.
            loss_fn: From model and batch to the *sum* of the loss; default next-token
                cross-entropy.
            count_fn: From a batch to the number the loss is a mean over; default its loss tokens.

        Raises:
            ValueError: No batch, no loss token, a bound that is not above 0, a ``loss_fn`` that
                returns a mean (looked for in the first step), or a model or an optimizer that
                `apply` of this strategy did not return.
            RuntimeError: There is no process group.

        Collective: every rank.
        """
        check_max_norm(max_grad_norm)
        self.mesh()
        check_applied(self, "train_step", model, optimizer)
        if not isinstance(micro_batches, Mapping):
            micro_batches = list(micro_batches)
        with explained(self, "train_step", model, micro_batches):
            if loss_fn is not None:
                check_loss_is_a_sum(model, micro_batches, loss_fn, self._after_forward)
            return run_step(self, model, optimizer, micro_batches, max_grad_norm, loss_fn, count_fn)

    def eval_step(
        self,
        model: nn.Module,
        micro_batches: Sequence[Batch],
        loss_fn: LossFunction | None = None,
        count_fn: CountFunction | None = None,
    ) -> EvalResult:
        """Return the mean loss over the micro-batches of all data ranks, without gradients.

        ``L = sum over ranks and micro-batches of loss_fn / sum of count_fn``: one process's mean
        over all loss tokens. The model is in evaluation mode meanwhile, then as it was, and its
        weights are split again.

        Args:
            model: What `apply` returned.
            micro_batches: This rank's batches; ranks may have different numbers of them.
            loss_fn: As for `train_step`.
            count_fn: As for `train_step`.

        Raises:
            ValueError: No batch, no loss token, or a model that `apply` of this strategy did not
                return.
            RuntimeError: There is no process group.

        Collective: every rank.
        """
        self.mesh()
        check_applied(self, "eval_step", model)
        with explained(self, "eval_step", model, micro_batches):
            try:
                windows = [micro_batches]
                return run_evaluation(
                    model, windows, loss_fn, count_fn, "eval_step", self.mesh().tp
                )
            finally:
                self._after_forward(model)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        *,
        micro_batch: int = 1,
        collate: Collate | None = None,
        loss_fn: LossFunction | None = None,
        count_fn: CountFunction | None = None,
    ) -> EvalResult:
        """Return the mean loss over a dataset, each row counted once, without gradients.

        No row is repeated to fill a batch or a rank: 9 rows on 2 ranks in batches of 5 are 5 and
        4 rows, and the mean over their loss tokens is that of one process.

        Args:
            model: What `apply` returned.
            dataset: As for `batches`; read in its own order.
            micro_batch: Rows of one forward pass.
            collate: As for `batches`.
            loss_fn: As for `train_step`.
            count_fn: As for `train_step`.

        Raises:
            ValueError: No row, no loss token, or a model that `apply` of this strategy did not
                return.
            RuntimeError: There is no process group.

        Collective: every rank.
        """
        self.mesh()
        check_applied(self, "evaluate", model)
        windows = self.batches(dataset, micro_batch=micro_batch, collate=collate, shuffle=False)
        size = f"{len(dataset)} rows" if hasattr(dataset, "__len__") else ""
        with explained(self, "evaluate", model, detail=size):
            try:
                return run_evaluation(model, windows, loss_fn, count_fn, "evaluate", self.mesh().tp)
            finally:
                self._after_forward(model)

    def generate(self, model: nn.Module, **inputs: Any) -> Any:
        """Return what the model's own ``generate`` returns for this rank's inputs.

        Ranks may have different prompts, numbers of them (none too, as ``input_ids`` of 0 rows)
        and lengths: where a forward pass gathers weights, a rank that is done helps the others
        until all are. Ranks of a `tp` group get the same prompts, and draw the same tokens. The
        model is in evaluation mode meanwhile, then as it was.

        Args:
            model: What `apply` returned.
            inputs: What ``generate`` of the model takes, tensors on any device.

        Raises:
            ValueError: The model cannot generate, is an encoder and a decoder whose weights are
                split, or `apply` of this strategy did not return it.
            RuntimeError: There is no process group, or ``generate`` raised on a rank.

        Collective: every rank under FSDP2, HSDP and ZeRO-3; none under DDP, ZeRO-1 and ZeRO-2.
        """
        self.mesh()
        check_applied(self, "generate", model)
        with explained(self, "generate", model, inputs):
            try:
                return run_generation(model, inputs, self.forward_gathers, self.mesh().tp)
            finally:
                self._after_forward(model)

    def expert_load(self, model: nn.Module) -> ExpertLoad:
        """Return the tokens that each expert of each layer got in training, over all data ranks.

        Since the last call, or `apply`. Printed, it shows for each layer how uneven the experts
        are, which got nothing, and how much longer the layer takes than with balanced ones.

        Args:
            model: What `apply` returned.

        Raises:
            ValueError: The model has no experts, or `apply` of this strategy did not return it.
            RuntimeError: There is no process group.

        Collective: every rank.
        """
        mesh = self.mesh()
        check_applied(self, "expert_load", model)
        return read_expert_load(model, mesh.ep, mesh.tp)

    def count_loss_tokens(
        self, batches: Sequence[Batch], count_fn: CountFunction | None = None
    ) -> int:
        """Return the number of loss tokens in the batches of all data ranks.

        Raises:
            RuntimeError: There is no process group.

        Collective: every rank.
        """
        self.mesh()
        loss_tokens, _, _ = count_over_ranks(batches, count_fn or count_next_tokens)
        return sum(loss_tokens[:: self.mesh().tp])

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's share of the loss; data ranks' gradients are summed.

        The share is this rank's summed loss over the global number of loss tokens. An engine that
        averages over ranks is compensated here.

        Collective: every rank, unless inside `no_sync` of a strategy that defers.
        """
        with at("backward"):
            self._backward(loss)
        note_share(loss)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Say that more micro-steps follow, for the forward and backward pass inside.

        What a strategy saves by it differs: DDP and ZeRO-1 reduce once a step, HSDP defers the
        all-reduce between replicas, FSDP2 and HSDP defer all with ``defer_reduce=True``; ZeRO-2
        and ZeRO-3 reduce every micro-step all the same.

        Collective: none of its own.
        """
        with self._no_sync(model):
            yield

    def clip_grad_norm_(self, model: nn.Module, max_norm: float | None) -> float:
        """Scale the gradients to a 2-norm of at most ``max_norm``; return the norm before.

        A plain number, the same on every rank. None sets no bound; parameter groups with a
        ``max_grad_norm`` of their own are clipped to it first in any case. Where the norm is
        infinite or NaN so are the gradients afterwards: leave that update out.

        Raises:
            ValueError: The bound is not above 0.

        Collective: every rank.
        """
        from distft.process_group import local_device

        check_max_norm(max_norm)
        with at("clip_grad_norm_"):
            parts = self._gradients(model)
            norm, _ = clip(parts, bounds_of(model), max_norm, local_device())
            return float(norm)

    def gather_weights(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return parameters whole, by name, on the host: the master weights where there are.

        For checks, adapters and small models: each rank ends up with all of them.

        Args:
            model: What `apply` returned.
            names: Which parameters; default every one.

        Collective: every rank.
        """
        return self._gather_weights(model, names)

    def gather_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Return every reduced gradient whole, by name, on the host; valid before the update.

        For checks and small models. Parameters without a gradient are left out.

        Collective: every rank.
        """
        return self._gather_gradients(model)

    # ---- checkpoints ------------------------------------------------------------------------

    @overload
    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: Literal[False] = False,
    ) -> Path: ...

    @overload
    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: Literal[True],
    ) -> PendingSave: ...

    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        scheduler: Any = None,
        processing_class: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        async_save: bool = False,
    ) -> Path | PendingSave:
        """Save everything a run needs to go on, and return the folder.

        The state is written to a temporary folder beside ``path``, checked, and renamed, so that
        ``path`` is either a whole checkpoint or not there.

        With ``async_save`` the call returns when the state is copied to memory of the host, as many
        bytes as this rank writes, which later saves use again; a thread writes the copy while
        training goes on. Its `PendingSave.result` waits for the checkpoint. The next save or load,
        and the end of the process, wait too; an error comes out there, on every rank.

        Args:
            path: The new folder.
            model: What `apply` returned.
            optimizer: What `apply` returned.
            step: Number of optimizer steps made.
            scheduler: A learning-rate scheduler, or anything with ``state_dict``.
            processing_class: A tokenizer or processor to save beside the weights.
            data: What `batches` returned, or anything with ``state_dict``.
            extra: Plain JSON values of your own.
            keep: Number of complete checkpoints of this run to keep in the folder above ``path``,
                this one among them; once it is there, those with the fewest steps go. A run is the
                same after a `load`; what others wrote there, or was copied or renamed, stays.
                None keeps all.
            async_save: Whether to write beside training.

        Raises:
            ValueError: ``path`` holds a complete checkpoint or other files; ``extra`` is no JSON.
            RuntimeError: Not every rank called, the file system is not shared, or writing failed.

        Collective: every rank.
        """
        from distft.checkpoint.save import save_checkpoint

        check_applied(self, "save", model, optimizer)
        with explained(self, "save", model, detail=f"step {step}"):
            return save_checkpoint(
                self,
                path,
                model,
                optimizer,
                step=step,
                scheduler=scheduler,
                processing_class=processing_class,
                data=data,
                extra=extra,
                keep=keep,
                async_save=async_save,
            )

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        data: Any = None,
    ) -> LoadedState:
        """Load a checkpoint into a model and an optimizer that `apply` returned.

        Make the scheduler before the load: its state is set here too.

        Raises:
            ValueError: ``path`` is no checkpoint or half one, or of another model or strategy.
            RuntimeError: Not every rank called.

        Collective: every rank.
        """
        from distft.checkpoint.load import load_checkpoint

        check_applied(self, "load", model, optimizer)
        with explained(self, "load", model):
            return load_checkpoint(self, path, model, optimizer, scheduler=scheduler, data=data)

    def consolidate(self, path: str | Path, out: str | Path, **options: Any) -> Path:
        """Turn a checkpoint into one that ``from_pretrained`` reads; see `distft.consolidate`.

        Rank 0 works and the others wait.

        Raises:
            ValueError: As `distft.consolidate`.
            RuntimeError: Not every rank called.

        Collective: every rank.
        """
        from distft.checkpoint.consolidation import consolidate
        from distft.checkpoint.pending import finish_last

        rendezvous("Strategy.consolidate")
        finish_last()
        with together():
            if group_rank() == 0:
                consolidate(path, out, **options)
        return Path(out)

    def reshard(
        self, path: str | Path, out: str | Path, world_size: int | None = None, **options: Any
    ) -> Path:
        """Turn a checkpoint of any layout into one of this strategy's; see `distft.reshard`.

        Rank 0 works and the others wait.

        Args:
            path: A checkpoint, or a run's root.
            out: New folder.
            world_size: Number of ranks that will go on; default those of this group.
            options: As `distft.reshard`.

        Raises:
            ValueError: As `distft.reshard`.
            RuntimeError: Not every rank called.

        Collective: every rank.
        """
        from distft.checkpoint.pending import finish_last
        from distft.checkpoint.resharding import Source, reshard_checkpoint

        rendezvous("Strategy.reshard")
        finish_last()
        num_ranks = self.mesh(world_size).num_ranks
        with together():
            if group_rank() == 0:
                reshard_checkpoint(Source.read(path), out, self, num_ranks, **options)
        return Path(out)

    @contextmanager
    def _explained(self, call: str, model: nn.Module | None = None) -> Iterator[None]:
        with explained(self, call, model):
            yield

    # ---- costs ------------------------------------------------------------------------------

    def _check_costs(self, spec: ModelSpec, mesh: Mesh) -> None:
        """Raise for what `apply` refuses, which has no costs."""
        quantized = sum(tensor.scales is not None for tensor in spec.tensors)
        if quantized and mesh.tp * mesh.ep > 1:
            raise ValueError(
                f"{self!r} splits layers over tp={mesh.tp} and ep={mesh.ep}, and {quantized} "
                "tensors are packed in 4 bits, which it does not train. Use FSDP2, HSDP, ZeRO or "
                "DDP for tuning='qlora'; distft.plan estimates quantized weights."
            )

    def memory(self, spec: ModelSpec, load: Workload, *, world_size: int) -> MemoryReport:
        """Return the bytes that each rank holds in the phases of a step.

        Model state to the byte, and buffers, activations and logits as estimates. Of a model
        whose widths are not known (`ModelSpec.shape`) activations are left out.

        Raises:
            ValueError: The degrees do not fit ``world_size``, or the workload is not covered.

        Collective: none.
        """
        mesh = self.mesh(world_size)
        report = self.state_memory(spec, load, world_size=world_size)
        return with_working_memory(report, self, spec, load, mesh)

    def state_memory(self, spec: ModelSpec, load: Workload, *, world_size: int) -> MemoryReport:
        """Return the bytes of model state and buffers alone, which no batch changes.

        Raises:
            ValueError: As `memory`.

        Collective: none.
        """
        mesh = self.mesh(world_size)
        trained = with_adapters(spec, load)
        self._check_costs(trained, mesh)
        report = self._memory(trained.stored(self.precision), load, mesh)
        return with_scales(report, trained)

    def traffic(
        self,
        spec: ModelSpec,
        load: Workload,
        *,
        world_size: int,
        cluster: Cluster | None = None,
    ) -> TrafficReport:
        """Return the bytes that one rank puts on the wire, by collective.

        With a `cluster` also the class of the slowest link of each, and its seconds there.

        Assumes one parameter group and one bound for the whole gradient. Where groups have bounds
        of their own, each group beyond the first adds a norm: one more all_reduce of 4 bytes a
        step over each axis that gradients are split on, none under DDP.

        Raises:
            ValueError: The degrees do not fit ``world_size``, or the workload is not covered.

        Collective: none.
        """
        mesh = self.mesh(world_size)
        trained = with_adapters(spec, load)
        self._check_costs(trained, mesh)
        report = self._traffic(trained.stored(self.precision), load, mesh)
        return report if cluster is None else on_links(report, mesh, cluster)
