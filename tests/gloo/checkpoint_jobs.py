"""What the ranks do in the tests of checkpoints; module-level, so that ranks find it by name."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.checkpoint.api import CheckpointException
from transformers import LlamaForCausalLM

import distft
from distft import FSDP2
from distft.process_group import RENDEZVOUS_TIMEOUT_VARIABLE
from distft.testing import tiny_batches, tiny_model
from tests.reading import counted_reads

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
    two_groups: bool = False

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
        model = self.build()
        groups = None
        if self.two_groups:
            named = list(model.named_parameters())
            groups = [
                {"params": [name for name, p in named if p.dim() > 1]},
                {"params": [name for name, p in named if p.dim() == 1], "lr": 1e-2},
            ]
        return strategy.apply(model, factory, param_groups=groups)

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


def save_own_experts(published: Path, path: Path) -> None:
    """Save as torch does, with experts by their own names, of which a rank knows every second."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    distft.init(seed=3)
    tensors = load_file(published / "model.safetensors")
    numbers = {name: re.search(r"experts\.(\d+)\.", name) for name in tensors}
    mine = {
        name: tensor
        for name, tensor in tensors.items()
        if (found := numbers[name]) is None or int(found[1]) % 2 == dist.get_rank()
    }
    dcp.save({"model": mine}, checkpoint_id=path)


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


def load_by_deepspeed(
    strategy: Any, recipe: Recipe, folder: Path, steps: int, universal: bool = True
) -> dict[str, Any]:
    """Let DeepSpeed's own engine load a folder, in its universal layout or its own, and go on."""
    model, optimizer = recipe.reseeded().apply(strategy)
    model._config.load_universal_checkpoint = universal
    model.load_checkpoint(str(folder), load_lr_scheduler_states=False)
    losses = [recipe.step(strategy, model, optimizer, 1 + step) for step in range(steps)]
    return {
        "losses": losses,
        "weights": strategy.gather_weights(model),
        "counts": _adam_counts(optimizer),
    }


def save_and_step(strategy: Any, recipe: Recipe, path: Path) -> float:
    """Train a step, save, and return the next step's loss."""
    model, optimizer = recipe.apply(strategy)
    recipe.step(strategy, model, optimizer, 0)
    strategy.save(path, model, optimizer, step=1)
    return recipe.step(strategy, model, optimizer, 1)


def load_and_save(strategy: Any, recipe: Recipe, path: Path, out: Path) -> float:
    """Load into a model of another seed, save the same step again, return the next one's loss."""
    model, optimizer = recipe.reseeded().apply(strategy)
    state = strategy.load(path, model, optimizer)
    strategy.save(out, model, optimizer, step=state.step)
    return recipe.step(strategy, model, optimizer, state.step)


def bytes_of_a_load(strategy: Any, recipe: Recipe, path: Path) -> int:
    """Load into a model of another seed and return the bytes of tensors that this rank read."""
    model, optimizer = recipe.reseeded().apply(strategy)
    with counted_reads() as read:
        strategy.load(path, model, optimizer)
    return read.num_bytes


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


# ---- what is refused ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One save or load that may be refused; `scheduler` and `data` True mean a real one."""

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)


def attempt(
    strategy: Any, recipe: Recipe, calls: Sequence[Call]
) -> list[tuple[type | None, str, bool]]:
    """Make calls on one model; return each one's error, its text, and whether weights changed."""
    import torch

    model, optimizer = recipe.apply(strategy)
    real = {
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "data": strategy.batches(list(range(10))),
    }
    found = []
    for call in calls:
        options = {
            key: real[key] if value is True and key in real else value
            for key, value in call.options.items()
        }
        if call.name == "save":
            options.setdefault("step", 1)
        before = strategy.gather_weights(model)
        kind, text = None, ""
        try:
            getattr(strategy, call.name)(call.path, model, optimizer, **options)
        except (Exception, CheckpointException) as error:
            kind, text = type(error), str(error)
        after = strategy.gather_weights(model)
        changed = any(not torch.equal(after[name], before[name]) for name in before)
        found.append((kind, text, changed))
    return found


def call_on_one_rank(
    strategy: Any, recipe: Recipe, call: str, caller: int, path: Path, later: Path
) -> tuple[type | None, str, float]:
    """Save or load on one rank while the others wait elsewhere; then save on all of them."""
    import torch.distributed as dist

    model, optimizer = recipe.apply(strategy)
    kind, text, seconds = None, "", 0.0
    if dist.get_rank() == caller:
        start = time.monotonic()
        try:
            with patch.dict(os.environ, {RENDEZVOUS_TIMEOUT_VARIABLE: "5"}):
                if call == "save":
                    strategy.save(path, model, optimizer, step=1)
                else:
                    strategy.load(path, model, optimizer)
        except Exception as error:
            kind, text = type(error), str(error)
        seconds = time.monotonic() - start
    dist.barrier()
    strategy.save(later, model, optimizer, step=1)
    strategy.load(later, model, optimizer)
    return kind, text, seconds


def consolidate_on_ranks(strategy: Any, path: Path, out: Path, dtype: str) -> Path:
    """Consolidate with every rank there."""
    distft.init(seed=3)
    return strategy.consolidate(path, out, dtype=dtype)


def die_in_a_save(recipe: Recipe, victim: int, path: Path) -> None:
    """Save with a rank that is killed when all state is written and the manifest is not."""
    strategy = DyingFSDP2(victim=victim)
    model, optimizer = recipe.apply(strategy)
    strategy.save(path, model, optimizer, step=2)


@dataclass(frozen=True, kw_only=True, repr=False)
class DyingFSDP2(FSDP2):
    """FSDP2 with a rank that is killed in the middle of a save."""

    victim: int = 0

    def _capture_state(self, model: Any, optimizer: Any, copies: Any) -> Any:
        captured = super()._capture_state(model, optimizer, copies)
        return DyingCapture(captured) if self.dp_rank == self.victim else captured


@dataclass
class DyingCapture:
    """What is written by a rank that is killed when its files are there."""

    captured: Any

    def write(self, folder: Path) -> Any:
        self.captured.write(folder)
        os.kill(os.getpid(), signal.SIGKILL)


# ---- what a conversion must carry ---------------------------------------------------------------


def go_on(strategy: Any, recipe: Recipe, path: Path | None, out: Path, steps: int) -> None:
    """Start, or load where there is something to load, make some steps, and save."""
    model, optimizer = recipe.apply(strategy)
    done = 0 if path is None else strategy.load(path, model, optimizer).step
    for step in range(done, done + steps):
        recipe.step(strategy, model, optimizer, step)
    strategy.save(out, model, optimizer, step=done + steps)


def decay(strategy: Any, path: Path, steps: int, load: bool) -> dict[str, Any]:
    """Make steps whose gradients are zero, mid-warm-up; save at the end, or load at the start."""
    import torch

    distft.init(seed=3)
    model = tiny_model("L", seed=77 if load else 0)
    named = list(model.named_parameters())
    groups = [
        {"params": [name for name, p in named if p.dim() > 1], "weight_decay": 0.5},
        {"params": [name for name, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    factory = partial(torch.optim.AdamW, lr=1e-2)
    model, optimizer = strategy.apply(model, factory, param_groups=groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step) / 10)
    done = 0
    if load:
        done = strategy.load(path, model, optimizer, scheduler=scheduler).step
    rates = []
    for step in range(done, done + steps):
        batches = tiny_batches([5] * 4, seed=step)[strategy.dp_rank :: strategy.dp_size]
        rates.append(optimizer.param_groups[0]["lr"])
        strategy.train_step(model, optimizer, batches, loss_fn=_nothing)
        scheduler.step()
    if not load:
        strategy.save(path, model, optimizer, step=steps, scheduler=scheduler)
    return {"weights": strategy.gather_weights(model), "rates": rates}


def _nothing(model: Any, batch: Any) -> Any:
    """Return a loss that all parameters take part in and none changes."""
    return 0.0 * model(input_ids=batch["input_ids"]).logits.sum()


def count_beyond_bf16(strategy: Any, recipe: Recipe, path: Path, load: bool) -> list[Any]:
    """Save with counters at 300, or load and make two steps; return the counters' kinds."""
    model, optimizer = recipe.apply(strategy)
    if load:
        state = strategy.load(path, model, optimizer)
    recipe.step(strategy, model, optimizer, 0)
    if load:
        recipe.step(strategy, model, optimizer, state.step)
    else:
        for held in optimizer.state.values():
            held["step"].fill_(300)
        strategy.save(path, model, optimizer, step=300)
    return sorted(
        {(str(held["step"].dtype), float(held["step"])) for held in optimizer.state.values()}
    )
