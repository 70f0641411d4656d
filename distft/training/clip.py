"""One gradient norm over sharded and plain tensors, the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GradientShards:
    """This rank's part of some gradients, and the groups over whose ranks they are split.

    An empty ``groups`` says that the tensors are whole on every rank, so they count once.
    """

    tensors: Sequence[Tensor]
    groups: Sequence[Any] = ()


def check_max_norm(max_norm: float | None) -> None:
    """Raise where a clipping bound is not None, infinite or a number above 0.

    Raises:
        ValueError: The bound is not above 0.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(
            f"max_norm is {max_norm!r}, and a gradient norm is clipped to a number above 0. "
            "Pass None to leave gradients as they are."
        )


def global_norm(parts: Sequence[GradientShards], device: Any) -> Tensor:
    """Return the 2-norm over all gradients of the model, an fp32 scalar on ``device``.

    ``||g|| = sqrt(sum_p ||g_p||^2)``, the squares of a split gradient summed over the ranks that
    share it and those of a whole one counted once. Infinities and NaN stay in the result.

    Collective: every rank of each part's groups: one all_reduce of 4 bytes per group.
    """
    import torch
    import torch.distributed as dist

    total = torch.zeros((), dtype=torch.float32, device=device)
    for part in parts:
        square = torch.zeros((), dtype=torch.float32, device=device)
        tensors = [tensor.detach() for tensor in part.tensors if tensor.numel()]
        if tensors:
            lifted = [t if t.dtype == torch.float32 else t.float() for t in tensors]
            norms = torch._foreach_norm(lifted, 2.0)
            square = square + torch.stack(list(norms)).to(device).square().sum()
        for group in part.groups:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def scale_gradients(parts: Sequence[GradientShards], norm: Tensor, max_norm: float | None) -> None:
    """Multiply every gradient in place by ``min(1, max_norm / (norm + 1e-6))``.

    The same rule as ``torch.nn.utils.clip_grad_norm_``. Without a bound nothing is touched, nor
    where the norm is not finite.

    Collective: none.
    """
    import torch

    if max_norm is None or math.isinf(max_norm):
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # Times a NaN, padding that nobody overwrites would stay NaN in every later step.
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    for part in parts:
        tensors = [tensor.detach() for tensor in part.tensors if tensor.numel()]
        if tensors:
            torch._foreach_mul_(tensors, factor.to(tensors[0].device))
