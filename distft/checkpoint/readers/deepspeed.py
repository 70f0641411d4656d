"""Folders of DeepSpeed's ZeRO, stages 1, 2 and 3, whatever precision it trained in.

Trained parameters are the fp32 values that the optimizer holds; frozen ones and buffers are as the
engine held them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.flat import Dealt, FlatVector
from distft.checkpoint.readers.state_dict import described, tie
from distft.checkpoint.readers.torch_zip import plain_values, read_torch_file
from distft.checkpoint.readers.universal import is_universal, read_universal
from distft.checkpoint.readers.unpickle import StandIn, StoredTensor
from distft.checkpoint.readers.zero_run import ZeroRun
from distft.checkpoint.shards import LogicalTensor, Piece, ShardMap

MODEL_STATES, OPTIM_STATES = "_model_states.pt", "_optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")
_MODEL_PARALLEL = re.compile(r"mp_rank_(\d+)")


def tag_folder(folder: Path) -> Path | None:
    """Return the folder with DeepSpeed's files: this, what ``latest`` names, or the newest below.

    Collective: none.
    """
    if any(folder.glob(f"*{MODEL_STATES}")):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        named = folder / latest.read_text().strip()
        if named.parent == folder and any(named.glob(f"*{MODEL_STATES}")):
            return named
    found = [
        child
        for child in folder.iterdir()
        if child.is_dir() and any(child.glob(f"*{MODEL_STATES}"))
    ]
    return max(found, key=lambda child: (len(child.name), child.name)) if found else None


def read_deepspeed(root: Path, folder: Path, kind: str = "") -> ShardMap:
    """Return the map of a folder that DeepSpeed calls a tag.

    Args:
        root: Folder that the map's files are relative to.
        folder: The tag's folder, in it or the same.
        kind: Class name of the optimizer, where something beside the files says it.

    Raises:
        ValueError: A rank's file is missing, files do not belong together, the model was split in a
            way that is not read, or a file asks for more than a checkpoint needs.

    Collective: none.
    """
    if is_universal(folder):
        return read_universal(root, folder, kind)
    files = _Files.find(root, folder)
    models = [read_torch_file(root, name) for name in files.models]
    for name, model in zip(files.models, models, strict=True):
        _check_model_states(root / name, model)
    first = models[0]
    if not files.optimizers:
        return _whole(root, files, first)
    optimizers = [_optimizer_state(root, name) for name in files.optimizers]
    run = ZeroRun(folder, models, optimizers, _stage(optimizers[0], first))
    files.check(run)
    run.check_agreement([*files.models], [*files.optimizers])
    trained = run.trained()
    tensors = run.weights(trained)
    ties = {alias: kept for alias, kept in (first.get("shared_params") or {}).items()}
    found = _frozen(run, tensors, ties)
    buffers = {
        name: described(name, first["module"][name])
        for name in first.get("buffer_names") or ()
        if isinstance(first["module"].get(name), StoredTensor)
    }
    return ShardMap(
        root,
        "deepspeed",
        {**tensors, **found, **buffers},
        optimizer=run.optimizer(root, trained, kind or _kind(first)),
        ties={alias: kept for alias, kept in ties.items() if kept in {**tensors, **found}},
        frozen=frozenset(found),
        buffers=frozenset(buffers),
        files={name: (root / name).stat().st_size for name in files.all()},
        step=first.get("global_steps"),
        strategy=f"ZeRO-{run.stage} of DeepSpeed {first.get('ds_version')}",
        world_size=run.world_size,
        extras=_scheduler(root, first),
    )


@dataclass(frozen=True)
class _Files:
    """Files of a tag by rank, relative to the root; of stages 1 and 2 one for all models."""

    folder: Path
    models: Sequence[str]
    optimizers: Sequence[str]

    @classmethod
    def find(cls, root: Path, folder: Path) -> _Files:
        names = sorted(file.name for file in folder.glob("*.pt"))
        split = sorted({m[1] for name in names if (m := _MODEL_PARALLEL.search(name))})
        experts = [name for name in names if "expert" in name]
        layers = [name for name in names if name.startswith("layer_") and name not in experts]
        if len(split) > 1:
            raise ValueError(
                f"{folder} holds a model split {len(split)} ways by tensor parallelism of "
                f"DeepSpeed (mp_rank_{split[0]} to mp_rank_{split[-1]}), which is not read here. "
                "Let DeepSpeed write it with one model-parallel rank."
            )
        if experts or layers:
            raise ValueError(
                f"{folder} holds {len(experts) + len(layers)} files of single "
                f"{'experts' if experts else 'pipeline layers'}, such as {(experts + layers)[0]}, "
                "which are not read here. Let DeepSpeed gather the model first."
            )
        above = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        by_rank = sorted(names, key=lambda name: (_rank(name), name))
        return cls(
            folder,
            [above + name for name in by_rank if name.endswith(MODEL_STATES)],
            [above + name for name in by_rank if name.endswith(OPTIM_STATES)],
        )

    def all(self) -> list[str]:
        return [*self.models, *self.optimizers]

    def check(self, run: ZeroRun) -> None:
        """Raise where a rank's file is missing or one too many is there."""
        wanted = [(self.optimizers, run.world_size, OPTIM_STATES)]
        wanted.append((self.models, run.world_size if run.stage == 3 else 1, MODEL_STATES))
        for names, number, suffix in wanted:
            ranks = [_rank(name) for name in names]
            absent = sorted(set(range(number)) - set(ranks)) if number > 1 else []
            if absent:
                raise ValueError(
                    f"{self.folder} lacks {len(absent)} of {number} files *{suffix}: that of rank "
                    f"{absent[0]} is missing. Copy the folder again."
                )
            if len(names) != number:
                raise ValueError(
                    f"{self.folder} has {len(names)} files *{suffix}, and {number} ranks wrote it. "
                    "Remove those of another run."
                )


def _rank(name: str) -> int:
    found = _RANK.search(name)
    return int(found[1]) if found else 0


def _check_model_states(path: Path, state: Any) -> None:
    if not isinstance(state, dict) or not isinstance(state.get("module"), dict):
        raise ValueError(
            f"{path} holds no module, which every *{MODEL_STATES} has. Use another checkpoint."
        )


def _optimizer_state(root: Path, name: str) -> Mapping[str, Any]:
    whole = read_torch_file(root, name)
    state = whole.get("optimizer_state_dict") if isinstance(whole, dict) else None
    if not isinstance(state, dict) or "ds_zero_partition_groups" in state:
        reason = "no state of ZeRO" if not isinstance(state, dict) else "experts split by AutoEP"
        raise ValueError(
            f"{root / name} holds {reason}, which is not read. Use another checkpoint."
        )
    return state


def _stage(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    said = optimizer.get("zero_stage")
    if said is None:
        said = model["ds_config"]["zero_optimization"]["stage"]
    return int(said.args[0] if isinstance(said, StandIn) else said)


def _kind(model: Mapping[str, Any]) -> str:
    config = model.get("ds_config")
    named = config.get("optimizer") if isinstance(config, dict) else None
    return str(named.get("type", "")) if isinstance(named, dict) else ""


def _scheduler(root: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    state = model.get("lr_scheduler")
    return {} if state is None else {"scheduler": plain_values(root, state)}


def _frozen(
    run: ZeroRun, tensors: Mapping[str, LogicalTensor], ties: dict[str, str]
) -> dict[str, LogicalTensor]:
    """Return the parameters that no optimizer holds, and add the ties among them."""
    first = run.models[0]
    shapes = first.get("frozen_param_shapes") or {}
    if run.stage == 3:
        return {
            name: _fragments(run, name, tuple(shape))
            for name, shape in shapes.items()
            if name not in ties
        }
    # Stages 1 and 2 keep whole weights too, of which these are the ones with no fp32 twin.
    buffers = set(first.get("buffer_names") or ())
    rest = {
        name: tensor
        for name, tensor in first["module"].items()
        if isinstance(tensor, StoredTensor) and name not in {*tensors, *ties, *buffers}
    }
    whole, more = tie(rest)
    ties |= more
    return {name: described(name, tensor) for name, tensor in whole.items()}


def _fragments(run: ZeroRun, name: str, shape: tuple[int, ...]) -> LogicalTensor:
    count = math.prod(shape)
    parts = [model["frozen_param_fragments"][name] for model in run.models]
    per_rank = -(-count // len(parts))
    short = [rank for rank, part in enumerate(parts) if part.num_elements != per_rank]
    if short:
        raise ValueError(
            f"{run.folder} holds {parts[short[0]].num_elements} elements of the frozen {name} on "
            f"rank {short[0]}, and {per_rank} belong there. Use another checkpoint."
        )
    stored: Iterable[Piece] = Dealt(
        tuple(FlatVector.of([part]) for part in parts), 0, per_rank, count
    )
    return LogicalTensor(name, shape, parts[0].dtype, stored)


def _whole(root: Path, files: _Files, state: Mapping[str, Any]) -> ShardMap:
    """Return the map of a run without ZeRO, whose module is whole."""
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("stage"):
        raise ValueError(
            f"{files.folder} was written by ZeRO-{zero['stage']}, and 0 files *{OPTIM_STATES} are "
            "there. Copy the folder again."
        )
    held = {
        name: tensor for name, tensor in state["module"].items() if isinstance(tensor, StoredTensor)
    }
    whole, ties = tie(held)
    return ShardMap(
        root,
        "deepspeed",
        {name: described(name, tensor) for name, tensor in whole.items()},
        ties=ties,
        buffers=frozenset(state.get("buffer_names") or ()) & whole.keys(),
        files={name: (root / name).stat().st_size for name in files.all()},
        step=state.get("global_steps"),
        strategy="DeepSpeed without ZeRO",
        world_size=state.get("dp_world_size"),
        extras=_scheduler(root, state),
        notes=["The optimizer of a run of DeepSpeed without ZeRO is not read."],
    )
