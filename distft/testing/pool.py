"""Real gloo ranks for tests: started once, fast to reuse, never able to hang the suite."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "torch.distributed.tensor", "transformers", "distft.testing.preload")

# What is said of a rank that is no longer there.
GONE = "The rank's process ended."


class RanksFailed(RuntimeError):
    """A function raised on at least one rank; the message holds the first one's traceback.

    Attributes:
        errors: The exception of each rank, or None.
    """

    def __init__(self, message: str, errors: Sequence[BaseException | None]) -> None:
        super().__init__(message)
        self.errors = list(errors)


class RanksTimedOut(RuntimeError):
    """Ranks did not come back in time; the message holds the stack of every rank."""


class WorkerPool:
    """A world of gloo ranks on this machine that runs functions one after another.

    The ranks are forked from a server that has torch, transformers and DeepSpeed loaded, which
    takes some seconds once and under a second for each world after that. They keep their process
    group between runs. After a time-out, or a failure that left a rank behind, the pool is
    poisoned: its processes are ended and the next run starts new ones.

    Every group that a run makes (a mesh has one for each axis) leaves three gloo threads behind,
    one of which wakes up a hundred times a second. Before a run that finds more than `max_threads`
    in a rank the pool therefore starts new ranks: ranks with 157 groups spent 102 of 131 s of CPU
    in those threads.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that one run may take.
        env: Environment variables of the ranks, beside those of this process.
        max_threads: Threads of a rank after which new ranks take over; 64 are about 20 groups.
    """

    def __init__(
        self,
        world_size: int,
        timeout: float = 120.0,
        env: dict[str, str] | None = None,
        max_threads: int = 64,
    ) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"WorkerPool({world_size!r}) needs an integer of at least 1 rank.")
        self.world_size = world_size
        self.timeout = timeout
        self.env = dict(env or {})
        self.max_threads = max_threads
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._starts = 0
        self._lost_a_rank = False
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> WorkerPool:
        """Return the pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks."""
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Return what ``function(*args)`` returns on each rank, in rank order.

        Args:
            function: A function at module level, so that the ranks find it by name.
            args: Its arguments, pickled.
            timeout: Seconds; default the pool's.

        Raises:
            RanksFailed: The function raised on a rank.
            RanksTimedOut: A rank did not come back in time.
        """
        if any(_num_threads(process.pid) > self.max_threads for process in self._processes):
            self._end()
        if not self._processes:
            self._start()
        limit = self.timeout if timeout is None else timeout
        job = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        answers = self._collect(time.monotonic() + limit, limit)
        errors = [answer[1] if answer and not answer[0] else None for answer in answers]
        if any(errors):
            if None in answers or self._lost_a_rank:
                self._poison()
            raise RanksFailed(_report(answers), [error[0] if error else None for error in errors])
        return [answer[1] for answer in answers if answer is not None]

    def _collect(self, deadline: float, limit: float) -> list[Any]:
        answers: list[Any] = [None] * self.world_size
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                if any(answer and not answer[0] for answer in answers):
                    return answers
                stacks = self._stacks()
                self._poison()
                raise RanksTimedOut(
                    f"{len(waiting)} of {self.world_size} ranks did not come back in {limit:g} s. "
                    f"Their stacks:\n{stacks}"
                )
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    del waiting[rank]
                    answers[rank] = self._receive(pipe)
                    if not answers[rank][0]:
                        # The others may wait for this rank in a collective; give them a moment.
                        deadline = min(deadline, time.monotonic() + 5.0)
        return answers

    def _receive(self, pipe: connection.Connection) -> Any:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._lost_a_rank = True
            return (False, (RuntimeError(GONE), GONE))

    def _start(self) -> None:
        self._starts += 1
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="distft-pool-")
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        store = self._path(f"store-{self._starts}")
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            stack_file = self._stack_file(rank)
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self.world_size,
                    str(store),
                    str(stack_file),
                    theirs,
                    self._environment(),
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            # A folder of their own: a lock that a dead process left elsewhere cannot stop them.
            "TORCH_EXTENSIONS_DIR": str(self._path("extensions")),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **self.env,
        }

    def _stack_file(self, rank: int) -> Path:
        return self._path(f"stack-{self._starts}-{rank}.txt")

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "the pool has not started"
        return Path(self._folder.name, name)

    def _stacks(self) -> str:
        """Return every rank's Python stack, which it writes when it is told to."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        texts = []
        # On a busy machine it takes them a while.
        deadline = time.monotonic() + 10.0
        for rank, process in enumerate(self._processes):
            path = self._stack_file(rank)
            while process.is_alive() and _is_empty(path) and time.monotonic() < deadline:
                time.sleep(0.1)
            text = path.read_text() if path.exists() else ""
            texts.append(f"---- rank {rank}\n{text or '(no stack: the process is gone)'}")
        return "\n".join(texts)

    def _poison(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._lost_a_rank = [], [], False

    def close(self) -> None:
        """End the ranks; the pool can be used again."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send_bytes(b"")
            except OSError:
                continue
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._poison()


def _num_threads(pid: int) -> int:
    """Return the threads of a process; 0 where the system does not tell (outside of Linux)."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


def _is_empty(path: Path) -> bool:
    return not path.exists() or path.stat().st_size == 0


def _report(answers: Sequence[Any]) -> str:
    failed = [rank for rank, answer in enumerate(answers) if answer and not answer[0]]
    behind = [rank for rank, answer in enumerate(answers) if answer is None]
    text = f"Ranks {failed} of {len(answers)} failed. Rank {failed[0]}:\n{answers[failed[0]][1][1]}"
    return f"{text}\nRanks {behind} did not come back." if behind else text


def _serve(
    rank: int,
    world_size: int,
    store: str,
    stack_file: str,
    pipe: connection.Connection,
    env: dict[str, str],
) -> None:
    """Run jobs until the pipe closes or an empty one comes."""
    os.environ.update(env)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        while True:
            try:
                job = pipe.recv_bytes()
            except EOFError:
                break
            if not job:
                break
            pipe.send_bytes(_answer(job))
        # The group's own shutdown may wait for a rank that is gone; the parent ends us anyway.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(job: bytes) -> bytes:
    """Return the pickled result of a job: (True, value) or (False, (error, traceback))."""
    try:
        function, args = pickle.loads(job)
        return pickle.dumps((True, function(*args)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return pickle.dumps((False, (error, text)))
        except Exception:
            return pickle.dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), text)))
