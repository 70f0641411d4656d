"""DeepSpeed's flat partitions, filled from whole tensors: the only file that knows their insides.

`tests/deepspeed/test_private_names.py` fails first when one of them moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.checkpoint.dcp import named_tensors
from distft.checkpoint.whole_run import StateTensor, WholeRun, full_shape
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
        for name in run.weights:
            whole = run.read_weight(name)
            _fill_model(tensors[name], whole, third)
            for piece in by_name.get(name, ()):
                _fill(piece.flat, piece, whole)
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
            key: float(value.read()) if isinstance(value, StateTensor) else value
            for key, value in state.items()
            if not isinstance(value, StateTensor) or value.shape in ((), (1,))
        }
        found = (sorted(state), values)
        first = counters.setdefault(id(piece.flat), (piece.name, found))
        if first[1] != found:
            raise ValueError(
                f"{run.folder} has the state {found} of {piece.name} and {first[1]} of {first[0]}, "
                "and ZeRO keeps one for both. Use DDP or FSDP2, which keep one for each."
            )


def _part(whole: Tensor, piece: Piece) -> Tensor:
    flat = whole.reshape(-1)
    return flat[piece.start : min(piece.start + piece.size, flat.numel())]


def _fill(flat: Tensor, piece: Piece, whole: Tensor) -> None:
    part = _part(whole, piece)
    flat[piece.offset : piece.offset + part.numel()].copy_(part)


def _fill_model(tensor: Any, whole: Tensor, third: bool) -> None:
    """Fill the weights that the forward pass reads."""
    if not third or not hasattr(tensor, "ds_tensor"):
        tensor.data.copy_(whole)
        return
    import torch.distributed as dist

    held = tensor.ds_tensor
    start = dist.get_rank() * held.numel()
    part = whole.reshape(-1)[start : start + held.numel()]
    held.data[: part.numel()].copy_(part)
    if tensor.data.numel() == whole.numel():
        # Small ones stay whole on every rank.
        tensor.data.copy_(whole)


def _fill_state(
    engine: Any, state: dict[str, Any], key: str, value: Any, piece: Piece, shape: tuple[int, ...]
) -> None:
    from distft.strategies import on_disk

    if not isinstance(value, StateTensor):
        state[key] = value
    elif value.shape != shape:
        state[key] = value.read().clone()
    else:
        if key not in state:
            state[key] = on_disk.new_state(engine, piece.flat, key)
        _fill(state[key], piece, value.read())
