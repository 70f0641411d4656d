"""Settings of parameter groups, which travel by the parameters' names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def group_settings(
    saved_groups: list[dict[str, Any]], optimizer: Optimizer, folder: Path
) -> list[dict[str, Any]]:
    """Return for each group of this run the settings that its parameters were saved with.

    Raises:
        ValueError: One group here holds parameters that were saved with different settings.

    Collective: none.
    """
    by_name = {
        name: {key: value for key, value in group.items() if key != "param_names"}
        for group in saved_groups
        for name in group["param_names"]
    }
    settings: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        known = [name for name in group["param_names"] if name in by_name]
        if not known:
            # Adapters that rested in the saved run: this run's own settings.
            settings.append({})
            continue
        first, *others = known
        different = [name for name in others if by_name[name] != by_name[first]]
        if different:
            raise ValueError(
                f"Group {index} of this run has {len(group['param_names'])} parameters that "
                f"{folder} saved with different settings, such as {first} and {different[0]}. "
                f"Use the {len(saved_groups)} groups of the saved run."
            )
        settings.append(by_name[first])
    return settings
