"""A saved run, tensor by tensor and of each what a rank holds, put where a strategy holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.boxes import boxes_of_range
from distft.checkpoint.dcp import named_tensors, set_optimizer_state
from distft.checkpoint.placement import held_blocks, narrow
from distft.kept import is_adapter
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

# How an optimizer computes, not what: a run here keeps its own.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
# What is in a group beside the settings of its optimizer.
ADDED = frozenset({"params", "param_names", "initial_lr", "max_grad_norm"})


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor that nobody has read yet.

    Attributes:
        shape: Its shape.
        dtype: torch's dtype.
        fill: Takes the first index of a box, for each dim, and a tensor of any dtype on any device,
            whose shape is that of the box, and fills it.
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: Callable[[Sequence[int], Tensor], None]

    def fill_range(self, first: int, flat: Tensor) -> None:
        """Fill a tensor of one dim with elements of the flattened whole, from one on.

        Collective: none.
        """
        at = 0
        for start, size in boxes_of_range(self.shape, first, first + flat.numel()):
            stop = at + math.prod(size)
            self.fill(start, flat[at:stop].view(size))
            at = stop

    def read(self) -> Tensor:
        """Return it whole in memory.

        Collective: none.
        """
        import torch

        made = torch.empty(self.shape, dtype=self.dtype)
        self.fill((0,) * made.dim(), made)
        return made


@dataclass(frozen=True)
class WholeRun:
    """What was saved of a run, of which each rank reads what it holds.

    Attributes:
        folder: Where it is, for errors.
        weights: The model's tensors that are there, by name.
        states: For each parameter the tensors and plain values of the optimizer's state.
        groups: Settings of the optimizer's groups, with ``param_names``.
    """

    folder: Path
    weights: Mapping[str, SavedTensor]
    states: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor before any sharding.

    Collective: none.
    """
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def check_run(run: WholeRun, model: nn.Module, optimizer: Optimizer, rest: bool = False) -> None:
    """Raise where the state in a folder is not of this model and this optimizer.

    Args:
        run: What is in the folder.
        model: What `Strategy.apply` returned.
        optimizer: What `Strategy.apply` returned.
        rest: Whether state of adapters may be there that were frozen then, or are now.

    Raises:
        ValueError: Parameters, shapes, or the settings of the optimizer differ.

    Collective: none.
    """
    tensors = named_tensors(model)
    for name, saved_weight in run.weights.items():
        if saved_weight.shape != full_shape(tensors[name]):
            raise ValueError(
                f"{run.folder} holds {name} in the shape {saved_weight.shape}, and the model has "
                f"{full_shape(tensors[name])}. Build the model of that run."
            )
    shapes = {name: full_shape(p) for name, p in unwrap(model).named_parameters()}
    mine = [name for group in optimizer.param_groups for name in group["param_names"]]
    saved = [name for group in run.groups for name in group["param_names"]]
    # A frozen parameter may be in a group, and has no state.
    different = sorted(name for name in mine if name not in saved)
    different += sorted(name for name in run.states if name not in mine)
    if rest:
        different = [n for n in different if not (is_adapter(n) and n in run.states)]
    if different:
        raise ValueError(
            f"{run.folder} has an optimizer of {len(saved)} parameters, {len(run.states)} of them "
            f"with state, and this run trains {len(mine)}: {different[0]} is one of "
            f"{len(different)} in one of the two only. Freeze the same ones before apply()."
        )
    for name, state in run.states.items():
        for key, value in state.items():
            if isinstance(value, SavedTensor) and value.shape not in ((), (1,), shapes[name]):
                raise ValueError(
                    f"{run.folder} holds {key} of {name} in the shape {value.shape}, and the "
                    f"parameter has {shapes[name]} here. Build the model of that run."
                )
    here = set(optimizer.param_groups[0]) - ADDED - IMPLEMENTATION
    there = set(run.groups[0]) - ADDED - IMPLEMENTATION
    if here != there:
        raise ValueError(
            f"{run.folder} holds an optimizer with {len(there)} settings {sorted(there)}, and this "
            f"run's has {len(here)}, {sorted(here)}. Pass the class of that run to apply()."
        )


def place_run(model: nn.Module, optimizer: Optimizer, run: WholeRun) -> None:
    """Put weights and optimizer state into plain parameters and DTensors.

    Collective: none.
    """
    import torch

    tensors = named_tensors(model)
    with torch.no_grad():
        for name, saved in run.weights.items():
            _copy(saved, tensors[name].detach())
        parameters = dict(unwrap(model).named_parameters())
        states = {
            name: {key: _like(value, parameters[name].detach()) for key, value in state.items()}
            for name, state in run.states.items()
        }
    set_optimizer_state(optimizer, parameters, states)


def _like(value: Any, parameter: Tensor) -> Any:
    """Return a state value laid out as its parameter is."""
    import torch

    if not isinstance(value, SavedTensor):
        return value
    if value.shape != tuple(parameter.shape):
        return value.read()
    made = torch.zeros_like(parameter, dtype=value.dtype)
    _copy(value, made)
    return made


def _copy(saved: SavedTensor, target: Any) -> None:
    """Read a whole tensor into a plain one, or this rank's part of it into a DTensor."""
    if not hasattr(target, "device_mesh"):
        saved.fill((0,) * target.dim(), target)
        return
    part = target.to_local()
    for block in held_blocks(target):
        if 0 not in block.size:
            saved.fill(block.start, narrow(part, block.local, block.size))
