"""How ranks tell the first one what they have done, and learn what it made of it.

In a save that training waits for this is a collective. Beside training it goes through the process
group's key-value store, since a collective there could meet one of the training's and neither
would end; the store also outlives the group.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

# What the first rank makes of the parts of all, in their order; plain values of JSON.
Combine = Callable[[Sequence[Any]], Any]
Exchange = Callable[[Any, Combine], Any]

# As long as a process group waits for its ranks.
TIMEOUT = 1800.0
_SHORTEST, _LONGEST = 0.002, 0.1
_PIECE = 1 << 20


def over_group(part: Any, combine: Combine) -> Any:
    """Return on every rank what the first one makes of the parts of all.

    Collective: every rank.
    """
    import torch.distributed as dist

    from distft.process_group import from_rank0, group_rank

    parts = [part]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part)
    return from_rank0(combine(parts) if group_rank() == 0 else None)


class StoreExchange:
    """The same once, through the group's store, from any thread.

    Args:
        key: What begins the keys of this exchange, the same on every rank and never used before.
    """

    def __init__(self, key: str) -> None:
        import torch.distributed as dist

        self._key, self._rank, self._world = key, dist.get_rank(), dist.get_world_size()
        # Held here, so that it is there when the group is gone.
        self._store = dist.distributed_c10d._get_default_store() if self._world > 1 else None

    def __call__(self, part: Any, combine: Combine) -> Any:
        """Return on every rank what the first one makes of the parts of all.

        Raises:
            RuntimeError: A rank did not come in time, or the store is gone.
        """
        if self._store is None:
            return combine([part])
        store, key = self._store, self._key
        self._put(f"part-{self._rank}", part)
        if store.add(f"{key}/parts", 1) == self._world:
            store.set(f"{key}/all", "1")
        if self._rank != 0:
            self._wait(f"{key}/told", "the first rank")
            made = self._get("made")
            if store.add(f"{key}/read", 1) == self._world - 1:
                store.set(f"{key}/end", "1")
            return made
        self._wait(f"{key}/all", f"{self._world} ranks")
        made = combine([self._get(f"part-{rank}") for rank in range(self._world)])
        self._put("made", made)
        store.set(f"{key}/told", "1")
        # It may be this process that keeps the store, so it is the last to leave.
        self._wait(f"{key}/end", f"{self._world} ranks")
        for name in ("parts", "all", "told", "read", "end"):
            store.delete_key(f"{key}/{name}")
        return made

    def _put(self, name: str, value: Any) -> None:
        """Store a value in pieces, since a store has a limit for one."""
        assert self._store is not None
        text = json.dumps(value)
        for number, low in enumerate(range(0, len(text), _PIECE)):
            piece, last = text[low : low + _PIECE], low + _PIECE >= len(text)
            self._store.set(f"{self._key}/{name}/{number}", ("." if last else "+") + piece)

    def _get(self, name: str) -> Any:
        """Return a value that is there, put together again."""
        assert self._store is not None
        pieces: list[str] = []
        while not pieces or pieces[-1][0] == "+":
            found = self._store.get(f"{self._key}/{name}/{len(pieces)}")
            pieces.append(found.decode())
        return json.loads("".join(piece[1:] for piece in pieces))

    def _wait(self, key: str, whom: str) -> None:
        """Wait for a key by asking: a blocking wait would keep training from the store."""
        assert self._store is not None
        end, pause = time.monotonic() + TIMEOUT, _SHORTEST
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"Waited {TIMEOUT:g} s for {whom} in a save beside training. "
                    "See what became of the other ranks."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
