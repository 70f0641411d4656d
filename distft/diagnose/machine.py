"""What a machine has and what its variables say, asked without naming anybody."""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Packages whose versions decide how a run behaves.
PACKAGES = (
    "distft torch transformers accelerate peft trl deepspeed bitsandbytes safetensors datasets "
    "numpy"
)
# Variables that change how ranks talk, by their beginnings; what else there is stays private.
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "GLOO_", "FSDP_")
_NAMES = (
    "ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED CUDA_DEVICE_MAX_CONNECTIONS "
    "CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS "
    "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF RANK TOKENIZERS_PARALLELISM WORLD_SIZE"
)
# Values that are plain: numbers, words of a list, names of devices. Paths and addresses are not.
_PLAIN = re.compile(r"[\w^=:,.+-]{0,48}")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|::")
_PRIVATE = re.compile(r"(FILE|PATH|DIR|HOST|ADDR|TOKEN|KEY|USER|COMM_ID)")


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, of those that are installed.

    Collective: none.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES.split():
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def variables() -> dict[str, str]:
    """Return the variables that change how ranks talk; ``(set)`` in place of a path or address.

    Collective: none.
    """
    found = {}
    for name, value in sorted(os.environ.items()):
        if name in _NAMES.split() or name.startswith(_PREFIXES):
            named = name in _NAMES.split() or not _PRIVATE.search(name)
            plain = _PLAIN.fullmatch(value) and not _ADDRESS.search(value)
            found[name] = value if named and plain else "(set)"
    return found


def shared_memory() -> tuple[int, int] | None:
    """Return bytes of /dev/shm that are free, and all; None where there is none.

    Collective: none.
    """
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.free, usage.total


def limits() -> dict[str, int | None]:
    """Return the soft limits of this process that stop runs; None stands for no limit.

    Open files, locked memory in bytes, processes of this user, and memory of its control group.

    Collective: none.
    """
    found: dict[str, int | None] = {}
    with suppress(ImportError):
        import resource

        for word, name in (
            ("open files", "RLIMIT_NOFILE"),
            ("locked memory", "RLIMIT_MEMLOCK"),
            ("processes", "RLIMIT_NPROC"),
        ):
            soft, _ = resource.getrlimit(getattr(resource, name))
            found[word] = None if soft == resource.RLIM_INFINITY else soft
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            size = int(Path("/sys/fs/cgroup", file).read_text())
            # The kernel's word for no limit is the largest number of pages.
            found["memory of the container"] = size if size < 2**60 else None
    return found


def memory() -> dict[str, int]:
    """Return bytes of host memory, in all and available; empty where the system does not tell.

    Collective: none.
    """
    found = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            word, _, rest = line.partition(":")
            if word in ("MemTotal", "MemAvailable"):
                found[word] = int(rest.split()[0]) * 1024
    return found


def devices() -> list[str]:
    """Return the GPUs that torch sees: kind, memory, compute capability, pairs without P2P.

    Collective: none.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    number = torch.cuda.device_count()
    found = []
    for index in range(number):
        has = torch.cuda.get_device_properties(index)
        found.append(
            f"{index}: {has.name}, {has.total_memory / 2**30:.0f} GiB, sm_{has.major}{has.minor}"
        )
    pairs = [
        f"{a}-{b}"
        for a in range(number)
        for b in range(a + 1, number)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if pairs:
        found.append(f"pairs without P2P: {', '.join(pairs)}")
    return found


def backends() -> str:
    """Return the communication backends that torch was built with, with NCCL's version.

    Collective: none.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return "none"
    found = [name for name in ("gloo", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    if dist.is_nccl_available() and torch.cuda.is_available():
        found.append("nccl " + ".".join(map(str, torch.cuda.nccl.version())))
    return ", ".join(found)


def write_rate(folder: Path, num_bytes: int = 2**26) -> float:
    """Return the bytes per second at which a folder takes a file of 64 MiB that is synced.

    Collective: none.
    """
    import tempfile

    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def stale_locks(older_than: float = 600.0) -> Iterator[tuple[str, float]]:
    """Yield names of torch's extensions whose build lock is old, and the lock's age in seconds.

    A process that is killed while it compiles leaves the lock, and every later run waits for it
    without a word.

    Collective: none.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    start = Path(root) if root else Path.home() / ".cache" / "torch_extensions"
    for file in start.rglob("lock") if start.is_dir() else ():
        with suppress(OSError):
            age = time.time() - file.stat().st_mtime
            if age > older_than:
                yield file.parent.name, age
