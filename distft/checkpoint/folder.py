"""The folder of a checkpoint: its manifest, and finding one."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from distft.mesh import DENSE_AXES

MANIFEST = "distft.json"
FORMAT_VERSION = 2
# Files had CRC-32 in the first.
_READABLE = (1, FORMAT_VERSION)
DCP, DEEPSPEED = "dcp", "deepspeed"
LAYOUTS = (DCP, DEEPSPEED)
STATE_FILE = "state.pt"
# The parts of the state file.
TRAIN_STATE = ("groups", "scalars", "scheduler", "data")
# A file is hashed in such pieces, which stay in the cache.
_PIECE = 1 << 20
_CHECKSUM = "manifest_crc32"
# Folders that hold one checkpoint of several, in the spelling of each tool.
NUMBERED = re.compile(r"(?:checkpoint|step|global_step)[-_]?(\d+)$")


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and checksum of one file of a checkpoint.

    Attributes:
        size: Bytes.
        xxh3: XXH3 of 64 bits, 16 hexadecimal digits; "" in saves of before.
        crc32: CRC-32 in saves of before, else None.
    """

    size: int
    xxh3: str = ""
    crc32: int | None = None

    @property
    def checksum(self) -> str:
        """The checksum with its name."""
        if self.crc32 is not None:
            return f"CRC-32 {self.crc32:08x}"
        return f"XXH3 {self.xxh3}"

    def to_fields(self) -> dict[str, Any]:
        """Return what the manifest says of the file."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


@dataclass(frozen=True)
class Manifest:
    """What ``distft.json`` says of a checkpoint; it is written last.

    Attributes:
        step: Optimizer steps made.
        strategy: Name of the strategy that wrote it, and `repr` of its constructor.
        layout: Which folder holds the state: ``dcp`` or ``deepspeed``.
        mesh: Size of each axis.
        files: Every other file of the folder by its relative path.
        tensors: Shape and dtype of each parameter and persistent buffer by name.
        ties: Names that share another name's tensor.
        trainable: Names of the parameters that were trained.
        dtype: Dtype of the trained weights as the optimizer holds them.
        optimizer: Class name of the optimizer.
        optimizer_state: Names of the state tensors of each parameter (dcp alone).
        versions: Versions of the packages that wrote it.
        extra: The caller's own values.
        ranges: Archives of the parts of each tensor of the state: file, first byte, number of
            bytes, XXH3 of them (of a save in training with the layout dcp).
        run: What a run has in common, also after a load; "" where nobody said.
        folder: Name of the folder as the run wrote it; "" where something else wrote it.
    """

    step: int
    strategy: Mapping[str, str]
    layout: str
    mesh: Mapping[str, int]
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, Mapping[str, Any]]
    ties: Mapping[str, str]
    trainable: Sequence[str]
    dtype: str
    optimizer: str
    optimizer_state: Mapping[str, Sequence[str]]
    versions: Mapping[str, str]
    extra: Mapping[str, Any]
    ranges: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    run: str = ""
    folder: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return math.prod(self.mesh.get(axis, 1) for axis in DENSE_AXES)

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different rows when it was written."""
        return self.world_size // self.mesh.get("tp", 1)

    def to_json(self) -> str:
        """Return the text of ``distft.json``, whose own checksum stands at its end."""
        files = {name: saved.to_fields() for name, saved in self.files.items()}
        fields = {"format_version": FORMAT_VERSION, **asdict(self), "files": files}
        return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1)


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields).encode())


def describe_file(path: Path, by_crc32: bool = False) -> SavedFile:
    """Return size and checksum of a file, read in pieces of 1 MiB.

    Args:
        path: The file.
        by_crc32: Whether it is to be compared with a save of before, which has CRC-32.

    Collective: none.
    """
    with path.open("rb", buffering=0) as file:
        if not by_crc32:
            hashed = hash_bytes(file)
            return SavedFile(file.tell(), hashed)
        crc = 0
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
        return SavedFile(file.tell(), crc32=crc)


def hash_bytes(file: FileIO, size: int | None = None) -> str:
    """Return the XXH3 of the next bytes of a file, 16 hexadecimal digits; of all without ``size``.

    Collective: none.
    """
    from xxhash import xxh3_64

    hashed, left = xxh3_64(), size
    buffer = memoryview(bytearray(_PIECE))
    while left is None or left:
        got = file.readinto(buffer if left is None else buffer[: min(left, _PIECE)])
        if not got:
            break
        hashed.update(buffer[:got])
        left = None if left is None else left - got
    return hashed.hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint folder after checking that its files are all there.

    Raises:
        ValueError: There is no folder, no manifest, a manifest of a later format, or a file is
            missing or has another size.

    Collective: none.
    """
    file = path / MANIFEST
    if not file.is_file():
        what = "no folder" if not path.is_dir() else f"no {MANIFEST} among its files"
        raise ValueError(
            f"{path} is not a complete checkpoint: there is {what}. "
            "Pass a folder that Strategy.save returned; distft.latest(root) finds one."
        )
    try:
        fields = json.loads(file.read_text())
        # Saves of before had none.
        said = fields.pop(_CHECKSUM, None)
        now = _checksum(fields)
        version = fields.pop("format_version")
        if version in _READABLE and said not in (None, now):
            raise ValueError(f"its checksum is {now}, and it says {said}")
        # A later format may have other fields, so its version is looked at before them.
        manifest = _manifest(fields) if version in _READABLE else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a whole manifest: {error}. Use another checkpoint.") from (
            error
        )
    if manifest is None:
        raise ValueError(
            f"{file} has format {version}, and this version reads {FORMAT_VERSION}. Upgrade distft."
        )
    for name, saved in manifest.files.items():
        member = path / name
        size = member.stat().st_size if member.is_file() else None
        if size != saved.size:
            state = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(
                f"{name} {state}, and {MANIFEST} says {saved.size} bytes; searched {path}. "
                "The checkpoint is incomplete: use another one."
            )
    return manifest


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    files = {name: SavedFile(**saved) for name, saved in fields["files"].items()}
    if not isinstance(fields["step"], int) or not isinstance(fields["mesh"], dict):
        raise TypeError(f"step is {fields['step']!r} and mesh {fields['mesh']!r}")
    return Manifest(**{**fields, "files": files})


def temporary_name(name: str, nonce: str) -> str:
    """Return the name under which a checkpoint is written before it is whole."""
    return f".{name}.{nonce}.tmp"


def removed_name(name: str, nonce: str) -> str:
    """Return the name under which a checkpoint is deleted."""
    return f".{name}.{nonce}.old"


def converted_name(name: str, nonce: str) -> str:
    """Return the name under which another format of a checkpoint is written."""
    return f".{name}.{nonce}.convert"


def is_temporary(path: Path) -> bool:
    """Return whether a folder has the name of a write that never ended, or is half deleted."""
    return path.name.startswith(".") and path.name.endswith((".tmp", ".old", ".convert"))


def is_complete(path: Path) -> bool:
    """Return whether a folder is a checkpoint with all its files.

    Collective: none.
    """
    try:
        read_manifest(path)
    except ValueError:
        return False
    return True


def latest(root: str | Path) -> Path | None:
    """Return the complete checkpoint with the highest step directly below ``root``, or None.

    Completeness is read off the folders themselves, so a run that died while saving leaves
    nothing to mend.

    Collective: none.
    """
    found = complete_below(Path(root))
    return found[-1][1] if found else None


def complete_below(root: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every complete checkpoint directly below one, oldest first.

    Collective: none.
    """
    found = []
    for path in _folders_below(root):
        # One may go in between, as old ones do.
        with suppress(ValueError, OSError):
            found.append((read_manifest(path).step, path))
    return sorted(found)


def _folders_below(root: Path) -> list[Path]:
    found = sorted(root.iterdir()) if root.is_dir() else []
    return [path for path in found if path.is_dir() and not is_temporary(path)]


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint folder that a path means.

    It may be the checkpoint, the folder inside that holds the state, or a run's root, which
    means its latest checkpoint.

    Raises:
        ValueError: There is none; the message says what was searched.

    Collective: none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        read_manifest(path)
        return path
    if path.name in LAYOUTS and (path.parent / MANIFEST).is_file():
        read_manifest(path.parent)
        return path.parent
    below = latest(path)
    if below is not None:
        return below
    below_it = _folders_below(path)
    for child in below_it:
        if (child / MANIFEST).is_file():
            read_manifest(child)
    what = f"neither it nor the {len(below_it)} folders in it have one"
    if not path.is_dir():
        what = "there is no such folder"
    raise ValueError(
        f"No checkpoint at {path}: searched it for {MANIFEST}, and {what}. "
        "Pass a folder that Strategy.save returned, or the folder above it."
    )


def newest_numbered(folder: Path) -> Path | None:
    """Return the folder below one that other tools would have numbered highest, or None.

    Collective: none.
    """
    found = [
        (int(match[1]), child)
        for child in folder.iterdir()
        if child.is_dir() and (match := NUMBERED.search(child.name))
    ]
    return max(found)[1] if found else None
