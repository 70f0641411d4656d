"""Unpickling that can build tensors' descriptions and plain containers, and nothing else.

The pickles in checkpoints name what they are made of, and unpickling calls whatever is named. Here
a name stands for nothing: each one that a checkpoint needs becomes an inert object, and any other
is refused before the file goes on.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.memo import check_memo
from distft.checkpoint.shards import ITEM_BYTES, Piece, row_major

# torch's classes of storages, which a tensor's dtype is read off.
STORAGE_DTYPES = {
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.storage.UntypedStorage": "uint8",
}
_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
ALLOWED = frozenset(
    {
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage.TypedStorage",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.planner.BytesIOWriteData",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA),
        *STORAGE_DTYPES,
        *(f"torch.{dtype}" for dtype in ITEM_BYTES),
    }
)


class Unreadable(ValueError):
    """A file asks for a name that is not on the list, or is not whole; it says so in full."""


class StandIn:
    """Stands for an object of a pickle; its class says which.

    Attributes:
        asked: The name that the pickle asked for; of a dtype or a function the class is all there
            is.
        args: What the pickle would have called it with.
        state: What it would have been filled with, such as its attributes.
    """

    asked = ""
    __slots__ = ("args", "state")

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        """Return an object that no state has reached yet."""
        made = super().__new__(cls)
        made.args, made.state = (), None
        return made

    def __setstate__(self, state: Any) -> None:
        # A class with slots has its attributes second.
        pair = isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
        self.state = state[1] if pair else state

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by its name, None where the pickle gave none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Mapping(dict[Any, Any]):
    """An ordered dict whose further attributes are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a torch file: where it lies, not what it holds.

    Attributes:
        file: Path of the file relative to the checkpoint's folder.
        offset: Byte of the first element.
        dtype: torch's name of the dtype.
        shape: Its shape.
        strides: As those of `Piece`.
        storage: Key of its storage in the file; tied tensors share one.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    storage: str

    def piece(self, start: Sequence[int] | None = None) -> Piece:
        """Return it as one block of a whole, which begins with it unless ``start`` is given.

        Collective: none.
        """
        at = tuple(start) if start is not None else (0,) * len(self.shape)
        return Piece(self.file, self.offset, at, self.shape, strides=self.strides)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        number = 1
        for size in self.shape:
            number *= size
        return number


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of a file that tensors share: where, how many, and of which dtype."""

    file: str
    offset: int
    num_bytes: int
    dtype: str
    key: str


def _rebuild_v2(
    storage: Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any
) -> StoredTensor:
    return _stored(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_v3(
    storage: Storage,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    requires_grad: bool,
    hooks: Any,
    dtype: type[StandIn],
    *_: Any,
) -> StoredTensor:
    name = dtype.asked.removeprefix("torch.")
    return _stored(storage, name, offset, tuple(shape), tuple(strides))


def _stored(
    storage: Storage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> StoredTensor:
    dense = row_major(shape)
    same = all(a == b or size <= 1 for a, b, size in zip(strides, dense, shape, strict=True))
    size = ITEM_BYTES[dtype]
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 not in shape and (min((offset, *strides)) < 0 or (last + 1) * size > storage.num_bytes):
        raise ValueError(
            f"a tensor of shape {shape} needs {(last + 1) * size} bytes of the storage "
            f"{storage.key}, which has {storage.num_bytes}"
        )
    at = storage.offset + offset * size
    return StoredTensor(
        storage.file, at, dtype, shape, None if same or 0 in shape else strides, storage.key
    )


def _from_type(function: Callable[..., Any], _: Any, args: Sequence[Any], __: Any) -> Any:
    return function(*args)


def _first(value: Any, *_: Any) -> Any:
    return value


_BUILT: dict[str, Any] = {
    "collections.OrderedDict": _Mapping,
    "torch.Size": tuple,
    "builtins.set": set,
    # As the older protocol that torch uses spells it.
    "__builtin__.set": set,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}
_STAND_INS: dict[str, type[StandIn]] = {
    name: type(name.rpartition(".")[2], (StandIn,), {"asked": name, "__slots__": ()})
    for name in ALLOWED - set(_BUILT)
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find_storage: Callable[[str, str, int], Storage]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._find_storage = find_storage
        self.refused: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        asked = f"{module}.{name}"
        found = _BUILT.get(asked) or _STAND_INS.get(asked)
        if found is None:
            self.refused = asked
            raise pickle.UnpicklingError(asked)
        return found

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, count = pid
        if kind != "storage":
            raise ValueError(f"it refers to a {kind!r}, where torch refers to storages")
        dtype = STORAGE_DTYPES[storage.asked]
        return self._find_storage(key, dtype, count * ITEM_BYTES[dtype])


def _no_storage(key: str, dtype: str, num_bytes: int) -> Storage:
    raise ValueError(f"it refers to the storage {key}, and no storages belong to it")


def read_pickle(
    data: bytes, path: Path, find_storage: Callable[[str, str, int], Storage] = _no_storage
) -> Any:
    """Return what a pickle describes: plain values, `StoredTensor`, and `StandIn` for all else.

    Args:
        data: The pickle.
        path: The file it is from, for errors.
        find_storage: Returns a storage of a key, a dtype and a number of bytes.

    Raises:
        ValueError: It asks for a name that is not on the list, or is not whole.

    Collective: none.
    """
    unpickler = _Unpickler(data, find_storage)
    try:
        check_memo(data)
        return unpickler.load()
    except Unreadable:
        raise
    except Exception as error:
        if unpickler.refused is not None:
            raise asks_for(path, unpickler.refused) from None
        raise not_whole(path, error) from error


def asks_for(path: Path, name: str) -> Unreadable:
    """Return the error of a file that asks for a name which could run code.

    Collective: none.
    """
    return Unreadable(
        f"{path} asks to load {name}, which is none of the {len(ALLOWED)} names that a checkpoint "
        "needs and could run code. Nothing was loaded. Do not open this file."
    )


def not_whole(path: Path, reason: Any) -> Unreadable:
    """Return the error of a file that cannot be read to its end.

    Collective: none.
    """
    # torch goes on for a page, with advice to switch its safety off.
    sentence = (str(reason) or type(reason).__name__).splitlines()[0].split(". ")[0].rstrip(".")
    return Unreadable(
        f"{path} ({path.stat().st_size} bytes) is not a whole file of a checkpoint: "
        f"{sentence}. Use a checkpoint whose files are complete."
    )
