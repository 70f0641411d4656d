"""Weights in ``.bin`` and ``.pt`` files of ``torch.save``: one state dict, or an index of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.torch_zip import read_torch_file
from distft.checkpoint.readers.unpickle import StoredTensor
from distft.checkpoint.shards import LogicalTensor, ShardMap

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def read_state_dict(path: Path) -> ShardMap:
    """Return the map of a file with a state dict, or of a folder with ``pytorch_model*.bin``.

    A dict whose tensors lie one level down, under ``model``, ``state_dict`` or ``module``, is read
    from there.

    Raises:
        ValueError: A file is missing, not whole, asks for more than a checkpoint needs, or holds no
            tensors.

    Collective: none.
    """
    root, names = (path.parent, [path.name]) if path.is_file() else (path, _files_of(path))
    held: dict[str, StoredTensor] = {}
    for name in names:
        tensors = _tensors_of(read_torch_file(root, name))
        if not tensors:
            raise ValueError(
                f"{root / name} holds no tensors by name. Pass a file with a state dict."
            )
        twice = sorted(held.keys() & tensors.keys())
        if twice:
            raise ValueError(
                f"{root / name} holds {len(twice)} tensors that another of the {len(names)} files "
                f"holds too, such as {twice[0]}. Remove the file that is stale."
            )
        held |= tensors
    whole, ties = tie(held)
    return ShardMap(
        root,
        "state_dict",
        {name: described(name, tensor) for name, tensor in whole.items()},
        ties=ties,
        files={name: (root / name).stat().st_size for name in names},
    )


def _files_of(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{index} names {absent[0]}, and {folder} has no such file ({len(absent)} of "
            f"{len(names)} are missing). Copy the folder again."
        )
    return names


def _tensors_of(value: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict by name."""
    if not isinstance(value, Mapping):
        return {}
    found = {
        name: tensor
        for name, tensor in value.items()
        if isinstance(name, str) and isinstance(tensor, StoredTensor)
    }
    if found:
        return found
    inside = (value.get(name) for name in ("model", "state_dict", "module"))
    return next(filter(None, map(_tensors_of, inside)), {})


def tie(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return each tensor under its first name, and the other names by what they share.

    Collective: none.
    """
    first: dict[StoredTensor, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        kept = first.setdefault(tensor, name) if tensor.num_elements else name
        if kept != name:
            ties[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in ties}, ties


def described(name: str, tensor: StoredTensor) -> LogicalTensor:
    """Return a stored tensor as a whole of one piece.

    Collective: none.
    """
    return LogicalTensor(name, tensor.shape, tensor.dtype, (tensor.piece(),))
