"""Watching for ranks that wait for each other, and ending the job with one message.

A thread of each rank looks every moment whether the main thread has stood still, whether a rank of
this machine is gone, and whether another rank has raised the alarm. It talks through a connection
of its own to the group's key-value store and never through a collective: whoever is gone, asleep
or elsewhere cannot keep the others from being heard.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, final

from distft.diagnose.scene import (
    Alarm,
    Scene,
    fingerprint,
    report,
    say_error,
    scene_here,
    started_at,
    this_machine,
    waits,
)
from distft.process_group import group_rank, group_size, group_timeout
from distft.whereabouts import raised_in, whereabouts

# What every rank exits with; EX_SOFTWARE of sysexits.h.
EXIT_CODE = 70
# Seconds between two looks, at most; with a limit of few seconds several looks fit in.
_POLL = 1.0
# Seconds in which the other ranks may raise alike, and in which an answer is expected.
_GRACE = 3.0
# The share of torch's own time-out after which a wait is taken for a hang.
_SHARE = 0.9

_sessions = 0


def watch_hangs(limit: float | None = None) -> HangWatch:
    """Return a context that ends the job with one message where ranks wait for each other.

    Where a rank has stood still for ``limit`` seconds while it waits for others, a rank's process
    is gone, or an error leaves the block on some ranks alone, every rank says where it is; one
    prints that (``rank 3: evaluate 1, 40 rows; ranks 0-2: save 1, step 500``) with stacks and,
    with ``TORCH_FR_BUFFER_SIZE`` set, torch's flight recorder; and all exit with code 70. Leaving
    the block waits for all ranks.

    Args:
        limit: Seconds; default 0.9 of the process group's time-out, after which torch would end
            the wait anyway, N times and without saying who is where.

    Raises:
        ValueError: The limit is not above 0.
        RuntimeError: There is no process group.

    Collective: every rank, entering and leaving.
    """
    return HangWatch(limit)


@final
class HangWatch:
    """What `watch_hangs` returns.

    Attributes:
        limit: Seconds of standing still that are taken for a hang.
        exit_code: What the ranks exit with.
    """

    exit_code = EXIT_CODE

    def __init__(self, limit: float | None = None) -> None:
        self._num_ranks = group_size("watch_hangs()")
        if limit is None:
            limit = _SHARE * (group_timeout() or 600.0)
        if limit <= 0:
            raise ValueError(
                f"watch_hangs(limit={limit!r}) needs more than 0 seconds. Pass the seconds that a "
                "rank may wait for the others, such as 600."
            )
        self.limit = float(limit)
        self._poll = min(_POLL, self.limit / 8)
        self._rank = group_rank()
        # What to answer in place of looking, whether the error is this rank's own, and whether the
        # report is on its way.
        self._scene: Scene | None = None
        self._raised = False
        self._ending = False
        self._reported = False
        self._last: tuple[tuple[int, ...], float] = ((), time.monotonic())
        self._peers: dict[int, tuple[int, str | None]] = {}
        self._known = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- the block --------------------------------------------------------------------------

    def __enter__(self) -> HangWatch:
        """Begin to watch."""
        global _sessions
        if self._num_ranks == 1:
            return self
        _sessions += 1
        self._store, self._main_store = _connection(_sessions), _connection(_sessions)
        pid = os.getpid()
        me = {"machine": this_machine(), "pid": pid, "started": started_at(pid)}
        self._main_store.set(f"rank/{self._rank}", json.dumps(me))
        # Whom to look for must be known before a fault; a rank that never comes is the thread's.
        self._wait_for(lambda: self._meet_peers(self._main_store), self.limit)
        self._thread = threading.Thread(target=self._run, name="distft-hangs", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the other ranks, or tell them of an error."""
        if self._thread is None:
            return
        if error is None:
            self._scene = Scene(whereabouts(), state="left")
        elif self._ending or self._is_of_a_peer(error):
            # The report is about the one that is gone; the thread ends this process with it.
            self._scene = Scene(raised_in(error))
        else:
            self._scene = Scene(raised_in(error), state="raised", error=say_error(error))
            self._raised = True
        try:
            self._wait_for_others(error)
        except Exception:
            # Without the store the thread reports and ends the process.
            self._over.wait(3 * _GRACE)

    def _wait_for_others(self, error: BaseException | None) -> None:
        """Be out; return when every rank is, or when it is time for a traceback of one's own."""
        store, scene = self._main_store, self._scene
        assert scene is not None, "a rank that is out has said where it was"
        store.set(f"here/{self._rank}", scene.to_json())
        if scene.state != "runs":
            store.add("num_out", 1)
        if self._raised and error is not None:
            name = f"{type(error).__name__}: {error}".splitlines()[0]
            text = f"rank {self._rank} raised {name}, others did not."
            self._raise_alarm(store, Alarm("raised", self._rank, text))
        deadline = time.monotonic() + (float("inf") if error is None else 4 * _GRACE)
        while not self._over.is_set() and time.monotonic() < deadline:
            if self._all_out(store):
                self._settle(store)
            self._over.wait(min(self._poll, 0.05))

    def _is_of_a_peer(self, error: BaseException) -> bool:
        """Return whether an error came of a process that is gone, which breaks connections."""
        deadline = time.monotonic() + 0.5
        while isinstance(error, RuntimeError) and time.monotonic() < deadline:
            if self._gone() or self._ending:
                return True
            time.sleep(0.02)
        return False

    def _gone_alarm(self, rank: int) -> Alarm:
        text = f"the process of rank {rank} is gone, and the others wait for it."
        return Alarm("gone", rank, text)

    def _settle(self, store: Any) -> None:
        """Let every rank see that all are out, before the process with the store may end."""
        store.add("num_settled", 1)
        deadline = time.monotonic() + _GRACE
        while self._rank == 0 and time.monotonic() < deadline:
            if int(store.add("num_settled", 0)) >= self._num_ranks:
                break
            time.sleep(0.01)
        self._over.set()

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(self._poll):
            try:
                self._look()
            except Exception as error:
                # The store is where rank 0 or the launcher is.
                if not self._over.is_set():
                    self._without_store(error)

    def _look(self) -> None:
        self._meet_peers(self._store)
        gone = self._gone()
        if gone and not self._store.check([f"here/{gone[0]}"]):
            self._raise_alarm(self._store, self._gone_alarm(gone[0]))
        seconds = self._unchanged()
        if self._scene is None and seconds > self.limit and waits():
            text = (
                f"rank {self._rank} has waited for {seconds:.1f} s; the limit is {self.limit:g} s."
            )
            self._raise_alarm(self._store, Alarm("stuck", self._rank, text))
        if self._store.check(["alarm"]):
            self._answer(Alarm.from_json(self._store.get("alarm").decode()))

    def _unchanged(self) -> float:
        """Return for how many seconds the main thread has stood still."""
        now = fingerprint()
        if now != self._last[0]:
            self._last = (now, time.monotonic())
        return time.monotonic() - self._last[1]

    def _meet_peers(self, store: Any) -> bool:
        """Read the process numbers of the ranks of this machine; return whether all have come."""
        names = [f"rank/{rank}" for rank in range(self._num_ranks)]
        if not self._known and store.check(names):
            machine = this_machine()
            for rank, name in enumerate(names):
                peer = json.loads(store.get(name))
                if peer["machine"] == machine and rank != self._rank:
                    self._peers[rank] = (peer["pid"], peer["started"])
            self._known = True
        return self._known

    def _gone(self) -> list[int]:
        return [rank for rank, (pid, began) in self._peers.items() if started_at(pid) != began]

    def _all_out(self, store: Any) -> bool:
        return int(store.add("num_out", 0)) >= self._num_ranks

    def _raise_alarm(self, store: Any, alarm: Alarm) -> None:
        if int(store.add("num_alarms", 1)) == 1:
            store.set("alarm", alarm.to_json())

    def _answer(self, alarm: Alarm) -> None:
        """Say where this rank is, have one rank report, and end the process."""
        deadline = time.monotonic() + _GRACE
        while alarm.kind == "raised" and time.monotonic() < deadline:
            # An error that every rank raises alike is the caller's.
            if self._all_out(self._store):
                return
            time.sleep(0.05)
        self._ending = True
        scene = self._scene or scene_here(self._unchanged())
        self._store.set(f"here/{self._rank}", scene.to_json())
        names = [f"here/{rank}" for rank in range(self._num_ranks)]
        self._wait_for(lambda: self._store.check(names), 2 * self._poll + 1.0)
        here = {rank for rank, name in enumerate(names) if self._store.check([name])}
        if int(self._store.add("num_reporters", 1)) == 1:
            scenes = {r: Scene.from_json(self._store.get(names[r]).decode()) for r in here}
            _print(report(alarm, scenes, self._num_ranks, self.limit))
            self._store.set("reported", "1")
        self._wait_for(lambda: self._store.check(["reported"]), _GRACE)
        self._reported = True
        # Together, so that no rank sees a connection break first.
        self._store.add("num_ending", 1)
        self._wait_for(lambda: int(self._store.add("num_ending", 0)) >= len(here), 1.0)
        self._end(silent=set(self._peers) - here)

    @staticmethod
    def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _without_store(self, error: Exception) -> None:
        """Report what this machine knows, where the process that kept the store has ended."""
        self._ending = True
        self._wait_for(lambda: bool(self._gone()), 1.0)
        gone = self._gone()
        alive = sorted({self._rank, *self._peers} - set(gone))
        if not self._reported and self._rank == alive[0]:
            who = gone[0] if gone else 0
            text = (
                f"the process of rank {who} is gone, and with it the store through which ranks "
                f"say where they are ({type(error).__name__})."
            )
            scenes = {self._rank: self._scene or scene_here(self._unchanged())}
            _print(report(Alarm("gone", who, text), scenes, self._num_ranks, self.limit))
            # While it is there no other one reports, and a busy machine takes a while to notice.
            self._wait_for(lambda: len(self._gone()) == len(self._peers), 3 * _GRACE)
        elif not self._reported:
            time.sleep(0.5)
        self._end(silent=set())

    def _end(self, silent: set[int]) -> None:
        """End this process, and those of this machine that cannot end themselves."""
        for rank in silent - set(self._gone()):
            with suppress(ProcessLookupError):
                os.kill(self._peers[rank][0], signal.SIGKILL)
        if self._raised:
            # Its own traceback ends it, after the others: it may keep their store. The thread ends
            # it where it hangs on the way out.
            self._wait_for(lambda: len(self._gone()) == len(self._peers), _GRACE)
            self._over.set()
            time.sleep(2 * _GRACE)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(EXIT_CODE)


def _print(text: str) -> None:
    # One write, so that lines of other ranks do not come between.
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()


def _connection(session: int) -> Any:
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"distft/hangs/{session}", store.clone())
