"""Loading: every check before the first tensor is touched, the same error on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from distft.checkpoint.checksums import refuse_damage, share_of
from distft.checkpoint.dcp import named_tensors
from distft.checkpoint.folder import (
    DCP,
    DEEPSPEED,
    STATE_FILE,
    TRAIN_STATE,
    Manifest,
    find_checkpoint,
    read_manifest,
)
from distft.checkpoint.groups import group_settings
from distft.checkpoint.load_foreign import RunLoader, find_foreign, load_foreign
from distft.checkpoint.mapped_run import mapped_run
from distft.checkpoint.pending import finish_last
from distft.checkpoint.pickles import load_values
from distft.checkpoint.quantize import check_packing
from distft.checkpoint.randomness import derive_random_state, random_file, set_random_state
from distft.checkpoint.readers import read_map
from distft.checkpoint.rotation import go_on_as
from distft.checkpoint.save import optimizer_name
from distft.checkpoint.whole_run import check_run
from distft.checkpoint.writers.universal import LATEST
from distft.kept import is_adapter
from distft.process_group import group_rank, group_size, rendezvous, together
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Loader(RunLoader, Protocol):
    """What a strategy brings to a load."""

    layout: ClassVar[str]
    name: ClassVar[str]

    def _engine_loads(self, saved_by: str) -> bool:
        """Return whether its engine reads the files of a strategy of this constructor."""

    def _read_state(
        self,
        folder: Path,
        manifest: Manifest,
        scalars: Mapping[str, Mapping[str, Any]],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        """Read weights and optimizer state."""


@dataclass(frozen=True)
class LoadedState:
    """What a load found beside the tensors it put in place.

    Attributes:
        path: The checkpoint.
        step: Optimizer steps made.
        extra: The caller's own values.
        strategy: Constructor of the strategy that saved it; of another tool what it says.
        world_size: Number of ranks that saved it.
    """

    path: Path
    step: int
    extra: Mapping[str, Any]
    strategy: str
    world_size: int


def load_checkpoint(
    strategy: Loader,
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any,
    data: Any,
) -> LoadedState:
    """Load a run; see `Strategy.load`.

    Collective: every rank.
    """
    rendezvous("Strategy.load")
    finish_last()
    with together():
        foreign = find_foreign(path)
    if foreign is not None:
        step = load_foreign(strategy, foreign, model, optimizer, scheduler=scheduler, data=data)
        by = foreign.strategy or foreign.kind
        return LoadedState(foreign.path, step, {}, by, foreign.world_size or 1)
    with together():
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
        mine = share_of(manifest, group_rank(), group_size("Strategy.load"))
        refuse_damage(folder, manifest, mine)
        native = _is_native(strategy, manifest, folder)
        _check_precision(strategy, manifest, folder, native)
        check_packing(manifest, folder, unwrap(model), strategy.precision)
        _check_model(manifest, model, folder)
        _check_optimizer(manifest, optimizer, folder)
        small = _read_train_state(folder)
        settings = group_settings(small["groups"], optimizer, folder)
        if native and manifest.layout == DEEPSPEED:
            _check_order(small["groups"], optimizer, folder)
        _check_target("scheduler", scheduler, small["scheduler"], folder)
        _check_target("data", data, small["data"][0], folder)
        random_state = _saved_random_state(strategy, manifest, folder)
        if data is not None:
            # It may refuse, so it goes before the first tensor.
            data.load_state_dict(_data_state(small["data"], strategy, folder))
    with together():
        if native:
            state = folder / manifest.layout
            strategy._read_state(state, manifest, small["scalars"], model, optimizer)
        else:
            _place(strategy, folder, manifest, small, model, optimizer)
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            group.update(saved)
        if manifest.run:
            go_on_as(optimizer, manifest.run)
        if scheduler is not None:
            scheduler.load_state_dict(small["scheduler"])
        if random_state is not None:
            set_random_state(random_state)
        else:
            derive_random_state(manifest.step, strategy.dp_rank, manifest.dp_size, strategy.dp_size)
    return LoadedState(
        folder,
        manifest.step,
        manifest.extra,
        manifest.strategy["constructor"],
        manifest.world_size,
    )


def _is_native(strategy: Loader, manifest: Manifest, folder: Path) -> bool:
    """Return whether the strategy's engine reads the files itself, as they were written."""
    if manifest.layout != strategy.layout or (folder / manifest.layout / LATEST).is_file():
        return False
    if manifest.world_size != group_size("Strategy.load"):
        return False
    if manifest.layout == DCP:
        # Of what was split in another way torch reads every part that this rank's meets, whole.
        return manifest.strategy["constructor"] == repr(strategy)
    return manifest.strategy["name"] == strategy.name and strategy._engine_loads(
        manifest.strategy["constructor"]
    )


def _place(
    strategy: Loader,
    folder: Path,
    manifest: Manifest,
    small: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Put a checkpoint of another layout in place, one tensor after another."""
    with mapped_run(read_map(folder), small["groups"], small["scalars"]) as run:
        check_run(run, model, optimizer, rest=manifest.layout == strategy.layout == DCP)
        strategy._place_run(model, optimizer, run)


def _check_precision(strategy: Loader, manifest: Manifest, folder: Path, native: bool) -> None:
    """Raise where the load would round weights, or the engine would look for other files."""
    saved = manifest.strategy.get("precision", strategy.precision)
    same = saved == strategy.precision
    if manifest.layout == DCP or not native:
        same = (saved == "bf16") == (strategy.precision == "bf16")
    if not same:
        raise ValueError(
            f"{folder} was saved with precision {saved!r}, and {strategy!r} trains in "
            f"{strategy.precision!r}. Load it in the precision of the run, or consolidate it and "
            "start from the weights."
        )


def _check_order(groups: list[dict[str, Any]], optimizer: Optimizer, folder: Path) -> None:
    """Raise where DeepSpeed's flat partitions would be cut at other places than they were."""
    saved = [list(group["param_names"]) for group in groups]
    mine = [list(group["param_names"]) for group in optimizer.param_groups]
    if saved == mine:
        return
    where = next(
        (i for i, pair in enumerate(zip(saved, mine, strict=False)) if pair[0] != pair[1]),
        min(len(saved), len(mine)),
    )
    raise ValueError(
        f"{folder} has {len(saved)} parameter groups and this run {len(mine)}, and group {where} "
        "has other parameters or another order. ZeRO keeps a group as one flat vector: give the "
        "groups and their parameters in the order of the saved run."
    )


def _check_model(manifest: Manifest, model: nn.Module, folder: Path) -> None:
    mine = {
        name: list(getattr(tensor, "ds_shape", tensor.shape))
        for name, tensor in named_tensors(model).items()
    }
    saved = {name: tensor["shape"] for name, tensor in manifest.tensors.items()}
    missing = [name for name in mine if name not in saved]
    extra = [name for name in saved if name not in mine]
    other = [name for name in mine if name in saved and mine[name] != saved[name]]
    if not (missing or extra or other):
        return
    examples = []
    if missing:
        examples.append(f"{len(missing)} tensors of the model are not saved, such as {missing[0]}")
    if extra:
        examples.append(f"{len(extra)} saved ones are not in the model, such as {extra[0]}")
    if other:
        name = other[0]
        examples.append(
            f"{len(other)} have another shape, such as {name} with {saved[name]} saved and "
            f"{mine[name]} in the model"
        )
    raise ValueError(
        f"{folder} is of another model ({len(saved)} tensors, this model has {len(mine)}): "
        f"{'; '.join(examples)}. Build the model from the config.json in the checkpoint."
    )


def _check_optimizer(manifest: Manifest, optimizer: Optimizer, folder: Path) -> None:
    mine = optimizer_name(optimizer)
    if mine != manifest.optimizer:
        raise ValueError(
            f"{folder} holds the state of {manifest.optimizer}, and this run has {mine}. "
            f"Pass {manifest.optimizer} to apply()."
        )
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    different = sorted(set(names) ^ set(manifest.trainable))
    if manifest.layout == DCP:
        # State is kept by name, so adapters may rest for a while and come back with theirs.
        different = [
            name
            for name in different
            if not (is_adapter(name) and name in manifest.optimizer_state)
        ]
    if different:
        raise ValueError(
            f"{folder} trained {len(manifest.trainable)} parameters, and this run trains "
            f"{len(names)}: {different[0]} is one of {len(different)} in one of the two only. "
            "Freeze the same ones before apply()."
        )


def _read_train_state(folder: Path) -> dict[str, Any]:
    small = load_values(folder / STATE_FILE)
    if not isinstance(small, dict) or set(small) != set(TRAIN_STATE):
        raise ValueError(
            f"{folder / STATE_FILE} does not hold the {len(TRAIN_STATE)} parts "
            f"{', '.join(TRAIN_STATE)}. The checkpoint is damaged: use another one."
        )
    return small


def _data_state(states: list[Any], strategy: Loader, folder: Path) -> Any:
    """Return the data state that this rank goes on from."""
    if len(states) > 1 and len(states) != strategy.dp_size:
        raise ValueError(
            f"{folder} holds a data state of its own for each of {len(states)} ranks, and this "
            f"run has {strategy.dp_size}. Start {len(states)} ranks, or leave data out."
        )
    return states[strategy.dp_rank % len(states)]


def _check_target(name: str, target: Any, saved: Any, folder: Path) -> None:
    if target is None:
        return
    if not hasattr(target, "load_state_dict"):
        raise ValueError(
            f"load({name}=...) needs an object with load_state_dict(), and got "
            f"{type(target).__name__}. Pass what the run was saved with, built anew."
        )
    if saved is None:
        raise ValueError(
            f"load({name}=...) was asked for, and {folder} was saved without {name}. "
            f"Leave {name} out, or use a checkpoint saved with it."
        )


def _saved_random_state(strategy: Loader, manifest: Manifest, folder: Path) -> Any:
    """Return the random state of this rank, or None where the number of ranks is another."""
    if manifest.dp_size != strategy.dp_size:
        return None
    # Ranks that read the same rows had the same state.
    rank = strategy.dp_rank * manifest.mesh.get("tp", 1)
    file = folder / random_file(rank)
    # A checkpoint that was resharded to other data ranks has none.
    return load_values(file) if file.is_file() else None
