"""`Strategy`: what every way to spread a model over ranks promises.

Its parts: value.py has the fields, applying.py spreads a model, saving.py writes and reads
checkpoints, costing.py states memory and traffic, and here it trains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.strategies.applying import Applying
from distft.strategies.guards import check_applied
from distft.strategies.out_of_memory import explained
from distft.strategies.saving import Saving
from distft.training.clip import bounds_of, check_max_norm, clip
from distft.training.data import Batches, Collate
from distft.training.evaluation import EvalResult, run_evaluation
from distft.training.experts import ExpertLoad, read_expert_load
from distft.training.generation import run_generation
from distft.training.loss import Batch, count_next_tokens
from distft.training.shares import note_share
from distft.training.step import (
    CountFunction,
    LossFunction,
    StepResult,
    count_over_ranks,
    run_step,
)
from distft.training.sums import check_loss_is_a_sum
from distft.whereabouts import at

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(Applying, Saving):
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
