"""The dtypes of weights and of compute, made without touching buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distft.process_group import local_device

if TYPE_CHECKING:
    from torch import nn


def cast_parameters(model: nn.Module, dtype: str) -> None:
    """Cast the floating parameters of a model in place and leave its buffers alone.

    ``module.to(bfloat16)`` would cast the rotary frequencies too, which no checkpoint restores.

    Collective: none.
    """
    import torch

    target = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != target:
            parameter.data = parameter.data.to(target)


def autocast_forward(model: nn.Module) -> None:
    """Make every forward pass of a model run under bf16 autocast, its weights staying fp32.

    Collective: none.
    """
    import torch

    device_type = local_device().type
    contexts: list[Any] = []

    def enter(_module: nn.Module, _inputs: Any) -> None:
        context = torch.autocast(device_type, dtype=torch.bfloat16)
        context.__enter__()
        contexts.append(context)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
