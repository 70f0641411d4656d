"""The model of a run as `from_pretrained` or PEFT reads it, without the state of its optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from distft.checkpoint.folder import DCP
from distft.checkpoint.save import save_checkpoint
from distft.peft import is_peft, names_to_save, write_adapter
from distft.process_group import group_rank, rendezvous, together
from distft.strategies.base import Strategy
from distft.training.wrappers import unwrap


class _NoState:
    """An optimizer that has nothing to save."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}
        self.param_groups: list[dict[str, Any]] = []


def save_model_alone(strategy: Strategy, model: nn.Module, optimizer: Any, out: Path) -> None:
    """Write a model, or its adapter where it has one, into a folder.

    An adapter is gathered. Of a model each rank writes its part beside, from which one makes the
    files, so that no rank needs the memory for it. The engine of ZeRO writes its optimizer's state
    with the weights, which are parts of it.

    Raises:
        RuntimeError: Not every rank called, or a file could not be written.

    Collective: every rank.
    """
    rendezvous("Trainer.save_model")
    inner = unwrap(model)
    temporary = out / ".distft-model"
    _remove(temporary)
    if is_peft(inner):
        adapter = strategy.gather_weights(model, set(names_to_save(inner)))
        with together():
            if group_rank() == 0:
                out.mkdir(parents=True, exist_ok=True)
                write_adapter(temporary, inner, adapter)
                for file in sorted(temporary.iterdir()):
                    file.replace(out / file.name)
        _remove(temporary)
        return
    # By hand, since `Strategy.save` takes the optimizer that belongs to the model alone.
    saved: Any = _NoState() if strategy.layout == DCP else optimizer
    save_checkpoint(
        strategy, temporary, model, saved, step=0, scheduler=None, processing_class=None,
        data=None, extra=None,
    )  # fmt: skip
    try:
        strategy.consolidate(temporary, out)
    finally:
        _remove(temporary)


def _remove(folder: Path) -> None:
    """Remove what this call, or a process that was killed in it, left."""
    with together():
        if group_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
