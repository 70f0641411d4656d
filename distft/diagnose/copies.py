"""Which ranks hold copies of which tensors, and whether the copies are equal.

Two ranks hold copies where they hold the same elements of a tensor of the same name: both whole
tensors under DDP, equal parts in two replicas of HSDP, norms on the ranks of a tp group. A copy is
compared by its 2-norm, one pass over memory; ranks that made the same sums have the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.checkpoint.placement import held_ranges
from distft.diagnose.flight import say_ranks
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

# In place of a norm: the rank has no such tensor, or no gradient.
ABSENT = -1.0
# Relative difference of norms. Copies of data ranks get the same sums, bit for bit; the ranks of a
# tp group compute theirs, and kernels of a GPU may add in another order each time.
_OF_DATA_RANKS = 1e-6
_OF_TP = {"weight": 1e-3, "gradient": 5e-2, "buffer": 1e-6}
_WAY_OUT = {
    "gradient": (
        "No collective has summed it over these ranks, so each trains its own copy. Let "
        "Strategy.apply() spread the whole model, adapters included, and leave no_sync() before "
        "the last micro-step."
    ),
    "weight": (
        "The copies have parted, so checkpoints and losses depend on which rank is asked. Look for "
        "code that changes weights, or skips updates, on some ranks; load the last checkpoint."
    ),
    "buffer": (
        "A buffer is stale on some ranks. Set it alike on every rank before apply(), and change it "
        "by values that ranks share."
    ),
}


@dataclass(frozen=True)
class Copied:
    """A tensor of which ranks hold copies.

    Attributes:
        kind: ``"weight"``, ``"gradient"`` or ``"buffer"``.
        name: Name of the parameter or buffer.
        groups: Ranks that hold the same elements, in sets of at least 2.
    """

    kind: str
    name: str
    groups: tuple[tuple[int, ...], ...]


def find_copies(model: nn.Module, has_gradients: bool) -> list[Copied]:
    """Return the tensors of which ranks hold copies, alike on every rank.

    Args:
        model: What `Strategy.apply` returned.
        has_gradients: Whether gradients are found on parameters, not inside of an engine.

    Collective: every rank.
    """
    import torch.distributed as dist

    mine = {(kind, name): _piece(tensor) for kind, name, tensor in _tensors(model)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = []
    for kind, name in sorted({key for pieces in everyone for key in pieces}):
        holders: dict[str, list[int]] = {}
        for rank, pieces in enumerate(everyone):
            piece = pieces.get((kind, name))
            if piece is not None:
                holders.setdefault(piece, []).append(rank)
        groups = tuple(tuple(ranks) for ranks in holders.values() if len(ranks) > 1)
        if groups:
            found.append(Copied(kind, name, groups))
    trained = {name for name, p in unwrap(model).named_parameters() if p.requires_grad}
    gradients = [
        Copied("gradient", each.name, each.groups)
        for each in found
        if has_gradients and each.kind == "weight" and each.name in trained
    ]
    return [*found, *gradients]


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, name and tensor of what copies are looked for."""
    import torch

    inner = unwrap(model)
    for name, parameter in inner.named_parameters():
        yield "weight", name, parameter
    # The running statistics of a rank's own rows differ by design, and so do they under DDP.
    own = {
        f"{path}.{name}" if path else name
        for path, module in inner.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._NormBase)
        for name, _ in module.named_buffers(recurse=False)
    }
    for name, buffer in inner.named_buffers():
        if name not in own:
            yield "buffer", name, buffer


def _piece(tensor: Any) -> str | None:
    """Return a word for the elements that this rank holds; None where it holds none."""
    if tensor.is_meta or not tensor.numel():
        return None
    placed = hasattr(tensor, "placements")
    if placed and not tensor.to_local().numel():
        return None
    held = tuple(held_ranges(tensor, dim) for dim in range(tensor.ndim)) if placed else ()
    whole = all(part == ((0, size),) for part, size in zip(held, tensor.shape, strict=False))
    text = f"{tuple(tensor.shape)} {'whole' if whole else held}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digests(model: nn.Module, copied: Sequence[Copied], device: Any) -> Tensor:
    """Return the 2-norm of each copy on this rank, and `ABSENT` where there is none.

    Collective: none.
    """
    import torch

    inner = unwrap(model)
    held: dict[str, Any] = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    found = torch.full((len(copied),), ABSENT, dtype=torch.float64, device=device)
    by_kind: dict[Any, list[tuple[int, Tensor]]] = {}
    for place, each in enumerate(copied):
        tensor = held.get(each.name)
        if each.kind == "gradient":
            tensor = getattr(tensor, "grad", None)
        if tensor is None:
            continue
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "placements") else local
        if not local.is_floating_point():
            local = local.double()
        by_kind.setdefault((local.device, local.dtype), []).append((place, local))
    for (_, dtype), members in by_kind.items():
        tensors = [tensor for _, tensor in members]
        # A norm has the dtype of its tensor: that of bf16 would tell 3 digits.
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        norms = torch._foreach_norm(tensors, 2, dtype=None if wide == dtype else wide)
        places = torch.tensor([place for place, _ in members], device=device)
        found[places] = torch.stack(norms).to(device, torch.float64)
    return found


def first_difference(
    copied: Sequence[Copied], norms: Sequence[Sequence[float]], tp: int
) -> str | None:
    """Return what is wrong with the first tensor whose copies differ, or None.

    Args:
        copied: The tensors, as `find_copies` returns them.
        norms: From each rank the norms that `digests` returns.
        tp: Size of a tp group.

    Collective: none.
    """
    for place, each in enumerate(copied):
        for group in each.groups:
            values = {rank: norms[rank][place] for rank in group}
            if any(_differs(each, values, a, b, tp) for a in group[:1] for b in group[1:]):
                return _say(each, values)
    return None


def _differs(each: Copied, values: Mapping[int, float], a: int, b: int, tp: int) -> bool:
    one, two = values[a], values[b]
    # Equal infinities too: packed weights are bytes that look like floats.
    if one == two or (math.isnan(one) and math.isnan(two)):
        return False
    if (one == ABSENT) != (two == ABSENT):
        return True
    same_rows = tp > 1 and a % tp != b % tp
    limit = _OF_TP[each.kind] if same_rows else _OF_DATA_RANKS
    # Below it a norm is rounding alone.
    floor = 1e-12
    return not abs(one - two) <= limit * max(abs(one), abs(two)) + floor


def _say(each: Copied, values: Mapping[int, float]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault("none" if value == ABSENT else f"{value:.9g}", []).append(rank)
    few, *others = sorted(by_value.items(), key=lambda item: (len(item[1]), item[1][0] == 0))
    if "none" in by_value:
        ranks = say_ranks(by_value["none"])
        return (
            f"{ranks} of {len(values)} ranks that hold {each.name} got no {each.kind} for it, and "
            "the others did, such as where no token of a rank reaches an expert: with weight decay "
            "the copies part. Use DDP(find_unused_parameters=True), or let every rank use it."
        )
    rest = "; ".join(f"{value} on {say_ranks(ranks)}" for value, ranks in others)
    return (
        f"The {each.kind} of {each.name} has the 2-norm {few[0]} on {say_ranks(few[1])} and "
        f"{rest}, which hold copies. {_WAY_OUT[each.kind]}"
    )
