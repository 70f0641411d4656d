"""Reading runs that other tools saved: torch's ``optimizer.pt`` and distributed checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.dcp import named_tensors
from distft.checkpoint.foreign import Parts
from distft.checkpoint.layouts import Layout, layout_of
from distft.checkpoint.mapped_run import in_memory, saved_tensor
from distft.checkpoint.matching import match_tensors
from distft.checkpoint.pickles import load_values
from distft.checkpoint.readers.dcp import Items, read_items
from distft.checkpoint.safetensors_reader import DTYPES, FileTensor, list_tensors
from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.stream import Stream
from distft.checkpoint.whole_run import SavedTensor, WholeRun, full_shape
from distft.kept import is_adapter
from distft.peft import base_model
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_STATE = re.compile(r"(?:^|\.)state\.(.+)\.([^.]+)$")
_GROUP_SETTING = re.compile(r"param_groups\.(\d+)\.([^.]+)$")


# ---- torch.save of an optimizer's state_dict, beside safetensors ---------------------------------


@contextmanager
def open_torch_run(
    folder: Path, parts: Parts, model: nn.Module, optimizer: Optimizer, by_trainer: bool
) -> Iterator[WholeRun]:
    """Open a folder of Trainer, TRL or Accelerate that holds whole tensors.

    Args:
        folder: The checkpoint.
        parts: Its files, as `adopt` found them.
        model: What `Strategy.apply` returned.
        optimizer: What `Strategy.apply` returned.
        by_trainer: Whether its optimizer was built by Trainer's rule.

    Raises:
        ValueError: There are several optimizers, their numbers do not belong to this run's
            parameters, or a file asks for more than tensors and plain values.

    Collective: none.
    """
    files = parts["optimizer"]
    if len(files) != 1:
        raise ValueError(
            f"{folder} holds {len(files)} optimizers, {', '.join(files)}, and a run here has 1. "
            "Start from the weights."
        )
    saved = load_values(folder / files[0], mmap=True)
    inner = unwrap(model)
    names = _names_by_number(saved, inner, optimizer, by_trainer, folder)
    states = {
        names[number]: {key: _described(value) for key, value in state.items()}
        for number, state in saved["state"].items()
    }
    groups = [
        {**group, "param_names": [names[number] for number in group["params"]]}
        for group in saved["param_groups"]
        if group["params"]
    ]
    with Stream(Path(), BUFFER_BYTES) as stream:
        yield WholeRun(folder, _weights_of(folder, parts, inner, stream), states, groups)


def _described(value: Any) -> Any:
    """Return a state value, a tensor as something to be read later."""
    return in_memory(value) if hasattr(value, "shape") else value


def _names_by_number(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    by_trainer: bool,
    folder: Path,
) -> dict[int, str]:
    """Return the parameters' names: torch numbers them by groups, and in the groups' order."""
    groups = saved["param_groups"]
    if all("param_names" in group for group in groups):
        pairs = [zip(group["params"], group["param_names"], strict=True) for group in groups]
        return dict(chain.from_iterable(pairs))
    shapes = {name: full_shape(p) for name, p in model.named_parameters()}
    here = [list(group["param_names"]) for group in optimizer.param_groups]
    trained = set(chain.from_iterable(here))
    in_order = [name for name in shapes if name in trained]
    candidates = [decay_groups(model, in_order)] if by_trainer else []
    candidates += [here, [in_order], [list(shapes)]]
    reasons = []
    for candidate in candidates:
        reason = _why_not(groups, saved["state"], candidate, shapes)
        if reason is None:
            numbers = chain.from_iterable(group["params"] for group in groups)
            return dict(zip(numbers, chain.from_iterable(candidate), strict=True))
        reasons.append(reason)
    raise ValueError(
        f"{folder} numbers the parameters of its optimizer, and the numbers do not belong to this "
        f"run's: {reasons[0]}. Build the model of that run, freeze what it froze, and pass apply() "
        "the param_groups of that run."
    )


def decay_groups(model: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Return the two groups that Trainer makes of parameters: with weight decay, and without.

    Collective: none.
    """
    from transformers import Trainer

    rule: Any = Trainer.get_decay_parameter_names
    decayed = set(rule(None, model))
    return [[n for n in names if n in decayed], [n for n in names if n not in decayed]]


def _why_not(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> str | None:
    """Return why saved groups cannot be these parameters, or None where they can."""
    sizes, mine = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != mine:
        return f"there the groups have {sizes} parameters, here {mine}"
    numbers = chain.from_iterable(group["params"] for group in groups)
    for number, name in zip(numbers, chain.from_iterable(names), strict=True):
        for key, value in state.get(number, {}).items():
            shape = tuple(getattr(value, "shape", ()))
            if shape not in ((), (1,), shapes[name]):
                return f"{key} of number {number} has the shape {shape}, {name} has {shapes[name]}"
    return None


def _weights_of(
    folder: Path, parts: Parts, model: nn.Module, stream: Stream
) -> dict[str, SavedTensor]:
    """Return each tensor of the model that a folder holds whole."""
    if "weights" not in parts:
        return _adapter_of(folder, parts, model, stream)
    if not any(name.endswith(".safetensors") for name in parts["weights"]):
        held: dict[str, Any] = {}
        for file in parts["weights"]:
            held |= load_values(folder / file, mmap=True)
        _check_all_there(named_tensors(model), held, folder)
        return {name: in_memory(held[name]) for name in named_tensors(model)}
    tensors = named_tensors(model)
    layout = layout_of(base_model(model)) or Layout()
    pieces = match_tensors(folder, model, layout, list_tensors(folder))
    return {
        name: _end_to_end(stream, name, pieces[name], full_shape(tensor))
        for name, tensor in tensors.items()
    }


def _adapter_of(folder: Path, parts: Parts, model: Any, stream: Stream) -> dict[str, SavedTensor]:
    """Return the same for an adapter in PEFT's own layout; the base stays as it is."""
    from distft.checkpoint.safetensors_reader import read_header

    files = read_header(folder / parts["adapter"][0])
    middle = f".{model.active_adapter}" if hasattr(model, "active_adapter") else ""
    wanted = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    on_disk = {
        name: name.replace(f".modules_to_save{middle}.", ".").replace(f"{middle}.", ".", 1)
        for name in wanted
    }
    _check_all_there(on_disk.values(), files, folder)
    return {
        name: _end_to_end(stream, name, [files[on_disk[name]]], full_shape(parameter))
        for name, parameter in wanted.items()
    }


def _check_all_there(wanted: Any, found: Any, folder: Path) -> None:
    absent = [name for name in wanted if name not in found]
    if absent:
        raise ValueError(
            f"{folder} lacks {len(absent)} of {len(list(wanted))} tensors of this model, such as "
            f"{absent[0]}. Build the model of that run."
        )


def _end_to_end(
    stream: Stream, name: str, parts: Sequence[FileTensor], shape: tuple[int, ...]
) -> SavedTensor:
    """Return the tensor that published ones make up, one after another."""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise ValueError(
            f"{parts[0].file.parent} holds the {len(parts)} parts of {name} in {len(dtypes)} "
            f"dtypes, {', '.join(sorted(dtypes))}. Save it in one."
        )
    pieces, begin = [], 0
    for part in parts:
        size = part.num_elements
        pieces.append(Piece(str(part.file), part.offset, (begin,), (size,), flat=True))
        begin += size
    return saved_tensor(stream, LogicalTensor(name, shape, DTYPES[dtypes.pop()], pieces))


# ---- torch's distributed checkpoint --------------------------------------------------------------


@contextmanager
def open_dcp_run(path: Path, model: nn.Module) -> Iterator[WholeRun]:
    """Open a run that ``dcp.save`` wrote of ``get_state_dict``, under whatever keys.

    Raises:
        ValueError: The names of this model, or state of its parameters, are not in the folder.

    Collective: none.
    """
    items = read_items(path, path)
    names = list(named_tensors(model))
    parameters = list(dict(unwrap(model).named_parameters()))
    prefix = _prefix(items.paths, parameters[0])
    _check_all_there([f"{prefix}{name}" for name in names], items.tensors, path)
    states: dict[str, dict[str, str]] = {}
    for item in items.paths:
        found = _STATE.search(item)
        if found is not None and found[1] in parameters:
            states.setdefault(found[1], {})[found[2]] = item
    groups = _dcp_groups(items, parameters)
    if not groups:
        raise ValueError(
            f"{path} holds the state of {len(states)} parameters and 0 groups of an optimizer. "
            "Start from the weights."
        )
    with Stream(path, BUFFER_BYTES) as stream:

        def saved(item: str) -> Any:
            found = items.tensors.get(item)
            return items.value(item) if found is None else saved_tensor(stream, found)

        yield WholeRun(
            path,
            {name: saved(f"{prefix}{name}") for name in names},
            {
                name: {key: saved(item) for key, item in held.items()}
                for name, held in states.items()
            },
            groups,
        )


def _prefix(items: Iterable[str], name: str) -> str:
    """Return what stands before the names of the model's tensors in a folder."""
    found = [
        item.removesuffix(name)
        for item in items
        if (item == name or item.endswith(f".{name}")) and ".state." not in f".{item}"
    ]
    return min(found, key=len, default="")


def _dcp_groups(items: Items, parameters: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups: numbered ones with their names, or settings under each name."""
    numbered: dict[int, dict[str, Any]] = {}
    named: dict[str, dict[str, Any]] = {}
    known = set(parameters)
    for item in items.paths:
        if found := _GROUP_SETTING.search(item):
            numbered.setdefault(int(found[1]), {})[found[2]] = items.value(item)
            continue
        _, within, rest = item.partition("param_groups.")
        name, _, key = rest.rpartition(".")
        if within and name in known:
            named.setdefault(name, {})[key] = items.value(item)
    if numbered:
        return [{**group, "param_names": list(group["params"])} for group in numbered.values()]
    return [{**settings, "param_names": [name]} for name, settings in named.items()]
