"""Finding a loss function that returns a mean where `Strategy.train_step` needs a sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distft.process_group import base_seed, local_device
from distft.training.evaluation import evaluating
from distft.training.loss import Batch
from distft.training.step import LossFunction, check_one_number, to_device
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn

# Set on the model once its loss function was looked at, or may not be.
_MARK = "_distft_loss_is_a_sum"
# Two rows keep a loss over pairs whole, and cost little.
ROWS = 2


def check_loss_is_a_sum(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_fn: LossFunction,
    after: Callable[[nn.Module], None],
) -> None:
    """Raise on every rank where a loss function returns a mean; look once for each model.

    The loss of some rows is compared with that of the same rows twice, in evaluation mode and
    without gradients: a sum doubles, a mean stays. A value that does neither is let pass, and so
    are a loss that draws random numbers and a batch whose tensors do not share their rows.
    Without it a mean over rows would train with another learning rate at every micro-batch size.

    Args:
        model: What `Strategy.apply` returned.
        micro_batches: This rank's batches.
        loss_fn: From model and batch to a loss.
        after: Called with the model after forward passes.

    Raises:
        ValueError: The loss is a mean, with both values.

    Collective: every rank, until one step had batches of rows on every rank; then none.
    """
    inner: Any = unwrap(model)
    if getattr(inner, _MARK, False):
        return
    # One batch in place of a list is refused by the step itself, on every rank.
    listed = bool(micro_batches) and not isinstance(micro_batches, Mapping)
    probe = _rows(micro_batches[0], 1) if listed else None
    if not all(_everyone(probe is not None)):
        # Batches without rows stay so; a rank without a batch may have one in the next step.
        setattr(inner, _MARK, all(_everyone(probe is not None or bool(micro_batches))))
        return
    twice = _rows(micro_batches[0], 2)
    assert probe is not None
    assert twice is not None
    try:
        once, double = (_value(model, loss_fn, batch, 0) for batch in (probe, twice))
        answers = _everyone((once, double))
        if not _all_means(answers):
            setattr(inner, _MARK, True)
            return
        # A random loss can look like a mean by chance: it has another value with another seed.
        if all(_everyone(_near(_value(model, loss_fn, probe, 1), once))):
            once, double = answers[0]
            raise ValueError(
                f"loss_fn returned {once:.6g} for some rows and {double:.6g} for the same rows "
                f"twice, so it is a mean, and the sum would be {2 * once:.6g}. Return a sum, such "
                "as reduction='sum': train_step divides by count_fn over all ranks."
            )
        setattr(inner, _MARK, True)
    finally:
        after(model)


def _rows(batch: Batch, times: int) -> dict[str, Any] | None:
    """Return the first rows of a batch, repeated; None where its tensors share no rows."""
    import torch

    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    others = [value for value in batch.values() if not isinstance(value, torch.Tensor)]
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in others)
    sizes = {len(value) if value.dim() else 0 for value in tensors}
    if not plain or len(sizes) != 1 or 0 in sizes:
        return None
    return {
        name: torch.cat([value[:ROWS]] * times) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _value(model: nn.Module, loss_fn: LossFunction, batch: Batch, seed: int) -> float:
    import torch

    device = local_device()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), evaluating(model), torch.no_grad():
        torch.manual_seed(base_seed() + seed)
        return float(check_one_number(loss_fn(model, to_device(batch, device))))


def _all_means(answers: Sequence[tuple[float, float]]) -> bool:
    """Return whether every rank saw a loss that stays where its rows are doubled."""
    return all(
        math.isfinite(once) and math.isfinite(double) and abs(once) > 1e-6 and _near(double, once)
        for once, double in answers
    )


def _near(value: float, other: float) -> bool:
    # bf16 kernels may round another number of rows in another way; a sum is 100 % off.
    return abs(value - other) <= 1e-2 * abs(other)


def _everyone(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
