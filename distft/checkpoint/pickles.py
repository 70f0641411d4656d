"""Refusing pickles that ask for anything but tensors' descriptions and plain containers.

DCP's ``.metadata`` and DeepSpeed's ``.pt`` files are pickles, and unpickling calls whatever a file
names. Each is read here first with every name inert: a name that is not on the list is refused
before anything that could run it sees the file.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_STORAGES = [f"torch.{kind}Storage" for kind in _KINDS]
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_DTYPES = [
    f"torch.{kind}" for kind in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")
]
ALLOWED = frozenset(
    {
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        "torch.storage.TypedStorage",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.planner.BytesIOWriteData",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *_STORAGES,
        *_DTYPES,
    }
)
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    # As the older protocol that torch uses spells it.
    ("__builtin__", "set"): set,
}
# What torch.load itself looks at to choose between its two formats.
_ZIP_START = b"PK\x03\x04"


class _Inert(dict[Any, Any]):
    """Stands for any allowed object; building and filling it runs nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return _Inert()

    def __setstate__(self, state: Any) -> None:
        pass

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _InertUnpickler(pickle.Unpickler):
    refused: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if f"{module}.{name}" in ALLOWED:
            return _Inert
        self.refused = f"{module}.{name}"
        raise pickle.UnpicklingError(self.refused)

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def refuse_code(path: Path) -> None:
    """Raise where the pickle in a file of ``torch.save`` names more than a checkpoint needs.

    torch's older format, a tar or several pickles in a row, is refused as a whole: no checkpoint
    here is written in it, and ``torch.load`` would run every part of it.

    Raises:
        ValueError: The file asks for a name that is not on the list, or is no whole torch file.

    Collective: none.
    """
    import torch

    _check_start(path)
    try:
        # torch's own reader: another one may be led to other bytes of a zip than torch reads.
        archive = torch._C.PyTorchFileReader(str(path))
        names = archive.get_all_records()
        data = archive.get_record("data.pkl")
    except RuntimeError as error:
        raise _not_whole(path, error) from error
    if "constants.pkl" in names:
        raise ValueError(
            f"{path} is a TorchScript program among {len(names)} records, and a checkpoint is "
            "data. Nothing was loaded. Do not open this file."
        )
    _check_pickle(data, path)


def refuse_code_in_pickle(path: Path) -> None:
    """Raise where a file that is one pickle names more than a checkpoint needs.

    Raises:
        ValueError: The file asks for a name that is not on the list, or is no whole pickle.

    Collective: none.
    """
    _check_pickle(path.read_bytes(), path)


def _check_pickle(data: bytes, path: Path) -> None:
    unpickler = _InertUnpickler(io.BytesIO(data))
    try:
        unpickler.load()
    except Exception as error:
        if unpickler.refused is not None:
            raise _asks_for(path, unpickler.refused) from None
        raise _not_whole(path, error) from error


class StandIn(_Inert):
    """Stands for an object or a tensor of a pickle that was looked at, not loaded.

    Attributes:
        asked: The name that the pickle asked for.
        args: What the pickle would have called it with.
    """

    asked = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.args = args


class _Looker(_InertUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return type(name, (StandIn,), {"asked": f"{module}.{name}"}) if found is _Inert else found

    def persistent_load(self, pid: Any) -> Any:
        return StandIn(*pid) if isinstance(pid, tuple) else StandIn(pid)


def look_inside(path: Path) -> Any:
    """Return containers and plain values of a file of ``torch.save``, `StandIn` for all else.

    Only the description is read, a small part of the file: no tensor, and nothing runs.

    Raises:
        ValueError: The file asks for a name that is not on the list, or is no whole torch file.

    Collective: none.
    """
    unpickler = _Looker(io.BytesIO(_description(path)))
    try:
        return unpickler.load()
    except Exception as error:
        if unpickler.refused is not None:
            raise _asks_for(path, unpickler.refused) from None
        raise _not_whole(path, error) from error


def names_asked(path: Path) -> list[str]:
    """Return every name that the pickle of a file of ``torch.save`` would import, in order.

    The pickle is read as text and not executed, so that any file can be looked at.

    Raises:
        ValueError: It is no whole torch file.

    Collective: none.
    """
    try:
        return [
            str(argument).replace(" ", ".")
            for opcode, argument, _ in pickletools.genops(_description(path))
            if opcode.name == "GLOBAL"
        ]
    except ValueError as error:
        raise _not_whole(path, error) from error


def _description(path: Path) -> bytes:
    import torch

    _check_start(path)
    try:
        return bytes(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    except RuntimeError as error:
        raise _not_whole(path, error) from error


def load_values(path: Path, mmap: bool = False) -> Any:
    """Return the tensors and plain values of a file of ``torch.save``, running nothing in it.

    With ``mmap`` a tensor takes memory only where it is read.

    Raises:
        ValueError: The file holds more than tensors and plain values, or is not whole.

    Collective: none.
    """
    _check_start(path)
    return _load_restricted(path, path, mmap)


def load_bytes(data: io.BytesIO, path: Path) -> Any:
    """Return the same of bytes that lie inside a file; ``path`` is for errors.

    Raises:
        ValueError: As `load_values`.

    Collective: none.
    """
    return _load_restricted(data, path, mmap=False)


def _load_restricted(source: Path | io.BytesIO, path: Path, mmap: bool) -> Any:
    import torch

    try:
        return torch.load(source, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:
        # torch says which name it refused in the middle of a long text.
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if name is not None:
            raise _asks_for(path, name[1]) from None
        raise _not_whole(path, error) from error


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:
            raise _not_whole(path, "it does not start as a torch file does")


def _asks_for(path: Path, name: str) -> ValueError:
    return ValueError(
        f"{path} asks to load {name}, which is none of the {len(ALLOWED)} names that a checkpoint "
        "needs and could run code. Nothing was loaded. Do not open this file."
    )


def _not_whole(path: Path, reason: Any) -> ValueError:
    # torch goes on for a page, with advice to switch its safety off.
    sentence = (str(reason) or type(reason).__name__).splitlines()[0].split(". ")[0].rstrip(".")
    return ValueError(
        f"{path} ({path.stat().st_size} bytes) is not a whole file of a checkpoint: "
        f"{sentence}. Use a checkpoint whose files are complete."
    )
