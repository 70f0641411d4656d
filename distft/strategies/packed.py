"""What is refused of models with quantized weights before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distft.kept import is_adapter
from distft.quantized import dtypes_of, other_quantization, packed_layers

if TYPE_CHECKING:
    from torch import nn


def compute_dtype(precision: str) -> str:
    """Return the dtype in which a precision computes, and packed weights are stored.

    Collective: none.
    """
    return "float32" if precision == "fp32" else "bfloat16"


def check_quantized(strategy: Any, model: nn.Module, peft_config: Any) -> None:
    """Raise where a model has quantized weights with which it cannot be trained as it is.

    Raises:
        ValueError: They are not bitsandbytes' of 4 bits, no adapters train beside them, their bytes
            are stored in a dtype that the strategy would cast, or it splits layers.

    Collective: none.
    """
    other = other_quantization(model)
    if other is not None:
        raise ValueError(
            f"{strategy!r} got a model quantized by {other}, and of 2 or more ranks 0 could hold "
            "a part of such weights: they have no floating storage, or were not shown to be right "
            "here. Load it with BitsAndBytesConfig(load_in_4bit=True, "
            f"bnb_4bit_quant_storage=torch.{compute_dtype(strategy.precision)})."
        )
    layers = packed_layers(model)
    if not layers:
        return
    mesh = strategy.mesh()
    if mesh.tp * mesh.ep > 1:
        raise ValueError(
            f"{strategy!r} splits layers over tp={mesh.tp} and experts over ep={mesh.ep}, and the "
            f"{len(layers)} layers of 4 bits are packed in blocks that cross rows. Use DDP, ZeRO1, "
            "ZeRO2, ZeRO3, FSDP2 or HSDP for QLoRA."
        )
    if strategy.compile is not None:
        raise ValueError(
            f"{strategy!r}: compile={strategy.compile!r} has not been shown to be right with the "
            f"{len(layers)} layers of 4 bits of this model. Leave compile out."
        )
    if not any(layer.weight.is_meta for layer in layers.values()):
        check_storage(repr(strategy), strategy.precision, layers)
    adapters = [name for name, _ in model.named_parameters() if is_adapter(name)]
    trained = [path for path, layer in layers.items() if layer.weight.requires_grad]
    if trained or not (adapters or peft_config is not None):
        what = f"{len(trained)} of them" if trained else "no adapters"
        raise ValueError(
            f"{strategy!r} got a model with {len(layers)} layers of 4 bits and {what} to train: "
            "quantized weights have no gradient. Pass peft_config=LoraConfig(...), or load the "
            "model without quantization_config for full tuning."
        )


def check_storage(caller: str, precision: str, layers: dict[str, Any]) -> None:
    """Raise where packed bytes are stored in another dtype than a strategy computes in.

    Raises:
        ValueError: Both dtypes, and the settings that would be right.

    Collective: none.
    """
    wanted = compute_dtype(precision)
    for path, layer in layers.items():
        storage, source = dtypes_of(layer)
        if (storage, source) != (wanted, wanted):
            raise ValueError(
                f"{caller} computes in {wanted}, and of {len(layers)} layers of 4 bits {path} was "
                f"quantized from {source} and has its bytes stored as {storage}: they would be "
                f"cast, or not split. Load the model with dtype=torch.{wanted} and "
                f"bnb_4bit_quant_storage=torch.{wanted}, or choose another precision."
            )
