"""From a checkpoint in any layout to one that a strategy resumes, optimizer included, offline."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from distft.checkpoint.checksums import refuse_damaged_source
from distft.checkpoint.copy import THREADS
from distft.checkpoint.folder import (
    DCP,
    LAYOUTS,
    MANIFEST,
    STATE_FILE,
    Manifest,
    SavedFile,
    describe_file,
    read_manifest,
)
from distft.checkpoint.memory import parse_bytes
from distft.checkpoint.publish import check_whole, main_dtype
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor, OptimizerState, ShardMap
from distft.checkpoint.target import check_new, check_target, written_whole
from distft.checkpoint.writers.dcp import DcpFolder, plan_dcp
from distft.checkpoint.writers.pickled import Stored
from distft.checkpoint.writers.torch_zip import Archives
from distft.checkpoint.writers.universal import LATEST, TAG, plan_universal
from distft.checkpoint.writers.zero3 import LATEST as LATEST_OF_ENGINE
from distft.checkpoint.writers.zero3 import plan_zero3
from distft.mesh import Mesh

MODEL, OPTIMIZER = "model", "optimizer"
_RANDOM = "rng"


class Target(Protocol):
    """What a strategy says of the layout that it resumes."""

    name: ClassVar[str]
    layout: ClassVar[str]

    @property
    def precision(self) -> str:
        """Precision of the training."""

    def mesh(self, world_size: int | None = None) -> Mesh:
        """Return the axis sizes."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that has been read: its map, and its manifest where distft wrote it."""

    found: ShardMap
    manifest: Manifest | None

    @classmethod
    def read(cls, path: str | Path) -> Source:
        """Return the source in a folder.

        Raises:
            ValueError: There is none, or one without an optimizer.

        Collective: none.
        """
        found = read_map(Path(path))
        if found.optimizer is None:
            raise ValueError(
                f"{found.root} holds {len(found.tensors)} tensors and no state of an optimizer, so "
                "no run goes on from it. Use distft.consolidate, and start from the weights."
            )
        manifest = None
        if (found.root / MANIFEST).is_file():
            manifest = read_manifest(found.root)
        return cls(found, manifest)

    @property
    def precision(self) -> str:
        """Precision of the training, by the dtype of the weights where no manifest says it."""
        if self.manifest is not None:
            return self.manifest.strategy.get("precision", "fp32")
        return "bf16" if main_dtype(self.found.tensors.values()) == "bfloat16" else "fp32"

    @property
    def optimizer(self) -> OptimizerState:
        """The state of its optimizer."""
        assert self.found.optimizer is not None
        return self.found.optimizer


def reshard_checkpoint(
    source: Source,
    out: str | Path,
    strategy: Target,
    world_size: int,
    max_ram: str | int = "2GB",
    advance: Callable[[int], None] | None = None,
    sub_group_size: int | None = None,
    check: bool = False,
) -> Path:
    """Write a checkpoint that a strategy resumes; see `distft.reshard`.

    Args:
        source: What is read.
        out: New folder.
        strategy: What resumes it.
        world_size: Number of ranks that will.
        max_ram: Most memory that this call may add.
        advance: Called with the number of bytes after each window.
        sub_group_size: That of a stage-3 engine whose own files are to be written for so many
            ranks, or None for a layout that any number reads.
        check: Whether to verify it first.

    Collective: none.
    """
    limit = parse_bytes("max_ram", max_ram)
    mesh = strategy.mesh(world_size)
    found, out = source.found, Path(out).absolute()
    if check:
        from distft.checkpoint.verify import refuse_broken

        refuse_broken(found.root)
    refuse_damaged_source(found.root)
    check_target(out, found.root)
    check_new(out)
    if (strategy.precision == "bf16") != (source.precision == "bf16"):
        raise ValueError(
            f"{found.root} was trained in {source.precision!r}, and {strategy!r} trains in "
            f"{strategy.precision!r}, which would round its weights. Use a strategy with "
            f"precision={source.precision!r}."
        )
    check_whole(found)
    plan: DcpFolder | Archives
    latest: str | None = None
    if strategy.layout == DCP:
        plan = plan_dcp(_items(source), mesh.num_ranks)
    elif sub_group_size is None:
        plan, latest = plan_universal(found, source.optimizer.groups, mesh.num_ranks), LATEST
    else:
        bf16 = strategy.precision != "fp32"
        groups, latest = source.optimizer.groups, LATEST_OF_ENGINE
        plan = plan_zero3(found, groups, mesh.num_ranks, TAG, bf16, sub_group_size)
    with written_whole(out, lambda member: member.name == MANIFEST, lambda _: []) as made:
        state = made / strategy.layout
        state.mkdir()
        plan.write(found.root, state, limit, advance or (lambda _: None))
        if latest is not None:
            (state / latest).write_text(TAG)
        _copy_beside(source, made, mesh, limit)
        manifest = _manifest(source, strategy, mesh, made)
        with (made / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
    return out


def _items(source: Source) -> dict[str, LogicalTensor | Stored]:
    """Return weights, moments and counters under the names that a save of distft gives them."""
    found, state = source.found, source.optimizer
    items: dict[str, LogicalTensor | Stored] = {
        f"{MODEL}.{name}": _as_trained(source, name, tensor)
        for name, tensor in found.tensors.items()
    }
    for name, keys in _state_names(state).items():
        for key in keys:
            full = f"{OPTIMIZER}.{name}.{key}"
            if key == "step":
                items[full] = Stored("float32", (), struct.pack("<f", state.steps[name]))
            else:
                items[full] = state.moments[name][key]
    return items


def _as_trained(source: Source, name: str, tensor: LogicalTensor) -> LogicalTensor | Stored:
    """Return a weight in the dtype that the parameter had, fp32 masters being more than that."""
    if source.manifest is None or source.precision != "bf16":
        return tensor
    said = source.manifest.tensors[name]["dtype"]
    return tensor if said == tensor.dtype else Stored(said, tensor.shape, tensor)


def _state_names(state: OptimizerState) -> dict[str, list[str]]:
    names = dict.fromkeys((*state.steps, *state.moments))
    return {
        name: [*(("step",) if name in state.steps else ()), *state.moments.get(name, ())]
        for name in names
    }


def _copy_beside(source: Source, made: Path, mesh: Mesh, max_ram: int) -> None:
    """Copy what is small: config, tokenizer, adapter, groups, scheduler, data, random states."""
    root = source.found.root
    if source.manifest is None:
        for name in ("config.json", "generation_config.json"):
            if (root / name).is_file():
                shutil.copy(root / name, made)
        archives = Archives()
        archives.add(STATE_FILE, _train_state(source))
        archives.write(root, made, max_ram)
        return
    for member in root.iterdir():
        if member.name in (MANIFEST, _RANDOM, *LAYOUTS):
            continue
        if member.is_dir():
            shutil.copytree(member, made / member.name)
        else:
            shutil.copy(member, made)
    if mesh.dp_size == source.manifest.dp_size:
        _copy_random_states(source.manifest, root, made, mesh)


def _copy_random_states(manifest: Manifest, root: Path, made: Path, mesh: Mesh) -> None:
    """Give every rank the state of one that read the same rows."""
    (made / _RANDOM).mkdir()
    before = manifest.world_size // manifest.dp_size
    for rank in range(mesh.num_ranks):
        reader = rank // mesh.tp * before
        file = root / _RANDOM / f"rank-{reader:05d}.pt"
        if file.is_file():
            shutil.copy(file, made / _RANDOM / f"rank-{rank:05d}.pt")


def _train_state(source: Source) -> dict[str, Any]:
    return {
        "groups": [
            {**group.settings, "param_names": list(group.names)}
            for group in source.optimizer.groups
        ],
        "scalars": {},
        "scheduler": None,
        "data": [None],
    }


def _manifest(source: Source, strategy: Target, mesh: Mesh, made: Path) -> Manifest:
    files = _describe(made)
    how = {
        "name": strategy.name,
        "constructor": repr(strategy),
        "precision": strategy.precision,
    }
    axes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    axes |= {"tp": mesh.tp, "ep": mesh.ep}
    # By name, as a save of these layouts says it.
    names = _state_names(source.optimizer) if strategy.layout == DCP else {}
    if source.manifest is not None:
        return replace(
            source.manifest,
            strategy=how,
            layout=strategy.layout,
            mesh=axes,
            files=files,
            optimizer_state=names,
            ranges={},
            # The run goes on from it, and deletes nothing that it did not write.
            folder="",
        )
    found = source.found
    steps = source.optimizer.steps.values()
    return Manifest(
        step=found.step if found.step is not None else int(max(steps, default=0)),
        strategy=how,
        layout=strategy.layout,
        mesh=axes,
        files=files,
        tensors={
            name: {"shape": list(tensor.shape), "dtype": tensor.dtype}
            for name, tensor in found.tensors.items()
        },
        ties=dict(found.ties),
        trainable=[name for name in found.tensors if name not in found.frozen | found.buffers],
        dtype="bfloat16" if strategy.precision == "bf16" else "float32",
        optimizer=source.optimizer.kind or "AdamW",
        optimizer_state=names,
        versions={},
        extra={},
    )


def _describe(made: Path) -> Mapping[str, SavedFile]:
    from concurrent.futures import ThreadPoolExecutor

    members = sorted(path for path in made.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(describe_file, members)
        names = [path.relative_to(made).as_posix() for path in members]
        return dict(zip(names, found, strict=True))
