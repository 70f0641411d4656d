"""An optimizer whose step takes parameters of different layouts one layout at a time."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def layout(tensor: Any) -> Any:
    """Return what tensors of one foreach operation must share: mesh and placements, None if plain.

    Collective: none.
    """
    if not hasattr(tensor, "placements"):
        return None
    return (tensor.device_mesh, tuple(tensor.placements))


def step_by_layout(optimizer: Optimizer) -> None:
    """Let ``optimizer.step`` update the parameters of each layout on their own.

    torch updates all tensors of a group in one foreach operation, which refuses plain tensors
    beside `DTensor`s and `DTensor`s of two meshes. The optimizers that `apply` takes treat each
    number by itself, so the result is the same. With one layout nothing is changed.

    Collective: none.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    layouts = list(dict.fromkeys(layout(parameter) for parameter in parameters))
    if len(layouts) < 2:
        return
    step: Any = optimizer.step

    def by_layout(self: Optimizer, closure: Any = None) -> Any:
        """Step once for every layout."""
        loss = None if closure is None else closure()
        groups = [group["params"] for group in self.param_groups]
        try:
            for wanted in layouts:
                for group, members in zip(self.param_groups, groups, strict=True):
                    group["params"] = [p for p in members if layout(p) == wanted]
                step()
        finally:
            for group, members in zip(self.param_groups, groups, strict=True):
                group["params"] = members
        return loss

    optimizer.step = MethodType(by_layout, optimizer)  # type: ignore[method-assign]
