"""Safetensors files as transformers names and splits them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.copy import Budget, Output, check_disk, copy_outputs, make_files
from distft.checkpoint.safetensors_reader import DTYPES, INDEX, SINGLE
from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor

# The format's name of each dtype.
_CODES = {name: code for code, name in DTYPES.items()} | {
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
# The header is padded so that data begins, and every tensor lies, on a multiple of 8 bytes or of
# its item, whichever is smaller.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Published:
    """A tensor as it is to be written: a range of a logical one under a name and a shape.

    Attributes:
        name: Its name in the file.
        shape: Its shape there.
        dtype: Its dtype there.
        tensor: Where its elements come from.
        start: Element of the flattened logical tensor with which it begins.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensor: LogicalTensor
    start: int = 0

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Files:
    """What is to be written: sizes and first bytes of files, the ranges in them, and an index."""

    sizes: Mapping[str, int]
    headers: Mapping[str, bytes]
    outputs: Sequence[Output]
    index: Mapping[str, Any] | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def write(
        self,
        root: Path,
        folder: Path,
        max_ram: int,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Write the files into a folder.

        Args:
            root: Folder that the pieces' files are relative to.
            folder: An existing folder without these files.
            max_ram: Bytes of memory that may be added.
            advance: Called with the number of bytes after each window.

        Raises:
            ValueError: The memory or the disk is too small, or a tensor has a gap.
            RuntimeError: A source file ends too early.
            OSError: A file cannot be read or written.

        Collective: none.
        """
        budget = Budget.within(max_ram, sum(map(len, self.headers.values())))
        check_disk(folder, self.num_bytes)
        make_files(folder, self.sizes, self.headers)
        copy_outputs(root, folder, self.outputs, budget, advance)
        if self.index is not None:
            text = json.dumps(self.index, indent=2, sort_keys=True) + "\n"
            (folder / INDEX).write_text(text, encoding="utf-8")


def plan_files(
    tensors: Sequence[Published],
    max_shard_bytes: int,
    single: str = SINGLE,
    metadata: Mapping[str, str] | None = None,
) -> Files:
    """Return the files that hold tensors, none larger than a size unless one tensor is.

    A file is closed when the next tensor would make it too large, as ``save_pretrained`` does;
    several files are named ``model-00001-of-0000N.safetensors`` and have an index.

    Args:
        tensors: In the order of the model.
        max_shard_bytes: Most bytes of tensors in one file.
        single: Name of a file that is alone.
        metadata: What the header of each file says beside its format.

    Raises:
        ValueError: Two tensors have one name, one has no element, or the format lacks the dtype.

    Collective: none.
    """
    _check(tensors)
    parts: list[list[Published]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.num_bytes > max_shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.num_bytes
    stem = single.removesuffix(".safetensors")
    names = [single]
    if len(parts) > 1:
        names = [
            f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
            for number in range(1, len(parts) + 1)
        ]
    sizes, headers, outputs = dict[str, int](), dict[str, bytes](), list[Output]()
    for name, part in zip(names, parts, strict=True):
        # Larger items first, so that each tensor lies where its items may.
        part.sort(key=lambda tensor: -ITEM_BYTES[tensor.dtype])
        headers[name] = _header(part, metadata or {})
        offset = len(headers[name])
        for tensor in part:
            outputs.append(
                Output(name, offset, tensor.tensor, tensor.dtype, tensor.start, tensor.num_elements)
            )
            offset += tensor.num_bytes
        sizes[name] = offset
    index = None
    if len(parts) > 1:
        homes = zip(names, parts, strict=True)
        index = {
            "metadata": {
                "total_parameters": sum(tensor.num_elements for tensor in tensors),
                "total_size": sum(tensor.num_bytes for tensor in tensors),
            },
            "weight_map": {tensor.name: name for name, part in homes for tensor in part},
        }
    return Files(sizes, headers, outputs, index)


def _check(tensors: Sequence[Published]) -> None:
    seen = set[str]()
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(
                f"{tensor.name} would be written twice among {len(tensors)} tensors. "
                "Rename one of the two with rename=."
            )
        seen.add(tensor.name)
        if tensor.dtype not in _CODES:
            raise ValueError(
                f"{tensor.name} is {tensor.dtype}, and safetensors has {len(_CODES)} other dtypes. "
                "Write it in another one with dtype=."
            )
    empty = [tensor.name for tensor in tensors if tensor.num_elements == 0]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(tensors)} tensors have no element, such as {empty[0]}: one "
            "rank's placeholders were saved, not the model. Use a checkpoint saved by all ranks."
        )


def _header(tensors: Sequence[Published], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
