"""Optimizer state on a disk (ZeRO-Infinity): DeepSpeed's swapper, known here and to `measure`.

Its files are plain numbers, one for the master weights of a sub-group and one for each of its
moments. Between steps the tensors of these are empty; `in_place` gives them their values as mapped
files, so that what gathers, saves or loads them finds tensors and no memory is asked for.
`tests/deepspeed/test_private_names.py` fails first when one of its names moves.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from distft.formulas.disk import aligned_numel
from distft.process_group import from_rank0, raise_together


def make_folder(strategy: Any, root: Path) -> Path:
    """Return a folder below `root` of this model alone, the same name on every rank.

    DeepSpeed names files by rank and parameter, so two models in one folder would share them.

    Raises:
        ValueError: On some rank there is no such folder, or no file can be made in it.
        RuntimeError: Its file system has no direct I/O.

    Collective: every rank.
    """
    folder = root / f"distft-{from_rank0(secrets.token_hex(8))}"
    raise_together(_problem(strategy, root, folder))
    return folder


def _problem(strategy: Any, root: Path, folder: Path) -> BaseException | None:
    if not root.is_dir():
        return ValueError(
            f"{strategy!r} keeps state below {root}, and there is no such folder on 1 or more "
            "ranks. Make it, on a disk of each machine."
        )
    trial = root / f"{folder.name}-{os.getpid()}"
    try:
        os.close(os.open(trial, os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        return ValueError(
            f"{strategy!r}: no file can be made in {root} ({error.strerror}). "
            "Name a folder that every rank may write to."
        )
    try:
        os.close(os.open(trial, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return RuntimeError(
            f"{strategy!r}: the file system of {root} has no direct I/O, by which DeepSpeed reads "
            f"and writes ({error.strerror}). Name a folder on a disk."
        )
    finally:
        trial.unlink()
    return None


def remove_at_exit(engine: Any, folder: Path) -> None:
    """Remove this rank's files when the process ends: DeepSpeed's engine lives as long.

    Collective: none.
    """
    atexit.register(_remove, Path(engine.optimizer.optimizer_swapper.swap_folder), folder)


def _remove(mine: Path, folder: Path) -> None:
    shutil.rmtree(mine, ignore_errors=True)
    for parent in mine.parents:
        if parent == folder.parent:
            break
        try:
            parent.rmdir()
        except OSError:
            # Other ranks' files are in it.
            break


def keep_gradients_in_memory(zero: Any) -> None:
    """Make the engine take each gradient from where it was reduced, and write none to the disk.

    DeepSpeed writes parts of 1 MiB and more at the last micro-step, where no norm is taken over
    them and no factor reaches them. It keeps the whole reduced gradient in memory all the same, a
    sub-group's end to end.

    Collective: none.
    """
    zero._swap_out_offload_fp32_gradients = lambda gradients, offsets: None
    start = 0
    for index, numel in enumerate(zero.fp16_partitioned_groups_flat_numel):
        info = _info(zero, index)
        if info is not None:
            info.unswapped_gradients = {0: zero.grad_partitions_flat_buffer[start : start + numel]}
            info.release_unswapped_gradients = lambda: None
        start += numel


def gradients(engine: Any) -> dict[int, torch.Tensor]:
    """Return the reduced gradients of the sub-groups whose state is on the disk, by their number.

    Collective: none.
    """
    zero = engine.optimizer
    if not _on_disk(zero):
        return {}
    found = {i: _info(zero, i) for i in range(len(zero.fp32_partitioned_groups_flat))}
    return {i: info.unswapped_gradients[0] for i, info in found.items() if info is not None}


@contextmanager
def in_place(engine: Any) -> Iterator[None]:
    """Give tensors on the disk their values while the context lasts; what is written is kept.

    The engine takes them for state in memory meanwhile. Nothing to do for any other engine.

    Collective: none.
    """
    zero = engine.optimizer
    if not _on_disk(zero):
        yield
        return
    held = gradients(engine)
    for index, gradient in held.items():
        info = _info(zero, index)
        for tensor in info.tensors:
            tensor.compute_tensor.data = _mapped(tensor.swap_path, info.numel(), info.dtype())
        zero.fp32_partitioned_groups_flat[index].grad = gradient
    zero.swap_optimizer = False
    engine.zero_nvme_offload_optimizer = lambda: False
    try:
        yield
    finally:
        del engine.zero_nvme_offload_optimizer
        zero.swap_optimizer = True
        for index in held:
            zero.fp32_partitioned_groups_flat[index].grad = None
            info = _info(zero, index)
            info.release_memory()
            for tensor in info.tensors:
                _flush(tensor.swap_path)


class Maps:
    """Where a save puts tensors that lie on the disk: nowhere, the maps of their files last."""

    def bytes_of(self, source: torch.Tensor) -> torch.Tensor:
        """Return the bytes themselves."""
        return source

    def wait(self) -> None:
        """Return at once."""


def maps(engine: Any) -> Maps | None:
    """Return what keeps tensors that are mapped now mapped, where there are any.

    Collective: none.
    """
    return Maps() if _on_disk(engine.optimizer) else None


def forget_moments(engine: Any) -> None:
    """Drop all optimizer state, that on the disk too; `new_state` makes the next.

    Collective: none.
    """
    engine.optimizer.optimizer.state.clear()
    if _on_disk(engine.optimizer):
        engine.optimizer.optimizer_swapper.purge_state()


def new_state(engine: Any, flat: Any, key: str) -> torch.Tensor:
    """Return a tensor of zeros for a moment of a partition, on the disk where that lies there.

    Call it inside of `in_place`.

    Collective: none.
    """
    zero = engine.optimizer
    swapper = zero.optimizer_swapper if _on_disk(zero) else None
    info = None if swapper is None else swapper.swap_params_info.get(flat.ds_id)
    if swapper is None or info is None:
        return torch.zeros_like(flat)
    name = f"{key}-{flat.ds_id}"
    path = Path(swapper.swap_folder, f"{name}.tensor.swp")
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(aligned_numel(info.numel()) * flat.element_size())
    made: Any = _mapped(str(path), info.numel(), info.dtype())
    made.ds_id = name
    info.add_state_tensors([made])
    moment: torch.Tensor = made
    return moment


def _on_disk(zero: Any) -> bool:
    return getattr(zero, "optimizer_swapper", None) is not None


def _info(zero: Any, index: int) -> Any:
    """Return what the swapper knows of a sub-group; None where it is too small for the disk."""
    flat = zero.fp32_partitioned_groups_flat[index]
    return zero.optimizer_swapper.swap_params_info.get(flat.ds_id)


def _flush(path: str) -> None:
    """Wait until the disk has what was written through a map: it is read past the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _mapped(path: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)
