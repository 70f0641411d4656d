"""The highest number of bytes in live tensors, by phase, of whatever runs inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class LiveBytes:
    """Bytes of storages that are alive, and the most of them in each phase.

    What is not tracked is what a kernel takes for itself while it runs.

    Attributes:
        peaks: From each phase that was entered to the most bytes that were alive in it.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._live = 0
        self._phase = ""

    def enter(self, phase: str) -> None:
        """Begin or go on with a phase; what is alive already counts in it."""
        self._phase = phase
        self._note()

    def forget_peaks(self) -> None:
        """Start all phases anew; what is alive stays counted."""
        self.peaks.clear()

    def add(self, tensors: Iterable[Any]) -> None:
        """Count the storages of some tensors, each once, at the size that they have now."""
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            key = storage._cdata
            if key not in self._watched:
                self._watched[key] = weakref.ref(storage, partial(self._drop, key))
            self._resize(key, storage.nbytes())
        self._note()

    def _note(self) -> None:
        if self._live > self.peaks.get(self._phase, -1):
            self.peaks[self._phase] = self._live

    def _resize(self, key: int, num_bytes: int) -> None:
        self._live += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes

    def _drop(self, key: int, _: Any = None) -> None:
        self._watched.pop(key, None)
        self._live -= self._sizes.pop(key, 0)

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Count what operations inside make; storages that change their size are followed.

        `fully_shard` frees gathered weights by a storage of size 0, which no dispatcher sees.
        """
        import torch

        kind: Any = torch.UntypedStorage
        resize = kind.resize_

        def followed(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            if storage._cdata in self._watched:
                self._resize(storage._cdata, storage.nbytes())
                self._note()
            return done

        kind.resize_ = followed
        try:
            with _listening_mode(self):
                yield
        finally:
            kind.resize_ = resize


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor as it is."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _listening_mode(live: LiveBytes) -> Any:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                # It comes back for what the DTensor makes of it.
                return NotImplemented
            made = func(*args, **(kwargs or {}))
            live.add(leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
            return made

    return Listener()  # type: ignore[no-untyped-call]
