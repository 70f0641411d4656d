"""The files that DeepSpeed's engine writes, captured before any is written.

With engine.py the only one that knows its private names.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distft.checkpoint.capture import Finished, HostCopies, Written
from distft.checkpoint.dcp_write import synced
from distft.strategies.on_disk import Maps


class _Recorder:
    """Stands in for what writes the engine's files, and keeps what it is given."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.saved: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        self.saved[path] = state_dict

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing: one rank that fails would leave the others at a barrier."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@dataclass(frozen=True)
class CapturedFiles:
    """The files that an engine writes on one rank.

    Attributes:
        engine: The engine.
        rank: The rank.
        contents: What is in each file, by its name in the folder.
    """

    engine: Any
    rank: int
    contents: dict[str, Any]

    def write(self, folder: Path) -> Written:
        """Write this rank's files as the engine does."""
        files = {}
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                # By its path, whose name is written into the file and tells swapped ones.
                torch.save(content, folder / name)
            except RuntimeError as error:
                # Its writer does not say what the system said.
                raise _refusal_of(folder) or error from error
            files[name] = synced(folder / name)
        if self.rank == 0:
            self.engine._copy_recovery_script(str(folder))
        return Written(files)

    def finish(self, folder: Path, chunks: Sequence[Sequence[Any]]) -> Finished:
        """Return nothing more."""
        return Finished()


def _refusal_of(folder: Path) -> OSError | None:
    """Return the error of writing a little into a folder, such as that the disk is full."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def capture_files(engine: Any, tag: str, copies: HostCopies | Maps | None) -> CapturedFiles:
    """Return what an engine would write, with no file written yet.

    All its collectives are over then, so that a rank whose disk is full keeps nobody waiting.

    Args:
        engine: The engine.
        tag: Name of the folder in the folder.
        copies: Where to copy tensors to; None leaves them where they are.

    Collective: every rank.
    """
    writer, root = engine.checkpoint_engine, "/nowhere"
    recorder = engine.checkpoint_engine = _Recorder(writer)
    engine._copy_recovery_script = lambda folder: None
    try:
        engine.save_checkpoint(root, tag=tag, save_latest=False)
    finally:
        engine.checkpoint_engine = writer
        del engine._copy_recovery_script
    contents = {os.path.relpath(path, root): saved for path, saved in recorder.saved.items()}
    if copies is not None:
        contents = copy_tensors(contents, copies)
    return CapturedFiles(engine, torch.distributed.get_rank(), contents)


def copy_tensors(value: Any, copies: HostCopies | Maps) -> Any:
    """Return a copy of nested containers whose tensors share storages as those before do.

    Collective: none.
    """
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors_in(value, set()):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[key] = copies.bytes_of(whole).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype).set_(
            storages[key], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        # The engine marks its partitions, and torch saves the marks.
        made.__dict__.update(tensor.__dict__)
    copies.wait()
    return copy.deepcopy(value, memo)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield each tensor in nested containers once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner, seen)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner, seen)
