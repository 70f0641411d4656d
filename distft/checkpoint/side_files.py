"""Small files beside the state: random states, settings and counters, the model's config.

What changes as training goes on is taken in the moment of a save, and written when there is time.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.dcp import optimizer_scalars
from distft.checkpoint.folder import STATE_FILE
from distft.checkpoint.pickles import load_bytes
from distft.peft import base_model
from distft.training.wrappers import published_class, unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def write_values(path: Path, value: Any) -> None:
    """Write what `load_values` reads; torch's own writing hides what the system says.

    Collective: none.
    """
    path.write_bytes(_saved(value).getbuffer())


def _saved(value: Any) -> BytesIO:
    import torch

    data = BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def shared_or_each(states: list[Any], copies: int) -> list[Any]:
    """Return the state of the data: one that all ranks share, or (of a stream) each rank's own.

    Args:
        states: Those of all ranks.
        copies: Number of neighbours that read the same rows and count as one.

    Collective: none.
    """
    same = len({pickle.dumps(state) for state in states}) == 1
    return states[:1] if same else states[::copies]


@dataclass(frozen=True)
class SideFiles:
    """What the first rank writes beside the state.

    Attributes:
        state: Settings of the groups, counters, scheduler and data.
        data: The bytes of that in the moment of the save, or None where it cannot be pickled.
        configs: Copies of the model's configs.
    """

    state: Mapping[str, Any]
    data: BytesIO | None
    configs: Sequence[Any]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Mapping[str, Any] | None,
        data_states: list[Any],
    ) -> SideFiles:
        """Return what is there now; what is wrong with it, `write` raises."""
        state = {
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
            "scalars": optimizer_scalars(model, optimizer),
            "scheduler": scheduler,
            "data": data_states,
        }
        try:
            data = _saved(state)
        except Exception:
            # Whatever an object of the caller's raises when it is pickled.
            data = None
        return cls(state, data, _configs(model))

    def write(self, folder: Path) -> None:
        """Write the files, and read the state back the way a load will.

        Raises:
            ValueError: It holds more than tensors and plain values.

        Collective: none.
        """
        try:
            if self.data is None:
                self._blame(folder)
                raise ValueError(f"{STATE_FILE} could not be pickled in the moment of the save.")
            load_bytes(self.data, folder / STATE_FILE)
        except ValueError:
            self._blame(folder)
            raise
        (folder / STATE_FILE).write_bytes(self.data.getbuffer())
        for config in self.configs:
            config.save_pretrained(folder)

    def _blame(self, folder: Path) -> None:
        """Raise with the name of the first part that cannot be read back."""
        for name, value in self.state.items():
            try:
                load_bytes(_saved(value), folder / STATE_FILE)
            except Exception as error:
                said = str(error).removeprefix(f"{folder / STATE_FILE} ").partition(", which")[0]
                raise ValueError(
                    f"save({name}=...) has a state that holds more than tensors and plain values, "
                    f"so no load could read it without running code: {said}. "
                    "Keep functions and objects out of its state_dict()."
                ) from error


def _configs(model: nn.Module) -> list[Any]:
    """Return copies of a model's configs, which write themselves."""
    inner: Any = base_model(unwrap(model))
    found = []
    for name in ("config", "generation_config"):
        config = copy.deepcopy(getattr(inner, name, None))
        if config is not None and hasattr(config, "save_pretrained"):
            if name == "config":
                # Only save_pretrained of a model would write it, and readers choose by it.
                config.architectures = [published_class(inner).__name__]
            found.append(config)
    return found
