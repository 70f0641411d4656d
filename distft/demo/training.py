"""The training itself, as a user would write it: what every rank runs.

Between strategies one argument differs, ``job.strategy``. `train_alone` is the same loop written
by hand in plain torch, in one process, without distft: what the strategies are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distft
from distft.demo.plan import Job
from distft.measure import ModelStateBytes, count_collectives, model_state_bytes
from distft.training.data import Batches

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

    from distft.strategies.base import Strategy

LEARNING_RATE, BETAS = 4e-3, (0.9, 0.95)
MAX_GRAD_NORM = 1.0
WARM_UP_STEPS = 8
# ZeRO-3 records the order of its gathers in the first step; from the next one on it is steady.
COUNTED_STEP = 3

Report = Callable[[int, float], None]  # called after each step with its number and loss


@dataclass(frozen=True)
class Run:
    """What one rank brings back.

    Attributes:
        losses: Cross-entropy in nats per answer token, one a step.
        grad_norms: 2-norm of the gradient before clipping, one a step.
        seconds: Wall time of the steps.
        state: Bytes of model state that this rank holds after a backward pass; None for one
            process.
        wire_bytes: Bytes that this rank sent in step `COUNTED_STEP`; None if it was not reached.
        resumed: Losses of the steps made again after a stop in the middle.
        checkpoint: Folder of the last save.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    seconds: float
    state: ModelStateBytes | None = None
    wire_bytes: float | None = None
    resumed: tuple[float, ...] = ()
    checkpoint: Path | None = None


def train(job: Job, report: Report) -> Run:
    """Train, save in the middle and at the end, then resume from the middle: this rank's `Run`.

    Collective: every rank.
    """
    assert job.strategy is not None
    distft.init(seed=job.seed)
    strategy = job.strategy
    model, optimizer, scheduler, batches = _start(job, job.seed)
    losses, norms, seconds = [], [], 0.0
    wire_bytes, middle = None, job.folder / "middle"
    for step, micro_batches in enumerate(_steps(batches, job.steps), start=1):
        begun = time.perf_counter()
        # Counting sees every operation go by, which is slow: one step is counted.
        with count_collectives() if step == COUNTED_STEP else nullcontext() as traffic:
            result = strategy.train_step(
                model, optimizer, micro_batches, max_grad_norm=MAX_GRAD_NORM
            )
        scheduler.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        seconds += time.perf_counter() - begun
        if traffic is not None:
            wire_bytes = traffic.wire_bytes
        if step == job.middle:
            strategy.save(middle, model, optimizer, step=step, scheduler=scheduler, data=batches)
        report(step, losses[-1])
    tokenizer = _load_tokenizer(job.tokenizer)
    checkpoint = strategy.save(
        job.folder / "end", model, optimizer, step=job.steps, processing_class=tokenizer
    )
    state = _state_after_backward(strategy, model, optimizer, micro_batches[0])
    del model, optimizer, scheduler
    resumed = _resume(job, middle, report)
    return Run(tuple(losses), tuple(norms), seconds, state, wire_bytes, resumed, checkpoint)


def _start(job: Job, seed: int) -> tuple[nn.Module, Optimizer, LambdaLR, Batches]:
    from torch.optim import AdamW

    assert job.strategy is not None
    model, optimizer = job.strategy.apply(
        _build(job, seed), partial(AdamW, lr=LEARNING_RATE, betas=BETAS)
    )
    batches = job.strategy.batches(
        job.rows, micro_batch=job.sizes.micro_batch, grad_accum=job.grad_accum, seed=job.seed
    )
    return model, optimizer, _schedule(optimizer, job.steps), batches


def _state_after_backward(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, batch: dict[str, Any]
) -> ModelStateBytes:
    """Bytes that this rank holds when weights, gradients and moments are all there.

    ZeRO lets its gradients go in the update, so they are counted after a backward pass.
    """
    from distft.process_group import local_device

    device = local_device()
    optimizer.zero_grad()
    strategy.backward(model(**{key: value.to(device) for key, value in batch.items()}).loss)
    return model_state_bytes(model, optimizer)


def _resume(job: Job, middle: Path, report: Report) -> tuple[float, ...]:
    """Losses of the steps after the middle, made again by a model that began as another one."""
    assert job.strategy is not None
    model, optimizer, scheduler, batches = _start(job, job.seed + 1)
    state = job.strategy.load(middle, model, optimizer, scheduler=scheduler, data=batches)
    losses = []
    for micro_batches in _steps(batches, job.resumed_steps):
        result = job.strategy.train_step(
            model, optimizer, micro_batches, max_grad_norm=MAX_GRAD_NORM
        )
        scheduler.step()
        losses.append(result.loss)
        report(state.step + len(losses), losses[-1])
    return tuple(losses)


def train_alone(job: Job, report: Report) -> Run:
    """The same training in one process, by hand in plain torch: the reference.

    Collective: none
    """
    import torch

    from distft.process_group import local_device

    device = local_device()
    model = _build(job, job.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    scheduler = _schedule(optimizer, job.steps)
    batches = Batches(
        job.rows,
        micro_batch=job.sizes.micro_batch,
        grad_accum=job.sizes.micro_batches,
        seed=job.seed,
        collate=None,
        shuffle=True,
        dp_rank=0,
        dp_size=1,
    )
    losses, norms, begun = [], [], time.perf_counter()
    for step, micro_batches in enumerate(_steps(batches, job.steps), start=1):
        answer_tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro_batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in micro_batches:
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            labels = on_device.pop("labels")[:, 1:]
            logits = model(**on_device).logits[:, :-1].float()
            share = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (share / answer_tokens).backward()
            loss += share.item() / answer_tokens
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(loss)
        norms.append(norm.item())
        report(step, loss)
    return Run(tuple(losses), tuple(norms), time.perf_counter() - begun)


def _build(job: Job, seed: int) -> nn.Module:
    from transformers import Qwen3Config

    from distft.demo.model import build_model

    return build_model(Qwen3Config.from_dict(job.config), seed)


def _schedule(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Linear warm-up, then linear decay to a twentieth."""
    from torch.optim.lr_scheduler import LambdaLR

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.05, 1 - step / steps)

    return LambdaLR(optimizer, factor)


def _steps(batches: Batches, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the micro-batches of ``count`` steps, over as many epochs as they take."""
    while True:
        for micro_batches in batches:
            if count == 0:
                return
            count -= 1
            yield micro_batches


def _load_tokenizer(path: Path) -> Any:
    from distft.demo.tokenizer import load_tokenizer

    return load_tokenizer(path)
