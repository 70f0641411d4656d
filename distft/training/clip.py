"""One gradient norm over sharded and plain tensors, the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

# The key of a parameter group, and where its values are kept on the model.
GROUP_BOUND = "max_grad_norm"
_MARK = "_distft_group_bounds"
_SHORT = 2**16


@dataclass(frozen=True)
class GradientShards:
    """This rank's part of some gradients, and the groups over whose ranks they are split.

    An empty ``groups`` says that the tensors are whole on every rank, so they count once.
    ``param_group`` is the number of the optimizer's group that all of them belong to; it is read
    only where `GroupBounds` of the model has bounds, and may be None elsewhere.
    """

    tensors: Sequence[Tensor]
    groups: Sequence[Any] = ()
    param_group: int | None = None


@dataclass(frozen=True)
class GroupBounds:
    """The clipping bounds of an optimizer's parameter groups.

    Attributes:
        bounds: For each group its bound, or None; empty where no group has one.
        group_of: From a parameter's name to the number of its group; empty where ``bounds`` is.
    """

    bounds: Sequence[float | None] = ()
    group_of: Mapping[str, int] = field(default_factory=dict)


def take_bounds(
    groups: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], GroupBounds]:
    """Return groups of parameter names without their clipping bounds, and the bounds.

    An optimizer would keep the key among its settings, where a checkpoint brings back its old
    value and DeepSpeed's flat groups lose it.

    Collective: none.
    """
    bare = [{key: group[key] for key in group if key != GROUP_BOUND} for group in groups]
    bounds = [group.get(GROUP_BOUND) for group in groups]
    if all(bound is None for bound in bounds):
        return bare, GroupBounds()
    members = {name: i for i, group in enumerate(groups) for name in group["params"]}
    return bare, GroupBounds(bounds, members)


def keep_bounds(model: nn.Module, bounds: GroupBounds) -> None:
    """Remember the bounds of its optimizer's groups on a model.

    Collective: none.
    """
    setattr(unwrap(model), _MARK, bounds)


def bounds_of(model: nn.Module) -> GroupBounds:
    """Return what `keep_bounds` remembered on a model.

    Collective: none.
    """
    found: GroupBounds = getattr(unwrap(model), _MARK, GroupBounds())
    return found


def check_group_bounds(param_groups: Sequence[Any]) -> None:
    """Raise where the clipping bound of a parameter group is not None or a number above 0.

    Raises:
        ValueError: Which group it is, and its bound.

    Collective: none.
    """
    for index, group in enumerate(param_groups):
        bound = group.get(GROUP_BOUND) if isinstance(group, Mapping) else None
        number = isinstance(bound, Real) and not isinstance(bound, bool)
        if bound is not None and not (number and bound > 0):
            raise ValueError(
                f"param_groups[{index}] has {GROUP_BOUND}={bound!r}, and the gradient of a group "
                "is clipped to a norm above 0. Leave the key out to bound it no further."
            )


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


def clip(
    parts: Sequence[GradientShards], bounds: GroupBounds, max_norm: float | None, device: Any
) -> tuple[Tensor, list[Tensor]]:
    """Scale gradients to their groups' bounds, then all of them to ``max_norm``.

    ``f_k = min(1, bound_k / (||g_k|| + 1e-6))`` for group k, then
    ``min(1, max_norm / (sqrt(sum_k (f_k ||g_k||)^2) + 1e-6))`` for all: what calling
    ``torch.nn.utils.clip_grad_norm_`` on each group and then on the whole does. Both bounds hold
    afterwards.

    Returns:
        The norm of the whole gradient and those of the groups, all before any scaling; no group's
        where no group has a bound.

    Raises:
        RuntimeError: A group has a bound, and a part does not say which group it is of.

    Collective: as `global_norm`.
    """
    if not bounds.bounds:
        norm = global_norm(parts, device)
        scale_gradients(parts, clip_factor(norm, max_norm))
        return norm, []
    if any(part.param_group is None for part in parts):
        raise RuntimeError(
            f"{sum(part.param_group is None for part in parts)} of {len(parts)} parts of the "
            f"gradient name no parameter group, and a group has a {GROUP_BOUND}. Let `_gradients` "
            "of the strategy give every GradientShards its param_group."
        )
    by_group = [
        [part for part in parts if part.param_group == index] for index in range(len(bounds.bounds))
    ]
    norms = [global_norm(mine, device) for mine in by_group]
    factors = [clip_factor(norm, bound) for norm, bound in zip(norms, bounds.bounds, strict=True)]
    left = [norm if f is None else norm * f for norm, f in zip(norms, factors, strict=True)]
    whole = clip_factor(_norm_of_norms(left), max_norm)
    for mine, factor in zip(by_group, factors, strict=True):
        scale_gradients(mine, factor)
        scale_gradients(mine, whole)
    return _norm_of_norms(norms), norms


def _norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.stack(list(norms)).square().sum().sqrt()


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
        norms = _norms([tensor.detach() for tensor in part.tensors if tensor.numel()])
        if norms:
            square = square + torch.cat(norms).to(device).square().sum()
        for group in part.groups:
            dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return vectors of fp32 norms of some tensors' parts, each part short enough for an exact one.

    On a CPU torch adds up squares in a few fp32 lanes: the norm of 1e8 numbers comes out 1 % too
    small, of 4e8 7 %, and that of the norms of parts of 65,536 is right to 2e-7. Offloaded
    gradients are vectors of up to 1e9. Sums are fp32 whatever the dtype, without a copy in fp32.
    """
    import torch

    norms: list[Tensor] = []
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if on_device:
        norms.append(torch.stack(torch._foreach_norm(on_device, 2.0, dtype=torch.float32)))
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue
        flat = tensor.reshape(-1)
        whole = flat.numel() // _SHORT * _SHORT
        parts = [flat[:whole].view(-1, _SHORT), flat[whole:].view(1, -1)]
        norms += [
            torch.linalg.vector_norm(part, dim=1, dtype=torch.float32)
            for part in parts
            if part.numel()
        ]
    return norms


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Return ``min(1, max_norm / (norm + 1e-6))``; None without a bound.

    The same rule as ``torch.nn.utils.clip_grad_norm_``, and 1 where the norm is not finite.

    Collective: none.
    """
    import torch

    if max_norm is None or math.isinf(max_norm):
        return None
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # Times a NaN, padding that nobody overwrites would stay NaN in every later step.
    return torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))


def scale_gradients(parts: Sequence[GradientShards], factor: Tensor | None) -> None:
    """Multiply every gradient in place by a factor; None leaves them untouched.

    Collective: none.
    """
    import torch

    if factor is None:
        return
    for part in parts:
        tensors = [tensor.detach() for tensor in part.tensors if tensor.numel()]
        if tensors:
            torch._foreach_mul_(tensors, factor.to(tensors[0].device))
