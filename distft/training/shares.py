"""Shares of the loss that go into backward passes, told to those who check them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Listener = Callable[["Tensor"], None]

_listeners: list[Listener] = []


def note_share(loss: Tensor) -> None:
    """Tell the listeners of a share that was backpropagated.

    Collective: none.
    """
    for listener in _listeners:
        listener(loss.detach())


def listen(listener: Listener) -> Callable[[], None]:
    """Have a function called with each share; return what ends that.

    Collective: none.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)
