"""A run that is told to end (SIGTERM) saves after the step at hand, and ends."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger("distft")


class SaveBeforeTheEnd(TrainerCallback):
    """Save and stop after the step in which any rank got SIGTERM.

    What ``enable_jit_checkpoint`` asks for. A launcher's signal reaches ranks at different moments,
    so they agree at the end of each step: one all_reduce of 4 bytes. transformers' own callback
    waits 3 s on each rank by itself, after which ranks may be at different steps.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Listen for the signal; only a process's main thread can."""
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask the training loop to save and to stop where a rank was told to end."""
        if _any_rank(self._asked):
            logger.warning("SIGTERM: the run saves after step %d, and ends.", state.global_step)
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the signal to whoever had it."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def _any_rank(asked: bool) -> bool:
    import torch
    import torch.distributed as dist

    from distft.training.step import control_device

    if dist.get_world_size() == 1:
        return asked
    found = torch.tensor([int(asked)], dtype=torch.int32, device=control_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())
