"""The reference of a parity check: plain torch in one process, what came of it in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.diagnose.recipe import CannotBuild, Recipe
from distft.testing.runs import router_share

if TYPE_CHECKING:
    from torch import Tensor, nn

REFERENCE = "reference.pt"


@dataclass(frozen=True)
class Built:
    """What the reference says of the model that was trained."""

    model: str
    num_parameters: int
    cut: Mapping[str, Any]
    digest: str


def train_reference(recipe: Recipe, folder: Path) -> Built | None:
    """Train in this process with plain torch and write what came out; other ranks than 0 rest.

    Raises:
        CannotBuild: The model cannot be built, or not be trained in one process.

    Collective: none.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    import torch

    stdout_to_stderr()
    model, cut = recipe.build()
    batches = len(recipe.batches(model, 0))
    if batches % int(os.environ.get("WORLD_SIZE", "1")):
        raise CannotBuild(
            f"batches(0) returned {batches} micro-batches for {os.environ['WORLD_SIZE']} ranks, "
            "and each needs as many as the others in the first step. Return a multiple."
        )
    built = Built(
        type(model).__name__, sum(p.numel() for p in model.parameters()), cut, _digest(model)
    )
    if recipe.peft_config is not None:
        from distft.peft import attach_adapters

        model = attach_adapters(model, recipe.peft_config, seed=0)
    try:
        torch.save(_reference(recipe, model.train()), folder / REFERENCE)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(
            f"The model of build_model does not train in one process: {type(error).__name__}: "
            f"{error}"
        ) from error
    return built


def _reference(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = recipe.factory()([p for _, p in trained])
    made: dict[str, Any] = {
        "start": _weights(model),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "losses": [],
        "norms": [],
        "gradients": {},
        "clipped": {},
        "weights": [],
    }
    for step in range(recipe.num_steps + 1):
        if step == recipe.num_steps:
            made["moments"] = {
                name: {key: value.clone() for key, value in _moments(optimizer.state[p]).items()}
                for name, p in trained
            }
        loss, norm = _plain_step(recipe, model, optimizer, step, made)
        made["losses"].append(loss)
        made["norms"].append(norm)
        made["weights"].append(_weights(model))
    return made


def _plain_step(
    recipe: Recipe, model: Any, optimizer: Any, step: int, made: Mapping[str, Any]
) -> tuple[float, float]:
    import torch

    from distft.training.loss import count_next_tokens, next_token_loss, router_losses

    batches = recipe.batches(model, step)
    num_tokens = sum((recipe.count_fn or count_next_tokens)(batch) for batch in batches)
    optimizer.zero_grad()
    total = 0.0
    with router_losses(model) as routers:
        for batch in batches:
            share = (recipe.loss_fn or next_token_loss)(model, batch) / num_tokens
            (share + router_share(model, routers, len(batches))).backward()
            total += share.item()
    if step == 0:
        made["gradients"].update(_grads(model))
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm))
    if step == 0:
        made["clipped"].update(_grads(model))
    optimizer.step()
    return total, norm


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if getattr(value, "ndim", 0)}


def _digest(model: Any) -> str:
    """Return a digest of what a model is made of: its config, or names and shapes."""
    import hashlib
    import json

    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    else:
        text = str([(name, tuple(p.shape)) for name, p in model.named_parameters()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stdout_to_stderr() -> None:
    """Keep what engines print out of the caller's own output.

    Collective: none.
    """
    os.dup2(2, 1)


def read_reference(folder: Path) -> dict[str, Any]:
    """Return what `train_reference` wrote.

    Collective: none.
    """
    import torch

    expected: dict[str, Any] = torch.load(folder / REFERENCE, weights_only=True)
    return expected
