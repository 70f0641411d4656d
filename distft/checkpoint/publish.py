"""From the tensors of a checkpoint to those that are published: names, shapes, dtypes, config."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.layouts import Layout
from distft.checkpoint.shards import CASTABLE, ITEM_BYTES, LogicalTensor, ShardMap
from distft.checkpoint.stream import Stream
from distft.checkpoint.writers.safetensors import Published

CONFIG = "config.json"
Rename = Mapping[str, str] | Callable[[str], str]
# transformers leaves out the first where a config ties the two.
_TIED = ("lm_head.weight", "embed_tokens.weight")


def read_config(folder: Path, config: Any = None) -> dict[str, Any] | None:
    """Return a model's config as plain values, or None where a folder has none.

    Args:
        folder: Folder that may hold ``config.json``.
        config: The caller's own: a transformers config, its values, a file or a folder with one.

    Raises:
        ValueError: The file is no JSON object, or is not there.

    Collective: none.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if config is not None and not isinstance(config, str | Path):
        return dict(json.loads(config.to_json_string()))
    file = folder / CONFIG
    if config is not None:
        file = Path(config) / CONFIG if Path(config).is_dir() else Path(config)
        if not file.is_file():
            raise ValueError(f"config={str(config)!r} is no file, and no folder with {CONFIG}.")
    if not file.is_file():
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no JSON object: {error}. Mend it, or pass config=.") from error


def bytes_in(tensors: Iterable[LogicalTensor], dtype: str | None) -> int:
    """Return the bytes of tensors with floating ones in a dtype, or each in its own for None.

    Collective: none.
    """
    return sum(
        tensor.num_elements * ITEM_BYTES[dtype]
        if dtype is not None and tensor.dtype in CASTABLE
        else tensor.num_bytes
        for tensor in tensors
    )


def config_with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config, and the configs in it, that say a dtype of the weights.

    Collective: none.
    """
    made = {
        key: config_with_dtype(value, dtype)
        if isinstance(value, Mapping) and ("dtype" in value or "torch_dtype" in value)
        else value
        for key, value in config.items()
        if key != "torch_dtype"
    }
    return {**made, "dtype": dtype}


def main_dtype(tensors: Iterable[LogicalTensor]) -> str:
    """Return the floating dtype that most elements have, ``"float32"`` where there are none.

    Collective: none.
    """
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in CASTABLE:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_elements
    return max(counts, key=counts.__getitem__) if counts else "float32"


def publish(
    tensors: Mapping[str, LogicalTensor],
    layout: Layout,
    dtype: str | None,
    kept: Collection[str] = (),
    rename: Rename | None = None,
) -> list[Published]:
    """Return tensors under the names and in the shapes in which a family is published.

    Args:
        tensors: By their names in memory.
        layout: How the family is published.
        dtype: Of all floating tensors, or None to leave each its own.
        kept: Names of tensors that keep theirs.
        rename: From published names to others: a function, or regular expressions and what
            replaces them, in order.

    Raises:
        ValueError: A tensor cannot be had in the dtype, or does not split into its parts.

    Collective: none.
    """
    made = []
    for name, tensor in tensors.items():
        target = tensor.dtype
        if dtype is not None and name not in kept and tensor.dtype.startswith(("float", "bfloat")):
            target = dtype
        if target != tensor.dtype and tensor.dtype not in CASTABLE:
            raise ValueError(
                f"{name} is {tensor.dtype}, whose values need a scale kept elsewhere, so it cannot "
                f"become {target}. Leave dtype out for this checkpoint."
            )
        start = 0
        for published, shape in layout.pieces(name, tensor.shape):
            made.append(Published(renamed(published, rename), shape, target, tensor, start))
            start += math.prod(shape)
        if start != tensor.num_elements:
            raise ValueError(
                f"{name} {tensor.shape} has {tensor.num_elements} elements, and its published "
                f"parts {start}. The config.json is of another model: pass config=."
            )
    return made


def renamed(name: str, rename: Rename | None) -> str:
    """Return what a name becomes.

    Collective: none.
    """
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    for pattern, replacement in rename.items():
        name = re.sub(pattern, replacement, name)
    return name


def untie(found: ShardMap, config: Mapping[str, Any] | None) -> dict[str, LogicalTensor]:
    """Return the tensors of a model without those that another one's values stand for.

    Where a config ties output and input embedding and the files hold both, the values decide.

    Raises:
        ValueError: They are tied by the config, and their values differ.

    Collective: none.
    """
    tensors = {name: found.tensors[name] for name in found.tensors if name not in found.ties}
    if not config or not config.get("tie_word_embeddings"):
        return tensors
    head = tensors.get(_TIED[0])
    inputs = [name for name in tensors if name.endswith(f".{_TIED[1]}")]
    if head is None or len(inputs) != 1 or tensors[inputs[0]].shape != head.shape:
        return tensors
    if not same_values(found.root, head, found.root, tensors[inputs[0]]):
        raise ValueError(
            f"{found.root} holds {_TIED[0]} and {inputs[0]} {head.shape} with different values, "
            f"and {CONFIG} ties them: one of the 2 would be lost. Set tie_word_embeddings to false "
            "in the config if both were trained."
        )
    del tensors[_TIED[0]]
    return tensors


def tied_names(
    found: ShardMap, tensors: Mapping[str, LogicalTensor], config: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the names that stand for another tensor of these, by what a map or a config says.

    Collective: none.
    """
    ties = {
        alias: kept
        for alias, kept in found.ties.items()
        if kept in tensors and alias not in tensors
    }
    inputs = [name for name in tensors if name.endswith(f".{_TIED[1]}")]
    tied = bool((config or {}).get("tie_word_embeddings"))
    if tied and _TIED[0] not in tensors and len(inputs) == 1:
        ties[_TIED[0]] = inputs[0]
    return ties


def same_values(root: Path, one: LogicalTensor, other_root: Path, other: LogicalTensor) -> bool:
    """Return whether two tensors have one shape, dtype and value of every bit; reads both.

    Collective: none.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    import numpy as np

    with Stream(root, BUFFER_BYTES) as left, Stream(other_root, BUFFER_BYTES) as right:
        pairs = zip(left.windows(one, one.dtype), right.windows(other, other.dtype), strict=True)
        return all(np.array_equal(a, b) for (_, a), (_, b) in pairs)


def check_no_placeholders(found: ShardMap) -> None:
    """Refuse a checkpoint of a tool that leaves a rank's placeholders in the place of weights.

    Raises:
        ValueError: A tensor has no element.

    Collective: none.
    """
    empty = [name for name, tensor in found.tensors.items() if tensor.num_elements == 0]
    if empty and found.format != "distft":
        raise ValueError(
            f"{len(empty)} of {len(found.tensors)} tensors in {found.root} have no element, "
            "such as "
            f"{', '.join(empty[:3])}: one rank's placeholders were saved, not the model. "
            "Use a checkpoint saved by all ranks."
        )


def check_whole(found: ShardMap) -> None:
    """Refuse a map whose pieces leave a gap, overlap, or lie outside of their files.

    Raises:
        ValueError: Some do; the first few are named.

    Collective: none.
    """
    problems = found.check()
    if problems:
        raise ValueError(
            f"{found.root} is broken in {len(problems)} places: {'; '.join(problems[:3])}. "
            "Use another checkpoint."
        )
