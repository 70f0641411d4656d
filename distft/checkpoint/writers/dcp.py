"""torch's distributed checkpoint format, written without torch; its own loader reads it.

Every item of a ``.distcp`` file is an archive of one tensor, and ``.metadata`` says where each
chunk of which tensor lies. Source: ``torch/distributed/checkpoint/metadata.py`` and
``filesystem.py`` of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.shards import LogicalTensor
from distft.checkpoint.writers.pickled import Call, Global, Pairs, Pickled, Stored, size_of
from distft.checkpoint.writers.torch_zip import Archives

METADATA = ".metadata"
_FIRST_FILE = "__0_0.distcp"
_VERSION = "1.0.0"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_CONTIGUOUS = Call(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))


@dataclass(frozen=True)
class DcpFolder:
    """What is to be written: the archives of all chunks, and the metadata."""

    archives: Archives
    metadata: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self.archives.num_bytes + len(self.metadata)

    def write(
        self,
        root: Path,
        folder: Path,
        max_ram: int,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Write the files into a folder; see `Archives.write`.

        Collective: none.
        """
        self.archives.write(root, folder, max_ram, advance)
        (folder / METADATA).write_bytes(self.metadata)


@dataclass(frozen=True, slots=True)
class Value:
    """An item that is no tensor."""

    value: Any


def plan_dcp(
    items: Mapping[str, LogicalTensor | Stored | Value],
    num_files: int,
    paths: Mapping[str, tuple[Any, ...]] | None = None,
) -> DcpFolder:
    """Return a folder that holds tensors under names, rows dealt out to files.

    File ``i`` of ``n`` gets rows ``i * ceil(R / n)`` to ``(i + 1) * ceil(R / n)`` of ``R``, as
    ``torch.chunk`` deals them to ranks; no mesh is written down, and any can read it.

    Args:
        items: Tensors by name; one whose bytes are known is a `Stored`.
        num_files: Number of files.
        paths: Keys under which each item was in a nest of dicts; by default its name alone.

    Raises:
        ValueError: There is a tensor of a dtype that torch has no storage for.

    Collective: none.
    """
    archives, chunks, values = Archives(), list[Chunk](), list[Chunk]()
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, item in items.items():
        if isinstance(item, Value):
            place = archives.add(_FIRST_FILE, item.value)
            values.append(Chunk(name, (), (), _FIRST_FILE, *place))
            continue
        described[name] = item.dtype, item.shape
        for number, start, shape in _rows(item.shape, num_files):
            if isinstance(item, Stored):
                stored = item
            else:
                first = start[0] * math.prod(shape[1:]) if start else 0
                stored = Stored(item.dtype, shape, item, first)
            file = f"__{number}_0.distcp"
            chunks.append(Chunk(name, start, shape, file, *archives.add(file, stored)))
    return DcpFolder(archives, make_metadata(described, chunks, values, paths))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: the name, where it begins, its shape, and the place of its archive."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


def make_metadata(
    items: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Sequence[Chunk],
    values: Sequence[Chunk] = (),
    paths: Mapping[str, tuple[Any, ...]] | None = None,
) -> bytes:
    """Return the bytes of ``.metadata``.

    Args:
        items: Dtype and shape of each tensor.
        chunks: What they are made of.
        values: Where items lie that are no tensors.
        paths: Keys under which each item was in a nest of dicts; by default its name alone.

    Collective: none.
    """
    boxes: dict[str, list[Any]] = {name: [] for name in items}
    places: list[tuple[Any, Any]] = []
    for chunk in chunks:
        start, known = size_of(chunk.start), boxes[chunk.name]
        index = {"fqn": chunk.name, "offset": start, "index": len(known)}
        known.append(
            _made("ChunkStorageMetadata", {"offsets": start, "sizes": size_of(chunk.shape)})
        )
        places.append(_placed(index, chunk))
    described = {
        name: _made(
            "TensorStorageMetadata",
            {
                "properties": _made(
                    "TensorProperties",
                    (Global("torch", dtype), _STRIDED, False, _CONTIGUOUS, False),
                ),
                "size": size_of(shape),
                "chunks": boxes[name],
            },
        )
        for name, (dtype, shape) in items.items()
    }
    for value in values:
        described[value.name] = _made("BytesStorageMetadata", {})
        places.append(_placed({"fqn": value.name, "offset": None, "index": None}, value))
    metadata = _made(
        "Metadata",
        {
            "state_dict_metadata": described,
            "planner_data": {name: (paths or {}).get(name, (name,)) for name in described},
            "storage_data": Pairs(places),
            "version": _VERSION,
        },
    )
    return Pickled(metadata).data


def _made(name: str, state: Any) -> Call:
    return Call(Global(_METADATA_MODULE, name), (), state, new=True)


def _placed(index: Mapping[str, Any], chunk: Chunk) -> tuple[Any, Any]:
    """Return an index of a chunk or a value, and where its archive lies."""
    place = {"relative_path": chunk.file, "offset": chunk.offset, "length": chunk.length}
    info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return _made("MetadataIndex", index), Call(info, (), place, new=True)


def _rows(
    shape: tuple[int, ...], num_files: int
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return file number, first index and shape of each chunk that has elements."""
    if not shape or 0 in shape:
        return [(0, (0,) * len(shape), shape)]
    rows = -(-shape[0] // num_files)
    rest = (0,) * (len(shape) - 1)
    return [
        (number, (low, *rest), (min(rows, shape[0] - low), *shape[1:]))
        for number, low in enumerate(range(0, shape[0], rows))
    ]
