"""Sharding units: the blocks of a model that are gathered and checkpointed as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def sharding_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules that are sharded each on its own, outermost first.

    These are the modules of the classes in the model's own ``_no_split_modules``; for a model that
    names none, the children of its largest ``nn.ModuleList``. What is in no unit belongs to the
    root, which is a unit of its own.

    Collective: none.
    """
    from torch import nn

    classes = set(getattr(model, "_no_split_modules", None) or ())
    units = [
        (name, module)
        for name, module in model.named_modules()
        if name and type(module).__name__ in classes
    ]
    if not units:
        lists = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module)
        ]
        if lists:
            name, largest = max(lists, key=lambda item: _num_parameters(item[1]))
            units = [(f"{name}.{index}", child) for index, child in enumerate(largest)]
    # A block inside a block is gathered with the outer one.
    names = {name for name, _ in units}
    return [
        (name, module)
        for name, module in units
        if not any(name.startswith(f"{other}.") for other in names if other != name)
    ]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
