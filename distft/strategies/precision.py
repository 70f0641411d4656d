"""The dtypes of weights and of compute, made without touching buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distft.kept import Keep, kept_modules, kept_names
from distft.process_group import local_device
from distft.quantized import packed_names

if TYPE_CHECKING:
    from torch import Tensor, nn


def cast_parameters(model: nn.Module, dtype: str) -> None:
    """Cast the floating parameters of a model in place and leave its buffers alone.

    Those marked by `kept.mark_kept` become fp32, and packed bytes stay as they are.
    ``module.to(bfloat16)`` would cast the rotary frequencies too, which no checkpoint restores.

    Collective: none.
    """
    import torch

    kept, packed = kept_names(model), packed_names(model)
    for name, parameter in model.named_parameters():
        if name in packed:
            continue
        target = torch.float32 if name in kept else getattr(torch, dtype)
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
    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (cast_floating(args), cast_floating(kwargs)),
        with_kwargs=True,
    )


def compute_kept_in_fp32(model: nn.Module) -> None:
    """Make the modules of which all is kept in fp32 compute in it, amid others in bf16.

    Autocast is off inside. Where the user kept it, floating inputs are cast to fp32 and outputs to
    bf16, so that no fp32 activation meets bf16 weights; scores of experts and logits stay fp32,
    since bf16 would not tell near ones apart. Code of a class that keeps a module itself casts
    where it must.

    Collective: none.
    """
    for path, keep in kept_modules(model).items():
        if keep.names is None:
            _compute_in_fp32(model.get_submodule(path), keep)


def _compute_in_fp32(module: nn.Module, keep: Keep) -> None:
    import torch

    device_type = local_device().type
    contexts: list[Any] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        context = torch.autocast(device_type, enabled=False)
        context.__enter__()
        contexts.append(context)
        if keep.by_class:
            return None
        return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    def lower(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        fp32 = keep.logits or _hands_on_choices(output)
        return output if fp32 else cast_floating(output)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    if not keep.by_class:
        module.register_forward_hook(lower)


def _hands_on_choices(output: Any) -> bool:
    """Return whether there are indices in an output: a router's, which says whom it chose."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return any(not tensor.is_floating_point() for tensor in tensors)


def cast_floating(values: Any, dtype: Any = None) -> Any:
    """Return a tree of values with its floating tensors in a dtype, default bf16.

    Collective: none.
    """
    import torch
    from torch.utils._pytree import tree_map

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype or torch.bfloat16) if floating else value

    return tree_map(cast, values)


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
            if not tensor.is_contiguous():
                tensor.copy_(whole)
