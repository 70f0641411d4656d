"""Where every tensor of a model lies in its folder, and what does not fit, named."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.layouts import Layout, layout_of
from distft.checkpoint.quantize import quantize_skeleton
from distft.checkpoint.safetensors_reader import DTYPES, FileTensor, list_tensors
from distft.checkpoint.weights import Weights, names_of
from distft.kept import kept_names, majority_is_bf16, mark_kept
from distft.process_group import group_rank, group_size

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("distft")

# How many tensors of a kind an error lists.
_SHOWN = 4
# Names that transformers gives new ones to in every model; older files have them.
_OLD_NAMES = re.compile(
    r"LayerNorm\.(gamma|beta)$|\.weight_[gv]$|^(model\.language_model\.model|language_model\.model)"
)
# In files of older Llama models; every build computes it.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


def find_weights(
    folder: Path,
    dtype: torch.dtype,
    config: Any,
    model_class: Any,
    quantization: Any = None,
) -> Weights:
    """Return a model without values, and where in the files each of its tensors lies.

    Args:
        folder: Folder with ``config.json`` and safetensors.
        dtype: Of the model's floating parameters.
        config: A transformers config, or None for the folder's.
        model_class: The class to build or its name, or None for the one the config names.
        quantization: By what linear layers are quantized as they are read, or None.

    Raises:
        ValueError: As `distft.load_model`.

    Collective: none.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds no config.json. Pass the folder of a saved model; one on the Hub "
            "is fetched with huggingface_hub.snapshot_download."
        )
    if not _has_gpu():
        # transformers looks for DeepSpeed's accelerator, which warns where nobody names one.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from distft.checkpoint.skeleton import build

    config = _config(folder) if config is None else copy.deepcopy(config)
    model_class = _class(folder, model_class)
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        raise ValueError(
            f"{folder} holds a {model_class.__name__}, which is built from a {wanted.__name__}, "
            f"and got a {type(config).__name__}. Pass a config of the folder's kind, or none."
        )
    files = list_tensors(folder)
    odd = next((name for name, tensor in files.items() if tensor.dtype not in DTYPES), None)
    if odd is not None or getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder} holds quantized weights"
            + (f", such as {odd} in {files[odd].dtype}" if odd is not None else "")
            + ". Pass a folder with weights in fp32, bf16 or fp16 and quantization_config=..., "
            "which quantizes as it reads; or load this one with from_pretrained for apply()."
        )
    config.dtype = dtype
    model: Any = build(model_class, config, dtype)
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    layout = layout_of(model)
    reason = _why_whole(model, layout, files)
    pieces = {} if reason else match_tensors(folder, model, layout or Layout(), files)
    kept_in_files = _keep_fp32(model, pieces, files)
    if reason and quantization is not None:
        raise ValueError(
            f"{folder}: {reason}, so each of {group_size('load_model()')} ranks would read the "
            "whole model before it is quantized. Load it with from_pretrained(quantization_config="
            "...), save it anew, or leave quantization_config out."
        )
    if reason:
        if group_rank() == 0:
            logger.warning("%s: %s, so each rank reads the whole model first.", folder, reason)
        # Read in bf16, what the files keep in fp32 would be rounded.
        return _read_whole(folder, model, model_class, config, None if kept_in_files else dtype)
    if quantization is not None:
        quantize_skeleton(model, quantization)
    return Weights(model, pieces, quantization=quantization)


def _keep_fp32(
    model: nn.Module, pieces: Mapping[str, Sequence[FileTensor]], files: Mapping[str, FileTensor]
) -> bool:
    """Make fp32 again what stays so, by the class or by the files; return whether files say so."""
    import torch

    sizes = ((DTYPES[tensor.dtype], math.prod(tensor.shape)) for tensor in files.values())
    by_files: list[str] = []
    if majority_is_bf16(sizes):
        for name, _ in model.named_parameters():
            found = pieces.get(name) or [files[each] for each in (name,) if each in files]
            if found and all(DTYPES[piece.dtype] == "float32" for piece in found):
                by_files.append(name)
    mark_kept(model, by_files)
    kept = kept_names(model)
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.data = parameter.data.to(torch.float32)
    return bool(by_files)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'} is of the unknown model type {error}. Pass config=."
        ) from error


def _class(folder: Path, model_class: Any) -> Any:
    import transformers

    # The folder's own word, also where the config is another one.
    held = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    held = list(held or [])
    if model_class is not None:
        asked = model_class if isinstance(model_class, str) else model_class.__name__
        if held and asked not in held:
            raise ValueError(
                f"{folder} holds a {held[0]}, and load_model was asked for a {asked}. "
                "Pass the class that the folder holds, or another folder."
            )
        if not isinstance(model_class, str):
            return model_class
        held = [model_class]
    found = getattr(transformers, held[0], None) if held else None
    if found is None:
        what = f"names {held[0]}, which transformers does not have" if held else "names no class"
        raise ValueError(f"{folder / 'config.json'} {what}. Pass model_class=.")
    return found


def _why_whole(model: Any, layout: Layout | None, files: Mapping[str, FileTensor]) -> str | None:
    """Return why names or values on disk do not follow from the model's by what is known here."""
    if layout is None:
        return f"transformers publishes a conversion for {type(model).__name__} unknown here"
    empty = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    if empty is not None:
        return f"the buffer {empty} is made without a value"
    old = next((name for name in files if _OLD_NAMES.search(name)), None)
    if old is not None:
        return f"{old} has an old name"
    for names in names_of(model).values():
        both = [name for name in names if name in files]
        if len(both) > 1:
            return f"{both[0]} and {both[1]} are tied, and the files hold both"
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = set(model.state_dict(keep_vars=True))
    if prefix != "." and not own & set(files):
        added = {f"{prefix}{name}" for name in files}
        bare = {name.removeprefix(prefix) for name in files}
        if own & (added | bare):
            return f"names differ by {prefix}"
    return None


def match_tensors(
    folder: Path, model: nn.Module, layout: Layout, files: Mapping[str, FileTensor]
) -> dict[str, list[FileTensor]]:
    """Return the pieces of every tensor, or raise one error that names all that do not fit.

    Raises:
        ValueError: Tensors are missing, too many, or of other shapes.

    Collective: none.
    """
    tensors = model.state_dict(keep_vars=True)
    found: dict[str, list[FileTensor]] = {}
    missing, mismatched, seen = [], [], set[str]()
    for names in names_of(model).values():
        shape = tuple(getattr(tensors[names[0]], "ds_shape", tensors[names[0]].shape))
        whole = next((name for name in names if name in files), None)
        wanted = [(whole, shape)] if whole else layout.pieces(names[0], shape)
        for name, expected in wanted:
            if name not in files:
                missing.append(f"{name} {expected}")
            elif files[name].shape != expected:
                mismatched.append(f"{name} {files[name].shape} where the model has {expected}")
        seen.update(names, (name for name, _ in wanted))
        found[names[0]] = [files[name] for name, _ in wanted if name in files]
    ignored = [*_patterns(model), _COMPUTED]
    extra = [
        f"{name} {files[name].shape}"
        for name in sorted(set(files) - seen)
        if not any(pattern.search(name) for pattern in ignored)
    ]
    _refuse(folder, model, missing, extra, mismatched)
    return found


def _patterns(model: Any) -> list[re.Pattern[str]]:
    """Return what a model says may be in its files without being in it."""
    listed = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [re.compile(pattern) for pattern in listed]


def _refuse(
    folder: Path,
    model: nn.Module,
    missing: Sequence[str],
    extra: Sequence[str],
    mismatched: Sequence[str],
) -> None:
    kinds = {"missing": missing, "extra": extra, "of another shape": mismatched}
    parts = []
    for kind, entries in kinds.items():
        if entries:
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            parts.append(f"{len(entries)} {kind}: {', '.join(entries[:_SHOWN])}{more}")
    if parts:
        raise ValueError(
            f"{folder} does not hold this {type(model).__name__}: {'; '.join(parts)}. "
            "Pass the folder that belongs to the config, or mend the config."
        )


def _read_whole(
    folder: Path, model: nn.Module, model_class: Any, config: Any, dtype: torch.dtype | None
) -> Weights:
    """Read the model with all of transformers' conversions, and keep its tensors.

    No dtype is fp32.
    """
    import torch

    shapes = model.state_dict(keep_vars=True)
    whole, report = model_class.from_pretrained(
        folder,
        config=config,
        dtype=dtype or torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    _refuse(
        folder,
        model,
        [f"{name} {tuple(shapes[name].shape)}" for name in sorted(report["missing_keys"])],
        sorted(report["unexpected_keys"]),
        [
            f"{name} {tuple(a)} where the model has {tuple(b)}"
            for name, a, b in sorted(report["mismatched_keys"])
        ],
    )
    held = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    for names in names_of(model).values():
        if len({id(held[name]) for name in names}) > 1:
            raise ValueError(
                f"{folder} holds different values for {names[0]} and {names[1]}, which the config "
                "ties. Set tie_word_embeddings=False in it, or drop one of the two."
            )
    pieces: dict[str, list[FileTensor]] = {names[0]: [] for names in names_of(model).values()}
    return Weights(model, pieces, held)
