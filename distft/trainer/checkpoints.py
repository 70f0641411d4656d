"""Checkpoints of the Trainer: the strategy's, with the state of the training loop in them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from trl.trainer.sft_trainer import SFTTrainer

from distft.checkpoint.folder import read_manifest
from distft.checkpoint.randomness import random_state, set_random_state
from distft.process_group import group_rank, together
from distft.trainer.model import save_model_alone
from distft.trainer.resume import follow_schedule, launched

# Its types are looser than a strict checker takes.
_Base: Any = SFTTrainer
# Where a checkpoint keeps what the training loop needs beside model and optimizer.
_STATE = "trainer_state"


class TrainerCheckpoints(_Base):  # type: ignore[misc]
    """What `distft.Trainer` saves and loads in place of transformers' `Trainer`."""

    # Whether a save of transformers' `Trainer` asks for the model, and the step of the last one.
    _saving_checkpoint: bool = False
    _saved_step: int = -1
    _loaded_randomness: dict[str, Any] | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._saved_step == self.state.global_step:
            # The end of an epoch, of a run or of a job may ask for one that is there.
            return
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_checkpoint = False
        self._saved_step = self.state.global_step

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapter, as ``from_pretrained`` reads it.

        Collective: every rank.
        """
        out = Path(output_dir or self.args.output_dir)
        if self._saving_checkpoint:
            self._save_run(out)
            return
        save_model_alone(self.strategy, self.model_wrapped, self.optimizer, out)
        with together():
            if group_rank() == 0 and self.processing_class is not None:
                self.processing_class.save_pretrained(out)

    def _save_run(self, folder: Path) -> None:
        """Write a checkpoint; the trainer's state goes with it, so that none is without."""
        self.strategy.save(
            folder,
            self.model_wrapped,
            self.optimizer,
            step=self.state.global_step,
            scheduler=self.lr_scheduler,
            processing_class=self.processing_class,
            extra={
                # As text: a loss may be no number of JSON.
                _STATE: json.dumps(dataclasses.asdict(self.state)),
                "rows_per_step": self.get_total_train_batch_size(self.args),
                "num_tokens": self._total_train_tokens,
                **self._progress.to_json(self.state.global_step),
                **launched(),
            },
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: the checkpoint has both."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the checkpoint has each rank's."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that a run can go on from here; its state is loaded once there is a scheduler."""
        folder = Path(resume_from_checkpoint)
        manifest = read_manifest(folder)
        if _STATE not in manifest.extra:
            raise ValueError(
                f"{folder} was saved after {manifest.step} steps by something else than "
                "distft.Trainer, which needs the trainer's state. Load it with strategy.load in a "
                "loop of your own."
            )
        self.run_metrics.resumes(manifest.extra)
        self._progress.begin(manifest.step, manifest.extra, manifest.dp_size)
        # TRL's own count begins at 0 again.
        self._total_train_tokens = manifest.extra["num_tokens"]
        with together():
            state = folder / TRAINER_STATE_NAME
            if group_rank() == 0 and not state.is_file():
                # The process ended after the checkpoint was whole and before this file was there.
                state.write_text(manifest.extra[_STATE])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.strategy.load(
            checkpoint, self.model_wrapped, self.optimizer, scheduler=self.lr_scheduler
        )
        follow_schedule(self.lr_scheduler)
        self._loaded_randomness = random_state()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # It is asked for again after the rows of before were skipped.
        if checkpoint is not None and self._loaded_randomness is not None:
            set_random_state(self._loaded_randomness)

    def _load_best_model(self) -> None:
        self.strategy.load(self.state.best_model_checkpoint, self.model_wrapped, self.optimizer)
