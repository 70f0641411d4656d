"""The error that a user sees when memory runs out: where, predicted beside measured, what fits."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from distft.formulas.reports import table
from distft.process_group import group_rank, group_size, local_device
from distft.spec import ModelSpec, Workload
from distft.strategies.changes import Change, list_changes, shortfall, smallest_that_fits
from distft.training.wrappers import unwrap
from distft.whereabouts import at

if TYPE_CHECKING:
    from distft.formulas import MemoryReport
    from distft.measure.memory import ModelStateBytes
    from distft.measure.out_of_memory import Room
    from distft.strategies.costing import Costing

# What a call does, by the phases of a memory report.
_PHASES = {"load_model": "load", "apply": "load", "save": "save", "load": "save"}
# A step passes through these functions; the innermost tells where it was.
_PARTS = {"_share_of_loss": "forward", "backward": "backward", "clip": "step", "_update": "step"}
_TRAINS = ("train_step",)
_KINDS = ("parameters", "gradients", "optimizer")
# Bytes that are set aside until memory runs out, for Python's own objects while the message is
# made. Never touched, they take room in the process's limits and none in the machine.
_RESERVE = 8 * 2**20
# Characters of torch's own message that are shown.
_SHOWN = 400

# The optimizer of a model that `apply` returned: calls that get no optimizer count its bytes too.
_optimizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def remember_optimizer(model: Any, optimizer: Any) -> None:
    """Remember which optimizer holds the state of a model, without keeping either alive.

    Collective: none.
    """
    _optimizers[unwrap(model)] = ref(optimizer)


@contextmanager
def explained(
    strategy: Costing, call: str, model: Any = None, batches: Any = None, detail: str = ""
) -> Iterator[None]:
    """Turn an error that says that memory ran out into one that says what would fit.

    Meanwhile this rank is noted to be in the call, for those that ask where it is.

    Args:
        strategy: The strategy at work.
        call: The public call, such as ``"train_step"``.
        model: The model, or None where there is none yet.
        batches: The micro-batches, for their shape.
        detail: What tells this call from others of its name, such as ``"step 500"``.

    Raises:
        OutOfMemory: Memory ran out inside; a ``torch.OutOfMemoryError``.

    Collective: none, also where it raises: the other ranks are in collectives of their own.
    """
    # All that the error needs is loaded while there is memory.
    import torch.distributed.tensor  # noqa: F401

    import distft.measure.memory
    import distft.strategies.by_name  # noqa: F401
    from distft.measure.out_of_memory import OutOfMemory, asked_bytes, find_out_of_memory

    reserve: bytearray | None = None
    try:
        reserve = bytearray(_RESERVE)
        with at(call, detail):
            yield
    except Exception as error:
        del reserve
        found = find_out_of_memory(error)
        if found is None or isinstance(found, OutOfMemory):
            raise
        asked = asked_bytes(str(found))
        raise OutOfMemory(_text(strategy, call, model, batches, found), call, asked) from error


@dataclass(frozen=True)
class _Scene:
    """What is known at the place where memory ran out."""

    strategy: Costing
    call: str
    phase: str
    asked: int | None
    room: Room
    measured: ModelStateBytes | None
    spec: ModelSpec
    load: Workload
    shape: Sequence[int] | None
    on_gpu: bool


def _text(strategy: Costing, call: str, model: Any, batches: Any, error: BaseException) -> str:
    """Return the message; a part that cannot be had is left out and said, never raised."""
    from distft.measure.out_of_memory import asked_bytes, is_of_host

    part = _PHASES.get(call) or _part_of_step(error) or "forward"
    said = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
    asked = asked_bytes(str(error))
    lines = [f"Rank {group_rank()} ran out of memory in {call} ({part}) under {strategy!r}: {said}"]
    try:
        room = _room(is_of_host(error))
        wanted = f"{asked:,} bytes were asked for, and " if asked is not None else ""
        lines.append(
            f"{wanted}{room.where} has {room.free:,} of {room.total:,} bytes free; this process "
            f"holds {room.reserved:,}, {room.allocated:,} of them in use."
        )
        if model is None:
            lines.append("The model was not built yet, so nothing is predicted for it.")
        else:
            on_gpu = local_device().type == "cuda"
            load = Workload(optimizer=_optimizer_kind(model))
            spec = ModelSpec.from_model(unwrap(model))
            shape = _shape(batches)
            measured = _measured(model)
            lines += _explain(
                _Scene(strategy, call, part, asked, room, measured, spec, load, shape, on_gpu)
            )
    except Exception as other:
        # The error of memory is what matters; this one only says why there is no table.
        lines.append(f"More cannot be said here ({type(other).__name__}: {other}).")
    lines.append(
        "Other ranks may wait for this one in a collective until its time-out. End the run, and "
        "start it again from the last checkpoint with the change."
    )
    return "\n".join(lines)


def _part_of_step(error: BaseException) -> str | None:
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("distft."):
            found = _PARTS.get(frame.f_code.co_name, found)
    return found


def _room(of_host: bool) -> Room:
    from distft.measure.out_of_memory import room_on_device, room_on_host

    device = local_device()
    return room_on_host() if of_host or device.type == "cpu" else room_on_device(device.index)


def _optimizer_kind(model: Any) -> str:
    """Return the optimizer for the formulas: two moments unless it is plain SGD."""
    optimizer = _optimizer(model)
    groups = getattr(optimizer, "param_groups", [])
    # Only SGD has this setting.
    plain = any("nesterov" in group and not group["momentum"] for group in groups)
    return "sgd" if plain else "adamw"


def _optimizer(model: Any) -> Any:
    found = _optimizers.get(unwrap(model))
    return found() if found is not None else None


def _measured(model: Any) -> ModelStateBytes | None:
    from distft.measure.memory import model_state_bytes

    return model_state_bytes(model, _optimizer(model))


def _shape(batches: Any) -> Sequence[int] | None:
    """Return the shape of the first tensor of the first batch, or None."""
    first = batches[0] if isinstance(batches, list | tuple) and batches else batches
    values = [first[name] for name in first] if isinstance(first, dict) else []
    shapes = [tuple(value.shape) for value in values if getattr(value, "shape", ())]
    return shapes[0] if shapes else None


def _explain(scene: _Scene) -> list[str]:
    ranks = group_size("An out-of-memory error")
    trains = scene.call in _TRAINS
    report = scene.strategy.state_memory(scene.spec, scene.load, world_size=ranks)
    lines = [_compare(scene, report)]
    missing = _missing(scene, report)
    if scene.measured is not None:
        to_come = {kind: size for kind, size in missing.items() if size}
        if to_come and (trains or scene.phase == "load"):
            listed = ", ".join(f"{size:,} bytes of {kind}" for kind, size in to_come.items())
            lines.append(f"Still to come by the prediction: {listed}.")
        beside = scene.room.allocated - scene.measured.total
        on_device = scene.on_gpu and scene.room.where != "the host"
        if on_device and beside > 0 and scene.strategy.offload is None:
            lines.append(f"Beside model state: {beside:,} bytes of activations and buffers.")
        else:
            lines.append("What else is held is activations and buffers, which are not counted.")
    if scene.on_gpu and scene.room.where == "the host":
        lines.append(
            "It is the host's memory that is short, and the lines above are the device's: start "
            "fewer ranks on a machine, or load_model() under FSDP2 or ZeRO3, which reads a part."
        )
        return lines
    if not (trains or scene.phase == "load"):
        missing = dict.fromkeys(missing, 0)
    short = shortfall(scene.phase, scene.asked or 0, missing, scene.room.free)
    changes = list_changes(
        scene.strategy,
        scene.spec,
        scene.load,
        ranks,
        scene.phase,
        shape=scene.shape,
        trains=trains,
        on_gpu=scene.on_gpu,
    )
    return [*lines, *_advise(changes, short, scene)]


def _missing(scene: _Scene, report: MemoryReport) -> dict[str, int]:
    held = scene.measured
    rank = group_rank()
    return {kind: max(report.kind_bytes(kind)[rank] - getattr(held, kind, 0), 0) for kind in _KINDS}


def _compare(scene: _Scene, report: MemoryReport) -> str:
    """Return the table of this rank's lines, predicted beside measured."""
    rank = group_rank()
    rows = []
    for kind in _KINDS:
        lines = [line for line in report.lines if line.kind == kind]
        place = " (host)" if any(line.on_host for line in lines) else ""
        predicted = sum(line.per_rank[rank] for line in lines)
        held = f"{getattr(scene.measured, kind):,}" if scene.measured else ""
        rows.append((kind + place, f"{predicted:,}", held))
    rows += [
        (f"{line.name} ({', '.join(line.phases)})", f"{line.per_rank[rank]:,}", "")
        for line in report.lines
        if line.kind == "buffer" and line.per_rank[rank]
    ]
    return table(("held by this rank", "predicted bytes", "measured bytes"), rows)


def _advise(changes: Sequence[Change], short: int, scene: _Scene) -> list[str]:
    lines = []
    gaps = scene.room.reserved - scene.room.allocated
    if scene.on_gpu and scene.asked is not None and gaps >= scene.asked:
        lines.append(
            f"{gaps:,} bytes lie in gaps between tensors, more than was asked for: try "
            "PYTORCH_ALLOC_CONF=expandable_segments:True before any other change."
        )
    if short:
        lines.append(f"At least {short:,} bytes must be found. Changes, from the smallest:")
    else:
        lines.append("More is free by now than was wanted. Changes, from the smallest:")
    for number, change in enumerate(changes, 1):
        if change.saved_bytes is None:
            effect = "less for activations, for which there is no formula"
        else:
            effect = (
                f"{change.saved_bytes:,} bytes less in this phase, model state "
                f"{change.model_state_bytes:,} on the heaviest rank"
            )
        lines.append(f"  {number}. {change.what}: {effect}")
    fits = smallest_that_fits(changes, short) if short else None
    if fits is not None:
        lines.append(f"The smallest change that is predicted to fit: {fits.what}.")
    elif short:
        lines.append("None of them alone is predicted to fit: put several together.")
    if any(change.saved_bytes is None for change in changes):
        lines.append("What activations save only a run can tell: try those changes first.")
    return lines
