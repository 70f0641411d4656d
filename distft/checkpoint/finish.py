"""The part of a save that needs no collective: writing, hashing, the manifest, and the rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distft.checkpoint.capture import Captured
from distft.checkpoint.dcp_write import synced
from distft.checkpoint.exchange import Exchange
from distft.checkpoint.folder import MANIFEST, Manifest, SavedFile
from distft.checkpoint.randomness import random_file
from distft.checkpoint.rotation import rotate
from distft.checkpoint.side_files import SideFiles, write_values
from distft.process_group import failure_of, first_failure


@dataclass(frozen=True)
class Finishing:
    """What is left of a save once its state is captured.

    Attributes:
        folder: Where the checkpoint is written.
        path: Where it appears.
        layout: Name of the folder of the state.
        rank: This rank.
        captured: Its part of the state.
        random: Its random state.
        manifest: On the first rank, what is said beside the files.
        keep: Number of checkpoints that stay, or None for all.
        side: On the first rank, what it writes beside the state.
    """

    folder: Path
    path: Path
    layout: str
    rank: int
    captured: Captured
    random: Any
    manifest: Manifest | None
    keep: int | None
    side: SideFiles | None

    def run(self, exchange: Exchange) -> None:
        """Write, and raise the first failing rank's error on every rank.

        Raises:
            ValueError: It was one on that rank.
            RuntimeError: It was another error.

        Collective: every rank, through ``exchange``.
        """
        part: dict[str, Any] = {"failure": None}
        try:
            part |= self._write()
        except Exception as error:
            part["failure"] = failure_of(error)
        failure = exchange(part, self._combine)
        if failure is not None:
            is_value_error, text = failure
            raise (ValueError if is_value_error else RuntimeError)(text)

    def _write(self) -> dict[str, Any]:
        if self.side is not None:
            self.side.write(self.folder)
        written = self.captured.write(self.folder / self.layout)
        files = {f"{self.layout}/{name}": saved for name, saved in written.files.items()}
        own = random_file(self.rank)
        write_values(self.folder / own, self.random)
        files[own] = synced(self.folder / own)
        return {
            "files": {name: asdict(saved) for name, saved in files.items()},
            "chunks": list(written.chunks),
        }

    def _combine(self, parts: Sequence[Any]) -> Any:
        """Publish what all ranks wrote; return a failure, None where there is none."""
        failure = first_failure([part["failure"] for part in parts])
        if failure is None:
            try:
                self._publish(parts)
            except Exception as error:
                failure = failure_of(error)
        if failure is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        return failure

    def _publish(self, parts: Sequence[Any]) -> None:
        assert self.manifest is not None
        finished = self.captured.finish(
            self.folder / self.layout, [part["chunks"] for part in parts]
        )
        files = {
            name: SavedFile(**saved) for part in parts for name, saved in part["files"].items()
        }
        files |= {f"{self.layout}/{name}": saved for name, saved in finished.files.items()}
        for member in sorted(self.folder.rglob("*")):
            name = member.relative_to(self.folder).as_posix()
            if member.is_file() and name not in files:
                files[name] = synced(member)
        ranges = {
            name: [[f"{self.layout}/{file}", *rest] for file, *rest in found]
            for name, found in finished.ranges.items()
        }
        manifest = replace(self.manifest, files=dict(sorted(files.items())), ranges=ranges)
        _check_sizes(self.folder, manifest)
        appear(self.folder, self.path, manifest)
        if self.keep is not None:
            rotate(self.path, self.keep)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise where the first rank sees other files than were written."""
    for name, saved in manifest.files.items():
        member = folder / name
        size = member.stat().st_size if member.is_file() else 0
        if size != saved.size:
            raise RuntimeError(
                f"{name} was written with {saved.size} bytes, and the first rank sees {size} in "
                f"{folder}. Save to a file system that all machines share."
            )


def appear(folder: Path, path: Path, manifest: Manifest) -> None:
    """Write the manifest last, then make the folder visible under its name in one rename.

    Collective: none.
    """
    with (folder / MANIFEST).open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    if path.is_dir():
        path.rmdir()
    folder.rename(path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
