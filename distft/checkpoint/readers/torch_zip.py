"""Files of ``torch.save``: an uncompressed zip of one pickle and the bytes of its storages.

Read with the standard library: the directory at the end, then the header before each record, whose
padding only that header knows. A file may hold many such zips, as torch's distributed checkpoint
keeps one for each item.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.unpickle import Storage, StoredTensor, not_whole, read_pickle

# What torch.load itself looks at to choose between its formats.
ZIP_START = b"PK\x03\x04"
_DIRECTORY_ENTRY, _END = b"PK\x01\x02", b"PK\x05\x06"
_END_64, _LOCATOR_64 = b"PK\x06\x06", b"PK\x06\x07"
# Bytes of the fixed parts: a record's header, a directory entry, the ends of both sizes.
_HEADER_BYTES, _ENTRY_BYTES, _END_BYTES, _END_64_BYTES, _LOCATOR_BYTES = 30, 46, 22, 56, 20
# Sizes that say: look into the extra field with 64 bits.
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF
_ZIP_64 = 1
# Enough for the directory of a small item and for the comment that a zip may end with.
_TAIL_BYTES = 2048
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a zip: where its header begins in the zip, its size, and its CRC-32."""

    header: int
    size: int
    crc32: int


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield the descriptor of a file opened for reading.

    Collective: none.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class TorchZip:
    """The zip that lies in a file from a byte on.

    Args:
        path: The file, for errors.
        name: How pieces name it, relative to the checkpoint's folder.
        descriptor: The file, open.
        base: Byte at which the zip begins.
        length: Bytes of the zip; default the rest of the file.

    Attributes:
        root: Name of the folder in it that holds all records, which torch makes of the file's name.
        records: Its records by their names below that folder.

    Raises:
        ValueError: There is no whole, uncompressed zip.
    """

    def __init__(
        self, path: Path, name: str, descriptor: int, base: int = 0, length: int | None = None
    ) -> None:
        size = os.fstat(descriptor).st_size
        self.path, self.name, self.base = path, name, base
        self.length = size - base if length is None else length
        self._descriptor = descriptor
        self.root = ""
        self.records: dict[str, Record] = {}
        if base < 0 or self.length < 0 or base + self.length > size:
            raise not_whole(path, f"an item ends at byte {base + self.length} of {size}")
        if self._read(0, len(ZIP_START)) != ZIP_START:
            raise not_whole(path, "it does not start as a torch file does")
        try:
            self._read_directory()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise not_whole(path, f"its zip directory is broken ({error})") from error

    def load(self) -> Any:
        """Return what its pickle describes, tensors as `StoredTensor`; nothing of it runs.

        Raises:
            ValueError: The pickle asks for more than a checkpoint needs, a storage is missing or
                too short, or the bytes are not in the order of this machine.

        Collective: none.
        """
        if "constants.pkl" in self.records:
            raise ValueError(
                f"{self.path} is a TorchScript program among {len(self.records)} records, and a "
                "checkpoint is data. Nothing was loaded. Do not open this file."
            )
        if "byteorder" in self.records and self.read("byteorder") != b"little":
            raise not_whole(self.path, f"its byte order is {self.read('byteorder')!r}, not little")
        found: dict[str, Storage] = {}

        def find_storage(key: str, dtype: str, num_bytes: int) -> Storage:
            if key not in found:
                offset, size = self.place(f"data/{key}")
                if size < num_bytes:
                    raise ValueError(f"the storage {key} has {size} bytes, and needs {num_bytes}")
                found[key] = Storage(self.name, offset, size, dtype, key)
            return found[key]

        return read_pickle(self.read("data.pkl"), self.path, find_storage)

    def place(self, name: str) -> tuple[int, int]:
        """Return the byte of the file where the contents of a record begin, and their size.

        Raises:
            ValueError: There is no such record, or its header is not its own.

        Collective: none.
        """
        record = self.records.get(name)
        if record is None:
            raise not_whole(self.path, f"the record {name} is not in it")
        header = self._read(record.header, _HEADER_BYTES)
        if len(header) < _HEADER_BYTES or not header.startswith(ZIP_START):
            raise not_whole(self.path, f"the record {name} has no header")
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        wanted = f"{self.root}/{name}".encode()
        if self._read(record.header + _HEADER_BYTES, name_bytes) != wanted:
            raise not_whole(self.path, f"the header of the record {name} names another one")
        start = record.header + _HEADER_BYTES + name_bytes + extra_bytes
        if start + record.size > self.length:
            raise not_whole(self.path, f"the record {name} ends beyond byte {self.length}")
        return self.base + start, record.size

    def read(self, name: str) -> bytes:
        """Return the contents of a small record.

        Collective: none.
        """
        offset, size = self.place(name)
        return os.pread(self._descriptor, size, offset)

    def has_checksums(self) -> bool:
        """Return whether the records have CRCs; torch can be told to write zeros instead.

        Collective: none.
        """
        return any(record.crc32 for record in self.records.values())

    def broken_records(self) -> list[str]:
        """Return the names of the records whose bytes are not those that their CRCs are of.

        Reads everything, through one small buffer.

        Collective: none.
        """
        return [name for name, record in self.records.items() if self._crc32(name) != record.crc32]

    def _crc32(self, name: str) -> int:
        offset, size = self.place(name)
        buffer, crc = memoryview(bytearray(min(size, _COPY_BYTES))), 0
        while size:
            got = os.preadv(self._descriptor, [buffer[: min(size, _COPY_BYTES)]], offset)
            if not got:
                break
            crc = zlib.crc32(buffer[:got], crc)
            offset, size = offset + got, size - got
        return crc

    def _read(self, offset: int, size: int) -> bytes:
        if offset >= self.length:
            return b""
        return os.pread(self._descriptor, min(size, self.length - offset), self.base + offset)

    def _read_directory(self) -> None:
        count, size, offset = self._find_directory()
        directory = self._read(offset, size)
        if offset + size > self.length or len(directory) < size:
            raise not_whole(self.path, f"its zip directory ends beyond byte {self.length}")
        at = 0
        for _ in range(count):
            if directory[at : at + 4] != _DIRECTORY_ENTRY:
                raise not_whole(self.path, "its zip directory is broken")
            method, _, _, crc = struct.unpack_from("<HHHI", directory, at + 10)
            packed, plain, name_bytes, extra, comment = struct.unpack_from(
                "<IIHHH", directory, at + 20
            )
            header = struct.unpack_from("<I", directory, at + 42)[0]
            name_at = at + _ENTRY_BYTES
            name = directory[name_at : name_at + name_bytes].decode()
            extra_at = name_at + name_bytes
            plain, packed, header = _wide(
                directory[extra_at : extra_at + extra], plain, packed, header
            )
            if method or packed != plain:
                raise not_whole(self.path, f"the record {name} is compressed")
            self._add(name, Record(header, plain, crc))
            at = extra_at + extra + comment

    def _add(self, name: str, record: Record) -> None:
        root, _, below = name.partition("/")
        if (self.root and root != self.root) or not below or below in self.records:
            raise not_whole(self.path, f"the record {name} is not one of {self.root or 'a folder'}")
        self.root = root
        self.records[below] = record

    def _find_directory(self) -> tuple[int, int, int]:
        """Return the number of entries of the directory, its size and where it begins."""
        for size in (_TAIL_BYTES, _FULL_16 + _END_BYTES + _END_64_BYTES + _LOCATOR_BYTES):
            start = max(0, self.length - size)
            tail = self._read(start, size)
            at = tail.rfind(_END)
            if at >= 0:
                break
        else:
            raise not_whole(self.path, "it has no zip directory")
        count, size, offset, comment = struct.unpack_from("<HIIH", tail, at + 10)
        end = start + at + _END_BYTES + comment
        if end != self.length:
            raise not_whole(self.path, f"its zip ends at byte {end} of {self.length}")
        locator = at - _LOCATOR_BYTES
        if locator >= 0 and tail[locator : locator + 4] == _LOCATOR_64:
            wide = self._read(struct.unpack_from("<Q", tail, locator + 8)[0], _END_64_BYTES)
            if not wide.startswith(_END_64):
                raise not_whole(self.path, "its zip directory is broken")
            count, size, offset = struct.unpack_from("<QQQ", wide, 32)
        return count, size, offset


def _wide(extra: bytes, plain: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return sizes and place of a record, those of files over 4 GB from the extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP_64:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            plain = next(values, plain) if plain == _FULL_32 else plain
            packed = next(values, packed) if packed == _FULL_32 else packed
            header = next(values, header) if header == _FULL_32 else header
        at += 4 + length
    return plain, packed, header


def read_torch_file(root: Path, name: str) -> Any:
    """Return what a file of ``torch.save`` describes; see `TorchZip.load`.

    Collective: none.
    """
    with opened(root / name) as descriptor:
        return TorchZip(root / name, name, descriptor).load()


# How the standard library reads one number of a dtype.
_NUMBERS = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}


def plain_values(root: Path, value: Any) -> Any:
    """Return a value in which tensors of one number are that number, such as a step or a rate.

    Collective: none.
    """
    if isinstance(value, StoredTensor) and value.num_elements == 1 and value.dtype in _NUMBERS:
        code = f"<{_NUMBERS[value.dtype]}"
        with opened(root / value.file) as descriptor:
            data = os.pread(descriptor, struct.calcsize(code), value.offset)
        return struct.unpack(code, data)[0]
    if isinstance(value, dict):
        return {key: plain_values(root, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_values(root, item) for item in value)
    return value
