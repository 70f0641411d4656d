"""What each rank runs: TRL's trainer and ours in one process, taking turns step by step."""

from __future__ import annotations

import tempfile
import threading
import time
from typing import Any

import paired
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import distft


class Turns(TrainerCallback):
    """A trainer in a thread of its own that makes one step when it is told to.

    A turn is all that lies between the beginnings of two steps: the step, its log, and the rows of
    the next one.
    """

    def __init__(self) -> None:
        self._go, self._done = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a turn, and wait for the next one."""
        self._done.set()
        self._go.wait()
        self._go.clear()

    def start(self, trainer: Any) -> None:
        """Start the training, up to its first step."""

        def train() -> None:
            try:
                trainer.train()
            except BaseException as error:
                self.error = error
            self._done.set()

        threading.Thread(target=train, daemon=True).start()
        self._wait()

    def take(self) -> float:
        """Return the seconds of one turn, from when all ranks are ready."""
        dist.barrier()
        start = time.perf_counter()
        self._go.set()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        self._done.wait()
        self._done.clear()
        if self.error is not None:
            raise self.error


def run_pairs(num_pairs: int, workload: paired.Workload) -> paired.Pairs:
    """Return the times of ``num_pairs`` pairs in ABBA order, and the losses before them.

    Raises:
        AssertionError: The losses of the warm-up differ, so that the times would say nothing.

    Collective: every rank.
    """
    distft.init(seed=0)
    steps = paired.WARM_UP + num_pairs + 1
    sides = []
    for make in (distft.Trainer, SFTTrainer):
        turns = Turns()
        trainer = make(
            workload.model(),
            _arguments(steps, workload),
            train_dataset=_rows(steps, workload),
            processing_class=_tokenizer(),
            callbacks=[turns],
            **({"strategy": "ddp"} if make is distft.Trainer else {}),
        )
        turns.start(trainer)
        sides.append((trainer, turns))
    for _ in range(paired.WARM_UP):
        for _, turns in sides:
            turns.take()
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        for trainer, _ in sides
    ]
    result = paired.Pairs([], [], list(zip(*losses, strict=True)))
    assert result.loss_difference <= paired.LOSS_TOLERANCE, (
        f"Losses differ by {result.loss_difference:.1e} relative: {result.warm_up_losses}"
    )
    (_, ours), (_, theirs) = sides
    for pair in range(num_pairs):
        order = [(ours, result.ours), (theirs, result.by_hand)]
        for turns, seconds in order if pair % 2 == 0 else reversed(order):
            seconds.append(turns.take())
    return result


def _arguments(steps: int, workload: paired.Workload) -> SFTConfig:
    return SFTConfig(
        tempfile.mkdtemp(prefix="distft-benchmark-"),
        per_device_train_batch_size=workload.rows,
        gradient_accumulation_steps=paired.MICRO_STEPS,
        max_steps=steps,
        max_length=None,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        # transformers' default looks for them in each step, which nothing here needs.
        ddp_find_unused_parameters=False,
        seed=0,
        data_seed=0,
    )


def _rows(steps: int, workload: paired.Workload) -> Dataset:
    """Return rows enough for one epoch, so that no side meets its end."""
    number = (steps + 2) * workload.rows * paired.MICRO_STEPS * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, paired.VOCABULARY, (number, workload.tokens), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(paired.VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="2")), pad_token="0", eos_token="1"
    )
