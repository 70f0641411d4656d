"""The first step's smoke test: a save and a load before hours are spent on a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import xxhash
from transformers import TrainerCallback

from distft.measure import trained_tensors
from distft.process_group import group_rank, together

if TYPE_CHECKING:
    from torch import Tensor

# Inside the output folder; the checkpoint is one below, so that nobody takes it for one of the run.
_FOLDER = ".distft-smoke-test"


@final
class SmokeTest(TrainerCallback):
    """After the first step: save, forget, load, compare, delete.

    What trains on this rank (weights, masters, moments) is hashed, saved as every checkpoint is,
    overwritten with NaN, loaded as a resumed run loads it, and hashed again. The run goes on with
    the same bits.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Test once.

        Raises:
            RuntimeError: Saving or loading failed, or what came back differs; on every rank alike.
        """
        if self._done:
            return
        self._done = True
        trainer, folder = self._trainer, Path(args.output_dir) / _FOLDER
        _remove(folder)
        with together():
            folder.mkdir(parents=True, exist_ok=True)
        tensors = _tensors(trainer)
        before = {name: _digest(tensor) for name, tensor in tensors.items()}
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        trainer._save_run(folder / "checkpoint")
        _forget(tensors)
        del tensors
        trainer.strategy.load(
            folder / "checkpoint",
            trainer.model_wrapped,
            trainer.optimizer,
            scheduler=trainer.lr_scheduler,
        )
        after = {name: _digest(tensor) for name, tensor in _tensors(trainer).items()}
        with together():
            _compare(before, after)
            _compare_rates(rates, [group["lr"] for group in trainer.optimizer.param_groups])
        _remove(folder)


def _tensors(trainer: Any) -> dict[str, Tensor]:
    return trained_tensors(trainer.model_wrapped, trainer.optimizer)


def _digest(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), xxhash.xxh3_128_hexdigest(flat.numpy().data)


@torch.no_grad()
def _forget(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    wrong = [name for name, digest in before.items() if after.get(name) != digest]
    if wrong:
        raise RuntimeError(
            f"The smoke test after the first step saved and loaded {len(before)} tensors, and "
            f"{len(wrong)} came back different, such as {wrong[0]}: this run could not be resumed. "
            "Look at the disk, and report it with the strategy; smoke_test=False leaves it out."
        )


def _compare_rates(before: list[float], after: list[float]) -> None:
    if before != after:
        raise RuntimeError(
            f"The smoke test after the first step saved the learning rates {before} and loaded "
            f"{after}: this run could not be resumed. Report it with the scheduler; "
            "smoke_test=False leaves it out."
        )


def _remove(folder: Path) -> None:
    with together():
        if group_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
