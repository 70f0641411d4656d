"""The loss of a step: a sum over this rank's loss tokens, to be divided by the global number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100

Batch = Mapping[str, Any]


def next_token_targets(batch: Batch) -> Tensor:
    """Return the labels that positions ``0 .. T-2`` predict, (B, T-1), ignored ones at -100.

    The first label of a row is never predicted. In a packed row the first label of every document
    is not predicted either: documents start where ``position_ids`` does not go up by one.

    Raises:
        ValueError: The batch has no ``labels``, or they are not (B, T).

    Collective: none.
    """
    labels = batch.get("labels")
    if labels is None:
        raise ValueError(
            f"A batch with the keys {sorted(batch)} has no `labels`. "
            "Add `labels`, or pass loss_fn and count_fn."
        )
    if labels.dim() != 2:
        raise ValueError(
            f"`labels` has shape {tuple(labels.shape)}, and the default loss reads (rows, tokens). "
            "Pass loss_fn and count_fn for another task."
        )
    targets: Tensor = labels[:, 1:]
    positions = batch.get("position_ids")
    if positions is not None:
        starts = positions[..., 1:] != positions[..., :-1] + 1
        targets = targets.masked_fill(starts, IGNORED)
    return targets


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy summed over a batch's loss tokens: a scalar in nats, fp32.

    ``L = - sum_t log softmax(z_t)[y_{t+1}]`` over all t whose target is not -100. Logits are lifted
    to fp32 first.

    Collective: none of its own.
    """
    import torch.nn.functional as F

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    config = getattr(unwrap(model), "config", None)
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    logits = model(**inputs).logits
    targets = next_token_targets(batch)
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def count_next_tokens(batch: Batch) -> int:
    """Return the number of loss tokens of a batch: the targets that are not -100.

    Collective: none.
    """
    return int((next_token_targets(batch) != IGNORED).sum())


def count_tokens(batch: Batch) -> int:
    """Return the number of input tokens of a batch that are not padding, else its rows.

    Collective: none.
    """
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return int(mask.sum())
    tokens = batch.get("input_ids")
    if tokens is not None:
        return int(tokens.numel())
    sized = (v for v in batch.values() if getattr(v, "ndim", 1) and hasattr(v, "__len__"))
    return next((len(value) for value in sized), 0)


@contextmanager
def router_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the router's auxiliary loss of every forward pass inside the context.

    The value is Hugging Face's own ``aux_loss`` output, which a model makes when its config says
    ``output_router_logits``. The list stays empty for every other model.

    Collective: none.
    """
    inner = unwrap(model)
    found: list[Tensor] = []
    if not has_router_loss(model):
        yield found
        return

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        value = getattr(output, "aux_loss", None)
        if value is not None:
            found.append(value)

    handle = inner.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def has_router_loss(model: nn.Module) -> bool:
    """Return whether a model's config turns the router's auxiliary loss on.

    Collective: none.
    """
    return bool(getattr(getattr(unwrap(model), "config", None), "output_router_logits", False))


def router_coefficient(model: nn.Module) -> float:
    """Return the factor of the router's auxiliary loss in the objective, from the config.

    Collective: none.
    """
    config = getattr(unwrap(model), "config", None)
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
