"""Which checkpoints stay when only so many are kept."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from pathlib import Path

from distft.checkpoint.folder import complete_below, removed_name

logger = logging.getLogger("distft")


def rotate(path: Path, keep: int) -> None:
    """Delete complete checkpoints beside one that is there now, until ``keep`` are left with it.

    The ones with the most steps stay. What is not complete is never touched, nor a folder under
    its name: it gets a hidden one first, which is nobody's checkpoint, so that a run that dies in
    between leaves none that is half deleted. The next rotation deletes what such a run left.
    A folder that cannot be deleted is no reason to lose a save, and is logged.

    Collective: none.
    """
    root = path.parent
    for left_over in root.glob(removed_name("*", "*")):
        shutil.rmtree(left_over, ignore_errors=True)
    others = [other for _, other in complete_below(root) if other != path]
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
