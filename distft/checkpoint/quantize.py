"""Weights quantized to 4 bits as they are read, so that no rank holds the model in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.publish import read_config
from distft.peft import base_model
from distft.quantized import pack_empty, packed_in, packed_layers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distft.checkpoint.folder import Manifest


def check_config(quantization_config: Any, peft_config: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a ``BitsAndBytesConfig`` that stores bytes in the dtype of compute.

    Args:
        quantization_config: What the caller passed.
        peft_config: The adapters to train.
        dtype: The dtype in which the strategy computes.

    Raises:
        ValueError: It is another config, quantizes to 8 bits, stores bytes in a floating dtype that
            the strategy would cast, or there are no adapters.

    Collective: none.
    """
    import torch
    from transformers import BitsAndBytesConfig

    name = str(dtype).removeprefix("torch.")
    if not isinstance(quantization_config, BitsAndBytesConfig):
        raise ValueError(
            "load_model(quantization_config=...) takes a transformers.BitsAndBytesConfig, and got "
            f"a {type(quantization_config).__name__}: of 2 or more ranks 0 could hold a part of "
            "other quantized weights. Pass BitsAndBytesConfig(load_in_4bit=True)."
        )
    if not quantization_config.load_in_4bit:
        raise ValueError(
            "load_model(quantization_config=...) got one of 8 bits, whose weights have no floating "
            "storage, so that 0 ranks could hold a part. Pass BitsAndBytesConfig("
            "load_in_4bit=True)."
        )
    if peft_config is None:
        raise ValueError(
            "load_model() got a quantization_config and 0 adapters: quantized weights have no "
            "gradient, and adapters go on before they are split. Pass peft_config=LoraConfig(...)."
        )
    storage = quantization_config.bnb_4bit_quant_storage
    # uint8 is what the config has where nobody chose.
    if storage not in (torch.uint8, dtype):
        raise ValueError(
            f"load_model(quantization_config=...) stores packed bytes as {storage}, and the "
            f"strategy computes in {name}: they would be cast. Leave bnb_4bit_quant_storage out, "
            f"or set it to torch.{name}."
        )
    chosen = copy.deepcopy(quantization_config)
    chosen.bnb_4bit_quant_storage = dtype
    return chosen


def quantize_skeleton(model: Any, quantization_config: Any) -> None:
    """Put layers of 4 bits, without values, where transformers would quantize.

    Collective: none.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": "meta"})
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def empty_layers(model: nn.Module, quantization_config: Any) -> dict[str, Any]:
    """Return the layers that are quantized as they are read, by the names of their weights.

    Collective: none.
    """
    # TRL would make the adapters bf16 that are there already, split or not.
    base_model(model).is_loaded_in_4bit = False
    found = {}
    for path, layer in packed_layers(model).items():
        pack_empty(
            layer,
            quantization_config.bnb_4bit_quant_storage,
            quantization_config.bnb_4bit_use_double_quant,
        )
        found[f"{path}.weight"] = layer
    return found


def check_packing(manifest: Manifest, folder: Path, model: Any, precision: str) -> None:
    """Raise where packed weights of a checkpoint mean something else than those of a model.

    Raises:
        ValueError: They are stored in another dtype, or of another type of 4 bits.

    Collective: none.
    """
    number = sum(name.endswith(".weight") for name in packed_in(manifest.tensors))
    saved = manifest.strategy.get("precision", precision)
    if number and (saved == "fp32") != (precision == "fp32"):
        raise ValueError(
            f"{folder} holds {number} packed weights of a run with precision {saved!r}, stored in "
            f"the dtype of its compute, and this run has {precision!r}. Load it in the precision "
            "of the run, or take its adapter: consolidate(adapter='only')."
        )
    said = (read_config(folder) or {}).get("quantization_config") if number else None
    kinds = {layer.quant_kind for layer in packed_layers(model).values()}
    if isinstance(said, Mapping) and kinds and {said.get("bnb_4bit_quant_type")} != kinds:
        raise ValueError(
            f"{folder} holds {number} packed weights of type {said.get('bnb_4bit_quant_type')}, "
            f"and this model has {len(packed_layers(model))} of {', '.join(sorted(kinds))}. "
            "Quantize it as the run did."
        )
