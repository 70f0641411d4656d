"""Worlds of real ranks that live for the whole session, and checks that nothing leaks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from distft.testing import WorkerPool

# Speed is measured in benchmarks/: on a busy machine an example may take any time.
settings.register_profile(
    "distft", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("distft")

# A test takes seconds; on a busy machine a rank needs minutes to load PEFT alone.
TIMEOUT = 600.0


# What pytest, torch and DeepSpeed set when they run or are first imported, and what keeps
# DeepSpeed quiet on a CPU.
SET_BY_IMPORTS = (
    "DS_ACCELERATOR",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], WorkerPool]]:
    """Return the pool of a number of ranks, started when it is first asked for."""
    started: dict[int, WorkerPool] = {}

    def pool(world_size: int) -> WorkerPool:
        if world_size not in started:
            started[world_size] = WorkerPool(world_size, timeout=TIMEOUT)
        return started[world_size]

    yield pool
    for running in started.values():
        running.close()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves an environment variable or a process group behind."""
    before = dict(os.environ)
    yield
    changed = {
        name
        for name in {*before, *os.environ}
        if before.get(name) != os.environ.get(name) and name not in SET_BY_IMPORTS
    }
    assert not changed, f"the test left {sorted(changed)} changed"
    torch = __import__("sys").modules.get("torch")
    if torch is not None:
        assert not torch.distributed.is_initialized(), "the test left a process group"
