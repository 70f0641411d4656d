"""The router's auxiliary loss in the log of a Trainer: of batches that hold rows, each once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distft.process_group import group_rank
from distft.trainer.data import LastRound

if TYPE_CHECKING:
    from torch import Tensor

    from distft.strategies.base import Strategy


def real_router_losses(
    mean: float, own: Tensor, last: LastRound | None, strategy: Strategy
) -> list[float]:
    """Return a value of the auxiliary loss for each data rank's batch of a round that holds rows.

    All are their mean: TRL logs the mean of all values since it logged last, which then is that
    over batches, however many of them were in one round.

    Args:
        mean: Over all data ranks.
        own: Of this rank's batch.
        last: The last round of the rows, or None where the round is another one.
        strategy: What deals the rows.

    Collective: every rank, where a rank has no row of its own; else none.
    """
    import torch.distributed as dist

    ranks = strategy.dp_size
    real = ranks if last is None else last.num_ranks
    if real == ranks:
        return [mean] * ranks
    counts = strategy.dp_rank < real and group_rank() % strategy.mesh().tp == 0
    total = own.detach().double().clone() * float(counts)
    dist.all_reduce(total)
    return [float(total) / real] * real
