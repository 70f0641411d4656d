"""Records of ``torch.save``: whether their bytes are those that their CRC-32 are of."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from distft.checkpoint.readers.chunks import Chunks
from distft.checkpoint.readers.torch_zip import TorchZip, opened
from distft.checkpoint.shards import LogicalTensor

TORCH_FILES = (".pt", ".pth", ".bin")
_THREADS = max(1, min(4, os.cpu_count() or 1))
# What is broken, and the bytes that CRCs were computed of: none where there are none.
Checked = tuple[list[str], int]


def check_records(
    root: Path, names: Iterable[str], tensors: Iterable[LogicalTensor] = ()
) -> list[Checked]:
    """Compare files, and parts of torch's distributed checkpoints, with the CRCs in them.

    Several threads read them, at 1 to 2 GB a second each.

    Args:
        root: Folder that the names are relative to.
        names: Files of ``torch.save``.
        tensors: Tensors whose parts are archives of their own; others have no CRC.

    Raises:
        ValueError: A file is no whole archive.

    Returns:
        Of each file, then of each tensor, what is broken and how much was read.

    Collective: none.
    """
    tasks = [partial(_of_file, root, name) for name in names]
    parts = [partial(_of_parts, t.name, t.stored) for t in tensors if isinstance(t.stored, Chunks)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [task.result() for task in [pool.submit(task) for task in (*tasks, *parts)]]


def refuse_broken_records(
    root: Path, names: Iterable[str], tensors: Iterable[LogicalTensor] = ()
) -> None:
    """Raise where a record is broken; arguments as of `check_records`.

    Raises:
        ValueError: One is; the message names it.

    Collective: none.
    """
    problems = [text for broken, _ in check_records(root, names, tensors) for text in broken]
    if problems:
        raise ValueError(
            f"{root}: {problems[0]} ({len(problems)} in all). The checkpoint is damaged: use "
            "another one."
        )


def _of_file(root: Path, name: str) -> Checked:
    with opened(root / name) as descriptor:
        archive = TorchZip(root / name, name, descriptor)
        if not archive.has_checksums():
            return [], 0
        broken = [f"{name} is damaged in its record {r}" for r in archive.broken_records()]
        return broken, archive.length


def _of_parts(name: str, chunks: Chunks) -> Checked:
    broken, read = chunks.broken_items()
    return [f"{name} is damaged {where}" for where in broken], read
