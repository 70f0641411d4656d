"""Items of torch's distributed checkpoint: where each chunk of a tensor lies, kept small.

A chunk is a torch zip of its own inside a ``.distcp`` file. The metadata says where the zip begins;
where the numbers begin in it, only the zip knows. It is looked at when its piece is first wanted.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.torch_zip import TorchZip, opened
from distft.checkpoint.readers.unpickle import StoredTensor
from distft.checkpoint.shards import Piece

# Not looked at yet.
_UNKNOWN = -1


class Chunks:
    """The chunks of one tensor, as arrays: 100,000 objects of Python would take 50 MB and more.

    Args:
        root: Folder that files are relative to.
        name: Name of the tensor, for errors.
        dtype: torch's name of the dtype.
        dims: Number of dims of the tensor.
    """

    def __init__(self, root: Path, name: str, dtype: str, dims: int) -> None:
        self._root, self._name, self._dtype, self._dims = root, name, dtype, dims
        self._files: list[str] = []
        # Of each chunk: its file's number, begin and length of its zip, begin of its numbers.
        self._places = array("q")
        # Of each chunk: start and shape.
        self._blocks = array("q")
        self._strides: dict[int, tuple[int, ...]] = {}

    def add(
        self, file: str, offset: int, length: int, start: Sequence[int], shape: Sequence[int]
    ) -> None:
        """Add one chunk; in the order of their starts.

        Collective: none.
        """
        if file not in self._files:
            self._files.append(file)
        self._places.extend((self._files.index(file), offset, length, _UNKNOWN))
        self._blocks.extend((*start, *shape))

    def __len__(self) -> int:
        return len(self._places) // 4

    def __iter__(self) -> Iterator[Piece]:
        with ExitStack() as stack:
            descriptors: dict[str, int] = {}
            for index in range(len(self)):
                number, offset, length, begin = self._places[4 * index : 4 * index + 4]
                block = self._blocks[2 * self._dims * index : 2 * self._dims * (index + 1)]
                start, shape = tuple(block[: self._dims]), tuple(block[self._dims :])
                if not math.prod(shape):
                    continue
                file = self._files[number]
                if begin == _UNKNOWN:
                    if file not in descriptors:
                        descriptors[file] = stack.enter_context(opened(self._root / file))
                    found = self._look(file, descriptors[file], offset, length, shape)
                    begin = self._places[4 * index + 3] = found.offset
                    if found.strides is not None:
                        self._strides[index] = found.strides
                yield Piece(file, begin, start, shape, strides=self._strides.get(index))

    def _look(
        self, file: str, descriptor: int, offset: int, length: int, shape: tuple[int, ...]
    ) -> StoredTensor:
        path = self._root / file
        found = read_item(path, file, descriptor, offset, length)
        said = f"{self._dtype} of shape {shape}"
        if not isinstance(found, StoredTensor):
            there = f"a {type(found).__name__}"
        else:
            there = f"{found.dtype} of shape {found.shape}"
        if not isinstance(found, StoredTensor) or there != said:
            raise ValueError(
                f"{path} holds {there} at byte {offset}, and the metadata says {said} of "
                f"{self._name} there. Its files do not belong together: use another checkpoint."
            )
        return found

    def broken_items(self) -> tuple[list[str], int]:
        """Return where chunks are not what their CRCs were made of, and the bytes that were read.

        Collective: none.
        """
        broken, read = [], 0
        for index in range(len(self)):
            number, offset, length, _ = self._places[4 * index : 4 * index + 4]
            file = self._files[number]
            with opened(self._root / file) as descriptor:
                archive = TorchZip(self._root / file, file, descriptor, offset, length)
                if archive.has_checksums():
                    read += length
                    records = archive.broken_records()
                    broken += [f"at byte {offset} of {file} ({record})" for record in records]
        return broken, read

    def stored(self) -> StoredTensor:
        """Return the only chunk, as what it is in its file.

        Collective: none.
        """
        number, offset, length, _ = self._places[:4]
        file = self._files[number]
        with opened(self._root / file) as descriptor:
            return self._look(file, descriptor, offset, length, tuple(self._blocks[self._dims :]))


def read_item(path: Path, name: str, descriptor: int, offset: int, length: int) -> Any:
    """Return what one item describes, a tensor as `StoredTensor`.

    Raises:
        ValueError: It is no whole torch zip, or asks for more than a checkpoint needs.

    Collective: none.
    """
    return TorchZip(path, name, descriptor, offset, length).load()


def inside(folder: Path, name: str) -> Path:
    """Return the file of a folder that its metadata names.

    Raises:
        ValueError: The name leads out of the folder, or no such file is there.

    Collective: none.
    """
    file = folder / name
    if os.path.isabs(name) or file.resolve().parent != folder.resolve():
        raise ValueError(
            f"{folder} keeps items in {name}, which is not 1 file inside it. "
            "Do not open this folder."
        )
    if not file.is_file():
        raise ValueError(f"{folder} lacks {name}, which its metadata names. Copy the folder again.")
    return file
