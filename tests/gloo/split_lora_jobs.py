"""What the ranks do in the tests of LoRA on split models; module-level, so that ranks find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import distft
from distft.peft import attach_adapters
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import Training, train_under
from tests.gloo.lora_jobs import lora_config

# Both factors are drawn: with B = 0 the gradient of A would be zero and prove nothing.
NON_ZERO = {"init_lora_weights": False}


@dataclass(frozen=True)
class LoraAlone(Training):
    """A training of adapters on one process, drawn as `apply` draws them."""

    lora: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the PEFT model at its start."""
        return attach_adapters(super().build(), lora_config(**NON_ZERO, **self.lora), seed=0)


def train_lora(strategy: Any, training: LoraAlone) -> Any:
    """Return the record of this rank's training, its adapters attached by `apply`."""
    plain = Training(
        training.model,
        training.num_steps,
        training.num_micro_batches,
        training.max_norm,
        training.learning_rate,
        training.changes,
        training.seed,
    )
    return train_under(strategy, plain, lora_config(**NON_ZERO, **training.lora))


@dataclass(frozen=True)
class FromFolder(Training):
    """A training of adapters that starts from a folder; on one process where no strategy is.

    Attributes:
        folder: Of the model, or of an adapter on the model's start where `saved`.
        saved: Whether `load_adapter` reads the adapter, or `load_model` attaches a new one.
    """

    lora: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    saved: bool = False
    strategy: Any = None

    def build(self) -> Any:
        """Return the PEFT model at its start, spread where a strategy is."""
        from transformers import AutoModelForCausalLM

        if self.saved:
            return distft.load_adapter(super().build(), self.folder)
        config = lora_config(**NON_ZERO, **self.lora)
        if self.strategy is not None:
            return distft.load_model(self.folder, self.strategy, peft_config=config)
        return attach_adapters(AutoModelForCausalLM.from_pretrained(self.folder), config, seed=0)


def write_adapter_folder(training: FromFolder, path: str) -> None:
    """Write an adapter of drawn values with PEFT alone."""
    plain = Training(training.model, changes=training.changes).build()
    made: Any = attach_adapters(plain, lora_config(**NON_ZERO, **training.lora), seed=5)
    made.save_pretrained(path, save_embedding_layers=False)


def train_from_folder(strategy: Any, training: FromFolder, out: str) -> Any:
    """Return the record of this rank's training; its start is saved to `out` where given."""
    distft.init(seed=0)
    if out:
        save_start(strategy, training, out)
    return train_under(strategy, replace(training, strategy=strategy))


def save_start(strategy: Any, training: FromFolder, out: str) -> None:
    """Save what `apply` makes of an adapter that was loaded."""
    from torch.optim import AdamW

    model, optimizer = strategy.apply(training.build(), partial(AdamW, lr=1e-3))
    strategy.save(out, model, optimizer, step=0)


def held_factors(strategy: Any, lora: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of this rank's part of every factor of the experts of M."""
    from torch.optim import AdamW

    distft.init(seed=0)
    model, _ = strategy.apply(
        tiny_model("M"), partial(AdamW, lr=1e-3), peft_config=lora_config(**lora)
    )
    return {
        name: tuple((p.to_local() if hasattr(p, "to_local") else p).shape)
        for name, p in distft.unwrap(model).named_parameters()
        if ".experts." in name and ".lora_" in name
    }


def refusal(strategy: Any, model: str, lora: Mapping[str, Any], attached: bool | str) -> str:
    """Return what `apply` says of adapters, attached before it, as LoRA or IA3, or by it."""
    from peft import IA3Config, get_peft_model
    from torch.optim import AdamW

    distft.init(seed=0)
    plain: Any = tiny_model(model)
    config: Any = lora_config(**lora)
    if attached == "IA3":
        ia3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
        plain, config = get_peft_model(plain, ia3), None
    elif attached:
        plain, config = attach_adapters(plain, config, seed=0), None
    try:
        strategy.apply(plain, partial(AdamW, lr=1e-3), peft_config=config)
    except ValueError as error:
        return str(error)
    return ""


def dtypes(strategy: Any, lora: Mapping[str, Any]) -> tuple[list[float], set[str], set[str]]:
    """Return two losses of M, and the dtypes of the adapters and of what a rank holds of them."""
    from torch.optim import AdamW

    distft.init(seed=0)
    model, optimizer = strategy.apply(
        tiny_model("M"), partial(AdamW, lr=1e-3), peft_config=lora_config(**NON_ZERO, **lora)
    )
    training = Training("M", 2, 4)
    losses = [
        strategy.train_step(
            model, optimizer, training.batches(step)[strategy.dp_rank :: strategy.dp_size]
        ).loss
        for step in range(2)
    ]
    adapters = [p for name, p in model.named_parameters() if ".lora_" in name]
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in adapters]
    return losses, {str(p.dtype) for p in adapters}, {str(p.dtype) for p in parts}


# ---- dropout ------------------------------------------------------------------------------------

DROPPED = {"target_modules": ["q_proj", "o_proj"], "lora_dropout": 0.5, "r": 2}


@contextmanager
def recorded_masks(model: Any) -> Iterator[dict[str, list[Any]]]:
    """Keep what every dropout of a model sets to zero, in the order in which it draws."""
    import torch

    found: dict[str, list[Any]] = {}
    original, hooks = torch.nn.functional.dropout, []

    def attention(values: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        output = original(values, p, training, inplace)
        if values.dim() == 4 and training and p > 0:
            found.setdefault("attention", []).append((output == 0) & (values != 0))
        return output

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):

            def look(_module: Any, args: Any, output: Any, name: str = name) -> None:
                found.setdefault(name, []).append((output == 0) & (args[0] != 0))

            hooks.append(module.register_forward_hook(look))
    torch.nn.functional.dropout = attention  # type: ignore[assignment]
    try:
        yield found
    finally:
        torch.nn.functional.dropout = original
        for hook in hooks:
            hook.remove()


def masks(strategy: Any, path: str) -> dict[str, Any]:
    """Train with dropout; return the masks of each place by step, whole weights, and a resume's."""
    from torch.optim import AdamW

    distft.init(seed=3)
    factory = partial(AdamW, lr=1e-2)
    changes = {"attention_dropout": 0.5}

    def build() -> Any:
        return strategy.apply(
            tiny_model("Q", **changes), factory, peft_config=lora_config(**NON_ZERO, **DROPPED)
        )

    def train(model: Any, optimizer: Any, steps: Any) -> tuple[dict[str, list[Any]], list[float]]:
        losses = []
        with recorded_masks(model) as seen:
            for step in steps:
                rows = tiny_batches([9, 12], seed=10 * step + strategy.dp_rank)
                losses.append(strategy.train_step(model, optimizer, rows).loss)
        return seen, losses

    model, optimizer = build()
    first, _ = train(model, optimizer, range(3))
    strategy.save(path, model, optimizer, step=3)
    after, losses = train(model, optimizer, (3, 4))
    whole = {
        name: (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad and not _is_split_over_tp(p)
    }
    again, optimizer = build()
    strategy.load(path, again, optimizer)
    resumed, same = train(again, optimizer, (3, 4))
    return {
        "first": first,
        "after": after,
        "resumed": resumed,
        "losses": (losses, same),
        "whole": whole,
    }


def _is_split_over_tp(tensor: Any) -> bool:
    if not hasattr(tensor, "placements"):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(
        name == "tp" and not placement.is_replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    )
