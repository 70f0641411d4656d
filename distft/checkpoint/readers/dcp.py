"""torch's distributed checkpoint, as torch, Accelerate, torchtitan and TRL write it.

Its names are a nest of dicts written flat. The metadata says how the nest was; what the names
before a parameter's own are depends on who saved it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.folder import NUMBERED
from distft.checkpoint.readers.chunks import Chunks, inside, read_item
from distft.checkpoint.readers.torch_zip import opened, plain_values
from distft.checkpoint.readers.unpickle import StandIn, not_whole, read_pickle
from distft.checkpoint.shards import (
    LogicalTensor,
    OptimizerState,
    ParamGroup,
    ShardMap,
)

METADATA = ".metadata"
# Accelerate's FSDP keeps the two halves of a run in folders of their own.
_MODEL_FOLDER, _OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_STATE = re.compile(r"(?:^|\.)state\.(.+)\.([^.]+)$")
_GROUPS = re.compile(r"(?:^|\.)param_groups\.(.+)\.([^.]+)$")
# What else a run keeps beside weights and an optimizer, by the first part of its name.
_SCHEDULER, _DATA = ("lr_scheduler", "scheduler"), ("dataloader",)
_OTHER = (*_SCHEDULER, *_DATA, "train_state")
# Dicts that hold the weights of a model and nothing else.
_MODEL_DICTS = ("model", "module", "state_dict")


@dataclass(frozen=True)
class Items:
    """The items of one or more ``.metadata``.

    Attributes:
        root: Folder that files are relative to.
        tensors: Tensors by item.
        values: Of each item that is no tensor: its file, the begin and the length of its zip.
        paths: Where each item was in the nest.
        files: Bytes of each file.
    """

    root: Path
    tensors: Mapping[str, LogicalTensor]
    values: Mapping[str, tuple[str, int, int]]
    paths: Mapping[str, tuple[Any, ...]]
    files: Mapping[str, int]

    def value(self, item: str) -> Any:
        """Return an item that is no tensor, or a tensor of one number, as a plain value."""
        if item in self.tensors:
            stored = self.tensors[item].stored
            return plain_values(self.root, stored.stored() if isinstance(stored, Chunks) else None)
        name, offset, length = self.values[item]
        with opened(self.root / name) as descriptor:
            value = read_item(self.root / name, name, descriptor, offset, length)
        return plain_values(self.root, value)


def read_items(root: Path, folder: Path) -> Items:
    """Return the items of a folder with ``.metadata``; of its other files nothing is read yet.

    Raises:
        ValueError: The metadata is missing or broken, asks for more than metadata needs, or names a
            file that is not there.

    Collective: none.
    """
    path = folder / METADATA
    said = _read_metadata(folder)
    described, places = said["state_dict_metadata"], said["storage_data"]
    above = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    by_item = _places(path, places)
    names = {place[0] for found in by_item.values() for place in found}
    files = {above + name: inside(folder, name).stat().st_size for name in sorted(names)}
    files[above + METADATA] = path.stat().st_size
    paths = said["planner_data"] or {}
    tensors: dict[str, LogicalTensor] = {}
    values = {}
    for item, what in described.items():
        found = by_item.pop(item, [])
        if what["chunks"] is None:
            if len(found) != 1:
                raise not_whole(path, f"it names {len(found)} places for the item {item}, not 1")
            name, _, offset, length = found[0]
            values[item] = (above + name, offset, length)
        else:
            tensors[item] = _tensor(root, above, path, item, what, found)
    return Items(
        root,
        tensors,
        values,
        {item: tuple(paths.get(item, (item,))) for item in described},
        files,
    )


def _read_metadata(folder: Path) -> StandIn:
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(
            f"{METADATA} is missing: searched {folder}. "
            "Without it nobody knows what the files hold; use another checkpoint."
        )
    said = read_pickle(path.read_bytes(), path)
    dicts = ("state_dict_metadata", "storage_data")
    if not isinstance(said, StandIn) or not all(isinstance(said[key], dict) for key in dicts):
        raise not_whole(path, "it is no metadata of torch")
    return said


def describe_items(folder: Path) -> tuple[dict[str, str | None], list[str]]:
    """Return the dtype of each item, None of what is no tensor, and the files that hold them.

    The files need not be there.

    Raises:
        ValueError: The metadata is missing or broken, or asks for more than metadata needs.

    Collective: none.
    """
    said = _read_metadata(folder)
    described = {
        item: None if what["chunks"] is None else _dtype(what)
        for item, what in said["state_dict_metadata"].items()
    }
    return described, sorted({place["relative_path"] for place in said["storage_data"].values()})


def _dtype(what: StandIn) -> str:
    properties = what["properties"]
    # Its state is a tuple, of which the dtype is the first.
    found = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    return str(found.asked).removeprefix("torch.")


# File, start of the chunk, begin and length of its zip.
_Place = tuple[str, tuple[int, ...], int, int]


def _places(path: Path, storage: dict[Any, Any]) -> dict[str, list[_Place]]:
    """Return where the chunks of each item lie; empties ``storage`` as it goes."""
    found: dict[str, list[_Place]] = {}
    names: dict[str, str] = {}
    while storage:
        index, place = storage.popitem()
        if place["transform_descriptors"]:
            raise ValueError(
                f"{path} holds items that were transformed ({place['transform_descriptors']}), "
                f"such as {index['fqn']}. Save it without extensions."
            )
        name = names.setdefault(place["relative_path"], place["relative_path"])
        start = tuple(index["offset"] or ())
        found.setdefault(index["fqn"], []).append((name, start, place["offset"], place["length"]))
    return found


def _tensor(
    root: Path, above: str, path: Path, item: str, what: Any, places: Sequence[_Place]
) -> LogicalTensor:
    shape, dtype = tuple(what["size"]), _dtype(what)
    by_start = {place[1] or (0,) * len(shape): place for place in places}
    chunks = Chunks(root, item, dtype, len(shape))
    for chunk in sorted(what["chunks"], key=lambda chunk: tuple(chunk["offsets"])):
        start, size = tuple(chunk["offsets"]), tuple(chunk["sizes"])
        place = by_start.get(start)
        if place is None and math.prod(size):
            raise not_whole(path, f"it names no place for the part of {item} at {start}")
        if place is not None:
            chunks.add(above + place[0], place[2], place[3], start, size)
    return LogicalTensor(item, shape, dtype, chunks)


def find_dcp(folder: Path) -> list[Path]:
    """Return the folders with ``.metadata`` that make up a run: one, or Accelerate's two.

    Collective: none.
    """
    if (folder / METADATA).is_file():
        above = folder.parent / _OPTIMIZER_FOLDER
        both = folder.name == _MODEL_FOLDER and (above / METADATA).is_file()
        return [folder, above] if both else [folder]
    halves = [folder / _MODEL_FOLDER, folder / _OPTIMIZER_FOLDER]
    return [half for half in halves if (half / METADATA).is_file()]


def read_dcp(folders: Sequence[Path]) -> ShardMap:
    """Return the map of a run that others saved as distributed checkpoints.

    Raises:
        ValueError: As `read_items`, or an item asks for more than a checkpoint needs.

    Collective: none.
    """
    root = folders[0] if len(folders) == 1 else Path(os.path.commonpath(folders))
    parts = [read_items(root, folder) for folder in folders]
    items = Items(
        root,
        *({k: v for part in parts for k, v in getattr(part, name).items()} for name in _MAPPINGS),
    )
    weights = {item: t for item, t in items.tensors.items() if _part(items, item) == "weights"}
    names = _names(items, weights)
    tensors = {
        names[item]: LogicalTensor(names[item], t.shape, t.dtype, t.stored)
        for item, t in weights.items()
    }
    optimizer = _optimizer(items, tensors)
    scheduler = _rest(items, _SCHEDULER)
    return ShardMap(
        root,
        "dcp",
        tensors,
        optimizer=optimizer,
        files=items.files,
        step=_step(items, folders[0], optimizer),
        strategy="FSDP" if len(folders) > 1 else None,
        extras={"scheduler": scheduler} if scheduler else {},
        notes=_notes(items, optimizer),
    )


_MAPPINGS = ("tensors", "values", "paths", "files")


def _step(items: Items, folder: Path, optimizer: OptimizerState | None) -> int | None:
    """Return the step that a run says of itself, its folder is named by, or its updates count."""
    said = _rest(items, ("train_state",)).get("step")
    if isinstance(said, (int, float)):
        return int(said)
    found = NUMBERED.search(folder.name)
    if found:
        return int(found[1])
    counts = set(optimizer.steps.values()) if optimizer else set()
    return int(counts.pop()) if len(counts) == 1 else None


def _notes(items: Items, optimizer: OptimizerState | None) -> list[str]:
    names = [item for item in items.paths if _part(items, item) == "optimizer"]
    if names and optimizer is None:
        return [f"{len(names)} items of an optimizer have no parameter groups, and are not read."]
    return []


def _part(items: Items, item: str) -> str:
    """Return which part of a run an item belongs to: weights, optimizer or another."""
    path = items.paths[item]
    first = str(path[0])
    if len(path) > 1 and any(name in _MODEL_DICTS for name in path[:-1]):
        return "weights"
    if _STATE.search(item) or _GROUPS.search(item) or path[-1] == "param_groups":
        return "optimizer"
    return "other" if first.partition(".")[0] in _OTHER else "weights"


def _names(items: Items, weights: Iterable[str]) -> dict[str, str]:
    """Return the parameters' own names, without the dicts around them."""
    nested = {item: str(items.paths[item][-1]) for item in weights if len(items.paths[item]) > 1}
    flat = [item for item in weights if item not in nested]
    prefix = _prefix(flat, {m[1] for item in items.paths if (m := _STATE.search(item))})
    return nested | {item: item.removeprefix(prefix) for item in flat}


def _prefix(flat: Sequence[str], trained: set[str]) -> str:
    """Return what stands before all names of a dict that was flat when it was saved.

    Models of transformers have names that begin with ``model.`` too, so it must be there twice,
    unless the optimizer's names show that it is not the parameters' own.
    """
    prefix = "model."
    if not flat or not all(item.startswith(prefix) for item in flat):
        return ""
    if trained:
        return prefix if not trained & set(flat) else ""
    inner = {item.removeprefix(prefix).partition(".")[0] for item in flat}
    return prefix if inner & {"model", "lm_head", "base_model"} else ""


def _optimizer(items: Items, tensors: Mapping[str, LogicalTensor]) -> OptimizerState | None:
    """Return the optimizer, where its groups are there too."""
    groups = _groups(items, tensors)
    if not groups:
        return None
    moments: dict[str, dict[str, LogicalTensor]] = {}
    steps: dict[str, float] = {}
    for item in items.paths:
        found = _STATE.search(item)
        if found is None or found[1] not in tensors or _part(items, item) != "optimizer":
            continue
        name, key = found[1], found[2]
        if key == "step":
            steps[name] = float(items.value(item))
        elif item in items.tensors:
            t = items.tensors[item]
            moments.setdefault(name, {})[key] = LogicalTensor(name, t.shape, t.dtype, t.stored)
    return OptimizerState("", moments, steps, groups)


def _groups(items: Items, tensors: Mapping[str, LogicalTensor]) -> list[ParamGroup]:
    """Return the groups: numbered ones with their names, or made of settings under each name."""
    settings: dict[str, dict[str, Any]] = {}
    for item in items.paths:
        found = _GROUPS.search(item)
        if found is not None and _part(items, item) == "optimizer":
            settings.setdefault(found[1], {})[found[2]] = items.value(item)
        elif items.paths[item][-1] == "param_groups" and item in items.values:
            settings |= {str(number): g for number, g in enumerate(items.value(item))}
    if settings and all(key.isdigit() for key in settings):
        return [
            ParamGroup({k: v for k, v in group.items() if k != "params"}, list(group["params"]))
            for _, group in sorted(settings.items(), key=lambda pair: int(pair[0]))
        ]
    alike: dict[str, ParamGroup] = {}
    for name, values in settings.items():
        if name in tensors:
            group = alike.setdefault(repr(sorted(values.items())), ParamGroup(values, []))
            alike[repr(sorted(values.items()))] = ParamGroup(values, [*group.names, name])
    return list(alike.values())


def _rest(items: Items, starts: Sequence[str]) -> dict[str, Any]:
    """Return the values below the first of these names, by the rest of theirs."""
    found = {}
    for item in items.paths:
        first, _, rest = item.partition(".")
        if first in starts:
            found[rest] = items.value(item)
    return found
