"""Archives that ``torch.load`` reads, written without torch, tensors streamed into their places.

An archive is a zip of uncompressed entries: ``data.pkl``, the storages ``data/0``, ``data/1``, ...
and a few words about the format. Source: PKWARE's APPNOTE 6.3.10, 4.3 (layout) and 4.5.3 (sizes of
64 bits); ``caffe2/serialize/inline_container.cc`` of torch (names, and data on multiples of 64).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distft.checkpoint.copy import Budget, Output, check_disk, copy_outputs, make_files
from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor
from distft.checkpoint.writers.checksums import Range, Storage
from distft.checkpoint.writers.pickled import Part, Pickled, Stored

_ALIGNMENT = 64
_BIG, _MANY = 0xFFFFFFFF, 0xFFFF
# Where the CRC stands in the header of an entry and in its line of the directory.
_CRC_IN_HEADER, _CRC_IN_DIRECTORY = 14, 16
# Two bytes that mark a field of padding, as torch writes it.
_PADDING = 0x4246


@dataclass(frozen=True)
class Archives:
    """Archives in files of one folder: their fixed bytes, and the ranges that are streamed.

    Attributes:
        fixed: File, offset and bytes of all that is known beforehand.
        outputs: The storages, or parts of them.
        storages: Where the CRC-32 of each storage is written, and what it is of.
        sizes: Bytes of each file so far.
    """

    fixed: list[tuple[str, int, bytes]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, file: str, value: Any, root: str = "archive") -> tuple[int, int]:
        """Append an archive of one value to a file; return where it begins and its length.

        Args:
            file: File, relative to the folder.
            value: What `Pickled` takes.
            root: Name that all entries begin with.

        Collective: none.
        """
        begin = self.sizes.get(file, 0)
        pickled = Pickled(value)
        entries: list[tuple[str, bytes | Stored]] = [("data.pkl", pickled.data)]
        entries += [("byteorder", b"little")]
        entries += [(f"data/{number}", stored) for number, stored in enumerate(pickled.stored)]
        entries += [("version", b"3\n")]
        at, directory = begin, bytearray()
        waiting: list[tuple[int, int, tuple[Range, ...]]] = []
        for name, content in entries:
            header, data_at, line = _entry(f"{root}/{name}".encode(), content, at - begin)
            self.fixed.append((file, at, header))
            data = content if isinstance(content, bytes) else content.content
            if isinstance(data, bytes):
                self.fixed.append((file, begin + data_at, data))
            else:
                assert isinstance(content, Stored)
                ranges = self._add_parts(file, begin + data_at, content)
                waiting.append((at + _CRC_IN_HEADER, len(directory) + _CRC_IN_DIRECTORY, ranges))
            at = begin + data_at + _num_bytes(content)
            directory += line
        self.storages.extend(
            Storage(file, (header, at + line), ranges) for header, line, ranges in waiting
        )
        end = _end(at - begin, len(directory), len(entries))
        self.fixed.append((file, at, bytes(directory) + end))
        self.sizes[file] = at + len(directory) + len(end)
        return begin, self.sizes[file] - begin

    def _add_parts(self, file: str, at: int, stored: Stored) -> tuple[Range, ...]:
        """Add what is streamed into a storage; zeros are what a new file has."""
        parts: Sequence[Part]
        if isinstance(stored.content, LogicalTensor):
            parts = (Part(stored.content, stored.start, _num_elements(stored)),)
        else:
            assert not isinstance(stored.content, bytes)
            parts = stored.content
        ranges, size = [], ITEM_BYTES[stored.dtype]
        for part in parts:
            number = None
            if part.tensor is not None:
                number = len(self.outputs)
                self.outputs.append(
                    Output(file, at, part.tensor, stored.dtype, part.start, part.count)
                )
            ranges.append((number, part.count * size))
            at += part.count * size
        return tuple(ranges)

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
        budget = Budget.within(max_ram, sum(len(data) for *_, data in self.fixed))
        check_disk(folder, self.num_bytes)
        make_files(folder, self.sizes, {})
        _write_all(folder, self.fixed)
        sums = copy_outputs(root, folder, self.outputs, budget, advance, checksums=True)
        _write_all(
            folder,
            (
                (storage.file, place, struct.pack("<I", storage.crc32(sums)))
                for storage in self.storages
                for place in storage.places
            ),
        )


def frame(dtype: str, shape: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    """Return what stands before and after the numbers in an archive of one tensor.

    Args:
        dtype: torch's name of the dtype.
        shape: The shape.
        crc: CRC-32 of the numbers.

    Raises:
        ValueError: torch has no storage for the dtype.

    Collective: none.
    """
    made = Archives()
    _, length = made.add("", Stored(dtype, shape, LogicalTensor("", shape, dtype, [])))
    [output], [storage] = made.outputs, made.storages
    at, size = output.offset, output.num_bytes
    archive = bytearray(length - size)
    for _, offset, data in made.fixed:
        offset -= size if offset >= at else 0
        archive[offset : offset + len(data)] = data
    for place in storage.places:
        struct.pack_into("<I", archive, place - (size if place >= at else 0), crc)
    return bytes(archive[:at]), bytes(archive[at:])


def _write_all(folder: Path, parts: Iterable[tuple[str, int, bytes]]) -> None:
    """Write bytes into existing files, one file open at a time."""
    name, descriptor = "", -1
    try:
        for file, offset, data in parts:
            if file != name:
                if descriptor >= 0:
                    os.close(descriptor)
                name, descriptor = file, os.open(folder / file, os.O_WRONLY)
            os.pwrite(descriptor, data, offset)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _num_elements(stored: Stored) -> int:
    count = 1
    for size in stored.shape:
        count *= size
    return count


def _num_bytes(content: bytes | Stored) -> int:
    if isinstance(content, bytes):
        return len(content)
    return _num_elements(content) * ITEM_BYTES[content.dtype]


def _entry(name: bytes, content: bytes | Stored, at: int) -> tuple[bytes, int, bytes]:
    """Return the header of an entry, where its data begins, and its line of the directory."""
    size = _num_bytes(content)
    fixed = content if isinstance(content, bytes) else content.content
    crc = zlib.crc32(fixed) if isinstance(fixed, bytes) else 0
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    padding = -(at + 30 + len(name) + len(extra) + 4) % _ALIGNMENT
    extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    short, version = min(size, _BIG), 45 if size >= _BIG else 20
    head = (version, 0, 0, 0, 0, crc, short, short, len(name))
    header = struct.pack("<IHHHHHIIIHH", 0x04034B50, *head, len(extra)) + name + extra
    wide = (struct.pack("<QQ", size, size) if size >= _BIG else b"") + (
        struct.pack("<Q", at) if at >= _BIG else b""
    )
    if wide:
        wide = struct.pack("<HH", 1, len(wide)) + wide
    line = struct.pack(
        "<IHHHHHHIIIHHHHHII",
        0x02014B50,
        45,
        45 if wide else 20,
        *head[1:],
        len(wide),
        0,
        0,
        0,
        0,
        min(at, _BIG),
    )
    return header, at + len(header), line + name + wide


def _end(at: int, length: int, count: int) -> bytes:
    """Return the end of a directory that begins at a byte, with 64 bits where it needs them."""
    wide = b""
    if at >= _BIG or count >= _MANY:
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, at)
        wide += struct.pack("<IIQI", 0x07064B50, 0, at + length, 1)
    few = min(count, _MANY)
    return wide + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, length, min(at, _BIG), 0)
