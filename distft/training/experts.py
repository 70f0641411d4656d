"""How many tokens the experts of each layer got: counted where the router hands them on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.formulas import expert_imbalance, expert_slowdown
from distft.peft import source_name
from distft.process_group import local_device
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

# Set on a model: its counters by layer.
_MARK = "_distft_expert_counters"
# What transformers' experts call the chosen experts of every token, after the hidden states.
CHOSEN = ("top_k_index", "router_indices")


@dataclass(frozen=True)
class LayerLoad:
    """The tokens of one layer's experts.

    Attributes:
        name: Path of the experts' module, in the model without adapters.
        counts: Tokens that each expert got; a token counts once for each expert it goes to.
        ep: Ranks over which the experts are spread.
    """

    name: str
    counts: tuple[int, ...]
    ep: int = 1

    @property
    def dead(self) -> tuple[int, ...]:
        """The experts that got no token."""
        return tuple(expert for expert, count in enumerate(self.counts) if count == 0)

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean of all; 1 is balanced."""
        return expert_imbalance(self.counts)

    @property
    def slowdown(self) -> float:
        """Time of the experts over that of balanced ones: all wait for the busiest rank."""
        return expert_slowdown(self.counts, self.ep)


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens of all layers' experts, over all data ranks since it was last asked for."""

    layers: tuple[LayerLoad, ...]

    def __str__(self) -> str:
        """One line for each layer."""
        lines = [f"{'experts':40} {'tokens':>10} {'max/mean':>9} {'slowdown':>9}  dead"]
        for layer in self.layers:
            dead = ", ".join(map(str, layer.dead)) or "none"
            lines.append(
                f"{layer.name:40} {sum(layer.counts):10,} {layer.imbalance:9.2f} "
                f"{layer.slowdown:9.2f}  {dead}"
            )
        return "\n".join(lines)


class _Counter:
    """The counts of one layer on this rank; ``active`` is False while they are not to grow."""

    def __init__(self, name: str, num_experts: int) -> None:
        self.name = name
        self.num_experts = num_experts
        self.active = True
        self.counts: Tensor | None = None

    def count(self, module: nn.Module, args: Any, keywords: Any) -> None:
        """Add the experts that the tokens of one forward pass chose."""
        import torch

        # In a backward pass it is activation checkpointing that runs the layer again.
        if not (module.training and self.active) or torch._C._current_graph_task_id() != -1:
            return
        chosen = next((keywords[name] for name in CHOSEN if name in keywords), None)
        chosen = args[1] if chosen is None else chosen
        chosen = chosen.to_local() if hasattr(chosen, "to_local") else chosen
        if self.counts is None:
            self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        flat = chosen.detach().reshape(-1)
        self.counts.scatter_add_(0, flat, torch.ones_like(flat))


def count_tokens_of_experts(model: nn.Module, num_experts: int) -> None:
    """Count from now on which experts the router of each layer chooses in training.

    Collective: none.
    """
    counters: dict[str, _Counter] = {}
    for path, module in unwrap(model).named_modules():
        if is_experts(module):
            # Experts and the copy that `modules_to_save` trains of them are one layer.
            name = source_name(path) or path
            counter = counters.setdefault(name, _Counter(name, num_experts))
            module.register_forward_pre_hook(counter.count, with_kwargs=True)
    setattr(unwrap(model), _MARK, list(counters.values()))


def counts_tokens(model: nn.Module) -> bool:
    """Return whether tokens of a model's experts are counted.

    Collective: none.
    """
    return bool(getattr(unwrap(model), _MARK, None))


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is called with the experts that a router chose.

    Collective: none.
    """
    names = list(inspect.signature(type(module).forward).parameters)
    return names[2:3] != [] and names[2] in CHOSEN


@contextmanager
def uncounted(model: nn.Module, skip: bool = True) -> Iterator[None]:
    """Leave the forward passes inside out of the counts, such as those that only fill up.

    Collective: none.
    """
    counters: list[_Counter] = getattr(unwrap(model), _MARK, [])
    for counter in counters:
        counter.active = not skip
    try:
        yield
    finally:
        for counter in counters:
            counter.active = True


def read_expert_load(model: nn.Module, ep: int, copies: int) -> ExpertLoad:
    """Return the tokens of every expert since the last call, over all data ranks.

    Args:
        model: What `Strategy.apply` returned.
        ep: Ranks over which the experts are spread.
        copies: Neighbours that work on the same rows, of which one counts.

    Raises:
        ValueError: The model has no experts whose router hands on what it chose.

    Collective: every rank: one all_reduce of 8 bytes for each expert of each layer.
    """
    import torch
    import torch.distributed as dist

    inner = unwrap(model)
    counters: list[_Counter] = getattr(inner, _MARK, [])
    if not counters:
        raise ValueError(
            f"expert_load() found 0 layers of experts in {type(inner).__name__}. "
            "Pass a mixture-of-experts model that apply() returned."
        )
    device = local_device()
    mine = [
        torch.zeros(counter.num_experts, dtype=torch.int64, device=device)
        if counter.counts is None
        else counter.counts.to(device)
        for counter in counters
    ]
    total = torch.stack(mine) * int(dist.get_rank() % copies == 0)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    for counter in counters:
        counter.counts = None
    return ExpertLoad(
        tuple(
            LayerLoad(counter.name, tuple(counts), ep)
            for counter, counts in zip(counters, total.tolist(), strict=True)
        )
    )
