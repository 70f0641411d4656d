"""Sizes as people write them, and the memory that a process has taken."""

from __future__ import annotations

import re
from pathlib import Path

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*")
# Where Linux says it.
_STATUS = Path("/proc/self/status")


def parse_bytes(name: str, size: str | int) -> int:
    """Return a number of bytes such as ``"5GB"`` (1e9 each) or ``"2GiB"`` (2**30 each).

    >>> parse_bytes("max_ram", "2GB"), parse_bytes("max_ram", "1.5KiB")
    (2000000000, 1536)

    Args:
        name: Name of the argument, for the error.
        size: Text with a unit, or a number of bytes.

    Raises:
        ValueError: It is no size, or 0.

    Collective: none.
    """
    found = _SIZE.fullmatch(str(size).upper())
    number = 0
    if found and found[2] in _UNITS and not isinstance(size, bool):
        number = int(float(found[1]) * _UNITS[found[2]])
    if number < 1:
        raise ValueError(f"{name}={size!r} is no size of at least 1 byte. Pass one such as '2GB'.")
    return number


def peak_bytes() -> int | None:
    """Return the highest resident bytes of this process, or None where it is not known.

    Collective: none.
    """
    if not _STATUS.is_file():
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
