"""distft.convert: a checkpoint of any format to the format of another tool."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.beside import copy_beside
from distft.checkpoint.checksums import refuse_damaged_source
from distft.checkpoint.consolidation import consolidate
from distft.checkpoint.memory import parse_bytes
from distft.checkpoint.publish import CONFIG, check_no_placeholders, check_whole
from distft.checkpoint.readers import read_map
from distft.checkpoint.resharding import MODEL, OPTIMIZER, Source
from distft.checkpoint.shards import LogicalTensor, ShardMap
from distft.checkpoint.target import check_new, check_target, written_whole
from distft.checkpoint.writers import universal, zero3
from distft.checkpoint.writers.dcp import DcpFolder, Value, plan_dcp
from distft.checkpoint.writers.pickled import Stored
from distft.checkpoint.writers.torch_zip import Archives

if TYPE_CHECKING:
    import torch

# What each format is to an error, and to the command line.
FORMATS = {
    "safetensors": "a model that from_pretrained reads",
    "adapter": "an adapter that PEFT reads",
    "dcp": "torch's distributed checkpoint",
    "deepspeed": "DeepSpeed's universal layout",
    "zero3": "the files of DeepSpeed's stage 3 for world_size ranks",
}
_PUBLISHED = ("safetensors", "adapter")


def convert(
    path: str | Path,
    out: str | Path,
    format: str = "safetensors",
    world_size: int = 1,
    dtype: str | torch.dtype | None = None,
    max_ram: str | int = "2GB",
    config: Any = None,
    base: str | Path | None = None,
    advance: Callable[[int], None] | None = None,
    check: bool = False,
) -> Path:
    """Write a checkpoint of any format in that of another tool, and return the folder.

    ``"safetensors"`` and ``"adapter"`` are what `distft.consolidate` writes. The others keep the
    names of the training and have the optimizer where there is one: ``"dcp"`` as
    ``dcp.save({"model": ..., "optimizer": ...})`` with the optimizer's state flattened, which
    ``set_state_dict`` takes; ``"deepspeed"`` and ``"zero3"`` as ``load_checkpoint`` of DeepSpeed's
    engine reads them. What a strategy of distft goes on from, `distft.reshard` writes.

    Args:
        path: A checkpoint of distft, DeepSpeed, torch, Accelerate, transformers or PEFT, a file of
            weights, or a run's root.
        out: Folder to write to; a new one but for ``"safetensors"`` and ``"adapter"``.
        format: Which format.
        world_size: Ranks that will read ``"zero3"``; number of files of ``"dcp"``.
        dtype: As in `distft.consolidate`, for ``"safetensors"`` and ``"adapter"`` alone.
        max_ram: Most memory that this call may add to the process.
        config: As in `distft.consolidate`, for ``"safetensors"`` alone.
        base: As in `distft.consolidate`, for ``"safetensors"`` alone.
        advance: Called with the number of bytes after each window, from any thread.
        check: As in `distft.consolidate`.

    Raises:
        ValueError: The format is none of these, ``path`` is no checkpoint, a broken one, or one
            without an optimizer where the format needs it, ``out`` holds something or lies inside
            it, an option is of another format, or memory or disk are too small.

    Collective: none.
    """
    if format not in FORMATS:
        known = "; ".join(f"{name!r}, {what}" for name, what in FORMATS.items())
        raise ValueError(
            f"convert(format={format!r}) is none of the {len(FORMATS)} formats: {known}."
        )
    _check_options(format, world_size, dtype=dtype, config=config, base=base)
    if format in _PUBLISHED:
        adapter = "only" if format == "adapter" else "keep"
        return consolidate(
            path,
            out,
            dtype,
            max_ram=max_ram,
            adapter=adapter,  # type: ignore[arg-type]
            config=config,
            base=base,
            advance=advance,
            check=check,
        )
    limit = parse_bytes("max_ram", max_ram)
    source = Source(read_map(path), None) if format == "dcp" else Source.read(path)
    found, out = source.found, Path(out).absolute()
    if check:
        from distft.checkpoint.verify import refuse_broken

        refuse_broken(path)
    refuse_damaged_source(found.root)
    check_target(out, Path(path) if Path(path).is_file() else found.root)
    check_new(out)
    check_whole(found)
    check_no_placeholders(found)
    with written_whole(out, lambda member: member.name.startswith("latest"), lambda _: []) as made:
        plan, names = _plan(source, format, world_size)
        plan.write(found.root, made, limit, advance or (lambda _: None))
        for name, text in names.items():
            (made / name).write_text(text)
        if (found.root / CONFIG).is_file():
            shutil.copy(found.root / CONFIG, made)
        copy_beside(found.root, made)
    return out


def _check_options(format: str, world_size: int, **published: Any) -> None:
    """Refuse what a format would ignore."""
    if world_size < 1 or (world_size != 1 and format in (*_PUBLISHED, "deepspeed")):
        raise ValueError(
            f"convert(format={format!r}, world_size={world_size}) was asked for, and 2 formats, "
            "'dcp' and 'zero3', are written for a number of ranks, at least 1. Leave it out."
        )
    taken = {"safetensors": set(published), "adapter": {"dtype"}}.get(format, set[str]())
    for name, value in published.items():
        if value is not None and name not in taken:
            raise ValueError(
                f"convert(format={format!r}, {name}={str(value)!r}) was asked for, and {name} is "
                f"for {' and '.join(_PUBLISHED) if name == 'dtype' else _PUBLISHED[0]}, 1 of 2 "
                "kinds of formats. Leave it out."
            )


def _plan(
    source: Source, format: str, world_size: int
) -> tuple[Archives | DcpFolder, dict[str, str]]:
    """Return what is to be written, and small files that name it."""
    found = source.found
    if format == "dcp":
        items = dcp_items(found)
        # In the nest of dicts they are below the model or the optimizer.
        paths = {item: tuple(item.split(".", 1)) for item in items}
        return plan_dcp(items, world_size, paths), {}
    groups = source.optimizer.groups
    if format == "deepspeed":
        plan = universal.plan_universal(found, groups, 1)
        return plan, {universal.LATEST: universal.TAG}
    tag = f"global_step{found.step or 0}"
    plan = zero3.plan_zero3(found, groups, world_size, tag, _computes_in_bf16(source))
    return plan, {zero3.LATEST: tag}


def _computes_in_bf16(source: Source) -> bool:
    """Return whether the run's engine would look for files of bf16 training."""
    named = any("bf16_zero_pp_rank" in name for name in source.found.files)
    return named or source.precision != "fp32"


def dcp_items(found: ShardMap) -> dict[str, LogicalTensor | Stored | Value]:
    """Return the items of a map as torch saves a model and its flattened optimizer.

    Collective: none.
    """
    items: dict[str, LogicalTensor | Stored | Value] = {
        f"{MODEL}.{name}": tensor for name, tensor in found.tensors.items()
    }
    items |= {f"{MODEL}.{alias}": found.tensors[kept] for alias, kept in found.ties.items()}
    state = found.optimizer
    if state is None:
        return items
    for name, moments in state.moments.items():
        for key, moment in moments.items():
            items[f"{OPTIMIZER}.state.{name}.{key}"] = moment
    for name, step in state.steps.items():
        items[f"{OPTIMIZER}.state.{name}.step"] = Stored("float32", (), struct.pack("<f", step))
    for group in state.groups:
        for name in group.names:
            for key, value in group.settings.items():
                items[f"{OPTIMIZER}.param_groups.{name}.{key}"] = Value(value)
    return items
