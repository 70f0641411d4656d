"""Which checkpoint a run of the Trainer goes on from, and what is in its way."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from distft.checkpoint.folder import complete_below, read_manifest
from distft.process_group import from_rank0, group_rank, together
from distft.trainer.progress import Progress

logger = logging.getLogger("distft")

# The name under which torchrun's agents find each other, and what it is where nobody gave one.
_RUN_ID, _NO_RUN_ID = "TORCHELASTIC_RUN_ID", "none"
_LAUNCH = "launch"


def launched() -> dict[str, str]:
    """Return the name of the job under which torchrun started this rank, for a checkpoint.

    Collective: none.
    """
    name = os.environ.get(_RUN_ID, _NO_RUN_ID)
    return {} if name in ("", _NO_RUN_ID) else {_LAUNCH: name}


def checkpoint_to_resume(asked: Any, args: Any) -> str | None:
    """Return the checkpoint that a run begins with, or None; the same on every rank.

    Args:
        asked: What `Trainer.train` got.
        args: The training arguments.

    Raises:
        ValueError: There is none where one is asked for, or the folder has later checkpoints,
            which this run would have to write again.

    Collective: every rank.
    """
    _warn_of_shared_store()
    with together():
        # The first rank's view of the folder is everybody's.
        chosen = _choose(asked, args)
    return None if (found := from_rank0(chosen)) is None else str(found)


def _choose(asked: Any, args: Any) -> Path | None:
    root = Path(args.output_dir)
    # Those of the Trainer: others may lie beside them, such as one that was resharded.
    there = [
        (step, path) for step, path in complete_below(root) if path.name == f"checkpoint-{step}"
    ]
    found = Path(asked) if isinstance(asked, str | os.PathLike) else None
    if asked is True:
        if not there:
            raise ValueError(
                f"{root} has 0 complete checkpoints, and resume_from_checkpoint=True asks for the "
                "latest. Pass distft.latest(output_dir), which is None where there is none yet."
            )
        found = there[-1][1]
    elif found is None and there and _is_of_this_job(there[-1][1]):
        found = there[-1][1]
        logger.warning("torchrun restarted this job, which goes on from %s.", found)
    step = 0 if found is None else read_manifest(found).step
    later = [path.name for other, path in there if other > step]
    if later and (args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint):
        raise ValueError(
            f"{root} holds a run that has saved {', '.join(later)}, and this one begins after "
            f"{step} steps, so it could not save there. Pass resume_from_checkpoint=True to go on "
            "from the latest, or another output_dir, or move them away."
        )
    return found


def _warn_of_shared_store() -> None:
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts and shared and group_rank() == 0:
        logger.warning(
            "torchrun may restart these ranks %d times, and torch keeps one store for all of them, "
            "in which new ranks find the addresses of dead ones and wait for them. Start torchrun "
            "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.",
            restarts,
        )


def _is_of_this_job(folder: Path) -> bool:
    name = launched().get(_LAUNCH)
    return name is not None and read_manifest(folder).extra.get(_LAUNCH) == name


def follow_schedule(scheduler: Any) -> None:
    """Set the learning rate that a schedule has at its step.

    A checkpoint has the rate of its own run, which may have been planned for other steps; the first
    step after it would be made with that rate.

    Collective: none.
    """
    if isinstance(scheduler, LambdaLR):
        rates = [
            base * rate(scheduler.last_epoch)
            for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = rates
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class EpochsOfARest(TrainerCallback):
    """In an epoch that began in its middle, count the rows of before too.

    Args:
        progress: Where the run is.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epochs that the log shows."""
        if self._progress.dealing is not None and self._progress.start.row:
            state.epoch = self._progress.epochs(state.global_step)
