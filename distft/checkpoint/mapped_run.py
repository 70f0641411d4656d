"""A checkpoint of any layout, read tensor by tensor through its shard map into any strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.publish import check_whole
from distft.checkpoint.shards import LogicalTensor, ShardMap
from distft.checkpoint.stream import Stream
from distft.checkpoint.whole_run import StateTensor, WholeRun

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def mapped_run(
    found: ShardMap,
    groups: Sequence[Mapping[str, Any]],
    scalars: Mapping[str, Mapping[str, Any]],
) -> Iterator[WholeRun]:
    """Give a run whose tensors are read as they are asked for, while the context lasts.

    Args:
        found: The map of a checkpoint with an optimizer.
        groups: Settings of its parameter groups, with ``param_names``.
        scalars: Plain numbers in the optimizer's state, by parameter.

    Raises:
        ValueError: The map has no optimizer, or its pieces leave gaps.

    Collective: none.
    """
    if found.optimizer is None:
        raise ValueError(
            f"{found.root} holds {len(found.tensors)} tensors and no state of an optimizer. "
            "Start from the weights."
        )
    check_whole(found)
    state = found.optimizer
    with Stream(found.root, BUFFER_BYTES) as stream:
        states: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys((*state.steps, *state.moments, *scalars)):
            values = states[name] = dict(scalars.get(name, {}))
            if name in state.steps and "step" not in values:
                values["step"] = _counter(state.steps[name])
            for key, tensor in state.moments.get(name, {}).items():
                read = partial(read_tensor, stream, tensor)
                values[key] = StateTensor(tensor.shape, _dtype(tensor.dtype), read)
        yield WholeRun(
            found.root,
            list(found.tensors),
            lambda name: read_tensor(stream, found.tensors[name]),
            states,
            groups,
        )


def read_tensor(stream: Stream, tensor: LogicalTensor, dtype: str | None = None) -> Tensor:
    """Return a tensor whole in memory, in its own dtype unless another is said.

    Collective: none.
    """
    import torch

    target = dtype or tensor.dtype
    made = torch.empty(tensor.shape, dtype=_dtype(target))
    place = made.reshape(-1).view(torch.uint8).numpy()
    size = made.dtype.itemsize
    for first, window in stream.windows(tensor, target):
        place[first * size : first * size + len(window)] = window
    return made


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _counter(step: float) -> StateTensor:
    """Return a counter as torch's optimizers keep it."""
    import torch

    return StateTensor((), torch.float32, lambda: torch.tensor(float(step)))
