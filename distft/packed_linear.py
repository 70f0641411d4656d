"""The product with a packed weight, which keeps no gathered bytes for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distft.quantized import state_of


class _Product(torch.autograd.Function):
    """``x W^T + b`` with a packed W that is frozen, as is b.

    bitsandbytes' own keeps the packed bytes that it was called with until the backward pass. Where
    they were gathered for the call, that is the whole model on every rank; here the layer is asked
    again, which has been gathered again by then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, bias: Tensor | None) -> Tensor:
        from bitsandbytes import matmul_4bit

        ctx.layer = layer
        found: Tensor = matmul_4bit(x, layer.weight, quant_state=state_of(layer), bias=bias)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        from bitsandbytes.functional import dequantize_4bit

        (gradient,) = gradients
        weight = dequantize_4bit(ctx.layer.weight, state_of(ctx.layer)).to(gradient.dtype)
        return torch.matmul(gradient, weight), None, None


def forward(layer: Any, x: Tensor) -> Tensor:
    """Compute as ``Linear4bit.forward`` does, and change nothing of the layer.

    That one puts another parameter in the place of the gathered one, casts the bias in place, and
    in evaluation on some CPUs reorders packed bytes that are a part of what all ranks hold.

    Collective: none.
    """
    dtype = layer.compute_dtype or x.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    product: Any = _Product.apply
    trained = bias is not None and bias.requires_grad
    found: Tensor = product(x.to(dtype), layer, None if trained else bias)
    if bias is not None and trained:
        found = found + bias
    return found.to(x.dtype)
