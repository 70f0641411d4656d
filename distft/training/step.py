"""One optimizer step, the same arithmetic under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from distft.mesh import Mesh
from distft.process_group import local_device, raise_together
from distft.training.clip import GradientShards, bounds_of, clip
from distft.training.experts import uncounted
from distft.training.loss import (
    Batch,
    count_next_tokens,
    count_tokens,
    has_router_loss,
    next_token_loss,
    router_coefficient,
    router_losses,
)
from distft.training.rows import check_first_rows, unequal_neighbours
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


# In place of a number of micro-batches: this rank could not count.
FAILED = -1
# On a model in whose window something was raised.
INTERRUPTED = "_distft_interrupted_by"

LossFunction = Callable[["nn.Module", Batch], "Tensor"]
CountFunction = Callable[[Batch], int]


class StepPieces(Protocol):
    """The pieces of a strategy that a step is made of."""

    def mesh(self) -> Mesh:
        """Return the axis sizes."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Say that more micro-steps follow."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's share."""

    def _gradients(self, model: nn.Module) -> Sequence[GradientShards]:
        """Return this rank's reduced gradients."""


@dataclass(frozen=True)
class StepResult:
    """What one step did: plain numbers, the same on every rank.

    The numbers that a GPU computes are copied to the host when they are first read, so a step
    whose result nobody reads does not wait for the device.
    """

    num_loss_tokens: int
    num_tokens: int
    _on_device: Tensor
    _has_router: bool

    @cached_property
    def _values(self) -> list[float]:
        values: list[float] = self._on_device.tolist()
        return values

    @property
    def loss(self) -> float:
        """Cross-entropy in nats per loss token, over all ranks and micro-batches."""
        return self._values[0]

    @property
    def grad_norm(self) -> float:
        """2-norm of the whole gradient before clipping."""
        return self._values[2]

    @property
    def group_norms(self) -> tuple[float, ...]:
        """2-norms of the parameter groups' gradients before clipping.

        In the order of ``optimizer.param_groups``; ``()`` where no group has a ``max_grad_norm``.
        """
        return tuple(self._values[4:])

    @property
    def aux_loss(self) -> float | None:
        """The router's auxiliary loss times its coefficient, or None for a model without one."""
        return self._values[1] if self._has_router else None

    @property
    def skipped(self) -> bool:
        """Whether the update was left out since the norm was not finite."""
        return bool(self._values[3])

    def __repr__(self) -> str:
        """Show every number."""
        return (
            f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, "
            f"num_loss_tokens={self.num_loss_tokens}, num_tokens={self.num_tokens}, "
            f"aux_loss={self.aux_loss}, skipped={self.skipped}"
            + (f", group_norms={self.group_norms})" if self.group_norms else ")")
        )


@dataclass(frozen=True)
class Window:
    """The micro-batches of one step on this rank, and the numbers all ranks agreed on."""

    batches: Sequence[Batch]
    num_real: int
    num_loss_tokens: int
    num_tokens: int
    num_micro_batches: int


def count_over_ranks(
    batches: Sequence[Batch], count_fn: CountFunction, group: Any = None
) -> tuple[list[int], list[int], list[int]]:
    """Return loss tokens, tokens and micro-batches of every data rank.

    Raises:
        ValueError: Counting failed on a rank, such as for a batch without labels.

    Collective: every data rank: one all_gather of 24 bytes from each.
    """
    import torch
    import torch.distributed as dist

    error: Exception | None = None
    try:
        if isinstance(batches, Mapping):
            raise ValueError(
                f"The micro-batches are one batch with the fields {', '.join(map(str, batches))}. "
                "Pass a list of batches, such as [batch]."
            )
        counts = [
            sum(_whole_number(count_fn(batch)) for batch in batches),
            sum(count_tokens(batch) for batch in batches),
            len(batches),
        ]
    except Exception as found:
        # The others wait for this rank's counts, so it tells them before it raises.
        error, counts = found, [0, 0, FAILED]
    mine = torch.tensor(counts, dtype=torch.int64)
    num_ranks = dist.get_world_size(group)
    everyone = [mine]
    if num_ranks > 1:
        # Counting on the host, over gloo, leaves the GPU's queue alone.
        mine = mine.to(control_device())
        everyone = [torch.empty_like(mine) for _ in range(num_ranks)]
        dist.all_gather(everyone, mine, group=group)
    loss_tokens, tokens, sizes = torch.stack(everyone).t().tolist()
    if FAILED in sizes:
        raise_together(error)
    return loss_tokens, tokens, sizes


def _whole_number(count: Any) -> int:
    if int(count) != count or count < 0:
        raise ValueError(
            f"count_fn returned {count!r}, and a loss is a mean over a whole number of at least 0. "
            "Return the number of tokens, rows or pixels that the loss sums over."
        )
    return int(count)


def control_device() -> Any:
    """Return the device for small host-side collectives: the CPU where the group has gloo.

    Collective: none.
    """
    import torch.distributed as dist

    return "cpu" if "gloo" in str(dist.get_backend_config()) else local_device()


def agree_on_window(
    batches: Sequence[Batch],
    count_fn: CountFunction,
    call: str = "train_step",
    needs_loss: bool = True,
    copies: int = 1,
) -> Window:
    """Return this rank's window, padded to the longest of all ranks.

    A rank whose window is shorter repeats a batch that then gets the weight zero, so that every
    rank makes the same collectives and no row enters a gradient twice.

    Raises:
        ValueError: No rank has a micro-batch, or no batch on any rank has a loss token and the
            window needs one.

    Collective: every data rank: one all_gather, and one broadcast where a rank has no batch.
    """
    loss_tokens, tokens, sizes = count_over_ranks(batches, count_fn)
    longest = max(sizes)
    if longest == 0:
        raise ValueError(
            f"{call} got 0 micro-batches on each of {len(sizes)} ranks. "
            "Pass a list with at least one batch on one rank."
        )
    _check_copies(loss_tokens, tokens, sizes, copies)
    spare_rank = sizes.index(longest)
    loss_tokens, tokens, sizes = loss_tokens[::copies], tokens[::copies], sizes[::copies]
    if needs_loss and sum(loss_tokens) == 0:
        raise ValueError(
            f"The {sum(sizes)} micro-batches of this step have 0 loss tokens on {len(sizes)} "
            "ranks, so the mean loss is undefined. Leave such a step out, or mask fewer labels."
        )
    padded = list(batches)
    if min(sizes) == 0:
        spare = _batch_of_rank(spare_rank, batches)
        padded = padded or [spare]
    padded += [padded[-1]] * (longest - len(padded))
    return Window(padded, len(batches), sum(loss_tokens), sum(tokens), sum(sizes))


def _check_copies(
    loss_tokens: Sequence[int], tokens: Sequence[int], sizes: Sequence[int], copies: int
) -> None:
    """Raise where ranks that must read the same rows counted different numbers."""
    found = list(zip(sizes, tokens, loss_tokens, strict=True))
    for first, rank in unequal_neighbours(found, copies):
        raise ValueError(
            f"Ranks {first} and {rank} are in one tp group, which works on the same rows, and "
            f"got {found[first]} and {found[rank]} micro-batches, tokens and loss tokens. Read "
            "data by strategy.dp_rank of strategy.dp_size, as strategy.batches does."
        )


def _batch_of_rank(rank: int, batches: Sequence[Batch]) -> Batch:
    import torch.distributed as dist

    box: list[Any] = [batches[0] if dist.get_rank() == rank else None]
    dist.broadcast_object_list(box, src=rank)
    batch: Batch = box[0]
    return batch


def to_device(batch: Batch, device: Any) -> dict[str, Any]:
    """Return a batch with its tensors on ``device``.

    Collective: none.
    """
    return {
        name: value.to(device, non_blocking=True) if hasattr(value, "to") else value
        for name, value in batch.items()
    }


def run_step(
    strategy: StepPieces,
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    max_grad_norm: float | None,
    loss_fn: LossFunction | None,
    count_fn: CountFunction | None,
) -> StepResult:
    """Return the result of one optimizer step; see `Strategy.train_step`.

    Collective: every rank.
    """
    import torch
    import torch.distributed as dist

    copies = strategy.mesh().tp
    window = agree_on_window(micro_batches, count_fn or count_next_tokens, copies=copies)
    check_first_rows(model, window.batches[: window.num_real], copies, "train_step")
    device = local_device()
    optimizer.zero_grad()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with router_losses(model) as routers, _marks_interruption(model):
        for index, batch in enumerate(window.batches):
            last = index == len(window.batches) - 1
            sync = nullcontext() if last else strategy.no_sync(model)
            with sync, uncounted(model, skip=index >= window.num_real):
                share, values = _share_of_loss(
                    model, to_device(batch, device), window, loss_fn or next_token_loss, routers
                )
                weight = 1.0 if index < window.num_real else 0.0
                strategy.backward(share * weight)
                sums += values * weight
    parts = strategy._gradients(model)
    norm, group_norms = clip(parts, bounds_of(model), max_grad_norm, device)
    applied = _update(optimizer, norm)
    if dist.get_world_size() > 1:
        # Neighbours that read the same rows have the same sums: one of them brings them.
        sums *= float(dist.get_rank() % copies == 0)
        dist.all_reduce(sums)
    on_device = torch.stack([sums[0], sums[1], norm.double(), 1.0 - applied.double()])
    on_device = torch.cat([on_device, *(one.double().reshape(1) for one in group_norms)])
    return StepResult(window.num_loss_tokens, window.num_tokens, on_device, has_router_loss(model))


def check_one_number(loss: Tensor) -> Tensor:
    """Return a loss that is one number, or raise.

    Raises:
        ValueError: The loss has a shape.

    Collective: none.
    """
    if loss.dim():
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}, and a step adds one number "
            "per micro-batch. Return the sum over the batch."
        )
    return loss


@contextmanager
def _marks_interruption(model: nn.Module) -> Iterator[None]:
    """Refuse a model in whose window an exception was raised before.

    DDP's reducer and FSDP2's deferred gradients keep what such a window left, out of reach of
    ``zero_grad``, and would add it to the next step.
    """
    inner: Any = unwrap(model)
    before = getattr(inner, INTERRUPTED, None)
    if before is not None:
        raise RuntimeError(
            f"An earlier step was interrupted between its micro-batches by {before}, and a part of "
            "its gradients may be left. Build the model anew, apply() it and load the last "
            "checkpoint."
        )
    try:
        yield
    except BaseException as error:
        setattr(inner, INTERRUPTED, f"{type(error).__name__}: {error}")
        raise


def _share_of_loss(
    model: nn.Module,
    batch: Batch,
    window: Window,
    loss_fn: LossFunction,
    routers: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return this micro-batch's share of the objective, and its shares of both reported losses."""
    import torch

    routers.clear()
    share = check_one_number(loss_fn(model, batch)).float() / window.num_loss_tokens
    router = torch.zeros((), device=share.device)
    if routers:
        # HF's value is a mean over one forward pass; its mean over all real passes of all ranks
        # does not change with how these are dealt out to ranks and micro-steps.
        router = router_coefficient(model) * routers[-1].float() / window.num_micro_batches
    return share + router, torch.stack([share.detach(), router.detach()]).double()


def _update(optimizer: Optimizer, norm: Tensor) -> Tensor:
    """Step where the norm is finite; return 1 where the update was made, else 0."""
    import torch

    finite = torch.isfinite(norm)
    if norm.device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False):
        # A fused optimizer decides on the device, so the host does not wait for the norm.
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, (~finite).float()
        optimizer.step()
    elif bool(finite):
        optimizer.step()
    return finite
