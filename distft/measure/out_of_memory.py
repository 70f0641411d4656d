"""What an out-of-memory error says, and how much room the device or the host has left."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

# What a RuntimeError that is no torch.OutOfMemoryError says: the host's allocator, and another
# rank's error that `raise_together` brought here.
_PHRASES = (
    "DefaultCPUAllocator: can't allocate memory",
    "out of memory. Tried to allocate",
    "CUDA error: out of memory",
)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB)\b", re.IGNORECASE)
_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class OutOfMemory(torch.OutOfMemoryError):
    """Memory ran out; the message has the phase, what was predicted and held, and what would fit.

    A ``torch.OutOfMemoryError``, raised from the error of torch or of the host.

    Attributes:
        phase: The call, such as ``"train_step"``.
        asked_bytes: Bytes that were asked for, where the error said so.
    """

    def __init__(self, message: str, phase: str = "", asked_bytes: int | None = None) -> None:
        super().__init__(message)
        self.phase = phase
        self.asked_bytes = asked_bytes


@dataclass(frozen=True)
class Room:
    """Memory of the place where an allocation failed.

    Attributes:
        where: Such as ``"GPU 0"`` or ``"the host"``.
        free: Bytes that this process could still get.
        total: Bytes that there are.
        allocated: Bytes of live tensors; of the host the process's resident bytes.
        reserved: Bytes that torch holds, tensors and gaps between them; of the host as allocated.
    """

    where: str
    free: int
    total: int
    allocated: int
    reserved: int


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the error of a chain that says that memory ran out, or None.

    Collective: none.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return error
        if isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES):
            return error
        # An error that is only in the context was handled, or would have been a cause.
        error = error.__cause__  # type: ignore[assignment]
    return None


def is_of_host(error: BaseException) -> bool:
    """Return whether it was the host's memory that ran out.

    Collective: none.
    """
    return isinstance(error, MemoryError) or _PHRASES[0] in str(error)


def asked_bytes(text: str) -> int | None:
    """Return the bytes that an error of torch says were asked for, or None.

    CUDA's message rounds to two decimals of its unit.

    Collective: none.

    >>> asked_bytes("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
    1610612736
    >>> asked_bytes("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.")
    4000
    """
    found = _ASKED.search(text)
    return round(float(found[1]) * _UNITS[found[2].lower()]) if found else None


def room_on_device(index: int) -> Room:
    """Return what a GPU has left.

    Collective: none.
    """
    free, total = torch.cuda.mem_get_info(index)
    stats = torch.cuda.memory_stats(index)
    allocated = int(stats.get("allocated_bytes.all.current", 0))
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    return Room(f"GPU {index}", free, total, allocated, reserved)


def room_on_host() -> Room:
    """Return what the host has left for this process: free memory, within the process's limits.

    ``free = min(MemAvailable, RLIMIT_AS - VmSize, RLIMIT_DATA - VmData)``; limits of a container
    are not in it, since they end a process instead of failing a request.

    Collective: none.
    """
    machine, mine = _kilobytes("/proc/meminfo"), _kilobytes("/proc/self/status")
    total = machine.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = machine.get("MemAvailable", 0)
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            free, total = min(free, max(most - mine.get(used, 0), 0)), min(total, most)
    held = mine.get("VmRSS", 0)
    return Room("the host", free, total, held, held)


def _kilobytes(file: str) -> dict[str, int]:
    """Return the bytes by name that a file of /proc lists in kB; nothing where there is none."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {p[0].rstrip(":"): int(p[1]) * 1024 for p in pairs if len(p) == 3 and p[2] == "kB"}
