"""Models and batches that parity's ranks find by name."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from distft.testing import tiny_model


def dense() -> Any:
    """Return the tiny dense model."""
    return tiny_model("L")


def tied() -> Any:
    """Return the tiny model whose head is its embedding."""
    return tiny_model("Lt")


def experts() -> Any:
    """Return the tiny model with experts."""
    return tiny_model("M", output_router_logits=True)


def adapted() -> Any:
    """Return a PEFT model, as a user's script makes it, dropout included."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
    return get_peft_model(tiny_model("Q"), config)


def raises() -> Any:
    """Raise, as a typo does."""
    raise KeyError("num_layer")


def nothing() -> Any:
    """Return no model."""
    return {"model": dense()}


def classifier() -> Any:
    """Return a model that is none of transformers."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def rows(count: int, step: int) -> list[dict[str, Any]]:
    """Return micro-batches of two rows for `classifier`."""
    import torch

    generator = torch.Generator().manual_seed(step)
    return [
        {
            "x": torch.randn(2, 8, generator=generator),
            "y": torch.randint(0, 3, (2,), generator=generator),
        }
        for _ in range(count)
    ]


four_rows = partial(rows, 4)
three_rows = partial(rows, 3)


def class_loss(model: Any, batch: Any) -> Any:
    """Return the summed cross-entropy of `classifier`."""
    import torch

    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def count_rows(batch: Any) -> int:
    """Return the number of rows."""
    return len(batch["y"])


def sleepless() -> None:
    """Never come back."""
    while True:
        time.sleep(1)
