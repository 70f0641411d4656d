"""Whether files are those that were written, by the checksums in the manifest beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from distft.checkpoint.folder import (
    DCP,
    MANIFEST,
    Manifest,
    describe_file,
    hash_bytes,
    read_manifest,
)

_THREADS = max(1, min(4, os.cpu_count() or 1))
# What stands before the names of weights in the ranges.
_MODEL = "model."


def damage(root: Path, manifest: Manifest, name: str) -> str | None:
    """Return what is wrong with the bytes of a file, and which tensors are hit; None if nothing.

    Collective: none.
    """
    saved = manifest.files[name]
    now = describe_file(root / name, by_crc32=saved.crc32 is not None)
    if now == saved:
        return None
    said = f"{name} has the {now.checksum}, and {MANIFEST} says {saved.checksum}"
    ranges = _ranges_in(manifest, name)
    if not ranges:
        return said
    hit = [part[0] for part in ranges if _differs(root, name, *part[1:])]
    if not hit:
        return f"{said}: none of its {len(ranges)} tensors is hit"
    return f"{said}: {hit[0]} is one of {len(hit)} of its {len(ranges)} tensors that are hit"


def refuse_damage(
    root: Path, manifest: Manifest, names: Iterable[str], weights_alone: bool = False
) -> None:
    """Raise where files are not those that were written, before anything is made of them.

    Args:
        root: The checkpoint.
        manifest: Its manifest.
        names: Files to read.
        weights_alone: Of files whose tensors the manifest knows, read those of the weights.

    Raises:
        ValueError: One is not; the message names it.

    Collective: none.
    """
    from concurrent.futures import ThreadPoolExecutor

    def problem(name: str) -> str | None:
        ranges = _ranges_in(manifest, name) if weights_alone else []
        weights = [part for part in ranges if part[0].startswith(_MODEL)]
        if ranges and not any(_differs(root, name, *part[1:]) for part in weights):
            return None
        return damage(root, manifest, name)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = next(filter(None, pool.map(problem, names)), None)
    if found is not None:
        raise ValueError(f"{root}: {found}. The checkpoint is damaged: use another one.")


def refuse_damaged_source(root: Path, weights_alone: bool = False) -> None:
    """Raise where a checkpoint of distft, or a part of it that is read, is damaged.

    Nothing is said of those of other tools.

    Raises:
        ValueError: As `refuse_damage`.

    Collective: none.
    """
    if not (root / MANIFEST).is_file():
        return
    manifest = read_manifest(root)
    # A model has no random state.
    names = [n for n in manifest.files if not (weights_alone and n.startswith("rng/"))]
    refuse_damage(root, manifest, names, weights_alone)


def share_of(manifest: Manifest, rank: int, num_ranks: int) -> list[str]:
    """Return the files of which one rank reads all bytes, about as many as every other.

    Collective: none.
    """
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].size, reverse=True)
    loads, mine = [0] * num_ranks, []
    for name in by_size:
        least = min(range(num_ranks), key=loads.__getitem__)
        loads[least] += manifest.files[name].size
        if least == rank:
            mine.append(name)
    return mine


def _ranges_in(manifest: Manifest, file: str) -> list[tuple[str, int, int, str]]:
    return [
        (tensor, at, size, said)
        for tensor, parts in manifest.ranges.items()
        if manifest.layout == DCP
        for name, at, size, said in parts
        if name == file
    ]


def _differs(root: Path, name: str, at: int, size: int, said: str) -> bool:
    with (root / name).open("rb", buffering=0) as file:
        file.seek(at)
        return hash_bytes(file, size) != said
