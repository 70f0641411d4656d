"""Checkpoints of distft itself: a manifest beside a folder of torch's or DeepSpeed's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distft.checkpoint.folder import DCP, MANIFEST, STATE_FILE, Manifest, read_manifest
from distft.checkpoint.readers.dcp import Items, read_items
from distft.checkpoint.readers.deepspeed import read_deepspeed, tag_folder
from distft.checkpoint.readers.torch_zip import plain_values, read_torch_file
from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor, OptimizerState, ParamGroup, ShardMap

# What stands before names in the items of a save.
MODEL, OPTIMIZER = "model", "optimizer"
_STEP = "step"


def read_distft(root: Path) -> ShardMap:
    """Return the map of a checkpoint of `Strategy.save`; the names are those of the training.

    Raises:
        ValueError: A file is missing, has another size than the manifest says, or is damaged.

    Collective: none.
    """
    manifest = read_manifest(root)
    state = read_torch_file(root, STATE_FILE)
    groups = [
        ParamGroup(
            plain_values(root, {k: v for k, v in group.items() if k != "param_names"}),
            list(group["param_names"]),
        )
        for group in state["groups"]
    ]
    folder = root / manifest.layout
    optimizer: OptimizerState | None
    if manifest.layout == DCP:
        items = read_items(root, folder)
        tensors = {name: _named(items, f"{MODEL}.{name}", name) for name in manifest.tensors}
        optimizer = _optimizer(items, manifest, plain_values(root, state["scalars"]), groups)
        ties = manifest.ties
    else:
        tag = tag_folder(folder)
        if tag is None:
            raise ValueError(f"{folder} holds none of DeepSpeed's files. Use another checkpoint.")
        found = read_deepspeed(root, tag, manifest.optimizer)
        tensors = {name: _held(found, name, folder) for name in manifest.tensors}
        optimizer = found.optimizer
        if optimizer is not None:
            optimizer = OptimizerState(optimizer.kind, optimizer.moments, optimizer.steps, groups)
        ties = {**found.ties, **manifest.ties}
    _check_shapes(root, manifest, tensors)
    numbers = {
        n for n, t in tensors.items() if "float" not in t.dtype and n not in manifest.trainable
    }
    extras = {key: plain_values(root, state[key]) for key in ("scheduler", "data")}
    return ShardMap(
        root,
        "distft",
        tensors,
        optimizer=optimizer,
        ties=ties,
        frozen=frozenset(tensors) - frozenset(manifest.trainable) - numbers,
        buffers=frozenset(numbers),
        files={name: saved.size for name, saved in manifest.files.items()}
        | {MANIFEST: (root / MANIFEST).stat().st_size},
        step=manifest.step,
        strategy=manifest.strategy["constructor"],
        world_size=manifest.world_size,
        extras={key: value for key, value in extras.items() if value not in (None, [None])},
    )


def _named(items: Items, item: str, name: str) -> LogicalTensor:
    found = items.tensors.get(item)
    if found is None:
        raise ValueError(
            f"{item} is missing among the {len(items.tensors)} tensors in {items.root}, and "
            f"{MANIFEST} names it. Use another checkpoint."
        )
    return LogicalTensor(name, found.shape, found.dtype, found.stored)


def _held(found: ShardMap, name: str, folder: Path) -> LogicalTensor:
    if name not in found.tensors:
        raise ValueError(
            f"{name} is missing among the {len(found.tensors)} tensors in {folder}, and {MANIFEST} "
            "names it. Use another checkpoint."
        )
    return found.tensors[name]


def _optimizer(
    items: Items, manifest: Manifest, scalars: Any, groups: list[ParamGroup]
) -> OptimizerState:
    moments: dict[str, dict[str, LogicalTensor]] = {}
    steps: dict[str, float] = {}
    for name, keys in manifest.optimizer_state.items():
        for key in keys:
            item = f"{OPTIMIZER}.{name}.{key}"
            if key == _STEP:
                _named(items, item, name)
                steps[name] = float(items.value(item))
            else:
                moments.setdefault(name, {})[key] = _named(items, item, name)
    for name, values in scalars.items():
        if _STEP in values:
            steps[name] = float(values[_STEP])
    return OptimizerState(manifest.optimizer, moments, steps, groups)


def _check_shapes(root: Path, manifest: Manifest, tensors: dict[str, LogicalTensor]) -> None:
    for name, saved in manifest.tensors.items():
        if list(tensors[name].shape) != saved["shape"] or tensors[name].dtype not in ITEM_BYTES:
            raise ValueError(
                f"{name} has shape {list(tensors[name].shape)} in {root}, and {MANIFEST} says "
                f"{saved['shape']}. The checkpoint is damaged: use another one."
            )
