"""What a run costs, in the log of the Trainer: speed, memory, waiting, experts."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from distft.measure import CollectiveRecords, count_collectives, model_state_bytes
from distft.measure.waiting import Waiting, measure_waiting
from distft.peft import base_model
from distft.process_group import from_rank0, group_rank
from distft.topology.gpus import gpu_by_name
from distft.trainer.costs import flops_per_token, predicted, workload_of
from distft.training.experts import ExpertLoad, counts_tokens
from distft.training.step import control_device

logger = logging.getLogger("distft")

PREFIX = "distft/"
# Steps between two gatherings of memory, and between two measurements of waiting.
_MEMORY_EVERY, _WAITING_EVERY = 10, 100
# The step whose collectives are counted (state and gradients are there), and the one whose waiting
# is measured first. Both are slower, and left out of the speed.
_COUNTED, _WATCHED = 2, 3


@final
class RunMetrics(TrainerCallback):
    """Adds numbers of its own to the log, under keys that begin with ``distft/``.

    At every log: tokens/s in all and per rank, the share of the GPU's peak arithmetic (MFU) where
    its data sheet is known, and of a mixture of experts the worst layer's imbalance and slowdown
    and the number of experts without a token since the last log. Every 10 steps the peak memory of
    the rank that needs most. In the second step bytes of model state and bytes sent, beside what
    the formulas say. In the third step, and every 100, the share of the step that ranks wait for
    collectives. Rank 0 writes all of the log as lines of JSON too, counts of every expert and
    memory of every rank among them.

    Args:
        trainer: The Trainer, before its model is spread.
        jsonl: File of the lines, relative to the output folder; None for none.
    """

    def __init__(self, trainer: Any, jsonl: str | Path | None) -> None:
        self._trainer = trainer
        self._file = None if jsonl is None else Path(trainer.args.output_dir) / jsonl
        self._flops_per_token = flops_per_token(trainer.model)
        self._pending: dict[str, float] = {}
        self._clock = _Clock()
        self._open = ExitStack()
        self._step = 0
        self._rows_before: int | None = None
        self._seq_len = 1
        self._sent: CollectiveRecords | None = None
        self._waiting: Waiting | None = None
        self._state_bytes = 0
        self.facts: dict[str, str] = {}

    # ---- what the Trainer calls -----------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End what is being measured when a run ends, also by an exception."""
        self._step = 0
        try:
            with self._open:
                yield
        finally:
            self._open = ExitStack()

    def resumes(self, extra: Mapping[str, Any]) -> None:
        """Remember what a checkpoint says of the batch."""
        self._rows_before = extra.get("rows_per_step")

    def saw(self, inputs: Mapping[str, Any]) -> None:
        """Remember how long the rows of a batch are."""
        if self._step == _COUNTED and "input_ids" in inputs:
            self._seq_len = max(1, inputs["input_ids"].numel() // len(inputs["input_ids"]))

    def beside(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a log with this callback's numbers, if it is one of training steps."""
        if "loss" not in logs:
            return dict(logs)
        taken, self._pending = self._pending, {}
        return {**logs, **{PREFIX + name: _rounded(value) for name, value in taken.items()}}

    # ---- events ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say what a step is made of, and whether that is another batch than before."""
        strategy, ranks = self._trainer.strategy, dist.get_world_size()
        micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        rows = micro * strategy.dp_size * steps
        batch = (
            f"{rows} rows a step: {micro} a micro-batch x {strategy.dp_size} data ranks x {steps} "
            "micro-steps"
        )
        config = self._trainer.model.config
        self.facts = {
            "model": type(base_model(self._trainer.model)).__name__,
            "strategy": f"{strategy!r} on {ranks} ranks",
            "batch": batch,
        }
        if counts_tokens(self._trainer.model_wrapped):
            self.facts["experts"] = str(getattr(config, "_experts_implementation", "as written"))
        if self._rows_before not in (None, rows):
            self.facts["batch changed"] = (
                f"the checkpoint was trained with {self._rows_before} rows a step; learning rate "
                "and number of steps were chosen for that"
            )
        self._write({"event": "start", **self.facts})
        if group_rank() == 0:
            for name, fact in self.facts.items():
                print(f"distft: {name}: {fact}", flush=True)
        self._clock.start(self._trainer._total_train_tokens)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to measure, in the steps that are measured."""
        self._step += 1
        # A compiled block would be compiled again under a mode that listens.
        if self._step == _COUNTED and self._trainer.strategy.compile is None:
            self._sent = self._open.enter_context(count_collectives())
        if self._step == _WATCHED or self._step % _WAITING_EVERY == 0:
            self._waiting = self._open.enter_context(measure_waiting())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count model state while gradients are there."""
        if self._step == _COUNTED:
            trainer = self._trainer
            self._state_bytes = model_state_bytes(trainer.model_wrapped, trainer.optimizer).total

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End measurements, and gather what is due."""
        self._open.close()
        measured = self._step in (_COUNTED, _WATCHED) or self._step % _WAITING_EVERY == 0
        self._clock.step(self._trainer._total_train_tokens, counts=not measured)
        if measured or state.global_step % _MEMORY_EVERY == 0:
            self._gather(state.global_step)
        if control.should_log:
            self._note_speed()
            self._note_experts(state.global_step)
        self._clock.leave_out()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write the log as a line."""
        self._write({"step": state.global_step, **(logs or {})})
        self._clock.leave_out()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the evaluation out of the speed."""
        self._clock.leave_out()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the save out of the speed."""
        self._clock.leave_out()

    # ---- numbers --------------------------------------------------------------------------------

    def _gather(self, step: int) -> None:
        waiting, sent = self._waiting, self._sent
        share = -1.0 if waiting is None or waiting.share is None else waiting.share
        wire = -1.0 if sent is None else float(sent.wire_bytes)
        mine = torch.tensor([_peak_bytes(), float(self._state_bytes), wire, share]).double()
        mine = mine.to(control_device())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        peaks, states, wires, shares = torch.stack(everyone).t().tolist()
        self._pending["peak_memory_gb"] = max(peaks) / 1e9
        record = {"event": "ranks", "step": step, "peak_memory_bytes": peaks}
        if min(shares) >= 0:
            self._pending["communication_share"] = sum(shares) / len(shares)
            record["communication_share"] = shares
        self._write(record)
        if self._step == _COUNTED:
            self._compare(max(states), max(wires), max(peaks))
        self._waiting = self._sent = None

    def _compare(self, state_bytes: float, wire: float, peak: float) -> None:
        """Log model state and traffic beside what was predicted."""
        trainer = self._trainer
        measured = {"model_state": state_bytes, "sent_per_step": wire, "peak_memory": peak}
        found: Any = None
        if group_rank() == 0:
            try:
                adapters = getattr(trainer.model, "peft_config", {}).get("default")
                config = trainer.model.config
                load = workload_of(config, trainer.args, adapters, self._seq_len)
                found = predicted(trainer.strategy, config, load, dist.get_world_size())
            except Exception as error:
                # A run is not to end since its costs cannot be told.
                found = f"{type(error).__name__}: {error}"
        found = from_rank0(found)
        if isinstance(found, str):
            self._write({"event": "costs", "measured": measured, "no prediction": found})
            logger.info("Costs of this run were not predicted: %s", found)
        else:
            self._write({"event": "costs", "measured": measured, "predicted": found})
            for name, value in found.items():
                if name != "peak_memory" or torch.cuda.is_available():
                    self._pending[f"{name}_predicted_gb"] = value / 1e9
        self._pending["model_state_gb"] = state_bytes / 1e9
        if wire >= 0:
            self._pending["sent_per_step_gb"] = wire / 1e9

    def _note_speed(self) -> None:
        speed = self._clock.tokens_per_second()
        if speed is None:
            return
        per_rank = speed / dist.get_world_size()
        self._pending["tokens_per_second"] = speed
        self._pending["tokens_per_second_per_rank"] = per_rank
        peak = _peak_flops(self._trainer.strategy.precision)
        if peak is not None:
            self._pending["mfu"] = per_rank * self._flops_per_token / peak

    def _note_experts(self, step: int) -> None:
        trainer = self._trainer
        if not counts_tokens(trainer.model_wrapped):
            return
        load: ExpertLoad = trainer.strategy.expert_load(trainer.model_wrapped)
        self._pending["expert_imbalance"] = max(layer.imbalance for layer in load.layers)
        self._pending["expert_slowdown"] = max(layer.slowdown for layer in load.layers)
        self._pending["dead_experts"] = sum(len(layer.dead) for layer in load.layers)
        counts = {layer.name: list(layer.counts) for layer in load.layers}
        self._write({"event": "experts", "step": step, "tokens": counts})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None or group_rank() != 0:
            return
        line = json.dumps({**_plain(record), "time": round(time.time(), 3)}) + "\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            # A raise on this rank alone would leave the others waiting for it.
            logger.warning("%s ends here, and the run goes on: %s", self._file, error)
            self._file = None


class _Clock:
    """Tokens and seconds of training steps, without what comes between them."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, tokens: int) -> None:
        """Begin anew."""
        self._tokens_before, self._tokens, self._seconds = tokens, 0, 0.0
        self._since = time.perf_counter()

    def step(self, tokens: int, counts: bool) -> None:
        """End a step; ``tokens`` are those of all steps."""
        if counts:
            self._tokens += tokens - self._tokens_before
            self._seconds += time.perf_counter() - self._since
        self._tokens_before = tokens

    def leave_out(self) -> None:
        """Leave out the time since the last step or the last call."""
        self._since = time.perf_counter()

    def tokens_per_second(self) -> float | None:
        """Return the speed since the last call, None where no step was taken."""
        speed = self._tokens / self._seconds if self._seconds and self._tokens else None
        self._tokens, self._seconds = 0, 0.0
        return speed


def _peak_bytes() -> float:
    """Return the most that this rank has held: by torch on a GPU, else by the process."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    import resource

    # Linux counts in KiB.
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_flops(precision: str) -> float | None:
    """Return the peak of this GPU in the dtype of training, None where it is not known."""
    if not torch.cuda.is_available() or precision == "fp32":
        return None
    try:
        return gpu_by_name(torch.cuda.get_device_name()).flops
    except ValueError:
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a number that is none as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
