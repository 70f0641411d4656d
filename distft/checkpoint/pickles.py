"""What stands before every load of torch or DeepSpeed that unpickles with nothing switched off.

Each file is read first with every name inert: a name that is not on the list of
`distft.checkpoint.readers.unpickle` is refused before anything that could run it sees the file.
"""

from __future__ import annotations

import io
import pickletools
import re
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.torch_zip import ZIP_START
from distft.checkpoint.readers.unpickle import Storage, asks_for, not_whole, read_pickle


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
        raise not_whole(path, error) from error
    if "constants.pkl" in names:
        raise ValueError(
            f"{path} is a TorchScript program among {len(names)} records, and a checkpoint is "
            "data. Nothing was loaded. Do not open this file."
        )
    read_pickle(data, path, _any_storage)


def _any_storage(key: str, dtype: str, num_bytes: int) -> Storage:
    return Storage("", 0, num_bytes, dtype, key)


def refuse_code_in_pickle(path: Path) -> None:
    """Raise where a file that is one pickle names more than a checkpoint needs.

    Raises:
        ValueError: The file asks for a name that is not on the list, or is no whole pickle.

    Collective: none.
    """
    read_pickle(path.read_bytes(), path)


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
        raise not_whole(path, error) from error


def _description(path: Path) -> bytes:
    import torch

    _check_start(path)
    try:
        return bytes(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    except RuntimeError as error:
        raise not_whole(path, error) from error


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
            raise asks_for(path, name[1]) from None
        raise not_whole(path, error) from error


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(ZIP_START)) != ZIP_START:
            raise not_whole(path, "it does not start as a torch file does")
