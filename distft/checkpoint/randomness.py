"""The random state of a rank, in plain tensors and numbers."""

from __future__ import annotations

import logging
import random
from typing import Any

from distft.process_group import base_seed, seed_everything

logger = logging.getLogger("distft")


def random_file(rank: int) -> str:
    """Return where in a checkpoint the random state of a rank lies.

    Collective: none.
    """
    return f"rng/rank-{rank:05d}.pt"


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators of this rank.

    Collective: none.
    """
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators of this rank to a state that `random_state` returned.

    Collective: none.
    """
    import numpy as np
    import torch

    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    np.random.set_state(
        (
            "MT19937",
            np.array(numpy["keys"], dtype=np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        )
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive_random_state(step: int, dp_rank: int, saved: int, dp_size: int) -> None:
    """Seed this rank anew after the number of data ranks changed, and say so in the log.

    Steps and ranks are spread by primes, so that no two of them share a stream.

    Collective: none.
    """
    seed_everything(base_seed() + dp_rank + 1_000_003 * (step + 1))
    logger.info(
        "The random state was re-derived from seed %d and step %d: the checkpoint has the states "
        "of %d data ranks, and this run has %d.",
        base_seed(),
        step,
        saved,
        dp_size,
    )
