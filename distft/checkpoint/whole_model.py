"""What only transformers and PEFT can do: merge an adapter, and publish families unknown here.

The whole model is in memory, which the copy of `distft.checkpoint.copy` never needs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.mapped_run import read_tensor
from distft.checkpoint.shards import LogicalTensor
from distft.checkpoint.stream import Stream
from distft.peft import merge_adapter

if TYPE_CHECKING:
    from torch import Tensor

# Weights, the copy that merging or converting makes of one, and what transformers itself takes.
_COPIES = 2


def skeleton(config: Mapping[str, Any] | None) -> Any:
    """Return the model of a config without values, or None where transformers has no class.

    Collective: none.
    """
    name = ((config or {}).get("architectures") or [""])[0]
    if not config or not name:
        return None
    import torch

    if not torch.cuda.is_available():
        # transformers looks for DeepSpeed's accelerator, which warns where nobody names one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None:
        return None
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        return cls(made)


def check_memory(num_bytes: int, max_ram: int, what: str) -> None:
    """Refuse to hold a whole model where it does not fit.

    Raises:
        ValueError: It does not.

    Collective: none.
    """
    if num_bytes * _COPIES > max_ram:
        raise ValueError(
            f"max_ram is {max_ram} bytes, and {what} holds the whole model {_COPIES} times, "
            f"{num_bytes * _COPIES} bytes. Allow that, or use adapter='keep'."
        )


def read_whole(
    root: Path, tensors: Mapping[str, LogicalTensor], dtype: str | None
) -> dict[str, Tensor]:
    """Return tensors whole in memory, floating ones in a dtype unless it is None.

    Collective: none.
    """
    import torch

    found = {}
    with Stream(root, BUFFER_BYTES) as stream:
        for name, tensor in tensors.items():
            floating = getattr(torch, tensor.dtype).is_floating_point
            found[name] = read_tensor(stream, tensor, dtype if floating else None)
    return found


def merge(
    config: Mapping[str, Any] | None, base: Mapping[str, Tensor], adapter: Path
) -> dict[str, Tensor]:
    """Return the weights of a base with an adapter added into them.

    Raises:
        ValueError: transformers has no class for the model, or the base does not fit it.

    Collective: none.
    """
    model = skeleton(config)
    if model is None:
        raise ValueError(
            "consolidate(adapter='merge') needs a model class of transformers, and the config "
            f"beside {adapter} names none. Use adapter='keep', and merge with PEFT on the model "
            "that you build."
        )
    buffers = [name for name, _ in model.named_buffers()]
    _, unexpected = model.load_state_dict(dict(base), strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent or unexpected:
        raise ValueError(
            f"The base beside {adapter} lacks {len(absent)} tensors of its model, and has "
            f"{len(unexpected)} others, such as {[*absent, *unexpected][0]}. Use adapter='keep'."
        )
    merged = merge_adapter(model, adapter)
    found = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    return found | {name: base[name] for name in buffers if name in base}


def cast(
    state: Mapping[str, Tensor], dtype: str | None, kept: Collection[str]
) -> dict[str, Tensor]:
    """Return weights with floating ones in a dtype, unless it is None, but for those kept.

    Collective: none.
    """
    import torch

    return {
        name: tensor.to(getattr(torch, dtype))
        if dtype is not None and tensor.is_floating_point() and name not in kept
        else tensor
        for name, tensor in state.items()
    }


def write_whole(
    made: Path, model: Any, state: Mapping[str, Tensor], dtype: str, max_shard_bytes: int
) -> None:
    """Write weights that are in memory as transformers names and splits them.

    Args:
        made: The folder.
        model: A `skeleton`.
        state: Weights by name.
        dtype: Dtype that the config is to say.
        max_shard_bytes: Most bytes in one file.

    Collective: none.
    """
    import torch

    # The config gets the dtype of the model, so it is the model that must have it.
    model.to(getattr(torch, dtype))
    with _no_progress_bars():
        model.save_pretrained(made, state_dict=dict(state), max_shard_size=max_shard_bytes)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
