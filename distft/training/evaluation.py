"""The loss without an update: every row once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distft.process_group import local_device
from distft.training.loss import Batch, count_next_tokens, next_token_loss
from distft.training.rows import check_first_rows
from distft.training.step import CountFunction, LossFunction, agree_on_window, to_device

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found: plain numbers, the same on every rank.

    Attributes:
        loss: Mean over all loss tokens of all ranks, in nats for cross-entropy.
        num_loss_tokens: What it is a mean over.
        num_tokens: Input tokens that are not padding.
    """

    loss: float
    num_loss_tokens: int
    num_tokens: int


def run_evaluation(
    model: nn.Module,
    windows: Iterable[Sequence[Batch]],
    loss_fn: LossFunction | None,
    count_fn: CountFunction | None,
    call: str,
    copies: int = 1,
) -> EvalResult:
    """Return the mean loss over windows of micro-batches; see `Strategy.eval_step`.

    ``L = sum over ranks and batches of loss_fn / sum of count_fn``. A rank with fewer batches in
    a window repeats one with weight zero, so that nobody waits and no row counts twice.

    Raises:
        ValueError: A window without a batch on any rank, or no loss token in all of them.

    Collective: every rank: one all_gather a window, one all_reduce in the end.
    """
    import torch
    import torch.distributed as dist

    device = local_device()
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_loss_tokens = num_tokens = num_windows = 0
    with evaluating(model), torch.no_grad():
        for batches in windows:
            window = agree_on_window(
                batches, count_fn or count_next_tokens, call, needs_loss=False, copies=copies
            )
            check_first_rows(model, window.batches[: window.num_real], copies, call)
            num_windows += 1
            num_loss_tokens += window.num_loss_tokens
            num_tokens += window.num_tokens
            for index, batch in enumerate(window.batches):
                value = (loss_fn or next_token_loss)(model, to_device(batch, device)).detach()
                # A batch that only fills up is left out, not multiplied by 0: it may be NaN.
                if index < window.num_real:
                    total += value.double()
    if num_loss_tokens == 0:
        raise ValueError(
            f"{call} saw 0 loss tokens in {num_windows} windows of batches on all ranks, so the "
            "mean loss is undefined. Pass rows whose labels are not all -100."
        )
    if dist.get_world_size() > 1:
        # Neighbours that read the same rows have the same sum: one of them brings it.
        total *= float(dist.get_rank() % copies == 0)
        dist.all_reduce(total)
    return EvalResult(float(total) / num_loss_tokens, num_loss_tokens, num_tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of a model in evaluation mode, and each back in the mode it had.

    Collective: none.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
