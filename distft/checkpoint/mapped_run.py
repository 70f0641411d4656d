"""A checkpoint of any layout, read through its shard map into any strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distft.checkpoint.boxes import boxes_of_range, crop
from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.placement import narrow
from distft.checkpoint.publish import check_whole
from distft.checkpoint.shards import LogicalTensor, ShardMap
from distft.checkpoint.stream import Stream
from distft.checkpoint.whole_run import SavedTensor, WholeRun

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
                values[key] = saved_tensor(stream, tensor)
        weights = {name: saved_tensor(stream, tensor) for name, tensor in found.tensors.items()}
        yield WholeRun(found.root, weights, states, groups)


def saved_tensor(stream: Stream, tensor: LogicalTensor) -> SavedTensor:
    """Return a tensor of which a box is read by the bytes that lie in it, through small buffers.

    Collective: none.
    """
    dtype = _dtype(tensor.dtype)

    def fill(start: Sequence[int], out: Tensor) -> None:
        import torch

        part = crop(tensor, start, out.shape)
        for first, window in stream.windows(part, part.dtype):
            values, at = torch.frombuffer(window, dtype=dtype), 0
            # A part of several blocks has some whose rows do not follow each other in memory.
            for begin, size in boxes_of_range(out.shape, first, first + len(values)):
                stop = at + math.prod(size)
                narrow(out, begin, size).copy_(values[at:stop].view(size))
                at = stop

    return SavedTensor(tensor.shape, dtype, fill)


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


def _counter(step: float) -> SavedTensor:
    """Return a counter as torch's optimizers keep it."""
    import torch

    return in_memory(torch.tensor(float(step)))


def in_memory(value: Tensor) -> SavedTensor:
    """Return a tensor that is in memory, or mapped there, as one that is read box by box.

    Collective: none.
    """

    def fill(start: Sequence[int], out: Tensor) -> None:
        out.copy_(narrow(value, start, out.shape))

    return SavedTensor(tuple(value.shape), value.dtype, fill)
