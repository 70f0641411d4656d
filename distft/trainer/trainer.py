"""TRL's `SFTTrainer` with a strategy underneath: its arguments, callbacks, loggers, log keys."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from trl.trainer.sft_config import SFTConfig

from distft.checkpoint.pretrained import loaded_by
from distft.checkpoint.randomness import set_random_state
from distft.diagnose.training import watched
from distft.expert_lora import patterns_of_parameters
from distft.process_group import group_rank, init, together
from distft.strategies.base import Strategy
from distft.trainer._hf import StrategyAccelerator, leave_out_update
from distft.trainer.arguments import (
    check_arguments,
    check_kind,
    check_objects,
    check_rows,
    strategy_of,
)
from distft.trainer.checkpoints import TrainerCheckpoints
from distft.trainer.data import (
    LastRound,
    SeededOrder,
    filled_batches,
    is_in_rows,
    without_filling_rows,
)
from distft.trainer.log import RunMetrics
from distft.trainer.metrics import WeighedMeans
from distft.trainer.preemption import SaveBeforeTheEnd
from distft.trainer.progress import Dealing, Progress
from distft.trainer.report import write_report
from distft.trainer.resume import EpochsOfARest, checkpoint_to_resume
from distft.trainer.router import real_router_losses
from distft.trainer.smoke import SmokeTest
from distft.trainer.strategy import chosen_strategy
from distft.training.experts import uncounted
from distft.training.loss import router_losses
from distft.whereabouts import at

logger = logging.getLogger("distft")


@final
class Trainer(TrainerCheckpoints):
    """Supervised fine-tuning under a strategy.

    Everything that `SFTTrainer` takes, and one argument more. Wrapping, accumulation, the mean over
    loss tokens, clipping, saving and resuming are the strategy's; data, chat templates, packing,
    callbacks, loggers and log keys are TRL's. A checkpoint is a folder that `distft.consolidate`,
    `reshard` and `verify` take, and any strategy resumes it. ``eval_loss`` is the mean over the
    loss tokens of all rows, each counted once; TRL's is a mean of batches' means.

    Args:
        model: As `SFTTrainer`, and not distributed yet.
        args: As `SFTTrainer`.
        strategy: A strategy or its name; by name it computes as ``args.bf16`` says. "auto" is what
            `accelerate launch` says, or the planner's best for this machine.
        optimizers: Refused: pass ``optimizer_cls_and_kwargs``.
        jsonl: File in the output folder, to which rank 0 adds the log line by line; None for none.
        smoke_test: Whether the first step of a run that saves is followed by a save and a load
            that are compared and deleted, so that a disk or a model that cannot go on shows at
            once. It costs one save and one load.
        invariants_every: As ``every`` of `distft.hold_invariants`; None holds none.
        watch_hangs: Seconds as of `distft.watch_hangs`; True for its default, False watches none.
        kwargs: As `SFTTrainer`: train_dataset, eval_dataset, processing_class, peft_config, ...

    Raises:
        ValueError: Arguments contradict the strategy, or an optimizer was built beforehand.

    Collective: every rank.
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        *,
        strategy: str | Strategy = "ddp",
        optimizers: tuple[Any, Any] = (None, None),
        jsonl: str | Path | None = "metrics.jsonl",
        smoke_test: bool = True,
        invariants_every: int | None = 50,
        watch_hangs: bool | float = True,
        **kwargs: Any,
    ) -> None:
        args = SFTConfig() if args is None else args
        check_kind(args, kwargs)
        check_arguments(args)
        check_objects(optimizers, model, kwargs.get("peft_config"))
        init(seed=args.seed)
        chosen = chosen_strategy(strategy, args, model, kwargs.get("peft_config"))
        self.strategy = strategy_of(chosen, args)
        if isinstance(model, nn.Module) and loaded_by(model) is None:
            # Before TRL and transformers say other things of it.
            self.strategy._check_quantized(model, kwargs.get("peft_config"))
        args.bf16 = self.strategy.precision != "fp32"
        self._watch = (invariants_every, watch_hangs)
        self._micro_steps = 1
        self._randomness_after_rows: dict[str, Any] | None = None
        self._progress = Progress(_data_seed(args), args.train_sampling_strategy)
        self._eval_sums = torch.zeros(2, dtype=torch.float64)
        self._eval_means = WeighedMeans()
        # Ours takes the place of transformers' callback, which would listen from here on.
        saves_on_signal, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
        with patterns_of_parameters(kwargs.get("peft_config")):
            super().__init__(model, args, **kwargs)
        args.enable_jit_checkpoint = saves_on_signal
        if saves_on_signal:
            self.add_callback(SaveBeforeTheEnd())
        check_objects((None, None), self.model, None)
        check_rows(self.train_dataset, kwargs.get("train_dataset"))
        self.callback_handler.callbacks.insert(0, EpochsOfARest(self._progress))
        self.run_metrics = RunMetrics(self, jsonl)
        self._spread()
        self.add_callback(self.run_metrics)
        if smoke_test and args.save_strategy != "no":
            self.add_callback(SmokeTest(self))

    # ---- the strategy underneath --------------------------------------------------------------

    def _spread(self) -> None:
        """Shard the model and build its optimizer, before anything calls it."""
        optimizer_class, settings = self.optimizer_cls_and_kwargs or (
            self.get_optimizer_cls_and_kwargs(self.args, self.model)
        )
        decayed = set(self.get_decay_parameter_names(self.model))
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [n for n in names if n in decayed], "weight_decay": self.args.weight_decay},
            {"params": [n for n in names if n not in decayed], "weight_decay": 0.0},
        ]
        self.model_wrapped, self.optimizer = self.strategy.apply(
            self.model,
            partial(optimizer_class, **settings),
            [group for group in groups if group["params"]],
        )

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Do nothing: a rank takes its part to its device, and may not hold the whole there."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        # The strategy casts.
        return {**built, "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        """Make Accelerate's object and hand its distributed part to the strategy."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = StrategyAccelerator
        self.accelerator.strategy = self.strategy
        self.accelerator.data_seed = _data_seed(self.args)
        self.accelerator.drops_last = self.args.dataloader_drop_last
        # It was bound before the class changed.
        bound: Any = self.gather_function  # type: ignore[has-type]
        gather = self.accelerator.gather_for_metrics
        self.gather_function = (
            partial(gather, **bound.keywords) if isinstance(bound, partial) else gather
        )

    def get_tp_size(self) -> int:
        """Return how many ranks read the same rows."""
        return self.strategy.mesh().tp

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, device)
        # transformers divides by the copies of tp, which the gathering has left out already.
        copies = self.get_tp_size() if self.args.world_size > 1 else 1
        return found if found is None else found * copies

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer that was built with the sharded model."""
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return self.model_wrapped

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        if self._created_lr_scheduler:  # type: ignore[has-type]
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(max_steps, optimizer=self.optimizer)
        # The scheduler's state is loaded with the optimizer's, so it must be there before.
        self._load_optimizer_and_scheduler(resume)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model_wrapped, train_dataloader

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self.strategy.clip_grad_norm_(self.model_wrapped, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        if grad_norm is None:
            grad_norm = self.strategy.clip_grad_norm_(self.model_wrapped, None)
        if not math.isfinite(grad_norm):
            leave_out_update(self.optimizer)
            logger.warning(
                "Step %d: the norm is %s, so its update is left out.",
                self.state.global_step + 1,
                grad_norm,
            )
        return grad_norm

    @property
    def current_gradient_accumulation_steps(self) -> float:
        """Micro-batches of a step that hold rows, over all data ranks and per rank.

        A router's loss, and any loss that is a mean of its batch, is divided by it.
        """
        if not self._ends_epoch:
            return self._micro_steps
        last, ranks = self._last_round, self.strategy.dp_size
        return self._micro_steps - 1 + last.num_ranks / ranks

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, number: int) -> None:
        self._micro_steps = number

    @property
    def _ends_epoch(self) -> bool:
        """Whether the step at hand has the last round of the rows."""
        return self.model.training and bool(self.accelerator.gradient_state.end_of_dataloader)

    @property
    def _last_round(self) -> LastRound:
        batches = filled_batches(self.accelerator.gradient_state.active_dataloader)
        number = 0
        if batches is not None and not batches.drop_last:
            number = len(batches.sampler) - batches.first_row
        size = self._train_batch_size if self.model.training else self.args.eval_batch_size
        return LastRound(number, size, self.strategy.dp_size)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return TRL's loss, without what rows bring that only fill the last round."""
        self.run_metrics.saw(inputs)
        training, state = self.model.training, self.accelerator.gradient_state
        last = self._last_round if state.end_of_dataloader else None
        if training and not state.sync_gradients:
            last = None
        if last is not None and not return_outputs:
            inputs = without_filling_rows(inputs, last, self.strategy.dp_rank)
        empty = last is not None and self.strategy.dp_rank >= last.num_ranks
        with router_losses(self.model) as routers, uncounted(self.model, skip=empty):
            found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if routers:
            values = self._metrics["train" if training else "eval"]["aux_loss"]
            values[-1:] = real_router_losses(values[-1], routers[0], last, self.strategy)
        if last is None or not training:
            return found
        # Each of them was one token.
        self._total_train_tokens -= last.num_filling_tokens(is_in_rows(inputs))
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        loss, *outputs = found if return_outputs else (found,)
        if empty:
            # No loss tokens, but a router's loss of its own.
            loss = loss * 0.0
        return (loss, *outputs) if return_outputs else loss

    # ---- the rows of a run -------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `SFTTrainer` does.

        Args:
            resume_from_checkpoint: A checkpoint of any strategy and number of ranks, or True for
                the latest that is complete in ``output_dir``. None begins anew, and goes on where
                torchrun restarts the ranks of a job that has saved.
            args: As `SFTTrainer`.
            kwargs: As `SFTTrainer`.

        Raises:
            ValueError: There is none to resume, or later ones are in the way of this run's.

        Collective: every rank.
        """
        resumed = checkpoint_to_resume(resume_from_checkpoint, self.args)
        self._progress.begin(0, None)
        self._saved_step = -1
        watch = watched(self.strategy, self.model_wrapped, self.optimizer, *self._watch)
        with watch, self.run_metrics.watching():
            return super().train(resumed, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        found = super()._get_train_sampler(train_dataset)
        if self.args.train_sampling_strategy == "group_by_length" and found is not None:
            # The order of an epoch depends on it, and it on batches and accumulation.
            found.batch_size = self._progress.group(found.batch_size)
            return SeededOrder(found, _data_seed(self.args))
        return found

    def set_initial_training_values(self, args: SFTConfig, dataloader: Any) -> Any:
        """Return transformers' values; a run that goes on in another way has other last steps."""
        *found, steps, max_steps = super().set_initial_training_values(args, dataloader)
        batches = filled_batches(dataloader)
        rows, ranks = self.get_total_train_batch_size(args), self.strategy.dp_size
        dealing = None
        if batches is not None:
            size, rounds = self._train_batch_size, args.gradient_accumulation_steps
            dealing = Dealing(len(batches.sampler), size, ranks, rounds, batches.drop_last)
        ahead = self._progress.deal(dealing, rows, ranks, skip=not args.ignore_data_skip)
        if ahead and args.max_steps > 0:
            found[0] = -(-(max_steps - ahead) // found[1])
        elif ahead:
            max_steps += ahead
        return (*found, steps, max_steps)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        found: tuple[int, int] = super()._init_training_state(*args)
        # Batches are skipped of streams alone; other rows begin where the last run ended.
        return found if self._progress.dealing is None else (self._progress.start.epoch, 0)

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            # A job may be restarted after its last step; transformers would make one more.
            self.control.should_training_stop = True
            return
        batches, dealing = filled_batches(train_dataloader), self._progress.dealing
        if batches is not None and dealing is not None:
            row = self._progress.enter(epoch, self.state.global_step)
            batches.first_row = row
            kwargs["steps_in_epoch"] = dealing.rounds_from(row)
            kwargs["num_update_steps_per_epoch"] = dealing.steps_from(row)
            # In the middle of an epoch its rows had been asked for when the state was saved.
            self._randomness_after_rows = self._loaded_randomness if row else None
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def get_batch_samples(self, *args: Any) -> Any:
        """Return the batches of a step, and their loss tokens over all ranks."""
        found = super().get_batch_samples(*args)
        if self._randomness_after_rows is not None:
            set_random_state(self._randomness_after_rows)
            self._randomness_after_rows = None
        return found

    # ---- what a user sees -----------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `SFTTrainer` does, with numbers of `RunMetrics` beside TRL's."""
        super().log(self.run_metrics.beside(logs), *args, **kwargs)

    def report(self, path: str | Path) -> Path:
        """Write one HTML file with the curves of all that was logged, and return it.

        Of a run that was resumed, from its first step on. It needs no other file and no network.

        Collective: every rank.
        """
        with together():
            if group_rank() == 0:
                write_report(Path(path), self.state.log_history, self.run_metrics.facts)
        return Path(path)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-step, this rank noted to be there."""
        with at("training_step", f"step {self.state.global_step + 1}"):
            return super().training_step(*args, **kwargs)

    # ---- evaluation -----------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Return what transformers returns, the loss a mean over the loss tokens of all rows."""
        self._eval_sums.zero_()
        self._eval_means = WeighedMeans()
        try:
            with at(metric_key_prefix, f"step {self.state.global_step}"):
                output = super().evaluation_loop(
                    *args, metric_key_prefix=metric_key_prefix, **kwargs
                )
        finally:
            self.strategy._after_forward(self.model_wrapped)
        sums = self._eval_sums.to(self.args.device)
        # One of the ranks that read the same rows brings them.
        sums *= float(group_rank() % self.get_tp_size() == 0)
        dist.all_reduce(sums)
        total, count = sums.tolist()
        self._eval_means.put(self._metrics["eval"])
        key = f"{metric_key_prefix}_loss"
        if count and key in output.metrics:
            output.metrics[key] = total / count
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return loss, logits and labels of a batch, and add its loss to that of all rows."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        loss, logits, found = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and labels is not None:
            count = float((labels[..., 1:] != -100).sum())
            self._eval_sums += torch.tensor([float(loss) * count if count else 0.0, count])
            self._eval_means.add(self._metrics["eval"], self._over_ranks(count))
        return loss, logits, found

    def _over_ranks(self, count: float) -> float:
        """Return the sum of a number over data ranks."""
        mine = torch.tensor(count, device=self.args.device)
        return float(self.accelerator.gather(mine.reshape(1)).sum())


def _data_seed(args: SFTConfig) -> int:
    return args.seed if args.data_seed is None else args.data_seed
