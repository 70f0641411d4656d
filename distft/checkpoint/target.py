"""A folder that is written beside its place and appears there when it is whole."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distft.checkpoint.folder import converted_name

# Locked as long as the process writes that made the folder, however it ends.
_LOCK = "lock"


def check_target(out: Path, source: Path, what: str = "the checkpoint") -> None:
    """Refuse a folder to write to that is a file, or that lies in what is read.

    Args:
        out: The folder.
        source: What is read; nothing lies in one file.
        what: What that is, for the error.

    Raises:
        ValueError: It is one of these.

    Collective: none.
    """
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out} lies inside {what} {source}. Choose a folder outside it.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file. Choose a folder to write to.")


def check_new(out: Path) -> None:
    """Refuse a folder to write to that holds something.

    Raises:
        ValueError: It does.

    Collective: none.
    """
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"{out} holds {len(list(out.iterdir()))} files or folders, and a checkpoint is never "
            "written over another. Choose a new folder."
        )


@contextmanager
def written_whole(
    out: Path, is_last: Callable[[Path], bool], stale: Callable[[Path], list[Path]]
) -> Iterator[Path]:
    """Give a temporary folder whose members move to ``out`` at the end, if nothing was raised.

    A new ``out`` appears by one rename. In one that exists other files stay; what an earlier
    write left goes first and what names the new files comes last, so that a reader who comes in
    between finds no model rather than half of two. What a write of before left that was killed is
    removed first.

    Args:
        out: Where it appears.
        is_last: Whether a member of the folder is moved last.
        stale: Of an existing ``out``, the files and folders that go.

    Collective: none.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_overs(out)
    with _locked_folder(out) as temporary:
        made = temporary / "made"
        made.mkdir()
        yield made
        if not out.exists():
            os.rename(made, out)
            return
        for old in stale(out):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        for source in sorted(made.iterdir(), key=is_last):
            target = out / source.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(source, target)


@contextmanager
def _locked_folder(out: Path) -> Iterator[Path]:
    """Make a hidden folder beside a target and hold its lock; remove it at the end."""
    folder = out.parent / converted_name(out.name, os.urandom(8).hex())
    folder.mkdir()
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_WRONLY)
    try:
        # A file system without locks has none that another process could take either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left_overs(out: Path) -> None:
    """Remove hidden folders of this target that no process writes any more."""
    for folder in out.parent.glob(converted_name(glob.escape(out.name), "*")):
        try:
            descriptor = os.open(folder / _LOCK, os.O_WRONLY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # It is being written, or nobody can tell.
            continue
        finally:
            os.close(descriptor)
