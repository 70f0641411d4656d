"""Reading the weights of a DeepSpeed ZeRO folder in one process."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distft.checkpoint.pickles import refuse_code

if TYPE_CHECKING:
    from torch import Tensor


MODULE_FILE = "mp_rank_00_model_states.pt"


def read_zero_weights(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return whole parameters and buffers of a ZeRO-1, 2 or 3 folder by name.

    Trained parameters are the fp32 master weights; frozen ones and buffers are as the engine held
    them.

    Raises:
        ValueError: A file is missing or names more than a checkpoint needs, or a name is absent.

    Collective: none.
    """
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    files = sorted(folder.rglob("*.pt"))
    if not files:
        raise ValueError(f"No .pt file in {folder}. Use a complete checkpoint.")
    for file in files:
        refuse_code(file)
    from deepspeed.utils import logger
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    logger.setLevel(logging.WARNING)
    tag = files[0].parent.name
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)
        if any(name not in found for name in names):
            # Stage 1 lists no frozen parameters beside its partitions; its module holds them whole.
            whole = torch.load(folder / tag / MODULE_FILE, mmap=True, weights_only=False)["module"]
            found = {**whole, **found}
    absent = [name for name in names if name not in found]
    if absent:
        raise ValueError(
            f"{len(absent)} of {len(names)} tensors are missing in {folder}, such as {absent[0]}. "
            "Use another checkpoint."
        )
    # Views of the flat vectors, which no writer of single tensors takes.
    return {name: torch.as_tensor(found[name]).detach().clone() for name in names}
