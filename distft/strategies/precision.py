"""The dtypes of weights and of compute, made without touching buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distft.process_group import local_device

if TYPE_CHECKING:
    from torch import Tensor, nn


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
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


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


def cast_inputs(model: nn.Module) -> None:
    """Make every forward pass of a model take its floating inputs in bf16, as its weights are.

    Autocast does it for DDP in mixed precision; elsewhere an image or an embedding in fp32 would
    meet bf16 weights.

    Collective: none.
    """
    import torch
    from torch.utils._pytree import tree_map

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if floating else value

    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (tree_map(cast, args), tree_map(cast, kwargs)),
        with_kwargs=True,
    )


def copy_from_rank0(tensors: Sequence[Tensor]) -> None:
    """Give every rank rank 0's values of some tensors, in place.

    Collective: every rank: one broadcast of each.
    """
    import torch
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
