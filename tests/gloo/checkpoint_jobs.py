"""What the ranks do in the tests of checkpoints; module-level, so that ranks find it by name."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

import distft
from distft.testing import tiny_batches, tiny_model

ODD_SIZES = {
    "hidden_size": 35,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 49,
}
PROBE = [[5, 17, 130, 0, 42, 8, 99, 3]]
LARGE = 16_777_217


class OwnLlama(LlamaForCausalLM):
    """A model class of a user's own."""


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained, the same on every rank.

    `frozen` is part of the names of parameters that are not trained; `extra` adds ``"buffers"``
    (int64 and bool), ``"small"`` (parameters of shapes (2, 3) and (1,)) or ``"own class"`` (one
    that transformers does not have); `dtype` is the dtype before `apply`.
    """

    model: str = "L"
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    frozen: str | None = None
    extra: str | None = None
    dtype: str = "float32"
    optimizer: str = "AdamW"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    rows: int = 12

    def build(self) -> Any:
        """Return the model at its start."""
        import torch

        model = tiny_model(self.model, self.seed, **self.changes)
        if self.extra == "buffers":
            model.register_buffer("big_count", torch.tensor([LARGE]))
            model.register_buffer("switches", torch.tensor([True, False]))
        if self.extra == "small":
            _add_small_parameters(model)
        if self.extra == "own class":
            model.__class__ = OwnLlama
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.frozen is None or self.frozen not in name)
        return model.to(getattr(torch, self.dtype))

    def apply(self, strategy: Any) -> tuple[Any, Any]:
        """Return the model and the optimizer of a strategy, after `distft.init`."""
        import torch

        distft.init(seed=3)
        factory = partial(getattr(torch.optim, self.optimizer), lr=self.learning_rate)
        if self.optimizer != "SGD":
            factory = partial(factory, weight_decay=self.weight_decay)
        return strategy.apply(self.build(), factory)

    def step(self, strategy: Any, model: Any, optimizer: Any, step: int) -> float:
        """Make one step on `rows` rows over all ranks and return its loss."""
        batches = tiny_batches([3 + (5 * row) % 12 for row in range(self.rows)], seed=100 + step)
        mine = batches[strategy.dp_rank :: strategy.dp_size]
        return strategy.train_step(model, optimizer, mine, max_grad_norm=1.0).loss

    def reseeded(self) -> Recipe:
        """Return the recipe with other values at the start, which a load must replace."""
        return replace(self, seed=77)


def _add_small_parameters(model: Any) -> None:
    """Add two parameters with fewer rows than ranks, and let the logits depend on them."""
    import torch

    model.small = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3) / 10)
    model.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def use(module: Any, args: Any, output: Any) -> Any:
        shift = torch.nn.functional.pad(module.small.flatten(), (0, 125))
        output.logits = output.logits * module.scale + shift
        return output

    model.register_forward_hook(use)


# ---- training, saving, loading ------------------------------------------------------------------


def train_and_save(
    strategy: Any, recipe: Recipe, path: Path, steps: int, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train some steps, save, and return what the run held in that moment."""
    import torch

    model, optimizer = recipe.apply(strategy)
    for step in range(steps):
        recipe.step(strategy, model, optimizer, step)
    weights = strategy.gather_weights(model)
    strategy.save(path, model, optimizer, step=steps, **(options or {}))
    inner = distft.unwrap(model)
    local = {name: tuple(_local(p).shape) for name, p in inner.named_parameters()}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(PROBE)).logits.float()
    return {"weights": weights, "logits": logits, "keys": list(inner.state_dict()), "local": local}


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def load_and_step(strategy: Any, recipe: Recipe, path: Path, steps: int) -> dict[str, Any]:
    """Load into a model of another seed, make some more steps, return what the run held."""
    model, optimizer = recipe.reseeded().apply(strategy)
    state = strategy.load(path, model, optimizer)
    loaded = strategy.gather_weights(model)
    losses = [recipe.step(strategy, model, optimizer, state.step + step) for step in range(steps)]
    return {
        "loaded": loaded,
        "losses": losses,
        "weights": strategy.gather_weights(model),
        "counts": _adam_counts(optimizer),
        "buffers": {n: b.clone() for n, b in distft.unwrap(model).named_buffers()},
    }


def load_and_save(strategy: Any, recipe: Recipe, path: Path, out: Path) -> None:
    """Load into a model of another seed and save the same step again."""
    model, optimizer = recipe.reseeded().apply(strategy)
    state = strategy.load(path, model, optimizer)
    strategy.save(out, model, optimizer, step=state.step)


def train_on(strategy: Any, recipe: Recipe, steps: int) -> dict[str, Any]:
    """Train without a stop and return the same as `load_and_step`."""
    model, optimizer = recipe.apply(strategy)
    losses = [recipe.step(strategy, model, optimizer, step) for step in range(steps)]
    return {
        "losses": losses,
        "weights": strategy.gather_weights(model),
        "counts": _adam_counts(optimizer),
    }


def _adam_counts(optimizer: Any) -> set[float]:
    """Return Adam's step counts on this rank, of all parameters or flat parts of them."""
    return {float(state["step"]) for state in optimizer.state.values() if "step" in state}


# ---- stopping and resuming with everything a run has --------------------------------------------


@dataclass(frozen=True)
class Course:
    """A training with two groups, a frozen part, a schedule and data that ends in mid-window."""

    model: str = "L"
    dropout: float = 0.0
    frozen: str | None = "mlp"
    rows_per_step: int = 12
    num_rows: int = 12 * 5 + 7

    def start(self, strategy: Any, seed: int) -> tuple[Any, Any, Any, Any, list[int]]:
        """Return model, optimizer, scheduler, data, and the list of rows that it will fill."""
        import torch

        distft.init(seed=3)
        model = tiny_model(self.model, seed, attention_dropout=self.dropout)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.frozen is None or self.frozen not in name)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [n for n, p in trained.items() if p.dim() > 1], "weight_decay": 0.1},
            {
                "params": [n for n, p in trained.items() if p.dim() == 1],
                "weight_decay": 0.0,
                "lr": 2e-3,
            },
        ]
        model, optimizer = strategy.apply(
            model, partial(torch.optim.AdamW, lr=1e-3), param_groups=groups
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        rows_read: list[int] = []
        data = strategy.batches(
            self._dataset(),
            grad_accum=self.rows_per_step // strategy.dp_size,
            seed=5,
            collate=partial(_collate, rows_read),
        )
        return model, optimizer, scheduler, data, rows_read

    def _dataset(self) -> list[tuple[int, Any]]:
        tokens = [3 + (5 * row) % 12 for row in range(self.num_rows)]
        return list(enumerate(tiny_batches(tokens)))


def _collate(rows_read: list[int], rows: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    [(index, batch)] = rows
    rows_read.append(index)
    return dict(batch)


def _draws() -> tuple[float, float, float]:
    import numpy as np
    import torch

    return random.random(), float(np.random.rand()), float(torch.rand(1))


def _run(
    strategy: Any, parts: Any, start: int, stop: int, save_at: int | None, path: Path
) -> dict[str, Any]:
    model, optimizer, scheduler, data, rows_read = parts
    steps, step = [], start
    while step < stop:
        for micro_batches in data:
            rates = [group["lr"] for group in optimizer.param_groups]
            result = strategy.train_step(model, optimizer, micro_batches, max_grad_norm=1.0)
            scheduler.step()
            step += 1
            steps.append((result.loss, result.grad_norm, rates, _draws(), rows_read[:]))
            rows_read.clear()
            if step == save_at:
                options = {"scheduler": scheduler, "data": data, "extra": {"run": [1, None]}}
                strategy.save(path, model, optimizer, step=step, **options)
            if step == stop:
                break
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    return {"steps": steps, "decay": decay, "weights": strategy.gather_weights(model)}


def run_course(
    strategy: Any, course: Course, path: Path, stop: int, save_at: int
) -> dict[str, Any]:
    """Train to step `stop` without a break, saving at `save_at` on the way."""
    return _run(strategy, course.start(strategy, seed=0), 0, stop, save_at, path)


def resume_course(strategy: Any, course: Course, path: Path, stop: int) -> dict[str, Any]:
    """Load into a run of another seed and train to step `stop`; also return the log."""
    model, optimizer, scheduler, data, rows_read = course.start(strategy, seed=77)
    lines: list[str] = []
    listener = _Listener(lines)
    logger = logging.getLogger("distft")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        state = strategy.load(path, model, optimizer, scheduler=scheduler, data=data)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    parts = model, optimizer, scheduler, data, rows_read
    found = _run(strategy, parts, state.step, stop, None, path)
    return {**found, "state": state, "log": lines}


class _Listener(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
