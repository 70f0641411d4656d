"""Safetensors files: where each tensor lies, and reading parts of them straight into place."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Bytes that are in memory twice while a tensor is read.
BUFFER_BYTES = 4 * 2**20

# The format's names of dtypes, and torch's.
DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor in a file: its numbers follow each other from a byte on, the last dim fastest.

    Attributes:
        file: The file.
        dtype: The format's name of the dtype, such as ``"BF16"``.
        shape: Its shape.
        offset: Byte of the file where it begins.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def list_tensors(folder: Path) -> dict[str, FileTensor]:
    """Return every tensor of a model's folder by its name; reads the files' headers alone.

    Raises:
        ValueError: There are no safetensors files, one is missing or cut short, or the index names
            a tensor that its file does not hold.

    Collective: none.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} holds neither {SINGLE} nor {INDEX}. "
            "Pass a folder that save_pretrained or distft.consolidate wrote."
        )
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    found: dict[str, FileTensor] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / INDEX} names {name}, and {folder} has no such file. "
                "Copy the folder again."
            )
        found.update(read_header(folder / name))
    lost = sorted(name for name, file in weight_map.items() if name not in found)
    if lost:
        raise ValueError(
            f"{folder / INDEX} puts {lost[0]} in {weight_map[lost[0]]}, which does not hold it "
            f"({len(lost)} of {len(weight_map)} tensors). Copy the folder again."
        )
    return found


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of one file by name.

    Raises:
        ValueError: The file is cut short.

    Collective: none.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{path} has {size} bytes, and its header alone needs {length + 8}. "
                "It is cut short or no safetensors file: copy it again."
            )
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise ValueError(
            f"{path} has {size} bytes, and its header promises {end}. "
            "It is cut short: copy it again."
        )
    return {
        name: FileTensor(
            path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


class Reader:
    """Reads ranges of tensors through one small buffer, so that nothing is in memory twice.

    A context manager: it keeps the files open until it ends.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = bytearray(0)
        self.num_bytes = 0

    def __enter__(self) -> Reader:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files and free the buffer."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._buffer = bytearray(0)

    def fill(self, pieces: Sequence[FileTensor], start: int, out: Tensor) -> None:
        """Fill a contiguous tensor, casting on the way.

        Args:
            pieces: Tensors whose elements, one after another, make up a whole.
            start: The element of that whole with which ``out`` begins.
            out: Where to write, on any device, of any dtype.

        Raises:
            RuntimeError: A file ends too early.

        Collective: none.
        """
        flat = out.detach().view(-1)
        stop = start + flat.numel()
        begin = 0
        for piece in pieces:
            first, last = max(start, begin), min(stop, begin + piece.num_elements)
            if first < last:
                self._copy(piece, first - begin, flat[first - start : last - start])
            begin += piece.num_elements

    def _copy(self, piece: FileTensor, first: int, flat: Tensor) -> None:
        import torch

        dtype = getattr(torch, DTYPES[piece.dtype])
        if not self._buffer:
            self._buffer = bytearray(BUFFER_BYTES)
        step = BUFFER_BYTES // dtype.itemsize
        for low in range(0, flat.numel(), step):
            count = min(step, flat.numel() - low)
            part = memoryview(self._buffer)[: count * dtype.itemsize]
            self._read(piece.file, piece.offset + (first + low) * dtype.itemsize, part)
            source = torch.frombuffer(self._buffer, dtype=dtype, count=count)
            flat[low : low + count].copy_(source)

    def _read(self, path: Path, offset: int, part: Any) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        done = 0
        while done < len(part):
            got = os.preadv(self._files[path], [part[done:]], offset + done)
            if got == 0:
                raise RuntimeError(
                    f"{path} ended at byte {offset + done}, and {offset + len(part)} were wanted. "
                    "It changed while it was read: load again."
                )
            done += got
        self.num_bytes += done
