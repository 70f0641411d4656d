"""What a result has to say about where it was measured."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate")


def describe(packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Return Markdown list items: hardware, versions, and the command of this process."""
    python = f"Python {platform.python_version()}"
    versions = ", ".join([python, *(f"{name} {version(name)}" for name in packages)])
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return [
        f"- Hardware: {_processor()}, {os.cpu_count()} logical cores, {_memory_gib():.0f} GiB; "
        "no GPU used",
        f"- Versions: {versions}",
        f"- Command: `{command}`, one thread per rank",
    ]


def publish(lines: Iterable[str], out: Path | None, broken: Sequence[str] = ()) -> None:
    """Print a result and the bounds that it breaks, and write both to a file if there is one."""
    said = [*lines, *([""] if broken else []), *(f"Broken: {line}" for line in broken)]
    text = "\n".join(said).rstrip() + "\n"
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
