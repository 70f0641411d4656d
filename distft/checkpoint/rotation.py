"""Which checkpoints stay when only so many are kept."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distft.checkpoint.folder import complete_below, read_manifest, removed_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger("distft")

# Set on an optimizer: which run it is in, as its checkpoints say it.
_RUN = "_distft_run"


def run_of(optimizer: Optimizer) -> str:
    """Return what the checkpoints of a run have in common; drawn at its first save.

    Collective: none.
    """
    if not getattr(optimizer, _RUN, ""):
        setattr(optimizer, _RUN, secrets.token_hex(8))
    return str(getattr(optimizer, _RUN))


def go_on_as(optimizer: Optimizer, run: str) -> None:
    """Say that an optimizer goes on with the run of a checkpoint.

    Collective: none.
    """
    setattr(optimizer, _RUN, run)


def rotate(path: Path, keep: int) -> None:
    """Delete checkpoints beside one that is there now, until ``keep`` of its run are left with it.

    The ones with the most steps stay. Those of other runs, and what was copied or converted under
    another name than the run gave it, are neither counted nor touched, nor is what is not complete.
    No folder is deleted under its name: it gets a hidden one first, which is nobody's checkpoint,
    so that a run that dies in between leaves none that is half deleted. The next rotation deletes
    what such a run left.
    A folder that cannot be deleted is no reason to lose a save, and is logged.

    Collective: none.
    """
    root = path.parent
    for left_over in root.glob(removed_name("*", "*")):
        shutil.rmtree(left_over, ignore_errors=True)
    run = read_manifest(path).run
    others = [o for _, o in complete_below(root) if o != path and _written_by(run, o)]
    for old in others[: max(0, len(others) - keep + 1)]:
        hidden = root / removed_name(old.name, secrets.token_hex(8))
        try:
            os.rename(old, hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning(
                "%s is older than the %d checkpoints to keep and cannot be deleted: %s",
                old,
                keep,
                error,
            )


def _written_by(run: str, path: Path) -> bool:
    """Return whether a run wrote a folder, and under the name that it has."""
    # One may go in between, as old ones do.
    with suppress(ValueError, OSError):
        manifest = read_manifest(path)
        return bool(run) and manifest.run == run and manifest.folder == path.name
    return False
