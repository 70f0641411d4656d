"""From a checkpoint of any strategy to one Hugging Face model on disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from distft.checkpoint.dcp import MODEL, read_tensors
from distft.checkpoint.folder import (
    DCP,
    LAYOUTS,
    MANIFEST,
    STATE_FILE,
    Manifest,
    find_checkpoint,
    read_manifest,
)
from distft.peft import ADAPTER, CONFIG_FILE, WEIGHTS_FILE, base_name, merge_adapter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OURS = {MANIFEST, STATE_FILE, "config.json", "rng", ADAPTER, *LAYOUTS}

AdapterChoice = Literal["keep", "merge", "only"]


def consolidate(
    path: str | Path,
    out: str | Path,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    exclude_frozen: bool = False,
    adapter: AdapterChoice = "keep",
) -> Path:
    """Write a checkpoint as safetensors that ``from_pretrained`` reads, and return the folder.

    Works in this process alone, on the host, and holds the whole model in memory once. The files
    carry the layout that transformers publishes (experts one by one where it does so, tied weights
    once), with the config, the generation config and the tokenizer beside them.

    Args:
        path: A checkpoint, the folder inside it that holds the state, or the run's root, which
            means its latest checkpoint.
        out: Folder to write to. Weight files of an earlier model in it are replaced; other files
            stay.
        dtype: Dtype of all floating tensors; default as trained, which is fp32, also for
            ``bf16-mixed`` with its fp32 master weights, and bf16 for ``precision="bf16"``, but for
            what stayed fp32 in it. Integer and boolean buffers keep theirs. The config says the
            same.
        max_shard_size: Largest file, such as ``"5GB"``; one larger tensor gets a file of its own.

        exclude_frozen: Leave out what was not trained: of a LoRA run the base, which leaves the
            folder ``adapter``; of another run the frozen tensors, the rest under the names that
            the model has in memory.
        adapter: What becomes of the adapter of a LoRA run: ``"keep"`` writes the base and, in the
            folder ``adapter`` in it, the adapter in PEFT's layout; ``"merge"`` adds it into the
            base; ``"only"`` makes ``out`` the adapter's folder.

    Raises:
        ValueError: ``path`` is no checkpoint or half one, ``out`` lies inside it or is a file,
            the dtype is not a floating one, or ``adapter`` asks for what the run does not have.

    Collective: none.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    out = Path(out).absolute()
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out} lies inside the checkpoint {folder}. Choose a folder outside it.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file. Choose a folder to write the model to.")
    target = _floating_dtype(dtype or manifest.dtype)
    has_adapter = (folder / ADAPTER / CONFIG_FILE).is_file()
    _check_adapter_choice(folder, adapter, exclude_frozen, has_adapter)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        if has_adapter and adapter != "merge":
            into = Path(made, ADAPTER) if adapter == "keep" else Path(made)
            _copy_adapter(folder / ADAPTER, into, None if dtype is None else target)
        if not has_adapter or not (exclude_frozen or adapter == "only"):
            tensors = _read_weights(folder, manifest)
            if has_adapter:
                tensors = _base_weights(folder, tensors, merge=adapter == "merge")
            if exclude_frozen:
                tensors = {n: tensor for n, tensor in tensors.items() if n in manifest.trainable}
            kept = _kept_in_fp32(manifest) if dtype is None else set()
            state = {
                name: tensor.to(target)
                if tensor.is_floating_point() and name not in kept
                else tensor
                for name, tensor in tensors.items()
            }
            _write_model(Path(made), folder, state, target, max_shard_size, exclude_frozen)
            _copy_others(folder, Path(made))
        _move_in(Path(made), out)
    return out


def _kept_in_fp32(manifest: Manifest) -> set[str]:
    """Return the tensors, by their names without PEFT, that were fp32 beside bf16 weights."""
    fp32 = (name for name, saved in manifest.tensors.items() if saved["dtype"] == "float32")
    return {base_name(name) or name for name in fp32}


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


def _copy_adapter(source: Path, into: Path, dtype: torch.dtype | None) -> None:
    shutil.copytree(source, into, dirs_exist_ok=True)
    if dtype is not None:
        from safetensors.torch import load_file, save_file

        state = {name: tensor.to(dtype) for name, tensor in load_file(into / WEIGHTS_FILE).items()}
        save_file(state, into / WEIGHTS_FILE, metadata={"format": "pt"})


def _base_weights(folder: Path, tensors: Mapping[str, Tensor], merge: bool) -> dict[str, Tensor]:
    """Return the base of a LoRA run under the names it has without PEFT, merged or as it was."""
    named = {base_name(name): tensor for name, tensor in tensors.items()}
    base = {name: tensor for name, tensor in named.items() if name is not None}
    if not merge:
        return base
    model = _skeleton(folder)
    if model is None:
        raise ValueError(
            f"consolidate(adapter='merge') needs a model class of transformers, and {folder} names "
            "none. Use adapter='keep', and merge with PEFT on the model that you build."
        )
    buffers = [name for name, _ in model.named_buffers()]
    _, unexpected = model.load_state_dict(base, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent or unexpected:
        raise ValueError(
            f"{folder} lacks {len(absent)} tensors of its own base, and has {len(unexpected)} "
            f"others, such as {[*absent, *unexpected][0]}. Use adapter='keep'."
        )
    merged = merge_adapter(model, folder / ADAPTER)
    whole = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    return whole | {name: base[name] for name in buffers if name in base}


def _floating_dtype(dtype: Any) -> torch.dtype:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"consolidate(dtype={dtype!r}) needs a floating dtype. Pass 'bfloat16' or 'float32'."
        )
    return found


def _read_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the whole tensors of a checkpoint by name, tied ones once."""
    if manifest.layout == DCP:
        found = read_tensors(folder / DCP, [f"{MODEL}.{name}" for name in manifest.tensors])
        tensors = {name.removeprefix(f"{MODEL}."): tensor for name, tensor in found.items()}
    else:
        from distft.checkpoint.deepspeed_reader import read_zero_weights

        tensors = read_zero_weights(folder / manifest.layout, list(manifest.tensors))
    for name, saved in manifest.tensors.items():
        if list(tensors[name].shape) != saved["shape"]:
            raise ValueError(
                f"{name} has shape {list(tensors[name].shape)} in {folder}, and {MANIFEST} says "
                f"{saved['shape']}. The checkpoint is damaged: use another one."
            )
    return tensors


def _write_model(
    made: Path,
    folder: Path,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    max_shard_size: str | int,
    partial: bool,
) -> None:
    """Write weights and config; transformers itself names and splits them where it knows how."""
    skeleton = None if partial else _skeleton(folder)
    if skeleton is None:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(dict(state), made, max_shard_size=max_shard_size)
        if (folder / "config.json").is_file():
            config = json.loads((folder / "config.json").read_text())
            config["dtype"] = str(dtype).removeprefix("torch.")
            (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return
    # The config gets the dtype of the model, so it is the model that must have it.
    skeleton.to(dtype)
    with _no_progress_bars():
        skeleton.save_pretrained(made, state_dict=dict(state), max_shard_size=max_shard_size)


def _skeleton(folder: Path) -> Any:
    """Return the model of a checkpoint without values, or None where transformers has no class."""
    import torch

    if not torch.cuda.is_available():
        # transformers looks for DeepSpeed's accelerator, which warns where nobody names one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    if not (folder / "config.json").is_file():
        return None
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if cls is None:
        return None
    with torch.device("meta"):
        return cls(config)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _copy_others(folder: Path, made: Path) -> None:
    """Copy generation config, tokenizer and the like, as the run saved them."""
    for source in folder.iterdir():
        if source.name in _OURS:
            continue
        if source.is_dir():
            shutil.copytree(source, made / source.name)
        else:
            shutil.copy(source, made)


def _move_in(made: Path, out: Path) -> None:
    """Move the finished files into place; an earlier model's weights and adapter go first."""
    out.mkdir(exist_ok=True)
    stale = [*out.glob("model*.safetensors"), *out.glob("*.safetensors.index.json")]
    stale += [file for name in (CONFIG_FILE, WEIGHTS_FILE) for file in out.glob(name)]
    for file in stale:
        file.unlink()
    if (out / ADAPTER / CONFIG_FILE).is_file():
        shutil.rmtree(out / ADAPTER)
    for source in made.iterdir():
        target = out / source.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(source, target)
