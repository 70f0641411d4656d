"""Ranks with a fault each, for the tests of the hang doctor: they end by exit codes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from distft.testing.pool import PRELOADED

LIMIT = 3.0
STEPS = 4


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_ranks(fault: Any, folder: Path, ranks: int = 3, seconds: float = 60.0) -> dict[str, Any]:
    """Return exit codes, what each rank printed, and how long it took from the fault to the end."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    port = free_port()
    processes = [
        context.Process(target=serve, args=(fault, rank, ranks, port, str(folder)))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    ended = time.time()
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    began = folder / "fault"
    printed = [(folder / f"err-{rank}").read_text() for rank in range(ranks)]
    return {
        "codes": [process.exitcode for process in processes],
        "printed": printed,
        "seconds": ended - float(began.read_text()) if began.is_file() else None,
        "late": late,
        "children": [int(pid) for file in folder.glob("child-*") for pid in [file.read_text()]],
    }


def serve(fault: Any, rank: int, ranks: int, port: int, folder: str) -> None:
    """Be a rank: train with a watch, and do what the fault says."""
    errors = open(Path(folder, f"err-{rank}"), "w", buffering=1)  # noqa: SIM115
    os.dup2(errors.fileno(), 2)
    sys.stderr = errors
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        OMP_NUM_THREADS="1",
        TORCH_FR_BUFFER_SIZE="100",
    )
    import torch

    torch.set_num_threads(1)
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    fault(rank, Path(folder))
    # A multiprocessing child skips exit handlers; a script's own shutdown does this.
    dist.destroy_process_group()


def note_fault(folder: Path) -> None:
    """Write down when the fault began."""
    (folder / "fault").write_text(str(time.time()))


def training(rank: int, folder: Path, fault: Any, strategy: Any = None) -> None:
    """Train under a watch; ``fault(step, rank, ...)`` runs before each step."""
    from functools import partial

    from torch.optim import AdamW

    import distft
    from distft.testing import tiny_batches, tiny_model

    distft.init()
    strategy = strategy or distft.DDP()
    model, optimizer = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    with distft.watch_hangs(LIMIT):
        for step in range(STEPS):
            if fault(step, rank, folder, strategy, model, optimizer) == "leave":
                break
            strategy.train_step(model, optimizer, tiny_batches([5, 3], seed=step))


def sleeps(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Rank 2 sleeps, and a process that it started goes on."""
    if rank == 2 and step == 2:
        from multiprocessing import get_context

        child = get_context("forkserver").Process(target=time.sleep, args=(600,), daemon=True)
        child.start()
        (folder / "child-2").write_text(str(child.pid))
        note_fault(folder)
        time.sleep(600)


def dies(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Rank 1 is killed."""
    if rank == 1 and step == 2:
        note_fault(folder)
        os.kill(os.getpid(), signal.SIGKILL)


def first_dies(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Rank 0, which keeps the store, is killed."""
    if rank == 0 and step == 2:
        note_fault(folder)
        os.kill(os.getpid(), signal.SIGKILL)


def stops(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Rank 1 does not run any more, and does not end."""
    if rank == 1 and step == 2:
        note_fault(folder)
        os.kill(os.getpid(), signal.SIGSTOP)


def raises(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Rank 1 meets a row that it cannot read."""
    if rank == 1 and step == 2:
        note_fault(folder)
        raise KeyError("labels of row 7")


def first_raises(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Rank 0, which keeps the store, raises."""
    if rank == 0 and step == 2:
        note_fault(folder)
        raise KeyError("labels of row 7")


def raise_alike(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Every rank raises."""
    if step == 2:
        note_fault(folder)
        raise KeyError("labels of row 7")


def saves_alone(
    step: int, rank: int, folder: Path, strategy: Any, model: Any, optimizer: Any
) -> None:
    """Rank 0 saves, and the others train on."""
    if rank == 0 and step == 2:
        note_fault(folder)
        strategy.save(folder / "run", model, optimizer, step=2)


def evaluates_alone(
    step: int, rank: int, folder: Path, strategy: Any, model: Any, optimizer: Any
) -> None:
    """Rank 1 evaluates 40 rows, and the others train on."""
    from distft.testing import tiny_batches

    if rank == 1 and step == 2:
        note_fault(folder)
        ids = tiny_batches([9] * 40, seed=0)
        rows = [{"input_ids": b["input_ids"][0], "labels": b["labels"][0]} for b in ids]
        strategy.evaluate(model, rows, micro_batch=4)


def has_fewer_batches(step: int, rank: int, folder: Path, *_: Any) -> str | None:
    """Rank 1 has one batch less: case 52 with a loop of one's own."""
    if rank == 1 and step == STEPS - 1:
        note_fault(folder)
        return "leave"
    return None


def trains(step: int, rank: int, folder: Path, *_: Any) -> None:
    """Nothing is wrong."""


def faulty(fault: Any) -> Any:
    """Return the job of a rank with a fault."""
    from functools import partial

    return partial(_job, fault)


def _job(fault: Any, rank: int, folder: Path) -> None:
    training(rank, folder, fault)


def waits_in_a_barrier(rank: int, folder: Path) -> None:
    """Rank 0 waits in a barrier of torch's, rank 1 in its own code: no call of distft at all."""
    import torch.distributed as dist

    import distft

    with distft.watch_hangs(LIMIT):
        dist.all_reduce(__import__("torch").ones(3))
        note_fault(folder)
        if rank == 0:
            dist.barrier()
        else:
            time.sleep(600)
