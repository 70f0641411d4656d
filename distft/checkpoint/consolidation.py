"""From a checkpoint of any strategy to one Hugging Face model on disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OURS = {MANIFEST, STATE_FILE, "config.json", "rng", *LAYOUTS}


def consolidate(
    path: str | Path,
    out: str | Path,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
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
            ``bf16-mixed`` with its fp32 master weights, and bf16 for ``precision="bf16"``. Integer
            and boolean buffers keep theirs. The config says the same.
        max_shard_size: Largest file, such as ``"5GB"``; one larger tensor gets a file of its own.

    Raises:
        ValueError: ``path`` is no checkpoint or half one, ``out`` lies inside it or is a file, or
            the dtype is not a floating one.

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
    tensors = _read_weights(folder, manifest)
    state = {
        name: tensor.to(target) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        _write_model(Path(made), folder, state, target, max_shard_size)
        _copy_others(folder, Path(made))
        _move_in(Path(made), out)
    return out


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
) -> None:
    """Write weights and config; transformers itself names and splits them where it knows how."""
    skeleton = _skeleton(folder)
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
    """Move the finished files into place; an earlier model's weight files go first."""
    out.mkdir(exist_ok=True)
    stale = [*out.glob("model*.safetensors"), *out.glob("*.safetensors.index.json")]
    for file in stale:
        file.unlink()
    for source in made.iterdir():
        target = out / source.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(source, target)
