"""Random numbers inside a tp group: the same for whole activations, others for split ones.

All ranks of a tp group draw from one seed, so that dropout on what is whole on each of them keeps
the same elements. Between a layer split by columns and the one split by rows that follows, each
rank has other heads or other features. There it draws from a stream of its own, which has no state
to keep: its seed is one number drawn from the shared stream, plus the rank. So the shared stream
moves on alike everywhere, a resumed run draws the same masks, and so does a block that activation
checkpointing runs again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


# What modules of transformers call the dropout that attention kernels get as a number.
ATTENTION_DROPOUT = (
    "attention_dropout",
    "attn_dropout",
    "attn_drop",
    "dropout",
    "dropout_p",
    "dropout_prob",
)


class SplitStream:
    """The stream of one rank inside one module; `enter` and `leave` may be called twice.

    Attributes:
        module: The module between whose children activations are split.
        rank: This rank in its tp group.
    """

    def __init__(self, module: nn.Module, rank: int, device: torch.device) -> None:
        self.module = module
        self.rank = rank
        self.device = device
        self._shared: Any = None

    def enter(self) -> None:
        """Draw from this rank's own stream from now on, in training."""
        import torch

        if self._shared is not None or not self.module.training:
            return
        # On the host: a number drawn on a GPU would have to be waited for.
        number = int(torch.randint(2**62, ()))
        generator = _generator(self.device)
        self._shared = _position(generator)
        generator.manual_seed(number + self.rank)

    def leave(self) -> None:
        """Draw from the shared stream again, where it was left."""
        if self._shared is not None:
            _go_to(_generator(self.device), self._shared)
            self._shared = None


def _generator(device: torch.device) -> torch.Generator:
    import torch

    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _position(generator: torch.Generator) -> Any:
    """Return where a generator is; on a GPU two numbers, without waiting for it."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _go_to(generator: torch.Generator, position: Any) -> None:
    if generator.device.type == "cuda":
        seed, offset = position
        generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(position)


def split_streams(
    model: nn.Module,
    columns: Collection[str],
    rows: Collection[str],
    rank: int,
    device: torch.device,
) -> list[SplitStream]:
    """Give this rank a stream of its own where activations are split and dropout draws.

    A module that holds layers of both kinds is where: from the end of a layer split by columns to
    the end of the one split by rows. Layers split by columns work on whole activations, and draw
    from the shared stream. A module without dropout gets nothing.

    Args:
        model: The model, with its adapters.
        columns: Paths of the layers that are split by columns and return a part.
        rows: Paths of the layers that are split by rows and take a part.
        rank: This rank in its tp group.
        device: Where activations are.

    Collective: none.
    """
    around = {path: _holder(path, rows) for path in columns}
    around |= {path: _holder(path, columns) for path in rows}
    streams: dict[str, SplitStream] = {}
    for path, holder in around.items():
        if holder is None or not _draws(model.get_submodule(holder)):
            continue
        if holder not in streams:
            module = model.get_submodule(holder)
            streams[holder] = SplitStream(module, rank, device)
            # Where a forward pass ends early, as when it is run again for the backward pass.
            _after(module, streams[holder].leave)
        child, stream = model.get_submodule(path), streams[holder]
        if path in columns:
            _before(child, stream.leave)
            _after(child, stream.enter)
        else:
            _after(child, stream.leave)
    return list(streams.values())


def _holder(path: str, others: Collection[str]) -> str | None:
    """Return the innermost module around a path that also holds one of the others."""
    holder = path
    while "." in holder:
        holder = holder.rpartition(".")[0]
        if any(other.startswith(f"{holder}.") for other in others):
            return holder
    return None


def _draws(module: nn.Module) -> bool:
    """Return whether a module has dropout: layers of it, or a number that attention is given."""
    from torch.nn.modules.dropout import _DropoutNd

    for inner in module.modules():
        if isinstance(inner, _DropoutNd) and inner.p > 0:
            return True
        numbers = (getattr(inner, name, None) for name in ATTENTION_DROPOUT)
        if any(isinstance(number, float) and number > 0 for number in numbers):
            return True
    return False


def _before(module: nn.Module, call: Any) -> None:
    module.register_forward_pre_hook(lambda *_: call())


def _after(module: nn.Module, call: Any) -> None:
    module.register_forward_hook(lambda *_: call(), always_call=True)
