"""Refusing pickles that ask for anything but tensors' descriptions and plain containers.

DCP's ``.metadata`` and DeepSpeed's ``.pt`` files are pickles, and unpickling calls whatever a file
names. Each is read here first with every name inert: a name that is not on the list is refused
before anything that could run it sees the file.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
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
    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("builtins", "set"):
            return set
        if f"{module}.{name}" in ALLOWED:
            return _Inert
        raise ValueError(
            f"{self.path} asks to load {module}.{name}, which is none of the {len(ALLOWED)} names "
            "that a checkpoint needs and could run code. Nothing was loaded. Do not open this file."
        )

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def refuse_code(path: Path) -> None:
    """Raise where a pickle, plain or inside a torch zip, names more than a checkpoint needs.

    Raises:
        ValueError: The file asks for a name that is not on the list, or is no readable pickle.

    Collective: none.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.endswith(".pkl")]
                pickles = [archive.read(name) for name in names]
        else:
            pickles = [path.read_bytes()]
        for data in pickles:
            _InertUnpickler(data, path).load()
    except (pickle.UnpicklingError, EOFError, zipfile.BadZipFile, IndexError, KeyError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole pickle: {error}. "
            "Use a checkpoint whose files are complete."
        ) from error
