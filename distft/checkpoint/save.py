"""Saving: what a rank holds is captured, written to a temporary folder, and renamed into place."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import secrets
import shutil
from collections.abc import Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from distft.checkpoint.capture import Captured, HostCopies, copies_for
from distft.checkpoint.dcp import named_tensors, optimizer_state_names
from distft.checkpoint.exchange import StoreExchange, over_group
from distft.checkpoint.finish import Finishing
from distft.checkpoint.folder import DCP, Manifest, is_complete, temporary_name
from distft.checkpoint.pending import PendingSave, remember, wait_for_last
from distft.checkpoint.randomness import random_state
from distft.checkpoint.rotation import run_of
from distft.checkpoint.side_files import SideFiles, shared_or_each
from distft.peft import ADAPTER, is_peft, names_to_save, write_adapter
from distft.process_group import group_rank, raise_together, rendezvous
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from distft.mesh import Mesh

# What shows whether all ranks see one folder.
_NONCE = "nonce"
PACKAGES = ("distft", "torch", "transformers", "deepspeed", "peft", "accelerate")


class Saver(Protocol):
    """What a strategy brings to a save."""

    name: ClassVar[str]
    layout: ClassVar[str]

    @property
    def precision(self) -> str:
        """Precision of the training."""

    def mesh(self) -> Mesh:
        """Return the axis sizes."""

    def _capture_state(
        self, model: nn.Module, optimizer: Optimizer, copies: HostCopies | None
    ) -> Captured:
        """Return weights and optimizer state, ready to be written."""

    def _gather_weights(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return parameters whole."""


def save_checkpoint(
    strategy: Saver,
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    scheduler: Any,
    processing_class: Any,
    data: Any,
    extra: Mapping[str, Any] | None,
    keep: int | None = None,
    async_save: bool = False,
) -> Path | PendingSave:
    """Save a run and return the folder; see `Strategy.save`.

    Collective: every rank.
    """
    rendezvous("Strategy.save")
    path = Path(path).absolute()
    nonce = secrets.token_hex(8)
    folder = path.parent / temporary_name(path.name, nonce)
    first = group_rank() == 0
    # Every meeting of the ranks is time that training waits, so the first one brings the first
    # rank's name of the folder, and the second one the states of the data, which it writes.
    error: Exception | None = None
    try:
        try:
            wait_for_last()
            _check_request(path, step, extra, {"scheduler": scheduler, "data": data})
            _check_keep(keep)
            if first:
                _make_folder(folder, path, nonce)
        except Exception as found:
            error = found
        nonce = raise_together(error, nonce)[0]
        folder = path.parent / temporary_name(path.name, nonce)
        captured = manifest = mine = states = random = None
        try:
            copies = copies_for(optimizer) if async_save else None
            captured = strategy._capture_state(model, optimizer, copies)
            adapter = _gather_adapter(strategy, model)
            mine = None if data is None else data.state_dict()
            # After the last collective, which a rank that fails here would leave to the others.
            _check_shared(folder, nonce)
            random = random_state()
            if first:
                states = None if scheduler is None else scheduler.state_dict()
                if processing_class is not None:
                    processing_class.save_pretrained(folder)
                if adapter:
                    write_adapter(folder / ADAPTER, unwrap(model), adapter)
                manifest = _manifest(strategy, model, optimizer, path, step, extra)
        except Exception as found:
            error = found
        everyone = raise_together(error, mine)
        assert captured is not None
        side = None
        if first:
            (folder / _NONCE).unlink()
            data_states = shared_or_each(everyone, strategy.mesh().tp)
            side = SideFiles.of(model, optimizer, states, data_states)
        finishing = Finishing(
            folder, path, strategy.layout, group_rank(), captured, random, manifest, keep, side
        )
        if async_save:
            finish = partial(finishing.run, StoreExchange(f"distft/save/{nonce}"))
            return remember(PendingSave(path, step, finish))
        finishing.run(over_group)
    except BaseException:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return path


def _check_keep(keep: int | None) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(
            f"save(keep={keep!r}) needs the number of checkpoints that stay, at least 1, or None "
            "for all of them."
        )


def _check_request(
    path: Path, step: int, extra: Mapping[str, Any] | None, stateful: Mapping[str, Any]
) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"save(step={step!r}) needs the number of steps made, at least 0.")
    for name, value in stateful.items():
        if value is not None and not hasattr(value, "state_dict"):
            raise ValueError(
                f"save({name}=...) needs an object with state_dict(), and got "
                f"{type(value).__name__}. Put plain values into extra={{...}}."
            )
    try:
        same = json.loads(json.dumps(extra or {})) == dict(extra or {})
    except (TypeError, ValueError) as error:
        raise ValueError(f"save(extra=...) takes JSON values only: {error}.") from error
    if not same:
        raise ValueError(
            "save(extra=...) would not come back as it is, since JSON has string keys and lists "
            "only. Use dicts with string keys, lists, numbers, strings."
        )
    if is_complete(path):
        raise ValueError(
            f"{path} holds a complete checkpoint, and a save never writes over one. "
            "Save to a new folder, such as one with the step in its name."
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{path} exists and is no empty folder. Save to a new one, or remove it first."
        )
    above = next(parent for parent in path.parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{path} lies below {above}, which is a file. Save below a folder.")


def _make_folder(folder: Path, path: Path, nonce: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(temporary_name(glob.escape(path.name), "*")):
        shutil.rmtree(left_over, ignore_errors=True)
    folder.mkdir()
    (folder / _NONCE).write_text(nonce)
    (folder / "rng").mkdir()


def _check_shared(folder: Path, nonce: str) -> None:
    """Refuse a folder that this rank does not see as the first one made it."""
    seen = (folder / _NONCE).read_text() if (folder / _NONCE).is_file() else None
    if seen != nonce:
        raise RuntimeError(
            f"Rank {group_rank()} does not see the folder {folder.parent} that rank 0 writes "
            "to. Save to a file system that all machines share."
        )


def _gather_adapter(strategy: Saver, model: nn.Module) -> dict[str, Tensor]:
    """Return the whole tensors of a model's adapter, none where it has no adapter.

    Collective: every rank.
    """
    inner = unwrap(model)
    return strategy._gather_weights(model, set(names_to_save(inner))) if is_peft(inner) else {}


def _manifest(
    strategy: Saver,
    model: nn.Module,
    optimizer: Optimizer,
    path: Path,
    step: int,
    extra: Mapping[str, Any] | None,
) -> Manifest:
    """Return all that the manifest says beside the files."""
    inner = unwrap(model)
    mesh = strategy.mesh()
    tensors = named_tensors(model)
    first_names = {id(tensor): name for name, tensor in tensors.items()}
    return Manifest(
        step=step,
        strategy={
            "name": strategy.name,
            "constructor": repr(strategy),
            "precision": strategy.precision,
        },
        layout=strategy.layout,
        mesh={
            "dp_replicate": mesh.dp_replicate,
            "dp_shard": mesh.dp_shard,
            "tp": mesh.tp,
            "ep": mesh.ep,
        },
        files={},
        tensors={
            name: {
                "shape": list(getattr(tensor, "ds_shape", tensor.shape)),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor in tensors.items()
        },
        ties={
            name: first_names[id(tensor)]
            for name, tensor in inner.named_parameters(remove_duplicate=False)
            if first_names[id(tensor)] != name
        },
        trainable=[name for name, p in inner.named_parameters() if p.requires_grad],
        dtype="bfloat16" if strategy.precision == "bf16" else "float32",
        optimizer=optimizer_name(optimizer),
        optimizer_state=optimizer_state_names(model, optimizer) if strategy.layout == DCP else {},
        versions=_versions(),
        extra=dict(extra or {}),
        run=run_of(optimizer),
        folder=path.name,
    )


def optimizer_name(optimizer: Any) -> str:
    """Return the class name of the torch optimizer, also of the one inside an engine.

    Collective: none.
    """
    return type(getattr(optimizer, "inner", optimizer)).__name__


@cache
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
