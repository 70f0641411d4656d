"""What commands print: a report for people or one JSON object, and progress."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


def wrote(options: argparse.Namespace, out: Path, what: str, *patterns: str) -> int:
    """Say what a folder holds now, and the highest memory of this process; return exit code 0.

    Collective: none.
    """
    from distft.checkpoint.memory import peak_bytes

    sizes = {
        file.relative_to(out).as_posix(): file.stat().st_size
        for file in sorted(out.rglob("*"))
        if file.is_file()
    }
    num_bytes = sum(
        size
        for name, size in sizes.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )
    peak = peak_bytes()
    if options.json:
        fields = {"out": str(out), "weight_bytes": num_bytes, "peak_bytes": peak, "files": sizes}
        print(json.dumps(fields))
    else:
        held = "" if peak is None else f", with {peak / 1e6:.0f} MB of memory at most"
        print(f"Wrote {len(sizes)} files with {num_bytes / 1e9:.3f} GB of {what} to {out}{held}")
    return 0


def report(options: argparse.Namespace, found: Any, **more: Any) -> None:
    """Print a report, with more fields where it is JSON.

    Collective: none.
    """
    fields = {**dataclasses.asdict(found), **more}
    print(json.dumps(fields, default=str) if options.json else found)


def failed(json_wanted: bool, error: Exception) -> int:
    """Print why a command could not do its work, and return exit code 1.

    Collective: none.
    """
    print(
        json.dumps({"error": str(error)}) if json_wanted else f"error: {error}",
        file=sys.stdout if json_wanted else sys.stderr,
    )
    return 1


@contextmanager
def progress() -> Iterator[Callable[[int], None]]:
    """Show the bytes that were written, where somebody is watching.

    Collective: none.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    import threading

    lock, done, shown = threading.Lock(), 0, 0

    def advance(num_bytes: int) -> None:
        nonlocal done, shown
        with lock:
            done += num_bytes
            # Every 64 MB is often enough for the eye.
            if done - shown >= 64_000_000:
                shown = done
                print(f"\r{done / 1e9:.2f} GB written", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print("\r" + " " * 24 + "\r", end="", file=sys.stderr, flush=True)
