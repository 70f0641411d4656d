"""Asking the kernel to write to the disk early, so that the sync at the end finds little to do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

# SYNC_FILE_RANGE_WRITE of Linux: begin to write what is dirty, and wait for nothing.
_BEGIN = 2


def begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Begin to write a range of a file to the disk, where the system can; wait for nothing.

    Errors are left to the sync at the end, which meets them again.

    Collective: none.
    """
    call = _sync_file_range()
    if call is not None:
        call(descriptor, start, length, _BEGIN)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's call, None where it has none (macOS, Windows)."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found
