"""The hooks of TRL's, transformers' and Accelerate's trainers that put a strategy underneath.

Everything of theirs that is private or not meant to be replaced is used in this file and in
`distft.trainer` alone; `tests/unit/test_trainer_arguments.py` fails first when upstream moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

from distft.trainer.data import filled_batches, in_whole_rounds

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from distft.strategies.base import Strategy

# Methods of transformers' Trainer that `distft.Trainer` replaces; each was there in 5.24.
REPLACED = (
    "_build_accelerator_args",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_get_train_sampler",
    "_init_training_state",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_move_model_to_device",
    "_prepare_for_training",
    "_run_epoch",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_wrap_model",
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "evaluation_loop",
    "get_batch_samples",
    "get_tp_size",
    "prediction_step",
    "save_model",
    "set_initial_training_values",
    "train",
)


def leave_out_update(optimizer: Any) -> None:
    """Make the next call of ``optimizer.step`` drop the gradients; the training loop has no way.

    Collective: none.
    """
    step = optimizer.step

    def drop(*_: Any, **__: Any) -> None:
        optimizer.step = step
        optimizer.zero_grad()

    optimizer.step = drop


class StrategyAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate's object with its distributed part handed to a strategy.

    It wraps no model and no optimizer; it deals batches to data ranks, gathers metrics, and passes
    on what the training loop asks for.
    """

    strategy: Strategy
    data_seed: int
    drops_last: bool

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Add gradients of a loss that was made for an average over data ranks."""
        # TRL multiplies by the number of data ranks what is a mean over the tokens of all of them;
        # what is a mean over this rank's own is averaged over ranks by the same division.
        self.strategy.backward(loss / self.strategy.dp_size)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Say that more micro-steps follow."""
        with self.strategy.no_sync(model):
            yield

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model: the strategy has wrapped it, autocast included."""
        return model

    def prepare_data_loader(self, data_loader: DataLoader[Any], *_: Any, **__: Any) -> Any:
        """Return the loader of this data rank's batches; ranks of a tp group read the same."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        prepared = prepare_data_loader(
            in_whole_rounds(data_loader, self.strategy.dp_size, self.drops_last),
            self.device,
            num_processes=self.strategy.dp_size,
            process_index=self.strategy.dp_rank,
            put_on_device=self.device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            # By default Accelerate takes the seed that torch has here, another one on each rank.
            data_seed=self.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        if (batches := filled_batches(prepared)) is not None:
            # Accelerate reads it off the loader, which leaves it to its batch sampler.
            prepared._drop_last = batches.drop_last
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all data ranks, one of each tp group."""
        from accelerate.utils import recursively_apply

        gathered = super().gather(tensor)
        copies = self.strategy.mesh().tp
        if copies == 1:
            return gathered
        return recursively_apply(lambda whole: self._one_of_each(whole, copies), gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what all data ranks have, without the rows that filled the last round.

        A number of each rank is no row: Accelerate would cut the last ranks off there.
        """
        if hasattr(input_data, "dim") and not input_data.dim():
            return self.gather(input_data)
        return super().gather_for_metrics(input_data, use_gather_object)

    def _one_of_each(self, whole: Tensor, copies: int) -> Tensor:
        if not whole.dim():
            return whole
        by_rank = whole.reshape(self.num_processes, -1, *whole.shape[1:])
        return by_rank[::copies].reshape(-1, *whole.shape[1:])
