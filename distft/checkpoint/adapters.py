"""The adapter in a checkpoint of any format, under the names of PEFT's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distft.checkpoint.folder import MANIFEST
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor, ShardMap
from distft.kept import is_adapter
from distft.peft import ADAPTER, CONFIG_FILE, PREFIX

# What PEFT calls the part of a name that says which of several adapters a tensor is of.
_NAMED = ("lora_", "modules_to_save")
# What PEFT writes without the module around it.
_BARE = "lora_magnitude_vector"
# What bitsandbytes keeps beside packed weights.
_QUANTIZED = (".quant_state.", ".absmax", ".quant_map", ".SCB", ".nested_absmax")


@dataclass(frozen=True)
class Adapter:
    """An adapter: what PEFT's config of it says, and its tensors.

    Attributes:
        root: Folder that the pieces' files are relative to.
        config: Values of ``adapter_config.json``.
        tensors: Its tensors by their names in ``adapter_model.safetensors``.
        own_base: Whether the checkpoint holds the base that the adapter was trained on.
    """

    root: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, LogicalTensor]
    own_base: bool

    @property
    def kind(self) -> str:
        """PEFT's name of its type, such as ``"LORA"``."""
        return str(self.config.get("peft_type"))


def find_adapter(found: ShardMap) -> Adapter | None:
    """Return the adapter that a checkpoint holds, or None where it holds a model alone.

    A save of distft has it in a folder of its own, a folder of PEFT is one; of what DeepSpeed,
    torch or Accelerate wrote during a LoRA run its tensors are among those of the model, and PEFT's
    config lies beside.

    Raises:
        ValueError: There are tensors of an adapter and no config of it, or of several adapters.

    Collective: none.
    """
    if found.format == "peft":
        # A tensor that stands under two names in a pickle is written under both.
        tied = {alias: found.tensors[kept] for alias, kept in found.ties.items()}
        return Adapter(found.root, _read_config(found.root), {**found.tensors, **tied}, False)
    inside = found.root / ADAPTER
    if (found.root / MANIFEST).is_file():
        if not (inside / CONFIG_FILE).is_file():
            return None
        return Adapter(inside, _read_config(inside), read_map(inside).tensors, own_base=True)
    names = {name for name in found.tensors if is_adapter(name)}
    if not names:
        return None
    tensors = {peft_name(name): found.tensors[name] for name in found.tensors if name in names}
    if len(tensors) < len(names):
        raise ValueError(
            f"{found.root} holds {len(names)} tensors of several adapters on the same "
            f"{len(tensors)} places. Save one of them with PEFT, and pass its folder."
        )
    return Adapter(found.root, _read_config(found.root, found.root.parent), tensors, own_base=True)


def _read_config(*folders: Path) -> dict[str, Any]:
    for folder in folders:
        file = folder / CONFIG_FILE
        if file.is_file():
            try:
                return dict(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file} is no JSON object: {error}. Copy it again.") from error
    raise ValueError(
        f"{folders[0]} holds the tensors of an adapter, and none of the {len(folders)} folders "
        f"{', '.join(map(str, folders))} has the {CONFIG_FILE} that says how they are scaled. "
        "Copy it there from the run."
    )


def peft_name(name: str) -> str:
    """Return the name that PEFT's file gives a tensor of an adapter in training.

    >>> peft_name("base_model.model.lm_head.modules_to_save.default.weight")
    'base_model.model.lm_head.weight'
    >>> peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'

    Collective: none.
    """
    parts = name.removeprefix(PREFIX).split(".")
    at = next(i for i, part in enumerate(parts) if part.startswith(_NAMED))
    head, kind, tail = parts[:at], parts[at], parts[at + 2 :]
    if kind == _BARE:
        tail = []
    kept = [] if kind == "modules_to_save" else [kind]
    return PREFIX + ".".join([*head, *kept, *tail])


def quantized(tensors: Mapping[str, LogicalTensor], config: Mapping[str, Any] | None) -> str | None:
    """Return how the weights of a model are quantized, or None where they are not.

    Collective: none.
    """
    said = (config or {}).get("quantization_config")
    if isinstance(said, Mapping):
        bits = (4, said.get("load_in_4bit")), (8, said.get("load_in_8bit"))
        kind = said.get("bnb_4bit_quant_type") if said.get("load_in_4bit") else None
        return str(kind or next((f"{n} bits" for n, on in bits if on), said.get("quant_method")))
    if any(part in name for name in tensors for part in _QUANTIZED):
        return "bitsandbytes"
    return None


def rooted(root: Path, tensor: LogicalTensor, name: str) -> LogicalTensor:
    """Return a tensor under another name whose pieces are found from any folder.

    Collective: none.
    """
    pieces = tuple(replace(piece, file=str(root / piece.file)) for piece in tensor.pieces())
    return LogicalTensor(name, tensor.shape, tensor.dtype, pieces)
