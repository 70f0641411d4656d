"""From a checkpoint of any strategy or tool to one Hugging Face model on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from distft.checkpoint.adapters import find_adapter
from distft.checkpoint.beside import copy_beside
from distft.checkpoint.checksums import refuse_damaged_source
from distft.checkpoint.config_shapes import unlike_config
from distft.checkpoint.copy import check_disk
from distft.checkpoint.layouts import AS_IT_IS, Layout, known_layout
from distft.checkpoint.memory import parse_bytes
from distft.checkpoint.merge_plan import Merge
from distft.checkpoint.model_source import ModelSource, check_adapter_choice
from distft.checkpoint.publish import (
    CONFIG,
    Rename,
    bytes_in,
    check_whole,
    config_with_dtype,
    publish,
    renamed,
)
from distft.checkpoint.readers import read_map
from distft.checkpoint.safetensors_reader import INDEX, SINGLE
from distft.checkpoint.shards import CASTABLE, LogicalTensor
from distft.checkpoint.target import check_target, written_whole
from distft.checkpoint.writers.adapter import write_adapter
from distft.checkpoint.writers.safetensors import plan_files
from distft.peft import ADAPTER, CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    import torch

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
    base: str | Path | None = None,
    check: bool = False,
) -> Path:
    """Write a checkpoint as safetensors that ``from_pretrained`` reads, and return the folder.

    Works in this process alone, on the host, through a few small buffers: no tensor is ever whole
    in memory, of an adapter that is merged the two factors of one. The files carry the layout that
    transformers publishes (experts one by one where it does so, tied weights once), with the
    config, the generation config and the tokenizer beside them. Classes whose published layout
    only transformers knows, and adapters that are more than LoRA, hold the whole model.

    Args:
        path: A checkpoint of distft, DeepSpeed, torch, Accelerate, transformers or PEFT, the folder
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
            base, ``W + scale * B A`` in fp32, rounded once; ``"only"`` makes ``out`` the adapter's
            folder.
        config: The model's config where the checkpoint has none or another: a transformers
            config, a file, or a folder.
        rename: From published names to others: a function, or a mapping of regular expressions
            to what replaces them, in order.
        advance: Called with the number of bytes after each window, from any thread.
        base: The base that the adapter goes on, where the checkpoint holds none or one of 4 or 8
            bits: the folder of a model, or a checkpoint. Its dtype is the default one, and the
            files that are written name it.
        check: Whether to `verify` ``path`` first. A checkpoint of distft is compared with its
            checksums in any case; of other tools this reads all files once more for the CRC-32 in
            them, which takes about as long as the conversion itself.

    Raises:
        ValueError: ``path`` is no checkpoint, half one or a broken one, ``out`` lies inside it or
            is a file, the dtype is not a floating one, ``adapter`` or ``base`` ask for what the run
            does not have, the base is quantized or another one, or memory or disk are too small,
            which is found before the first byte is written.
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
    check_target(out, Path(path) if Path(path).is_file() else found.root)
    if check:
        from distft.checkpoint.verify import refuse_broken

        refuse_broken(path)
    refuse_damaged_source(found.root, weights_alone=True)
    held = find_adapter(found)
    choices = get_args(AdapterChoice)
    check_adapter_choice(found.root, held, adapter, choices, exclude_frozen, base)
    source = None
    if held is None or not (exclude_frozen or adapter == "only"):
        source = ModelSource.of(found, held, base, config, adapter == "merge")
        if base is not None and not Path(base).is_file():
            check_target(out, source.found.root, "the base")
    with written_whole(out, _names_weights, _earlier_model) as made:
        if held is not None and adapter != "merge":
            into = made / ADAPTER if adapter == "keep" else made
            if source is not None:
                # Both have to fit before the first is written.
                every = (*held.tensors.values(), *source.found.tensors.values())
                check_disk(out, bytes_in(every, source.dtypes(asked)[0]))
            write_adapter(held, into, asked, limits.ram, limits.advance)
        if source is not None:
            _write_model(made, source, asked, limits, exclude_frozen, rename)
            # Of both the run's own, which may have another tokenizer than its base.
            for root in dict.fromkeys((source.found.root, found.root)):
                copy_beside(root, made)
    return out


@dataclass(frozen=True)
class _Limits:
    """What a call may use, and whom it tells."""

    shard_bytes: int
    ram: int
    advance: Advance


def _write_model(
    made: Path,
    source: ModelSource,
    asked: str | None,
    limits: _Limits,
    exclude_frozen: bool,
    rename: Rename | None,
) -> None:
    tensors = source.tensors(exclude_frozen)
    check_whole(replace(source.found, tensors=tensors, optimizer=None))
    if not exclude_frozen:
        _check_against_config(source, tensors, rename)
    # A part of a model has no layout: its names stay those in memory.
    layout, model = known_layout(None if exclude_frozen else source.config), None
    if layout is None:
        layout, model = _ask_transformers(source.config)
    merge = None
    if source.merged is not None and layout is not None:
        merge = source.plan(tensors, layout)
    if layout is None or (source.merged is not None and merge is None):
        if rename is not None:
            raise ValueError(
                "consolidate(rename=...) and a model that transformers itself writes exclude each "
                "other. Consolidate without rename=."
            )
        _write_whole(made, source, model, tensors, asked, limits)
    else:
        _stream(made, source, tensors, layout, merge, asked, limits, rename)


def _ask_transformers(config: Mapping[str, Any] | None) -> tuple[Layout | None, Any]:
    """Return how a model is published, None where only transformers can, and a skeleton of it."""
    from distft.checkpoint import whole_model
    from distft.checkpoint.layouts import layout_of

    model = whole_model.skeleton(config)
    return (AS_IT_IS if model is None else layout_of(model)), model


def _stream(
    made: Path,
    source: ModelSource,
    tensors: Mapping[str, LogicalTensor],
    layout: Layout,
    merge: Merge | None,
    asked: str | None,
    limits: _Limits,
    rename: Rename | None,
) -> None:
    config = source.config
    if merge is not None:
        if merge.held_bytes > limits.ram:
            raise ValueError(
                f"max_ram is {limits.ram} bytes, and merging takes {merge.held_bytes}: the largest "
                f"factors and the rows they are added to. Allow {merge.held_bytes} bytes or more."
            )
        tensors, config = source.with_merge(tensors, merge)
    dtype, kept, said = source.dtypes(asked)
    published = publish(tensors, layout, dtype, kept, rename)
    files = plan_files(published, limits.shard_bytes, metadata=source.metadata)
    root = source.found.root
    if merge is None:
        files.write(root, made, limits.ram, limits.advance)
    else:
        # Sums need numpy, which takes longer to start than all else here.
        from distft.checkpoint.merging import split_outputs, write_sums

        copied, summed = split_outputs(files.outputs, merge.changes)
        replace(files, outputs=copied).write(root, made, limits.ram, limits.advance)
        write_sums(root, made, summed, merge, limits.advance)
    if config is not None:
        _write_config(made, config, said)


def _check_against_config(
    source: ModelSource, tensors: Mapping[str, LogicalTensor], rename: Rename | None
) -> None:
    """Refuse a model that has not what its config asks for, which would load as random values."""
    shapes = {renamed(name, rename): tensor.shape for name, tensor in tensors.items()}
    wrong = list(unlike_config(shapes, source.config or {}, source.found.format))
    if wrong:
        raise ValueError(
            f"{source.found.root} is another model than its config says, in {len(wrong)} places: "
            f"{'; '.join(wrong[:3])}. Pass config=, that of this model, or use another checkpoint."
        )


def _write_whole(
    made: Path,
    source: ModelSource,
    model: Any,
    tensors: Mapping[str, LogicalTensor],
    asked: str | None,
    limits: _Limits,
) -> None:
    """Let transformers publish, and PEFT merge, with the whole model in memory."""
    from distft.checkpoint import whole_model

    dtype, kept, said = source.dtypes(asked)
    model = whole_model.skeleton(source.config) if model is None else model
    size = sum(tensor.num_bytes for tensor in tensors.values())
    adapter = source.merged
    what = "merging an adapter" if adapter else f"publishing {type(model).__name__}"
    whole_model.check_memory(size, limits.ram, what)
    # Merged in the dtype of the tensors, then rounded once.
    state = whole_model.read_whole(source.found.root, tensors, None if adapter else dtype)
    if adapter is not None:
        # Beside the folder that is made, so it goes with what is temporary.
        folder = made.parent / ADAPTER
        write_adapter(adapter, folder, None, limits.ram)
        state = whole_model.merge(source.config, state, folder)
    state = whole_model.cast(state, dtype, kept)
    whole_model.write_whole(made, model, state, said, limits.shard_bytes)
    if source.config is not None:
        _write_config(made, source.config, said)


def _write_config(made: Path, config: Mapping[str, Any], dtype: str) -> None:
    text = json.dumps(config_with_dtype(config, dtype), indent=2, sort_keys=True) + "\n"
    (made / CONFIG).write_text(text, encoding="utf-8")


def _floating_dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in CASTABLE:
        raise ValueError(
            f"consolidate(dtype={dtype!r}) needs a floating dtype. Pass 'bfloat16' or 'float32'."
        )
    return name


def _names_weights(member: Path) -> bool:
    return member.name in (SINGLE, INDEX)


def _earlier_model(out: Path) -> list[Path]:
    """Return the weights of an earlier model, what names them first, and its adapter."""
    found = [*out.glob("*.safetensors.index.json"), *out.glob("model*.safetensors")]
    found += [file for name in (CONFIG_FILE, WEIGHTS_FILE) for file in out.glob(name)]
    if (out / ADAPTER / CONFIG_FILE).is_file():
        found.append(out / ADAPTER)
    return found
