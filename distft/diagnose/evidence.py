"""What a rank notes of the forward passes of one step, for the others to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distft.spec import sharding_units
from distft.training.shares import listen
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

# Digests are whole numbers that a float64 holds.
_MASK = 2**52 - 1
_IGNORED = -100


@dataclass
class Window:
    """What one step's forward passes showed on this rank; tensors stay where they are.

    Attributes:
        forwards: Their number.
        rows: A digest of each one's token ids and labels.
        loss_tokens: Loss tokens of each one's labels.
        losses: The loss that each one returned, a mean over its loss tokens.
        divisors: What each one was told to divide its loss by, where it was.
        shares: What went into backward passes.
        randomness: A digest of the random state before the first one.
        masks_drawn_anew: Whether a block that was run again had another random state.
        compute: Dtype of the first linear layer's output.
    """

    forwards: int = 0
    rows: list[Tensor] = field(default_factory=list)
    loss_tokens: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    divisors: list[float] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    randomness: int = 0
    draws: bool = False
    masks_drawn_anew: str = ""
    compute: str = ""


class Evidence:
    """Hooks on a model that fill a `Window` while `notes` is True, and cost next to nothing else.

    Args:
        model: What `Strategy.apply` returned.
        timed: Wraps each hook, so that its seconds are counted.
    """

    def __init__(self, model: nn.Module, timed: Callable[[Any], Any]) -> None:
        self.notes = True
        self.window = Window()
        self.model = inner = unwrap(model)
        self._before: dict[str, dict[int, int]] = {}
        paths = sharding_units(inner)
        # Blocks are alike: the first and the last tell.
        blocks = {path: inner.get_submodule(path) for path in {*paths[:1], *paths[-1:]}}
        self._undo: list[Callable[[], None]] = [
            inner.register_forward_pre_hook(timed(self._on_forward), with_kwargs=True).remove,
            inner.register_forward_hook(timed(self._on_output)).remove,
            listen(timed(self._on_share)),
        ]
        for path, block in blocks.items():
            linear = self._first_linear(block)
            if linear is None:
                continue
            first, then = self._block_hooks(path)
            self._undo += [
                # The block's own hooks do not run when it is run again; those inside do.
                linear.register_forward_pre_hook(timed(first)).remove,
                block.register_forward_hook(timed(then)).remove,
                linear.register_forward_hook(timed(self._on_linear)).remove,
            ]

    def close(self) -> None:
        """Take the hooks off."""
        while self._undo:
            self._undo.pop()()

    def start(self, notes: bool) -> None:
        """Begin a new step."""
        self.notes, self.window = notes, Window()
        self._before.clear()

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        import torch

        if not (module.training and torch.is_grad_enabled()):
            return
        seen = self.window
        seen.forwards += 1
        if not self.notes:
            return
        if seen.forwards == 1:
            seen.randomness = _random_state()
        given = {str(place): value for place, value in enumerate(args)} | dict(kwargs)
        whole = [
            value
            for name, value in sorted(given.items())
            if isinstance(value, torch.Tensor)
            and name in ("0", "input_ids", "labels")
            and not value.is_floating_point()
        ]
        if whole:
            seen.rows.append(_rows_digest(whole))
        labels = given.get("labels")
        if isinstance(labels, torch.Tensor) and labels.dim() == 2:
            seen.loss_tokens.append((labels[:, 1:] != _IGNORED).sum().double())
        divisor = given.get("num_items_in_batch")
        if divisor is not None:
            seen.divisors.append(float(divisor))

    def _on_output(self, module: nn.Module, _: Any, output: Any) -> None:
        import torch

        loss = getattr(output, "loss", None)
        if self.notes and module.training and isinstance(loss, torch.Tensor) and not loss.dim():
            self.window.losses.append(loss.detach().double())

    def _on_share(self, share: Tensor) -> None:
        if self.notes and not share.dim():
            self.window.shares.append(share.double())

    def _on_linear(self, _: Any, __: Any, output: Any) -> None:
        if self.notes and not self.window.compute and hasattr(output, "dtype"):
            self.window.compute = str(output.dtype).removeprefix("torch.")

    def _block_hooks(self, path: str) -> tuple[Any, Any]:
        """Return hooks that compare the random state of a block's two forward passes.

        Activation checkpointing runs it again in the backward pass, where dropout must draw the
        same masks: from the state that it had before. What draws nothing may have any state.
        """
        import torch

        def before(module: nn.Module, _: Any) -> None:
            if not (self.notes and module.training):
                return
            state = _random_state()
            known = self._before.setdefault(path, {})
            if torch._C._current_graph_task_id() == -1:
                known[state] = state
            elif state not in known and any(was != then for was, then in known.items()):
                self.window.masks_drawn_anew = path

        def after(module: nn.Module, _: Any, __: Any) -> None:
            if not (self.notes and module.training):
                return
            known = self._before.get(path)
            if known and torch._C._current_graph_task_id() == -1:
                first = next(reversed(known))
                known[first] = _random_state()
                self.window.draws |= known[first] != first

        return before, after

    @staticmethod
    def _first_linear(block: nn.Module) -> nn.Module | None:
        import torch

        return next((each for each in block.modules() if isinstance(each, torch.nn.Linear)), None)


def _rows_digest(tensors: list[Tensor]) -> Tensor:
    """Return a whole number below 2**52 that changes with any element, on the tensors' device."""
    import torch

    found = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).to(torch.int64)
        place = torch.arange(1, len(flat) + 1, device=flat.device)
        # Knuth's multiplier spreads neighbours; int64 wraps around.
        found = found * 31 + ((flat + 101) * (place * 2654435761 + 12345)).sum()
    return found & _MASK


def _random_state() -> int:
    """Return a digest of this rank's random state: the host's and that of its device."""
    import torch

    state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state.update(torch.cuda.get_rng_state().numpy().tobytes())
    return int.from_bytes(state.digest(), "big") & _MASK


def number_of(text: str) -> int:
    """Return a digest of a text as a whole number that a float64 holds.

    Collective: none.
    """
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "big") & _MASK
