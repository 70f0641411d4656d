"""Pickles of torch's own kinds, written without torch: what its loaders read, and nothing more.

The opcodes are those of protocol 2, which ``torch.save`` writes too. Source: ``pickletools`` of
the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distft.checkpoint.shards import LogicalTensor, row_major

# What torch calls the storage of a dtype; newer ones are untyped there, and views of bytes.
STORAGES = {
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by the module that has it and its name there."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What a loader makes of a global: called with arguments, or made empty and given a state."""

    what: Global
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A range of the flattened logical tensor, or zeros where there is none."""

    tensor: LogicalTensor | None
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor whose elements follow in the archive: a logical one, parts, or the bytes themselves.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        content: Where its elements come from.
        start: Of one logical tensor, the element with which it begins.
    """

    dtype: str
    shape: tuple[int, ...]
    content: LogicalTensor | bytes | Sequence[Part]
    start: int = 0


def size_of(shape: Sequence[int]) -> Call:
    """Return a ``torch.Size``.

    Collective: none.
    """
    return Call(Global("torch", "Size"), (tuple(shape),))


def ordered(pairs: Mapping[str, Any] | Iterable[tuple[Any, Any]] = ()) -> Call:
    """Return an ``OrderedDict``.

    Collective: none.
    """
    made = [tuple(pair) for pair in (pairs.items() if isinstance(pairs, Mapping) else pairs)]
    return Call(Global("collections", "OrderedDict"), (made,) if made else ())


class Pickled:
    """A pickle of one value; the tensors met on the way are numbered in their order.

    Args:
        value: Of plain values, the kinds of this module, and pairs in `Pairs`.

    Raises:
        ValueError: It holds something else.
    """

    def __init__(self, value: Any) -> None:
        self._out = bytearray(b"\x80\x02")
        self.stored: list[Stored] = []
        self._write(value)
        self._out += b"."

    @property
    def data(self) -> bytes:
        """The bytes."""
        return bytes(self._out)

    def _write(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self._out += b"N" if value is None else b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, float):
            self._out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            self._out += b"X" + struct.pack("<I", len(text)) + text
        elif isinstance(value, tuple):
            self._out += b"("
            self._each(value)
            self._out += b"t"
        elif isinstance(value, list):
            self._out += b"]("
            self._each(value)
            self._out += b"e"
        elif isinstance(value, Mapping):
            self._out += b"}("
            for pair in value.items():
                self._each(pair)
            self._out += b"u"
        elif isinstance(value, Pairs):
            self._out += b"}("
            for pair in value.pairs:
                self._each(pair)
            self._out += b"u"
        elif isinstance(value, Global):
            self._out += f"c{value.module}\n{value.name}\n".encode()
        elif isinstance(value, Call):
            self._call(value)
        elif isinstance(value, Stored):
            self._tensor(value)
        else:
            raise ValueError(
                f"A checkpoint holds plain values and tensors, and got a {type(value).__name__}. "
                "Leave it out of the state."
            )

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self._write(value)

    def _integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += b"K" + bytes([value])
        elif -(1 << 31) <= value < 1 << 31:
            self._out += b"J" + struct.pack("<i", value)
        else:
            length = (value.bit_length() + 8) // 8
            if length > 255:
                raise ValueError(f"A checkpoint holds integers of up to 2040 bits, not {length}.")
            self._out += b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)

    def _call(self, call: Call) -> None:
        self._write(call.what)
        self._write(call.args)
        self._out += b"\x81" if call.new else b"R"
        if call.state is not None:
            self._write(call.state)
            self._out += b"b"

    def _tensor(self, tensor: Stored) -> None:
        if tensor.dtype not in STORAGES:
            raise ValueError(
                f"A tensor is {tensor.dtype}, and the {len(STORAGES)} dtypes that are written are "
                f"{', '.join(sorted(STORAGES))}."
            )
        count = 1
        for size in tensor.shape:
            count *= size
        storage = Global("torch", STORAGES[tensor.dtype])
        self._write(Global("torch._utils", "_rebuild_tensor_v2"))
        self._out += b"("
        self._write(("storage", storage, str(len(self.stored)), "cpu", count))
        self._out += b"Q"
        self._each((0, tensor.shape, row_major(tensor.shape), False, ordered()))
        self._out += b"tR"
        self.stored.append(tensor)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict whose keys may be calls, which no dict of Python's can hold."""

    pairs: Sequence[tuple[Any, Any]]
