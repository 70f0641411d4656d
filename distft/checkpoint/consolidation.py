"""From a checkpoint of any strategy or tool to one Hugging Face model on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from distft.checkpoint.casts import CASTABLE
from distft.checkpoint.folder import LAYOUTS, MANIFEST, STATE_FILE, Manifest, read_manifest
from distft.checkpoint.layouts import AS_IT_IS
from distft.checkpoint.memory import parse_bytes
from distft.checkpoint.publish import (
    CONFIG,
    Rename,
    check_whole,
    config_with_dtype,
    known_layout,
    main_dtype,
    publish,
    read_config,
    untie,
)
from distft.checkpoint.readers import read_map
from distft.checkpoint.safetensors_reader import INDEX, SINGLE
from distft.checkpoint.shards import LogicalTensor, ShardMap
from distft.checkpoint.target import check_target, written_whole
from distft.checkpoint.writers.safetensors import plan_files
from distft.peft import ADAPTER, CONFIG_FILE, WEIGHTS_FILE, base_name

if TYPE_CHECKING:
    import torch

_OURS = {MANIFEST, STATE_FILE, CONFIG, "rng", ADAPTER, *LAYOUTS}
# What a model's folder has beside weights; a folder of another tool may hold anything else.
_BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "chat_template.*", "*processor_config.json",
)  # fmt: skip

AdapterChoice = Literal["keep", "merge", "only"]
Advance = Callable[[int], None]


def consolidate(
    path: str | Path,
    out: str | Path,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    max_ram: str | int = "2GB",
    exclude_frozen: bool = False,
    adapter: AdapterChoice = "keep",
    config: Any = None,
    rename: Rename | None = None,
    advance: Advance | None = None,
) -> Path:
    """Write a checkpoint as safetensors that ``from_pretrained`` reads, and return the folder.

    Works in this process alone, on the host, through a few small buffers: no tensor is ever whole
    in memory. The files carry the layout that transformers publishes (experts one by one where it
    does so, tied weights once), with the config, the generation config and the tokenizer beside
    them. Merging an adapter, and classes whose published layout only transformers knows, hold the
    whole model.

    Args:
        path: A checkpoint of distft, DeepSpeed, torch, Accelerate or transformers, the folder
            inside it that holds the state, or a run's root, which means its latest checkpoint.
        out: Folder to write to. Weight files of an earlier model in it are replaced; other files
            stay.
        dtype: Dtype of all floating tensors; default as trained, which is fp32, also for
            ``bf16-mixed`` with its fp32 master weights, and bf16 for ``precision="bf16"``, but for
            what stayed fp32 in it. Integer and boolean buffers keep theirs. The config says the
            same.
        max_shard_size: Largest file, such as ``"5GB"``; one larger tensor gets a file of its own.
        max_ram: Most memory that this call may add to the process.
        exclude_frozen: Leave out what was not trained: of a LoRA run the base, which leaves the
            folder ``adapter``; of another run the frozen tensors, the rest under the names that
            the model has in memory.
        adapter: What becomes of the adapter of a LoRA run: ``"keep"`` writes the base and, in the
            folder ``adapter`` in it, the adapter in PEFT's layout; ``"merge"`` adds it into the
            base; ``"only"`` makes ``out`` the adapter's folder.
        config: The model's config where the checkpoint has none or another: a transformers
            config, a file, or a folder.
        rename: From published names to others: a function, or a mapping of regular expressions
            to what replaces them, in order.
        advance: Called with the number of bytes after each window, from any thread.

    Raises:
        ValueError: ``path`` is no checkpoint, half one or a broken one, ``out`` lies inside it or
            is a file, the dtype is not a floating one, ``adapter`` asks for what the run does not
            have, or memory or disk are too small, which is found before the first byte is written.
        RuntimeError: A file of the checkpoint ends too early.

    Collective: none.
    """
    asked = None if dtype is None else _floating_dtype(dtype)
    limits = _Limits(
        parse_bytes("max_shard_size", max_shard_size),
        parse_bytes("max_ram", max_ram),
        advance or (lambda _: None),
    )
    found = read_map(Path(path))
    out = Path(out).absolute()
    check_target(out, found.root)
    manifest = read_manifest(found.root) if (found.root / MANIFEST).is_file() else None
    has_adapter = manifest is not None and (found.root / ADAPTER / CONFIG_FILE).is_file()
    _check_adapter_choice(found.root, adapter, exclude_frozen, has_adapter)
    source = _Source(found, manifest, read_config(found.root, config), has_adapter, rename)
    with written_whole(out, _names_weights, _earlier_model) as made:
        if has_adapter and adapter != "merge":
            into = made / ADAPTER if adapter == "keep" else made
            _copy_adapter(found.root / ADAPTER, into, asked, limits)
        if not has_adapter or not (exclude_frozen or adapter == "only"):
            _write_model(made, source, asked, limits, exclude_frozen, adapter == "merge")
            _copy_others(source, made)
    return out


@dataclass(frozen=True)
class _Limits:
    """What a call may use, and whom it tells."""

    shard_bytes: int
    ram: int
    advance: Advance


@dataclass(frozen=True)
class _Source:
    """A checkpoint, and what the caller adds to it."""

    found: ShardMap
    manifest: Manifest | None
    config: dict[str, Any] | None
    has_adapter: bool
    rename: Rename | None

    def tensors(self, exclude_frozen: bool) -> dict[str, LogicalTensor]:
        """Return the tensors to write by the names that they have without PEFT."""
        chosen = untie(self.found, self.config)
        if exclude_frozen:
            frozen = self.found.frozen | self.found.buffers
            if self.manifest is not None:
                frozen = frozenset(chosen) - frozenset(self.manifest.trainable)
            chosen = {name: tensor for name, tensor in chosen.items() if name not in frozen}
        if not self.has_adapter:
            return chosen
        named = {base_name(name): tensor for name, tensor in chosen.items()}
        return {name: tensor for name, tensor in named.items() if name is not None}

    def dtypes(self, asked: str | None) -> tuple[str | None, set[str], str]:
        """Return the dtype to cast to if any, the tensors left alone, and what the config says."""
        if asked is not None:
            return asked, set(), asked
        if self.manifest is not None:
            # What stayed fp32 beside bf16 weights, by its name without PEFT.
            kept = {
                base_name(name) or name
                for name, saved in self.manifest.tensors.items()
                if saved["dtype"] == "float32"
            }
            return self.manifest.dtype, kept, self.manifest.dtype
        # DeepSpeed keeps fp32 masters of what is trained and the rest in 16 bits.
        if self.found.format == "deepspeed":
            return "float32", set(), "float32"
        return None, set(), main_dtype(self.found.tensors.values())


def _write_model(
    made: Path,
    source: _Source,
    asked: str | None,
    limits: _Limits,
    exclude_frozen: bool,
    merge: bool,
) -> None:
    tensors = source.tensors(exclude_frozen)
    check_whole(replace(source.found, tensors=tensors, optimizer=None))
    dtype, kept, said = source.dtypes(asked)
    # A part of a model has no layout: its names stay those in memory.
    layout = known_layout(None if exclude_frozen else source.config)
    if merge or layout is None:
        _write_with_transformers(made, source, tensors, asked, limits, merge)
        return
    published = publish(tensors, layout, dtype, kept, source.rename)
    files = plan_files(published, limits.shard_bytes)
    files.write(source.found.root, made, limits.ram, limits.advance)
    if source.config is not None:
        _write_config(made, source.config, said)


def _write_with_transformers(
    made: Path,
    source: _Source,
    tensors: Mapping[str, LogicalTensor],
    asked: str | None,
    limits: _Limits,
    merge: bool,
) -> None:
    from distft.checkpoint import whole_model
    from distft.checkpoint.layouts import layout_of

    dtype, kept, said = source.dtypes(asked)
    model = whole_model.skeleton(source.config)
    layout = AS_IT_IS if model is None else layout_of(model)
    if layout is not None and not merge:
        published = publish(tensors, layout, dtype, kept, source.rename)
        files = plan_files(published, limits.shard_bytes)
        files.write(source.found.root, made, limits.ram, limits.advance)
    else:
        if source.rename is not None:
            raise ValueError(
                "consolidate(rename=...) and a model that transformers itself writes exclude each "
                "other. Consolidate without rename=."
            )
        size = sum(tensor.num_bytes for tensor in tensors.values())
        what = "merging an adapter" if merge else f"publishing {type(model).__name__}"
        whole_model.check_memory(size, limits.ram, what)
        # Merged in the dtype of the tensors, then rounded once.
        state = whole_model.read_whole(source.found.root, tensors, None if merge else dtype)
        if merge:
            state = whole_model.merge(source.config, state, source.found.root / ADAPTER)
        state = whole_model.cast(state, dtype, kept)
        whole_model.write_whole(made, model, state, said, limits.shard_bytes)
    if source.config is not None:
        _write_config(made, source.config, said)


def _write_config(made: Path, config: Mapping[str, Any], dtype: str) -> None:
    text = json.dumps(config_with_dtype(config, dtype), indent=2, sort_keys=True) + "\n"
    (made / CONFIG).write_text(text, encoding="utf-8")


def _check_adapter_choice(
    folder: Path, adapter: str, exclude_frozen: bool, has_adapter: bool
) -> None:
    choices = get_args(AdapterChoice)
    if adapter not in choices:
        raise ValueError(
            f"consolidate(adapter={adapter!r}) is none of the {len(choices)} choices "
            f"{', '.join(choices)}."
        )
    if adapter != "keep" and not has_adapter:
        raise ValueError(
            f"consolidate(adapter={adapter!r}) was asked for, and {folder} holds 0 adapters. "
            "Leave it out: the run trained the model itself."
        )
    if adapter == "merge" and exclude_frozen:
        raise ValueError(
            "consolidate(adapter='merge', exclude_frozen=True) contradicts itself: merging makes "
            "1 model of the frozen base and the adapter. Use adapter='only' for the adapter."
        )


def _copy_adapter(source: Path, into: Path, dtype: str | None, limits: _Limits) -> None:
    shutil.copytree(source, into, dirs_exist_ok=True)
    if dtype is None:
        return
    (into / WEIGHTS_FILE).unlink()
    found = read_map(source)
    published = publish(found.tensors, AS_IT_IS, dtype)
    plan_files(published, 1 << 62, WEIGHTS_FILE).write(found.root, into, limits.ram)


def _floating_dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in CASTABLE:
        raise ValueError(
            f"consolidate(dtype={dtype!r}) needs a floating dtype. Pass 'bfloat16' or 'float32'."
        )
    return name


def _copy_others(source: _Source, made: Path) -> None:
    """Copy generation config, tokenizer and the like, as the run saved them."""
    root = source.found.root
    members = (
        root.iterdir()
        if source.manifest is not None
        else (file for pattern in _BESIDE for file in root.glob(pattern) if file.is_file())
    )
    for member in members:
        if member.name in _OURS:
            continue
        if member.is_dir():
            shutil.copytree(member, made / member.name)
        else:
            shutil.copy(member, made)


def _names_weights(member: Path) -> bool:
    return member.name in (SINGLE, INDEX)


def _earlier_model(out: Path) -> list[Path]:
    """Return the weights of an earlier model, what names them first, and its adapter."""
    found = [*out.glob("*.safetensors.index.json"), *out.glob("model*.safetensors")]
    found += [file for name in (CONFIG_FILE, WEIGHTS_FILE) for file in out.glob(name)]
    if (out / ADAPTER / CONFIG_FILE).is_file():
        found.append(out / ADAPTER)
    return found
