"""A save that goes on beside training, and where its error comes out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distft.process_group import together

logger = logging.getLogger("distft")
_ASIDE = 0.01


class PendingSave:
    """A save whose state is copied, and that a thread of this process writes.

    The process does not end before it. Its error is raised by `result`, or else by the next save or
    load, on every rank.

    Attributes:
        path: Where the checkpoint appears.
        step: Its number of steps.
    """

    def __init__(self, path: Path, step: int, work: Callable[[], None]) -> None:
        self.path, self.step = path, step
        self._work = work
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"save of step {step}", daemon=False)
        self._thread.start()

    def __repr__(self) -> str:
        state = "is being written" if not self.done() else "failed" if self._error else "is there"
        return f"<PendingSave of step {self.step}: {self.path} {state}>"

    def _run(self) -> None:
        # A new thread keeps the interpreter for 5 ms, and training waits for so long. Asleep, it
        # lets the one that started it go on at once.
        time.sleep(_ASIDE)
        try:
            self._work()
        except BaseException as error:
            self._error = error
            # The process may end without another save.
            logger.error("%s", self._text())
        finally:
            # What it copied is used again by the next save.
            del self._work

    def _text(self) -> str:
        return (
            f"The save of step {self.step} to {self.path}, beside training, failed: {self._error}"
        )

    def done(self) -> bool:
        """Return whether it has ended, well or not.

        Collective: none.
        """
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until it has ended; raise as `result` where nobody has been told of its error."""
        self._thread.join()
        if not self._told:
            self.result()

    def result(self) -> Path:
        """Wait until the checkpoint is there, and return its folder.

        Raises:
            ValueError: The save failed by one on some rank.
            RuntimeError: The save failed in another way; the text is the same on every rank.

        Collective: none; every rank has the same result.
        """
        self._thread.join()
        if self._error is not None:
            self._told = True
            kind = ValueError if isinstance(self._error, ValueError) else RuntimeError
            raise kind(self._text()) from self._error
        return self.path


_last: PendingSave | None = None


def remember(save: PendingSave) -> PendingSave:
    """Return a save that the next one waits for.

    Collective: none.
    """
    global _last
    _last = save
    return save


def finish_last() -> None:
    """Wait for the save that is being written, if there is one.

    Raises:
        ValueError: It failed, and nobody has been told.
        RuntimeError: As above.

    Collective: every rank.
    """
    with together():
        wait_for_last()


def wait_for_last() -> None:
    """Do the same on this rank; the caller tells the others.

    Raises:
        ValueError: As `finish_last`.
        RuntimeError: As above.

    Collective: none.
    """
    global _last
    waiting, _last = _last, None
    if waiting is not None:
        waiting.finish()
