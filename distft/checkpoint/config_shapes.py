"""The tensors of a model beside what its config asks for, for architectures known from numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from distft.checkpoint.layouts import AS_IT_IS, known_layout

_PUBLISHED = ("safetensors", "state_dict")
# Keys of which a config has one where it says its sizes; without them they would be defaults.
_WIDTHS = ("hidden_size", "n_embd", "d_model")


def unlike_config(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], format: str
) -> Iterator[str]:
    """Yield what a model lacks, or has in another shape, of what its config says.

    What a model has beside that is its own. Experts are compared by their number of elements, since
    families publish them in several ways. Nothing is said of quantized models, and of
    architectures whose tensors are not known here.

    Args:
        shapes: Shapes by name, as published or as in memory.
        config: Values of ``config.json``.
        format: Format of the checkpoint: published files may have names that memory has not.

    Collective: none.
    """
    if config.get("quantization_config") or not any(key in config for key in _WIDTHS):
        return
    # What it takes to know architectures is more than the rest of a conversion needs.
    from distft.spec import ModelSpec

    try:
        architecture = str((config.get("architectures") or [""])[0])
        spec = ModelSpec.from_config(config)
    except (ValueError, TypeError, AttributeError):
        return
    if not architecture.endswith("ForCausalLM"):
        return
    layout = known_layout(config)
    if layout is None:
        if format in _PUBLISHED:
            return
        layout = AS_IT_IS
    twins = {**dict(spec.ties), **{kept: alias for alias, kept in spec.ties}}
    for tensor in spec.tensors:
        if tensor.is_expert:
            continue
        published = layout.pieces(tensor.name, tensor.shape)[0][0]
        names = (tensor.name, published, twins.get(tensor.name, ""))
        here = next((shapes[name] for name in names if name in shapes), None)
        if here is None:
            yield f"{tensor.name} of shape {tensor.shape} is missing, and config.json asks for it"
        elif here != tensor.shape:
            yield f"{tensor.name} has the shape {here}, and config.json says {tensor.shape}"
    wanted = sum(tensor.numel for tensor in spec.tensors if tensor.is_expert)
    held = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    if wanted != held:
        yield f"experts have {held} elements, and config.json asks for {wanted}"
