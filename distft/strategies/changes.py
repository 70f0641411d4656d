"""Changes to a run that hold less memory, from the smallest, and what the formulas say of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distft.formulas import MemoryReport
    from distft.spec import ModelSpec, Workload
    from distft.strategies.costing import Costing

# Strategies that split more of the model state, after each that splits less.
_NEXT = {
    "ddp": ("zero1", "zero2", "zero3", "fsdp2"),
    "zero1": ("zero2", "zero3", "fsdp2"),
    "zero2": ("zero3", "fsdp2"),
    "hsdp": ("fsdp2",),
}
# How many times the ranks are tried.
_MORE_RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Change:
    """One change to a run.

    Attributes:
        what: The change, in words.
        model_state_bytes: Of the heaviest rank afterwards, or None where it stays as it is.
        saved_bytes: Predicted for the heaviest rank in the phase; None where only activations
            change, for which there is no formula.
    """

    what: str
    model_state_bytes: int | None = None
    saved_bytes: int | None = None


def held_bytes(report: MemoryReport, phase: str) -> int:
    """Return the bytes of the heaviest rank in a phase; in ``"load"`` parameters alone.

    Reports count optimizer state in every phase, since it is there from the first step on.

    Collective: none.
    """
    return max(report.kind_bytes("parameters")) if phase == "load" else report.phase_bytes(phase)


def shortfall(phase: str, asked: int, missing: dict[str, int], free: int) -> int:
    """Return the bytes that must be found, at least.

    ``asked + optimizer state still to come - free`` in a forward or backward pass, whose
    activations lie beside it in every later step; elsewhere what is asked for is part of what is
    to come: ``max(asked, to come) - free``.

    Args:
        phase: A phase of the memory report.
        asked: Bytes that were asked for.
        missing: Predicted bytes that are not there yet, by kind of model state.
        free: Bytes that are free.

    Collective: none.
    """
    if phase in ("forward", "backward"):
        return max(asked + missing["optimizer"] - free, 0)
    to_come = missing["parameters" if phase == "load" else "optimizer"]
    return max(asked, to_come) - free if max(asked, to_come) > free else 0


def list_changes(
    strategy: Costing,
    spec: ModelSpec,
    load: Workload,
    world_size: int,
    phase: str,
    *,
    shape: Sequence[int] | None = None,
    trains: bool = True,
    on_gpu: bool = True,
) -> list[Change]:
    """Return the changes that hold less in a phase, in a fixed order from the smallest.

    Less at once, recomputation, what a strategy keeps for speed, precision, other strategies,
    the host's memory, more ranks. A change whose formula says that it saves nothing is left out,
    as is one that the strategy refuses.

    Args:
        strategy: The strategy that ran out.
        spec: The model.
        load: The workload; its optimizer counts.
        world_size: Number of ranks.
        phase: A phase of the memory report.
        shape: Rows and tokens of the batch, where they are known.
        trains: Whether a backward pass follows.
        on_gpu: Whether the device has memory of its own.

    Raises:
        ValueError: The formulas do not cover the strategy or the workload.

    Collective: none.
    """
    now = held_bytes(strategy.state_memory(spec, load, world_size=world_size), phase)
    changes: list[Change] = []
    if phase in ("forward", "backward"):
        changes += _smaller_activations(strategy, shape, trains)
    for what, make, ranks in _candidates(strategy, world_size, trains, on_gpu):
        try:
            report = make().state_memory(spec, load, world_size=ranks)
        except (ValueError, TypeError):
            continue
        saved = now - held_bytes(report, phase)
        if saved > 0:
            changes.append(Change(what, report.model_state_bytes, saved))
    return changes


def smallest_that_fits(changes: Sequence[Change], short: int) -> Change | None:
    """Return the first change whose predicted saving covers the shortfall, or None.

    Collective: none.
    """
    predicted = (change for change in changes if change.saved_bytes is not None)
    return next((change for change in predicted if (change.saved_bytes or 0) >= short), None)


def _smaller_activations(
    strategy: Costing, shape: Sequence[int] | None, trains: bool
) -> Iterator[Change]:
    rows = shape[0] if shape else 0
    if rows > 1 and trains:
        less = rows // 2
        times = -(-rows // less)
        yield Change(f"micro_batch={less} in place of {rows}, and grad_accum times {times}")
    elif rows > 1:
        yield Change(f"{rows // 2} rows at a time in place of {rows}")
    elif rows == 1:
        tokens = f" than {shape[1]} tokens" if shape and len(shape) > 1 else ""
        yield Change(f"shorter rows{tokens}: there is 1 row at a time already")
    else:
        yield Change("fewer rows at a time" + (", and a larger grad_accum" if trains else ""))
    if trains and not strategy.activation_checkpointing:
        yield Change("activation_checkpointing=True")
    if strategy.precision == "fp32":
        yield Change('precision="bf16-mixed"')


def _candidates(
    strategy: Costing, world_size: int, trains: bool, on_gpu: bool
) -> Iterator[tuple[str, Callable[[], Costing], int]]:
    """Yield what each change is called, how its strategy is made, and its number of ranks."""
    from distft.strategies.by_name import STRATEGIES

    changed = partial(replace, strategy)
    if getattr(strategy, "reshard_after_forward", True) is False:
        yield "reshard_after_forward=True", partial(changed, reshard_after_forward=True), world_size
    if trains and getattr(strategy, "defer_reduce", False):
        yield "defer_reduce=False", partial(changed, defer_reduce=False), world_size
    if getattr(strategy, "secondary_partition", None) is not None:
        yield "secondary_partition=None", partial(changed, secondary_partition=None), world_size
    if strategy.precision != "bf16":
        yield (
            'precision="bf16" (also rounds weights)',
            partial(changed, precision="bf16"),
            world_size,
        )
    common = {
        name: getattr(strategy, name)
        for name in ("precision", "activation_checkpointing", "offload", "compile")
    }
    for name in _NEXT.get(strategy.name, ()):
        yield STRATEGIES[name].__name__, partial(STRATEGIES[name], **common), world_size
    if on_gpu and strategy.offload is None:
        for place in ("optimizer", "params"):
            yield f'offload="{place}"', partial(changed, offload=place), world_size
    for times in _MORE_RANKS:
        ranks = times * world_size
        yield f"{ranks} ranks in place of {world_size}", partial(changed), ranks
