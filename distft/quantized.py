"""Weights of 4 bits, packed by bitsandbytes: how a rank holds what nothing may compute on.

A packed weight is a parameter of a floating dtype, which engines take, whose bits are no numbers:
among them are patterns of NaN, and a cast or a sum would ruin them. What its scales are is kept in
buffers of its layer, whole on every rank, where engines, saves and loads find it by name.

One dtype rules a run: the one its strategy computes in ("fp32" float32, "bf16-mixed" and "bf16"
bfloat16) is that in which packed weights were quantized and in which their bytes are stored. What
is not packed (norms, embeddings, head, adapters) has the dtype of the strategy's weights, whatever
a preparation for k-bit training made of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Buffers of a layer beside its packed weight, by bitsandbytes' names of them where it has one.
ABSMAX, CODE, FACTS = "absmax", "quant_map", "packing"
NESTED_ABSMAX, NESTED_CODE, NESTED_OFFSET = "nested_absmax", "nested_quant_map", "nested_offset"
BUFFERS = (ABSMAX, CODE, NESTED_ABSMAX, NESTED_CODE, NESTED_OFFSET, FACTS)
# Elements that are quantized at once on the host, a multiple of every block.
_AT_ONCE = 1 << 16
# Set on a layer: what is no tensor of its scales, None before there are any.
_MARK = "_distft_packed"


def packed_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers of 4 bits in a model by their paths, packed or still to be.

    Collective: none.
    """
    return {
        path: module
        for path, module in model.named_modules()
        if _is_of_bitsandbytes(module, "Linear4bit")
    }


def packed_names(model: Any) -> frozenset[str]:
    """Return the names of the parameters that are packed bytes, which nothing may compute on.

    Collective: none.
    """
    return frozenset(f"{path}.weight" for path in packed_layers(model))


def packed_in(names: Iterable[str]) -> frozenset[str]:
    """Return, of the names of a checkpoint's tensors, those of packed weights and their buffers.

    >>> sorted(packed_in(["q.weight", "q.absmax", "q.bias", "norm.weight"]))
    ['q.absmax', 'q.weight']

    Collective: none.
    """
    there = frozenset(names)
    layers = [name.removesuffix(f".{ABSMAX}") for name in there if name.endswith(f".{ABSMAX}")]
    # bitsandbytes has them below the weight, distft beside it.
    layers = [layer.removesuffix(".weight") for layer in layers]
    below = {f"{layer}.weight" for layer in layers} | {
        f"{layer}.{between}{buffer}"
        for layer in layers
        for between in ("", "weight.")
        for buffer in BUFFERS
    }
    kinds = {
        f"{layer}.weight.quant_state.bitsandbytes__{kind}"
        for layer in layers
        for kind in ("nf4", "fp4")
    }
    return there & (below | kinds)


def published_name(name: str, kind: str) -> str | None:
    """Return the name under which transformers reads a buffer of packed weights; None for none.

    Args:
        name: The name in memory, whose last part is one of `BUFFERS`.
        kind: Type of the 4-bit values, ``"nf4"`` or ``"fp4"``.

    >>> published_name("q_proj.absmax", "nf4"), published_name("q_proj.packing", "nf4")
    ('q_proj.weight.absmax', 'q_proj.weight.quant_state.bitsandbytes__nf4')

    Collective: none.
    """
    layer, _, buffer = name.rpartition(".")
    if buffer == NESTED_OFFSET:
        # It is in the text, too.
        return None
    return f"{layer}.weight." + (f"quant_state.bitsandbytes__{kind}" if buffer == FACTS else buffer)


def dtypes_of(layer: Any) -> tuple[str, str]:
    """Return the dtype in which a layer's bytes are stored, and the one it was quantized from.

    Collective: none.
    """
    storage = str(layer.weight.dtype).removeprefix("torch.")
    facts = getattr(layer, _MARK, None)
    if facts is not None:
        return storage, facts["dtype"]
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    return storage, str(state.dtype).removeprefix("torch.")


def scales_of(layer: Any) -> str:
    """Return whether a layer's scales are quantized in their turn: `"nested"`, or `"plain"`.

    Collective: none.
    """
    weight = layer.weight
    nested = getattr(weight, "compress_statistics", None)
    return "nested" if NESTED_ABSMAX in layer._buffers or nested else "plain"


def scale_tensors(model: Any) -> list[Tensor]:
    """Return the buffers in which a model keeps the scales of its packed weights.

    Collective: none.
    """
    return [
        layer._buffers[name]
        for layer in packed_layers(model).values()
        for name in BUFFERS
        if name in layer._buffers
    ]


def other_quantization(model: Any) -> str | None:
    """Return the name of a quantization that is not bitsandbytes' of 4 bits, or None.

    Collective: none.
    """
    if any(_is_of_bitsandbytes(module, "Linear8bitLt") for module in model.modules()):
        return "LLM.int8"
    method = getattr(model, "quantization_method", None)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is None and config is not None:
        method = (
            config.get("quant_method")
            if isinstance(config, dict)
            else getattr(config, "quant_method", None)
        )
    name = getattr(method, "value", method)
    return None if name is None or name == "bitsandbytes" else str(name)


def _is_of_bitsandbytes(module: Any, name: str) -> bool:
    # PEFT has classes of the same names.
    return any(
        base.__name__ == name and base.__module__.startswith("bitsandbytes.")
        for base in type(module).__mro__
    )


def pack(model: Any) -> None:
    """Turn weights that bitsandbytes has quantized into plain parameters and buffers, in place.

    What is packed already stays. The values are those of before, to the bit.

    Collective: none.
    """
    import torch

    for layer in packed_layers(model).values():
        if hasattr(layer, _MARK):
            continue
        state = getattr(layer.weight, "quant_state", None) or layer.quant_state
        packed = layer.weight.data.detach().as_subclass(torch.Tensor)
        _register(layer, packed, _buffers_of(state))
        setattr(layer, _MARK, _facts_of(state))


def pack_empty(layer: Any, storage: torch.dtype, is_nested: bool) -> None:
    """Give a layer without values what it will hold, its packed weight on the meta device.

    Collective: none.
    """
    import torch

    # Not at the top: converting a checkpoint needs the names above and no formula.
    from distft.formulas.packed import BLOCK, FACTS_BYTES, NESTED_BLOCK, packed_rows

    numel = layer.weight.numel()
    blocks = -(-numel // BLOCK)
    rows = packed_rows(numel, storage.itemsize)
    buffers = {
        ABSMAX: torch.zeros(blocks, dtype=torch.uint8 if is_nested else torch.float32),
        CODE: torch.zeros(16),
        FACTS: torch.zeros(FACTS_BYTES, dtype=torch.uint8),
    }
    if is_nested:
        buffers |= {
            NESTED_ABSMAX: torch.zeros(-(-blocks // NESTED_BLOCK)),
            NESTED_CODE: torch.zeros(256),
            NESTED_OFFSET: torch.zeros(()),
        }
    _register(layer, torch.empty(rows, 1, dtype=storage, device="meta"), buffers)
    setattr(layer, _MARK, None)


def quantize_into(layer: Any, whole: Tensor) -> Tensor:
    """Return the packed bytes of a whole weight, and let a layer of `pack_empty` keep its scales.

    Bit for bit what bitsandbytes' ``quantize_4bit`` gives of the whole. On the host it would take
    64 bytes an element at once, so that blocks go to it a few at a time; scales are quantized
    together, as it does.

    Collective: none.
    """
    import torch
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    from distft.formulas.packed import BLOCK, NESTED_BLOCK

    flat = whole.reshape(-1)
    parts = [
        quantize_4bit(
            part,
            blocksize=BLOCK,
            compress_statistics=False,
            quant_type=layer.quant_kind,
            quant_storage=layer.weight.dtype,
        )
        for part in flat.split(_AT_ONCE if flat.device.type == "cpu" else flat.numel())
    ]
    state: Any = parts[0][1]
    state.shape, state.absmax = whole.shape, torch.cat([part.absmax for _, part in parts])
    if NESTED_ABSMAX in layer._buffers:
        offset = state.absmax.mean()
        absmax, nested = quantize_blockwise(state.absmax - offset, blocksize=NESTED_BLOCK)
        facts = {"code": state.code, "blocksize": BLOCK, "quant_type": state.quant_type}
        state = QuantState(
            absmax, whole.shape, dtype=state.dtype, offset=offset, state2=nested, **facts
        )
    for name, value in _buffers_of(state).items():
        layer._buffers[name] = value.to(whole.device)
    setattr(layer, _MARK, _facts_of(state))
    return torch.cat([packed for packed, _ in parts])


def _register(layer: Any, packed: Tensor, buffers: Mapping[str, Tensor]) -> None:
    import torch

    from distft.packed_linear import forward

    # The scales are the buffers' from here on.
    layer.quant_state = None
    layer.quant_kind = layer.weight.quant_type
    for name, tensor in buffers.items():
        layer.register_buffer(name, tensor)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.forward = partial(forward, layer)


def _facts_of(state: Any) -> dict[str, Any]:
    facts = {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "dtype": str(state.dtype).removeprefix("torch."),
        "shape": list(state.shape),
    }
    if state.nested:
        facts["nested_blocksize"] = state.state2.blocksize
        facts["nested_dtype"] = str(state.state2.dtype).removeprefix("torch.")
        facts["nested_offset"] = state.offset.item()
    return facts


def _buffers_of(state: Any) -> dict[str, Tensor]:
    import torch

    from distft.formulas.packed import FACTS_BYTES

    buffers = {ABSMAX: state.absmax, CODE: state.code}
    if state.nested:
        buffers |= {
            NESTED_ABSMAX: state.state2.absmax,
            NESTED_CODE: state.state2.code,
            NESTED_OFFSET: state.offset,
        }
    # One storage each: saves and moves go by storages.
    made = {name: tensor.detach().clone() for name, tensor in buffers.items()}
    text = json.dumps(_facts_of(state)).encode().ljust(FACTS_BYTES)
    made[FACTS] = torch.tensor(list(text), dtype=torch.uint8)
    return made


def state_of(layer: Any) -> Any:
    """Return what bitsandbytes asks for beside packed bytes, over the buffers of a layer.

    Collective: none.
    """
    import torch
    from bitsandbytes.functional import QuantState

    facts = getattr(layer, _MARK)
    nested = None
    if NESTED_ABSMAX in layer._buffers:
        nested = QuantState(
            layer.nested_absmax,
            code=layer.nested_quant_map,
            blocksize=facts["nested_blocksize"],
            dtype=getattr(torch, facts["nested_dtype"]),
        )
    return QuantState(
        layer.absmax,
        shape=torch.Size(facts["shape"]),
        code=layer.quant_map,
        blocksize=facts["blocksize"],
        quant_type=facts["quant_type"],
        dtype=getattr(torch, facts["dtype"]),
        offset=None if nested is None else layer.nested_offset,
        state2=nested,
    )
