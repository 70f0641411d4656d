"""Reading runs that other tools saved: torch's ``optimizer.pt`` and distributed checkpoints."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.dcp import named_tensors, safe_reader
from distft.checkpoint.foreign import Parts
from distft.checkpoint.layouts import Layout, layout_of
from distft.checkpoint.pickles import load_bytes, load_values
from distft.checkpoint.placement import narrow
from distft.checkpoint.safetensors_reader import DTYPES, Reader, list_tensors
from distft.checkpoint.weights import match_tensors
from distft.checkpoint.whole_run import StateTensor, WholeRun, full_shape
from distft.kept import is_adapter
from distft.peft import base_model
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
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
    reader = Reader()
    with reader:
        read = _weights_of(folder, parts, inner, reader)
        yield WholeRun(folder, list(read), lambda name: read[name](), states, groups)


def _described(value: Any) -> Any:
    """Return a state value, a tensor as something to be read later."""
    if not hasattr(value, "shape"):
        return value
    return StateTensor(tuple(value.shape), value.dtype, lambda: value)


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


def _weights_of(folder: Path, parts: Parts, model: nn.Module, reader: Reader) -> dict[str, Any]:
    """Return how to read each tensor of the model that a folder holds whole."""
    if "weights" not in parts:
        return _adapter_of(folder, parts, model, reader)
    if not any(name.endswith(".safetensors") for name in parts["weights"]):
        held: dict[str, Any] = {}
        for file in parts["weights"]:
            held |= load_values(folder / file, mmap=True)
        _check_all_there(named_tensors(model), held, folder)
        return {name: partial(held.__getitem__, name) for name in named_tensors(model)}
    tensors = named_tensors(model)
    layout = layout_of(base_model(model)) or Layout()
    pieces = match_tensors(folder, model, layout, list_tensors(folder))
    return {
        name: partial(_read_pieces, reader, pieces[name], full_shape(tensor))
        for name, tensor in tensors.items()
    }


def _adapter_of(folder: Path, parts: Parts, model: Any, reader: Reader) -> dict[str, Any]:
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
        name: partial(_read_pieces, reader, [files[on_disk[name]]], full_shape(parameter))
        for name, parameter in wanted.items()
    }


def _check_all_there(wanted: Any, found: Any, folder: Path) -> None:
    absent = [name for name in wanted if name not in found]
    if absent:
        raise ValueError(
            f"{folder} lacks {len(absent)} of {len(list(wanted))} tensors of this model, such as "
            f"{absent[0]}. Build the model of that run."
        )


def _read_pieces(reader: Reader, pieces: Any, shape: tuple[int, ...]) -> Tensor:
    import torch

    whole = torch.empty(shape, dtype=getattr(torch, DTYPES[pieces[0].dtype]))
    reader.fill(pieces, 0, whole)
    return whole


# ---- torch's distributed checkpoint --------------------------------------------------------------


@dataclass(frozen=True)
class DcpFolder:
    """A distributed checkpoint of which single items are read, whole, by this rank alone.

    torch's own loading plans all of them anew for each call, and unpickles what is no tensor with
    nothing switched off.
    """

    path: Path
    items: Mapping[str, Any]
    places: Mapping[str, Sequence[tuple[Any, Any]]]

    @classmethod
    def open(cls, path: Path) -> DcpFolder:
        """Return what the metadata of a folder says."""
        metadata = safe_reader(path).read_metadata()
        places: dict[str, list[tuple[Any, Any]]] = {}
        for index, place in metadata.storage_data.items():
            if getattr(place, "transform_descriptors", None):
                raise ValueError(
                    f"{path} holds items that were transformed ({place.transform_descriptors}), "
                    f"such as {index.fqn}. Save it without extensions."
                )
            places.setdefault(index.fqn, []).append((index.offset, place))
        return cls(path, metadata.state_dict_metadata, places)

    def value(self, item: str) -> Any:
        """Return an item that is no tensor, by torch's restricted loading."""
        [(_, place)] = self.places[item]
        return self._load(place)

    def tensor(self, item: str) -> Tensor:
        """Return a tensor whole."""
        import torch

        described = self.items[item]
        whole = torch.empty(tuple(described.size), dtype=described.properties.dtype)
        for offset, place in self.places[item]:
            part = self._load(place)
            narrow(whole, tuple(offset or [0] * part.dim()), part.shape).copy_(part)
        return whole

    def state_value(self, item: str) -> Any:
        """Return an item of an optimizer's state, a tensor as something to be read later."""
        described = self.items[item]
        if not hasattr(described, "size"):
            return self.value(item)
        shape, dtype = tuple(described.size), described.properties.dtype
        return StateTensor(shape, dtype, partial(self.tensor, item))

    def _load(self, place: Any) -> Any:
        file = self.path / place.relative_path
        if file.resolve().parent != self.path.resolve():
            raise ValueError(
                f"{self.path} keeps items in {place.relative_path}, which is not 1 file inside it. "
                "Do not open this folder."
            )
        with file.open("rb") as opened:
            opened.seek(place.offset)
            return load_bytes(io.BytesIO(opened.read(place.length)), file)


def read_dcp_run(path: Path, model: nn.Module) -> WholeRun:
    """Return a run that ``dcp.save`` wrote of ``get_state_dict``, under whatever keys.

    Raises:
        ValueError: The names of this model, or state of its parameters, are not in the folder.

    Collective: none.
    """
    folder = DcpFolder.open(path)
    tensors = named_tensors(model)
    parameters = list(dict(unwrap(model).named_parameters()))
    prefix = _prefix(folder.items, parameters[0])
    states: dict[str, dict[str, Any]] = {}
    for item in folder.items:
        found = _STATE.search(item)
        if found is not None and found[1] in parameters:
            states.setdefault(found[1], {})[found[2]] = folder.state_value(item)
    _check_all_there([f"{prefix}{name}" for name in tensors], folder.items, path)
    _check_shapes(path, prefix, tensors, folder.items)
    groups = _dcp_groups(folder, parameters)
    if not groups:
        raise ValueError(
            f"{path} holds the state of {len(states)} parameters and 0 groups of an optimizer. "
            "Start from the weights."
        )
    return WholeRun(
        path, list(tensors), lambda name: folder.tensor(f"{prefix}{name}"), states, groups
    )


def _check_shapes(
    folder: Path, prefix: str, tensors: Mapping[str, Any], items: Mapping[str, Any]
) -> None:
    for name, tensor in tensors.items():
        saved = tuple(items[f"{prefix}{name}"].size)
        if saved != full_shape(tensor):
            raise ValueError(
                f"{folder} holds {name} in the shape {saved}, and the model has "
                f"{full_shape(tensor)}. Build the model of that run."
            )


def _prefix(items: Mapping[str, Any], name: str) -> str:
    """Return what stands before the names of the model's tensors in a folder."""
    found = [
        item.removesuffix(name)
        for item in items
        if (item == name or item.endswith(f".{name}")) and ".state." not in f".{item}"
    ]
    return min(found, key=len, default="")


def _dcp_groups(folder: DcpFolder, parameters: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups: numbered ones with their names, or settings under each name."""
    numbered: dict[int, dict[str, Any]] = {}
    named: dict[str, dict[str, Any]] = {}
    known = set(parameters)
    for item in folder.items:
        if found := _GROUP_SETTING.search(item):
            numbered.setdefault(int(found[1]), {})[found[2]] = folder.value(item)
            continue
        _, within, rest = item.partition("param_groups.")
        name, _, key = rest.rpartition(".")
        if within and name in known:
            named.setdefault(name, {})[key] = folder.value(item)
    if numbered:
        return [{**group, "param_names": list(group["params"])} for group in numbered.values()]
    return [{**settings, "param_names": [name]} for name, settings in named.items()]
