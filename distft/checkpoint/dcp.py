"""State in torch's distributed checkpoint format: its names, and every rank's reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.pickles import refuse_code_in_pickle
from distft.checkpoint.placement import by_blocks
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.checkpoint import FileSystemReader
    from torch.optim import Optimizer

MODEL, OPTIMIZER = "model", "optimizer"
METADATA = ".metadata"
# Set on an optimizer: loaded state of adapters that are frozen in this run, for its next save.
_RESTING = "_distft_resting"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied tensor under its first name only.

    Collective: none.
    """
    inner = unwrap(model)
    persistent = inner.state_dict(keep_vars=True)
    buffers = {name: b for name, b in inner.named_buffers() if name in persistent}
    return {**dict(inner.named_parameters()), **buffers}


def optimizer_state_names(model: nn.Module, optimizer: Optimizer) -> dict[str, list[str]]:
    """Return the names of the state tensors of every parameter that has any.

    Collective: none.
    """
    state = _state_by_name(model, optimizer)
    return {
        name: [key for key, value in values.items() if hasattr(value, "shape")]
        for name, values in state.items()
    }


def optimizer_scalars(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return the plain numbers in the optimizer's state, by parameter.

    Collective: none.
    """
    state = _state_by_name(model, optimizer)
    return {
        name: {key: value for key, value in values.items() if not hasattr(value, "shape")}
        for name, values in state.items()
    }


def _state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    held = {
        name: optimizer.state[parameter]
        for name, parameter in unwrap(model).named_parameters()
        if parameter in optimizer.state
    }
    return {**getattr(optimizer, _RESTING, {}), **held}


def named_items(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor that a save holds under its name there, the same on every rank.

    Collective: none.
    """
    items = {f"{MODEL}.{name}": tensor.detach() for name, tensor in named_tensors(model).items()}
    for name, values in _state_by_name(model, optimizer).items():
        for key, value in values.items():
            if hasattr(value, "shape"):
                items[f"{OPTIMIZER}.{name}.{key}"] = value
    return items


@contextmanager
def _plain_errors(kind: type[Exception], what: str) -> Iterator[None]:
    """Raise what torch raises on every rank in a form that ``except Exception`` catches."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise kind(f"{what} on rank {rank}: {type(cause).__name__}: {cause}") from error


def safe_reader(folder: Path) -> FileSystemReader:
    """Return torch's reader of a folder whose metadata has been found to run no code.

    Raises:
        ValueError: ``.metadata`` is missing, broken, or names more than metadata needs.

    Collective: none.
    """
    from torch.distributed.checkpoint import FileSystemReader

    metadata = folder / METADATA
    if not metadata.is_file():
        raise ValueError(
            f"{METADATA} is missing: searched {folder}. "
            "Without it nobody knows what the files hold; use another checkpoint."
        )
    refuse_code_in_pickle(metadata)
    return FileSystemReader(folder)


def read_shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of every tensor in a folder.

    Raises:
        ValueError: The metadata is unusable, or an item is no tensor: reading it would unpickle.

    Collective: none.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = safe_reader(folder)
    try:
        items = reader.read_metadata().state_dict_metadata
    except Exception as error:
        size = (folder / METADATA).stat().st_size
        raise ValueError(
            f"{folder / METADATA} ({size} bytes) is no metadata of torch: "
            f"{type(error).__name__}: {error}. Use another checkpoint."
        ) from error
    strange = [name for name, item in items.items() if not isinstance(item, TensorStorageMetadata)]
    if strange:
        raise ValueError(
            f"{len(strange)} of {len(items)} items in {folder} are no tensors, such as "
            f"{strange[0]}. A checkpoint of distft holds tensors only; use another one."
        )
    return {
        name: (tuple(item.size), item.properties.dtype)  # type: ignore[union-attr]
        for name, item in items.items()
    }


def _check_present(names: Sequence[str], shapes: Mapping[str, Any], folder: Path) -> None:
    absent = [name for name in names if name not in shapes]
    if absent:
        raise ValueError(
            f"{len(absent)} of {len(names)} tensors are missing in {folder}, such as {absent[0]}. "
            "Use another checkpoint."
        )


def read_dcp(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    state_names: Mapping[str, Sequence[str]],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Read this rank's shards into a model and an optimizer, whatever mesh wrote the folder.

    State tensors are made from the metadata, not by a trial step, which would count as one.

    Raises:
        ValueError: The metadata is unusable, a tensor is missing, or a file cannot be read.

    Collective: every rank.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    shapes = read_shapes(folder)
    targets: dict[str, Any] = {
        f"{MODEL}.{name}": by_blocks(tensor.detach())
        for name, tensor in named_tensors(model).items()
    }
    full_names = [f"{OPTIMIZER}.{name}.{key}" for name in state_names for key in state_names[name]]
    _check_present([*targets, *full_names], shapes, folder)
    states: dict[str, dict[str, Any]] = {}
    parameters = dict(unwrap(model).named_parameters())
    for name, keys in state_names.items():
        states[name] = dict(scalars.get(name, {}))
        for key in keys:
            full_name = f"{OPTIMIZER}.{name}.{key}"
            shape, dtype = shapes[full_name]
            like = parameters[name].detach()
            same = shape == tuple(like.shape)
            made = torch.zeros_like(like, dtype=dtype) if same else torch.zeros(shape, dtype=dtype)
            states[name][key], targets[full_name] = made, by_blocks(made)
    with _plain_errors(ValueError, f"Reading {folder} failed"):
        dcp.load(targets, storage_reader=safe_reader(folder))
    set_optimizer_state(optimizer, parameters, states)


def set_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], states: Mapping[str, dict[str, Any]]
) -> None:
    """Hand the state over through torch's own loading, which knows where each tensor belongs.

    Collective: none.
    """
    current = optimizer.state_dict()
    names = {id(parameter): name for name, parameter in parameters.items()}
    state = {}
    for group, indices in zip(optimizer.param_groups, current["param_groups"], strict=True):
        for parameter, index in zip(group["params"], indices["params"], strict=True):
            if names[id(parameter)] in states:
                state[index] = states[names[id(parameter)]]
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})
    held = {
        names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    }
    setattr(optimizer, _RESTING, {name: states[name] for name in states if name not in held})
