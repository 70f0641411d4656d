"""Readers of every checkpoint format; each returns a shard map."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distft.checkpoint.folder import LAYOUTS, MANIFEST, find_checkpoint, newest_numbered
from distft.checkpoint.readers.dcp import METADATA, find_dcp, read_dcp
from distft.checkpoint.readers.deepspeed import MODEL_STATES, read_deepspeed, tag_folder
from distft.checkpoint.readers.distft import read_distft
from distft.checkpoint.readers.safetensors import ADAPTER_FILE, find_safetensors, read_safetensors
from distft.checkpoint.readers.state_dict import INDEX, SINGLE, read_state_dict
from distft.checkpoint.shards import ShardMap

# What a description leads to that was changed in one place and still is one.
_DAMAGE = (TypeError, KeyError, IndexError, AttributeError, OverflowError)
# What PEFT wrote before safetensors.
ADAPTER_PICKLE = "adapter_model.bin"
_FILES = (".pt", ".pth", ".bin")


class UnknownFormat(ValueError):
    """Nothing of a known format is at a path."""


def read_map(path: str | Path) -> ShardMap:
    """Return what a checkpoint of any format holds, as a shard map; no tensor is read.

    Args:
        path: A checkpoint's folder, the folder inside it that holds the state, a run's root, which
            means its latest checkpoint, or one file of weights.

    Raises:
        ValueError: There is no checkpoint of a known format, or it is broken; what was looked for,
            or what is wrong, is named.

    Collective: none.
    """
    path = Path(path).absolute()
    try:
        found = _read(path)
    except _DAMAGE as error:
        raise ValueError(
            f"{path} describes what no checkpoint holds ({type(error).__name__}: {error}). "
            "Its files are damaged, or of a tool that is not known here: use another checkpoint."
        ) from error
    _check_names(path, found)
    return found


def _check_names(path: Path, found: ShardMap) -> None:
    """Refuse names that lead out of a folder: some formats make files that tensors name."""
    for kind, names in (("file", found.files), ("tensor", found.tensors), ("tensor", found.ties)):
        for name in names:
            if name.startswith("/") or "\0" in name or ".." in name.split("/"):
                raise ValueError(
                    f"{path} names the {kind} {name!r}, which would lead out of its folder. No "
                    "tool writes that: do not use this checkpoint."
                )


def is_of_distft(path: Path) -> bool:
    """Return whether a path means a checkpoint of distft, complete or not.

    Collective: none.
    """
    inside = path.name in LAYOUTS and (path.parent / MANIFEST).is_file()
    return inside or (path / MANIFEST).is_file() or any(path.glob(f"*/{MANIFEST}"))


def _read(path: Path) -> ShardMap:
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise UnknownFormat(
            f"No checkpoint at {path}: there is no such folder. Pass one that exists."
        )
    if is_of_distft(path):
        return read_distft(find_checkpoint(path))
    tag = tag_folder(path)
    if tag is not None:
        return read_deepspeed(path, tag)
    halves = find_dcp(path)
    if halves or any(path.glob("*.distcp")):
        return read_dcp(halves or [path])
    if find_safetensors(path):
        return read_safetensors(path)
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        return read_state_dict(path)
    if (path / ADAPTER_PICKLE).is_file():
        return replace(read_state_dict(path / ADAPTER_PICKLE), format="peft")
    below = newest_numbered(path)
    if below is not None:
        return read_map(below)
    raise _unknown(path)


def _read_file(path: Path) -> ShardMap:
    if path.suffix in _FILES:
        return read_state_dict(path)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    raise ValueError(
        f"{path} is none of {', '.join(_FILES)}, .safetensors. Pass the folder of a checkpoint."
    )


def _unknown(path: Path) -> UnknownFormat:
    names = sorted(member.name for member in path.iterdir())
    return UnknownFormat(
        f"No checkpoint at {path}: nothing known among its {len(names)} files and folders"
        f"{' (' + ', '.join(names[:5]) + ')' if names else ''}. Looked for {MANIFEST} (distft), "
        f"*{MODEL_STATES} (DeepSpeed), {METADATA} (torch's distributed checkpoint, also in "
        f"pytorch_model_fsdp_0), model*.safetensors, {ADAPTER_FILE}, "
        f"{ADAPTER_PICKLE} (PEFT), {SINGLE}, and folders checkpoint-N, step-N, global_stepN. "
        "Pass the folder that holds one of these."
    )
