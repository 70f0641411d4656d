"""Starting the process group, and the few collectives on plain Python values that guards need."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("distft")

# Seconds a rank waits for the others at the door of a save or a load.
RENDEZVOUS_TIMEOUT_VARIABLE = "DISTFT_RENDEZVOUS_TIMEOUT"
RENDEZVOUS_TIMEOUT = 60.0
# Seconds that a process waits at its end for threads of its group to let go of their tensors.
_LAST_RELEASE = 0.2

_base_seed: int = 0
_arrivals: dict[str, int] = {}


def init(
    seed: int = 0, backend: str | None = None, timeout: timedelta | float | None = None
) -> torch.device:
    """Start the process group of this rank and return the device that this rank uses.

    Under a launcher (``RANK`` and ``WORLD_SIZE`` are set) every rank joins one group; without one
    a group of one rank is made, so that the same script runs alone. A group that exists already is
    used as it is. Every rank gets the same seed, so that a model built from its config has the
    same values everywhere; `Strategy.apply` then moves rank r to ``seed + dp_rank``.

    Args:
        seed: The seed of the run.
        backend: A torch backend; default NCCL for CUDA tensors with gloo beside it for CPU
            tensors, and gloo alone where there is no GPU.
        timeout: Seconds (or a timedelta) after which a collective fails; default torch's own.

    Raises:
        ValueError: The seed is not an integer of at least 0, or the time-out is not positive.
        RuntimeError: ``LOCAL_RANK`` names a GPU that this machine does not have.

    Collective: every rank of the job.
    """
    import torch
    import torch.distributed as dist

    global _base_seed
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"init(seed={seed!r}) needs an integer of at least 0. Pass seed=0.")
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(
            f"init(timeout={timeout.total_seconds():g} s) needs more than 0 seconds. "
            "Pass the seconds a collective may take, such as 1800."
        )
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if backend is None:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        _start_group(backend, timeout)
        atexit.register(_leave)
    _base_seed = seed
    seed_everything(seed)
    return device


def _start_group(backend: str, timeout: timedelta | None) -> None:
    import torch.distributed as dist

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    # A file store needs no port, so two scripts on one machine never meet.
    folder = tempfile.TemporaryDirectory(prefix="distft-")
    atexit.register(folder.cleanup)
    store = dist.FileStore(os.path.join(folder.name, "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _leave() -> None:
    """End the group of a process that ends.

    gloo's threads may still hold the last reference to a tensor of the last collective, and need
    the interpreter to let it go; one that asks while the interpreter ends aborts the process, so
    that a run which has saved everything fails (torch 2.13, 4 of 12 runs on a busy machine).
    """
    import torch.distributed as dist

    several = dist.is_initialized() and dist.get_world_size() > 1
    shutdown()
    if several:
        time.sleep(_LAST_RELEASE)


def shutdown() -> None:
    """End the process group if there is one; safe to call twice.

    Collective: every rank of the job.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def local_device() -> torch.device:
    """Return the device of this rank: ``cuda:LOCAL_RANK`` where there is a GPU, else the CPU.

    Raises:
        RuntimeError: ``LOCAL_RANK`` is not below the number of GPUs.

    Collective: none.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise RuntimeError(
            f"LOCAL_RANK is {local_rank}, but this machine shows {num_gpus} GPUs. "
            f"Start at most {num_gpus} ranks here, or widen CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", local_rank)


def check_host_collectives(caller: str) -> None:
    """Raise where the process group cannot move tensors in host memory.

    Raises:
        RuntimeError: It has no backend for them, as one of NCCL alone.

    Collective: none.
    """
    import torch.distributed as dist

    config = dist.get_backend_config()
    if not host_backends(config):
        raise RuntimeError(
            f"{caller} keeps weights on the host, and the backend {config} has 0 parts that move "
            "host tensors. Start with distft.init(), or with backend='cpu:gloo,cuda:nccl'."
        )


def host_backends(config: str) -> list[str]:
    """Return the backends that move host tensors, of a process group's ``device:backend`` pairs.

    >>> host_backends("cpu:gloo,cuda:nccl"), host_backends("cpu:nccl,cuda:nccl")
    (['gloo'], [])

    Collective: none.
    """
    pairs = [pair.partition(":") for pair in config.split(",")]
    return [name for device, _, name in pairs if device == "cpu" and name not in ("nccl", "xccl")]


def group_size(purpose: str) -> int:
    """Return the number of ranks in the process group.

    Raises:
        RuntimeError: There is no process group.

    Collective: none.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError(
            f"{purpose} needs a process group, and this process has none. Call distft.init() first."
        )
    return dist.get_world_size()


def group_timeout() -> float | None:
    """Return the seconds after which a collective of the group fails; None without a group.

    Collective: none.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    backend = dist.distributed_c10d._get_default_group()._get_backend(local_device())
    timeout: timedelta = backend.options._timeout
    return timeout.total_seconds()


def local_ranks() -> int:
    """Return how many ranks the launcher started on this machine, and 1 where it does not say.

    Collective: none.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def group_rank() -> int:
    """Return this process's rank in the group, and 0 where there is none.

    Collective: none.
    """
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def base_seed() -> int:
    """Return the seed given to `init`.

    Collective: none.
    """
    return _base_seed


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) of this rank.

    Collective: none.
    """
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def raise_together(error: BaseException | None, value: Any = None) -> list[Any]:
    """Raise the first failing rank's error on every rank; return each rank's value where none has.

    A raise on one rank alone leaves the others waiting in their next collective until it times
    out, so each rank tells all others before anybody leaves.

    Raises:
        ValueError: The first failing rank had a ``ValueError``.
        RuntimeError: The first failing rank had any other error.

    Collective: every rank.
    """
    import torch.distributed as dist

    mine = None if error is None else failure_of(error)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, value))
    failure = first_failure([failed for failed, _ in everyone])
    if failure is None:
        return [told for _, told in everyone]
    is_value_error, text = failure
    raise (ValueError if is_value_error else RuntimeError)(text) from error


Failure = tuple[bool, str]


def failure_of(error: BaseException) -> Failure:
    """Return what other ranks are told of an error: whether it is a ``ValueError``, and its text.

    Collective: none.
    """
    known = isinstance(error, ValueError | RuntimeError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return isinstance(error, ValueError), text


def first_failure(everyone: Sequence[Failure | None]) -> Failure | None:
    """Return the failure that all ranks raise, of one or none of each rank.

    >>> first_failure([None, (True, "Too large."), None])
    (True, 'Too large. (on rank 1)')

    Collective: none.
    """
    failing = [rank for rank, found in enumerate(everyone) if found is not None]
    if not failing:
        return None
    is_value_error, text = everyone[failing[0]]  # type: ignore[misc]
    if any(found != everyone[failing[0]] for found in everyone):
        text = f"{text} (on rank {failing[0]})"
    return is_value_error, text


@contextmanager
def together() -> Iterator[None]:
    """Run a block on every rank; where it raises on one rank, raise that error on all.

    Collective: every rank.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as found:
        error = found
    raise_together(error)


def from_rank0(value: Any) -> Any:
    """Return rank 0's value of a picklable object on every rank.

    Collective: every rank.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def rendezvous(call: str) -> None:
    """Wait until every rank has made the same call; fail after a time-out instead of hanging.

    The wait goes through the group's key-value store, not through a collective, so a rank that
    came alone leaves with an error and can call again later. The time-out is 60 seconds, or the
    seconds in ``DISTFT_RENDEZVOUS_TIMEOUT``.

    Raises:
        RuntimeError: The other ranks did not come in time.

    Collective: every rank.
    """
    import torch.distributed as dist

    num_ranks = group_size(call)
    if num_ranks == 1:
        return
    seconds = float(os.environ.get(RENDEZVOUS_TIMEOUT_VARIABLE, RENDEZVOUS_TIMEOUT))
    store = dist.distributed_c10d._get_default_store()
    turn = _arrivals.get(call, 0)
    key = f"distft/{call}/{turn}"
    came = time.time()
    store.set(f"{key}/rank-{dist.get_rank()}", str(came))
    arrived = store.add(f"{key}/arrived", 1)
    if arrived == num_ranks:
        store.set(f"{key}/open", "1")
    try:
        store.wait([f"{key}/open"], timedelta(seconds=seconds))
    except RuntimeError as error:
        # Withdraw, so that a later call by every rank counts from nothing. Where the count shows
        # that the last rank came in this instant, the door is open after all.
        arrived = store.add(f"{key}/arrived", -1) + 1
        if arrived < num_ranks:
            present = _ranks_that_came(store, key, num_ranks, came - seconds)
            raise RuntimeError(
                f"{call} was called on {present} of {num_ranks} ranks within {seconds:g} s. "
                f"Call {call} on every rank, outside of any `if rank == 0`."
            ) from error
        store.add(f"{key}/arrived", 1)
        store.wait([f"{key}/open"], timedelta(seconds=seconds))
    _arrivals[call] = turn + 1


def _ranks_that_came(store: Any, key: str, num_ranks: int, since: float) -> int:
    """Count the ranks whose mark is not from an earlier try; others may have withdrawn by now."""
    marks = [f"{key}/rank-{rank}" for rank in range(num_ranks)]
    return sum(store.check([mark]) and float(store.get(mark)) >= since for mark in marks)
