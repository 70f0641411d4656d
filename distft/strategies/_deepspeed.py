"""Importing DeepSpeed; nothing else in distft does."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from distft.process_group import local_device

_last_world: Any = None


def groups_module() -> Any:
    """Return the module that has its process groups.

    Collective: none.
    """
    from deepspeed.utils import groups

    return groups


def stage3_module() -> Any:
    """Return the module of the optimizer of stage 3.

    Collective: none.
    """
    from deepspeed.runtime.zero import stage3

    return stage3


def load_deepspeed() -> Any:
    """Import DeepSpeed on this process group, quietly and without its shared-memory op.

    Collective: every rank.
    """
    global _last_world
    import torch.distributed as dist

    os.environ.setdefault("LOCAL_RANK", "0")
    if local_device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Ignored on import, DeepSpeed's logger would print a page per engine.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed.utils import groups, logger

    logger.setLevel(logging.WARNING)
    # torch 2.13 renames collectives that DeepSpeed calls by their older names, in every step.
    warnings.filterwarnings(
        "ignore",
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        FutureWarning,
    )
    # Only inference uses this op. Compiling it takes a minute and a C++ compiler, and a process
    # that dies meanwhile leaves a lock on which every later run waits for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if _last_world is not None and _last_world is not dist.group.WORLD:
        # DeepSpeed would go on with the groups of a world that is gone.
        deepspeed.comm.comm.cdb = None
        groups._release_process_group_references(group=None)
    _last_world = dist.group.WORLD
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed
