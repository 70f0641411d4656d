"""The collectives as tensor algebra in one process: one tensor per rank in, one per rank out.

For property tests and for teaching: what NCCL or gloo moves between ranks is here a sum, a cut or
a transposition of a list. Nothing is communicated, inputs are left as they are, and every output
is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def shard_size(num_rows: int, num_ranks: int) -> int:
    """Return the rows of one rank's shard, ``ceil(num_rows / num_ranks)``: all shards are equal.

    >>> shard_size(131, 3)
    44

    Raises:
        ValueError: There is no rank, or a negative number of rows.

    Collective: none.
    """
    if num_ranks < 1 or num_rows < 0:
        raise ValueError(
            f"shard_size({num_rows} rows, {num_ranks} ranks) needs at least 0 rows and 1 rank."
        )
    return -(-num_rows // num_ranks)


def broadcast(tensors: Sequence[Tensor], src: int = 0) -> list[Tensor]:
    """Return rank ``src``'s tensor on every rank: ``y_r = x_src``.

    Raises:
        ValueError: The tensors differ in shape or dtype, or there is no rank ``src``.

    Collective: none.
    """
    _check_alike("broadcast", tensors)
    if not 0 <= src < len(tensors):
        raise ValueError(f"broadcast(src={src}) on {len(tensors)} ranks: use a rank that exists.")
    return [tensors[src].clone() for _ in tensors]


def all_reduce(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum over ranks on every rank: ``y_r = sum_s x_s``, added in rank order.

    A ring adds in another order, so floating-point sums of real ranks may differ in the last bit.

    Raises:
        ValueError: The tensors differ in shape or dtype.

    Collective: none.
    """
    _check_alike("all_reduce", tensors)
    return [_sum(tensors) for _ in tensors]


def reduce_scatter(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return to each rank its rows of the sum: ``y_r = (sum_s x_s)[r c : (r + 1) c]``.

    ``c`` is `shard_size`. Where the rows do not divide by the ranks the sum is padded with rows of
    zeros first, as FSDP2 pads, so that shards are equal; the last ones may be padding alone.

    Raises:
        ValueError: The tensors differ in shape or dtype, or have no dim 0.

    Collective: none.
    """
    _check_alike("reduce_scatter", tensors)
    _check_rows("reduce_scatter", tensors)
    whole, ranks = _sum(tensors), len(tensors)
    size = shard_size(len(whole), ranks)
    padding = whole.new_zeros((size * ranks - len(whole), *whole.shape[1:]))
    return [shard.clone() for shard in _cut(_join([whole, padding]), [size] * ranks)]


def all_gather(shards: Sequence[Tensor], num_rows: int | None = None) -> list[Tensor]:
    """Return the ranks' shards one below the other on every rank.

    Args:
        shards: Each rank's shard, all of one shape.
        num_rows: Rows of the whole tensor before it was padded; the rest is cut off. Default all.

    Raises:
        ValueError: The shards differ in shape or dtype, or have fewer than ``num_rows`` rows.

    Collective: none.
    """
    _check_alike("all_gather", shards)
    _check_rows("all_gather", shards)
    whole = _join(shards)
    rows = len(whole) if num_rows is None else num_rows
    if not 0 <= rows <= len(whole):
        raise ValueError(
            f"all_gather(num_rows={num_rows}) of {len(shards)} shards with {len(whole)} rows "
            "together: pass the rows that the tensor had before it was padded."
        )
    return [whole[:rows].clone() for _ in shards]


def all_to_all(
    tensors: Sequence[Tensor], splits: Sequence[Sequence[int]] | None = None
) -> list[Tensor]:
    """Return to each rank the parts that all ranks cut for it: part ``(s, r)`` goes from s to r.

    With equal parts this is a transposition and its own inverse. With ``splits`` the way back
    takes the transposed splits, as expert parallelism does on its way from the experts.

    Args:
        tensors: Each rank's rows, those for rank 0 first.
        splits: ``splits[s][r]`` rows go from rank s to rank r. Default equal parts.

    Raises:
        ValueError: Rows do not divide into equal parts, or the splits do not fit the rows.

    Collective: none.
    """
    ranks = len(tensors)
    _check_rows("all_to_all", tensors)
    if splits is None:
        _check_alike("all_to_all without splits", tensors)
        if len(tensors[0]) % ranks:
            raise ValueError(
                f"all_to_all of {len(tensors[0])} rows on {ranks} ranks has no equal parts. "
                "Pass splits."
            )
        splits = [[len(tensors[0]) // ranks] * ranks] * ranks
    _check_splits(tensors, splits)
    parts = [_cut(tensor, sizes) for tensor, sizes in zip(tensors, splits, strict=True)]
    return [
        _join([parts[sender][receiver] for sender in range(ranks)]) for receiver in range(ranks)
    ]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _join(tensors: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(list(tensors))


def _cut(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [tensor[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _check_alike(what: str, tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError(f"{what} needs the tensors of at least 1 rank, and got 0.")
    first: tuple[Any, Any] = (tuple(tensors[0].shape), tensors[0].dtype)
    for rank, tensor in enumerate(tensors):
        if (tuple(tensor.shape), tensor.dtype) != first:
            raise ValueError(
                f"{what}: rank {rank} has {tuple(tensor.shape)} of {tensor.dtype} and rank 0 "
                f"{first[0]} of {first[1]}. Real ranks would hang or mix numbers: make them equal."
            )


def _check_rows(what: str, tensors: Sequence[Tensor]) -> None:
    for rank, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise ValueError(f"{what}: rank {rank} has a tensor of 0 dims. Give it at least 1.")


def _check_splits(tensors: Sequence[Tensor], splits: Sequence[Sequence[int]]) -> None:
    ranks = len(tensors)
    if len(splits) != ranks or any(len(sizes) != ranks for sizes in splits):
        raise ValueError(
            f"all_to_all on {ranks} ranks needs splits of {ranks} x {ranks} numbers, and got "
            f"{[len(sizes) for sizes in splits]}."
        )
    for rank, (tensor, sizes) in enumerate(zip(tensors, splits, strict=True)):
        if min(sizes) < 0 or sum(sizes) != len(tensor):
            raise ValueError(
                f"all_to_all: rank {rank} has {len(tensor)} rows and its splits {list(sizes)} sum "
                f"to {sum(sizes)}. Splits are numbers of rows, at least 0, of all the rows."
            )
