"""DeepSpeed's flat partitions, filled from whole tensors: the only file that knows their insides.

`tests/deepspeed/test_private_names.py` fails first when one of them moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.checkpoint.dcp import named_tensors
from distft.checkpoint.whole_run import SavedTensor, WholeRun, full_shape
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Where this rank's part of one parameter lies in a flat partition.

    Attributes:
        name: The parameter.
        flat: The partition.
        offset: First element in the partition.
        start: First element in the whole parameter.
        size: Number of elements; those past the end of the parameter are padding.
    """

    name: str
    flat: Tensor
    offset: int
    start: int
    size: int


def place_run(engine: Any, run: WholeRun) -> None:
    """Put weights and optimizer state into an engine of stage 1, 2 or 3.

    Every parameter of a partition must have made the same steps: the engine counts them once.

    Raises:
        ValueError: Parameters of one partition have different counters, or only some have state.

    Collective: none.
    """
    import torch

    from distft.strategies import on_disk

    zero = engine.optimizer
    third = engine.zero_optimization_stage() == 3
    pieces = list(_pieces_of_stage_3(engine) if third else _pieces_of_stage_1(engine))
    _check_counters(run, pieces)
    with torch.no_grad():
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        tensors = named_tensors(engine)
        for name, saved in run.weights.items():
            parts = by_name.get(name, [])
            if third and hasattr(tensors[name], "ds_tensor"):
                _fill_stage_3(tensors[name], saved, parts)
            else:
                _fill_whole(tensors[name], saved, parts)
        on_disk.forget_moments(engine)
        for piece in pieces:
            state = zero.optimizer.state[piece.flat]
            for key, value in run.states.get(piece.name, {}).items():
                _fill_state(engine, state, key, value, piece, full_shape(tensors[piece.name]))
    if hasattr(zero, "_hp_optimizer_states_linked"):
        # The fragments of what was cleared are looked up again at the next step.
        zero._hp_optimizer_states_linked = False


def _pieces_of_stage_1(engine: Any) -> Iterator[Piece]:
    """Yield the parts that this rank holds of stages 1 and 2: one partition a group."""
    zero, names = engine.optimizer, _names(engine)
    for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            held = parameter._hp_mapping
            if held is not None:
                there, here = held.hp_fragment_address, held.lp_fragment_address
                yield Piece(names[parameter], flat, there.start, here.start, here.numel)


def _pieces_of_stage_3(engine: Any) -> Iterator[Piece]:
    """Yield the parts that this rank holds of stage 3: each parameter padded to equal parts."""
    zero, names = engine.optimizer, _names(engine)
    for parameter, name in names.items():
        if parameter.requires_grad:
            index, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = zero._get_param_partition_rank(parameter) * parameter.ds_tensor.numel()
            yield Piece(name, zero.fp32_partitioned_groups_flat[index], offset, start, size)


def _names(engine: Any) -> dict[Any, str]:
    return {parameter: name for name, parameter in unwrap(engine).named_parameters()}


def _check_counters(run: WholeRun, pieces: list[Piece]) -> None:
    counters: dict[int, tuple[str, Any]] = {}
    for piece in pieces:
        state = run.states.get(piece.name, {})
        values = {
            key: float(value.read()) if isinstance(value, SavedTensor) else value
            for key, value in state.items()
            if not isinstance(value, SavedTensor) or value.shape in ((), (1,))
        }
        found = (sorted(state), values)
        first = counters.setdefault(id(piece.flat), (piece.name, found))
        if first[1] != found:
            raise ValueError(
                f"{run.folder} has the state {found} of {piece.name} and {first[1]} of {first[0]}, "
                "and ZeRO keeps one for both. Use DDP or FSDP2, which keep one for each."
            )


def _within(flat: Tensor, start: int, saved: SavedTensor) -> Tensor:
    """Return a part without the padding past the end of the whole."""
    return flat[: max(0, min(flat.numel(), math.prod(saved.shape) - start))]


def _fill(flat: Tensor, piece: Piece, saved: SavedTensor) -> None:
    part = flat[piece.offset : piece.offset + piece.size]
    saved.fill_range(piece.start, _within(part, piece.start, saved))


def _fill_whole(tensor: Tensor, saved: SavedTensor, pieces: Sequence[Piece]) -> None:
    """Fill weights that are whole on this rank, and its part of their fp32 copy."""
    saved.fill((0,) * tensor.dim(), tensor.data)
    for piece in pieces:
        if tensor.dtype == saved.dtype:
            part = tensor.data.reshape(-1)[piece.start : piece.start + piece.size]
            piece.flat[piece.offset : piece.offset + part.numel()].copy_(part)
        else:
            _fill(piece.flat, piece, saved)


def _fill_stage_3(tensor: Any, saved: SavedTensor, pieces: Sequence[Piece]) -> None:
    """Fill this rank's part of the weights that the forward pass reads, and of their fp32 copy."""
    import torch.distributed as dist

    held = tensor.ds_tensor
    start = dist.get_rank() * held.numel()
    part, filled = _within(held.data, start, saved), False
    for piece in pieces:
        _fill(piece.flat, piece, saved)
        if (piece.start, piece.size) == (start, held.numel()):
            part.copy_(piece.flat[piece.offset : piece.offset + part.numel()])
            filled = True
    if not filled:
        saved.fill_range(start, part)
    if tensor.data.numel() == math.prod(saved.shape):
        # Small ones stay whole on every rank.
        saved.fill((0,) * len(saved.shape), tensor.data.view(saved.shape))


def _fill_state(
    engine: Any, state: dict[str, Any], key: str, value: Any, piece: Piece, shape: tuple[int, ...]
) -> None:
    from distft.strategies import on_disk

    if not isinstance(value, SavedTensor):
        state[key] = value
    elif value.shape != shape:
        state[key] = value.read()
    else:
        if key not in state:
            state[key] = on_disk.new_state(engine, piece.flat, key)
        _fill(state[key], piece, value)
