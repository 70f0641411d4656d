"""What the files of DeepSpeed, torch's distributed checkpoint and safetensors say of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.dcp import METADATA, describe_items
from distft.checkpoint.readers.deepspeed import MODEL_STATES, OPTIM_STATES, tag_folder
from distft.checkpoint.readers.safetensors import checked_header
from distft.checkpoint.readers.torch_zip import read_torch_file
from distft.checkpoint.readers.unpickle import StandIn, StoredTensor
from distft.checkpoint.safetensors_reader import DTYPES

Parts = Mapping[str, Sequence[str]]

_MODEL_STATES, _OPTIM_STATES = f"*{MODEL_STATES}", f"*{OPTIM_STATES}"


@dataclass(frozen=True)
class Engine:
    """What the part of a folder says that a sharding engine wrote; its files as parts.

    Attributes:
        folder: The folder that is to be named to the engine.
        strategy: How the model was spread over ranks.
        world_size: Number of ranks.
        stage: ZeRO stage.
        step: Optimizer steps.
        dtype: Dtype of the weights.
        beside: What a report says after the kind of folder.
        merge: The command that makes whole weights of it.
        parts: Files of each part, relative to the folder that was searched.
        missing: Files that should be there.
        tag: The folder of DeepSpeed's files relative to ``folder``, or None.
        other_names: Whether its tensors have names that no model of transformers has.
    """

    folder: Path
    strategy: str | None = None
    world_size: int | None = None
    stage: int | None = None
    step: int | None = None
    dtype: str | None = None
    beside: str = ""
    merge: str | None = None
    parts: Parts = field(default_factory=dict)
    missing: Sequence[str] = ()
    tag: str | None = None
    other_names: bool = False


def names(folder: Path, *patterns: str) -> list[str]:
    """Return the files below a folder that match, relative to it.

    Collective: none.
    """
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in found)


def files_of(folder: Path, part: str, *patterns: str) -> dict[str, list[str]]:
    """Return the part with its files, or nothing where there are none.

    Collective: none.
    """
    found = names(folder, *patterns)
    return {part: found} if found else {}


def whole_files(folder: Path) -> dict[str, list[str]]:
    """Return the weights and the adapter that ``from_pretrained`` reads, where there are any.

    Collective: none.
    """
    patterns = ("model*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
    adapter = ("adapter_model.safetensors", "adapter_model.bin")
    return {
        **files_of(folder, "weights", *patterns, "pytorch_model_fsdp.bin"),
        **files_of(folder, "adapter", *adapter),
    }


def absent_shards(folder: Path) -> list[str]:
    """Return the files that an index of safetensors names and that are not there.

    Collective: none.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    wanted = set(json.loads(index.read_text())["weight_map"].values())
    return sorted(name for name in wanted if not (folder / name).is_file())


def safetensors_dtype(folder: Path, parts: Parts) -> str | None:
    """Return the dtypes in the first safetensors file of the weights, from its header alone.

    Raises:
        ValueError: The file is broken.

    Collective: none.
    """
    files = [*parts.get("weights", ()), *parts.get("adapter", ())]
    file = next((folder / name for name in files if name.endswith(".safetensors")), None)
    if file is None:
        return None
    kinds = {tensor.dtype for tensor in checked_header(file).values()}
    return ", ".join(sorted(DTYPES[kind] for kind in kinds)) or None


def find_engine(folder: Path) -> Engine:
    """Return what DeepSpeed or torch's distributed checkpoint left in a folder or right below it.

    Raises:
        ValueError: A file is broken, or asks for more than a checkpoint needs.

    Collective: none.
    """
    tag = tag_folder(folder)
    if tag is not None:
        return _read_deepspeed(folder, tag)
    # Where Accelerate's FSDP puts them, and the folder itself.
    for home in (folder / "pytorch_model_fsdp_0", folder):
        if (home / METADATA).is_file():
            return _read_dcp(folder, home)
    if (folder / "pytorch_model_fsdp.bin").is_file():
        return Engine(folder, strategy="FSDP (whole tensors)", beside=", with FSDP")
    return Engine(folder)


def _read_deepspeed(folder: Path, tag: Path) -> Engine:
    models, optimizers = names(tag, _MODEL_STATES), names(tag, _OPTIM_STATES)
    state = _mapping(read_torch_file(tag, models[0]))
    ranks = state.get("dp_world_size")
    config = _mapping(state.get("ds_config"))
    stage = int(_mapping(config.get("zero_optimization")).get("stage") or 0)
    if optimizers:
        inner = _mapping(read_torch_file(tag, optimizers[0])).get("optimizer_state_dict")
        said = _mapping(inner).get("zero_stage", stage)
        stage = int(said.args[0] if isinstance(said, StandIn) else said)
    prefix = "" if tag == folder else f"{tag.name}/"
    weights = [f"{prefix}{name}" for name in models]
    optimizer = [f"{prefix}{name}" for name in optimizers] if stage else weights
    parts = {"weights": weights}
    parts |= {"optimizer": optimizer} if optimizer else {}
    parts |= {"scheduler": weights[:1]} if state.get("lr_scheduler") is not None else {}
    missing = []
    if stage and isinstance(ranks, int) and len(optimizers) != ranks:
        missing.append(f"{ranks - len(optimizers)} of {ranks} files {tag.name}/{_OPTIM_STATES}")
    if stage == 3 and isinstance(ranks, int) and len(models) != ranks:
        missing.append(f"{ranks - len(models)} of {ranks} files {tag.name}/{_MODEL_STATES}")
    root = tag.parent if tag == folder else folder
    return Engine(
        folder,
        strategy=f"ZeRO-{stage} of DeepSpeed {state.get('ds_version')}" if stage else "DeepSpeed",
        world_size=ranks,
        stage=stage,
        step=state.get("global_steps"),
        dtype=_dtype(_mapping(state.get("module"))),
        beside=", with DeepSpeed",
        # Stage 1 and 2 hold whole weights too, but not the fp32 masters.
        merge=f"python {root}/zero_to_fp32.py {root} OUT --safe_serialization -t {tag.name}"
        "  # and put config.json beside",
        parts=parts,
        missing=missing,
        tag=prefix or ".",
    )


def _dtype(tensors: Mapping[str, Any]) -> str | None:
    """Return the dtype of the first tensor."""
    found = (tensor.dtype for tensor in tensors.values() if isinstance(tensor, StoredTensor))
    return next(found, None)


def _read_dcp(folder: Path, home: Path) -> Engine:
    items, files = describe_items(home)
    by_accelerate = home != folder
    prefix = f"{home.name}/" if by_accelerate else ""
    there = [f"{prefix}{name}" for name in files if (home / name).is_file()]
    parts = {part: there for part in _dcp_parts(items) if there}
    optimizer = folder / "optimizer_0"
    if by_accelerate and (optimizer / METADATA).is_file():
        parts |= files_of(folder, "optimizer", "optimizer_0/*.distcp")
    titan = any(name.startswith(("tok_embeddings.", "train_state")) for name in items)
    out = "accelerate merge-weights {} OUT  # and put config.json beside"
    if not by_accelerate:
        out = (
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {} weights.pt\n"
            "# then model.load_state_dict of its model's part, model.save_pretrained('OUT')"
        )
    ranks = {name.split("_")[2] for name in files if name.startswith("__")}
    return Engine(
        folder,
        strategy="FSDP" if by_accelerate else None,
        # A rank that wrote nothing has no file, so that this is a lower bound elsewhere.
        world_size=len(ranks) if by_accelerate else None,
        dtype=_dcp_dtype(items),
        beside=", with FSDP" if by_accelerate else (", by torchtitan" if titan else ""),
        merge=out.format(home),
        parts=parts,
        other_names=any("tok_embeddings." in name for name in items),
        missing=[f"{prefix}{name}" for name in files if not (home / name).is_file()],
    )


def _dcp_parts(items: Mapping[str, Any]) -> list[str]:
    """Return the parts that a distributed checkpoint's names speak of."""
    prefixes = {
        "optimizer": ("optimizer", "optim.", "optim_"),
        "scheduler": ("lr_scheduler", "scheduler"),
        "data position": ("dataloader",),
        "step": ("train_state",),
    }
    known = tuple(prefix for group in prefixes.values() for prefix in group)
    found = [part for part, starts in prefixes.items() if _any_starts(items, starts)]
    weights = ["weights"] if any(not name.startswith(known) for name in items) else []
    return [*weights, *(part for part in found if part != "step")]


def _any_starts(items: Mapping[str, Any], starts: tuple[str, ...]) -> bool:
    return any(name.startswith(starts) for name in items)


def _dcp_dtype(items: Mapping[str, str | None]) -> str | None:
    for name, dtype in items.items():
        if dtype is not None and not name.startswith(("optim", "train_state")):
            return dtype
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
