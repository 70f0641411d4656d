"""A budget of memory for work on files: said, checked at the start, and measured."""

from __future__ import annotations

import re
from pathlib import Path

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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


class Peak:
    """Measures the resident bytes that work adds to this process, on Linux."""

    def __init__(self) -> None:
        self.before = _resident("VmRSS")
        try:
            # The kernel starts anew with the highest value.
            _RESET.write_text("5")
        except OSError:
            self.before = 0

    def added_bytes(self) -> int | None:
        """Return the most bytes held beyond those at the start, or None where it is not known.

        Where the kernel does not reset its mark, it is the peak of the whole process.

        Collective: none.
        """
        highest = _resident("VmHWM")
        return max(0, highest - self.before) if highest else None


def peak_bytes() -> int | None:
    """Return the highest resident bytes of this process, or None where it is not known.

    Collective: none.
    """
    return _resident("VmHWM") or None


def _resident(field: str) -> int:
    if not _STATUS.is_file():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
