"""Safetensors: models in one file or several, transformers' files of each rank, PEFT adapters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from distft.checkpoint.safetensors_reader import DTYPES, INDEX, SINGLE, FileTensor, read_header
from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor, Piece, ShardMap

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What torch's writer of Hugging Face's files calls the file of a rank.
_OF_A_RANK = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors$")
# Where that writer says which part of each tensor a file holds.
_PARTS = "DCP_SHARDING_INFO"


def find_safetensors(folder: Path) -> list[str]:
    """Return the names of the files that make up a model or an adapter, none where there is none.

    Collective: none.
    """
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    of_ranks = [name for name in names if _OF_A_RANK.match(name)]
    if of_ranks:
        return of_ranks
    if SINGLE in names:
        return [SINGLE]
    if (folder / INDEX).is_file():
        return sorted(set(_weight_map(folder).values()))
    return [ADAPTER_FILE] if ADAPTER_FILE in names else []


def read_safetensors(path: Path) -> ShardMap:
    """Return the map of one file, or of a folder with a model or an adapter.

    Raises:
        ValueError: A file is missing, cut short or says what cannot be, or the index and the files
            do not agree.

    Collective: none.
    """
    root, names = (path.parent, [path.name]) if path.is_file() else (path, find_safetensors(path))
    absent = [name for name in names if not (root / name).is_file()]
    if absent:
        raise ValueError(
            f"{root / INDEX} names {absent[0]}, and {root} has no such file ({len(absent)} of "
            f"{len(names)} are missing). Copy the folder again."
        )
    headers = {name: checked_header(root / name) for name in names}
    of_ranks = bool(_OF_A_RANK.match(names[0]))
    tensors = _parts(root, headers) if of_ranks else _whole(root, headers)
    if not of_ranks and path.is_dir() and (root / INDEX).is_file() and names != [SINGLE]:
        _check_index(root, headers)
    files = {name: (root / name).stat().st_size for name in names}
    adapter = names == [ADAPTER_FILE]
    extra = ADAPTER_CONFIG if adapter else INDEX
    if (root / extra).is_file() and not of_ranks and path.is_dir():
        files[extra] = (root / extra).stat().st_size
    note = "The number of ranks is said nowhere: rows that a last file held would not be missed."
    return ShardMap(
        root,
        "peft" if adapter else "safetensors",
        tensors,
        files=files,
        world_size=len(names) if of_ranks else None,
        notes=[note] if of_ranks else [],
    )


def checked_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of one file after checking that they fill it without gap or overlap.

    Raises:
        ValueError: They do not, or the file is no safetensors file.

    Collective: none.
    """
    try:
        found = read_header(path)
    except (
        json.JSONDecodeError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        UnicodeDecodeError,
    ) as error:
        raise ValueError(
            f"{path} is no whole safetensors file: {error!r}. Copy it again."
        ) from error
    size = path.stat().st_size
    at = 8 + int.from_bytes(_first_bytes(path), "little")
    for name, tensor in sorted(found.items(), key=lambda pair: (pair[1].offset, _bytes(pair[1]))):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{path} holds {name} in {tensor.dtype}, which is not read here.")
        if tensor.offset != at:
            raise ValueError(
                f"{path} has {name} at byte {tensor.offset}, and the one before it ends at {at}. "
                "Its header is damaged: copy it again."
            )
        at += _bytes(tensor)
    if at != size:
        raise ValueError(
            f"{path} has {size} bytes, and its tensors end at byte {at}. Copy it again."
        )
    return found


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def _bytes(tensor: FileTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[DTYPES.get(tensor.dtype, "uint8")]


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / INDEX} is no index of safetensors ({error!r}). Copy the folder again."
        ) from error


def _check_index(root: Path, headers: Mapping[str, Mapping[str, FileTensor]]) -> None:
    said, held = _weight_map(root), {n: file for file, found in headers.items() for n in found}
    for name in sorted({*said, *held}):
        if said.get(name) != held.get(name):
            raise ValueError(
                f"{root / INDEX} puts {name} in {said.get(name, 'no file')}, and it is in "
                f"{held.get(name, 'no file')}. Copy the folder again."
            )


def _whole(root: Path, headers: Mapping[str, Mapping[str, FileTensor]]) -> dict[str, LogicalTensor]:
    tensors: dict[str, LogicalTensor] = {}
    for file, found in headers.items():
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise ValueError(
                f"{root / file} holds {len(twice)} tensors that another of the {len(headers)} "
                f"files holds too, such as {twice[0]}. Remove the file that is stale."
            )
        for name, tensor in found.items():
            start = (0,) * len(tensor.shape)
            piece = Piece(file, tensor.offset, start, tensor.shape)
            tensors[name] = LogicalTensor(name, tensor.shape, DTYPES[tensor.dtype], (piece,))
    return tensors


def _parts(root: Path, headers: Mapping[str, Mapping[str, FileTensor]]) -> dict[str, LogicalTensor]:
    """Return the tensors of files that hold a part of each, one file for each rank."""
    _check_numbers(root, list(headers))
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, set[str]] = {}
    for file, found in headers.items():
        starts = _starts(root / file)
        for name, tensor in found.items():
            start = tuple(starts.get(name, {}).get("saved_offsets", (0,) * len(tensor.shape)))
            pieces.setdefault(name, []).append(Piece(file, tensor.offset, start, tensor.shape))
            dtypes.setdefault(name, set()).add(DTYPES[tensor.dtype])
    tensors = {}
    for name, parts in pieces.items():
        dims = {len(part.shape) for part in parts} | {len(part.start) for part in parts}
        if len(dims) > 1 or len(dtypes[name]) > 1:
            raise ValueError(
                f"{root} holds {name} in parts of {len(dims)} numbers of dims and "
                f"{len(dtypes[name])} dtypes. Its files do not belong together."
            )
        ends = [[a + b for a, b in zip(p.start, p.shape, strict=True)] for p in parts]
        shape = tuple(map(max, zip(*ends, strict=True)))
        ordered = tuple(sorted(parts, key=lambda part: part.start))
        tensors[name] = LogicalTensor(name, shape, dtypes[name].pop(), ordered)
    return tensors


def _check_numbers(root: Path, names: Sequence[str]) -> None:
    numbers = [int(match[1]) for name in names if (match := _OF_A_RANK.match(name))]
    lost = sorted(set(range(1, max(numbers) + 1)) - set(numbers))
    if lost:
        raise ValueError(
            f"{root} holds the files of {len(numbers)} ranks, and that of number {lost[0]} of "
            f"{max(numbers)} is missing. Copy the folder again."
        )


def _starts(path: Path) -> dict[str, dict[str, Sequence[int]]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    said = header.get("__metadata__", {}).get(_PARTS)
    found: dict[str, dict[str, Sequence[int]]] = json.loads(said) if said else {}
    return found
