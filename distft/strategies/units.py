"""What units of ``fully_shard`` need: policies, partial sums finished, gradients cut, groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distft.checkpoint.placement import gather_whole
from distft.peft import base_model
from distft.process_group import local_device
from distft.strategies._transformers import HALVES
from distft.strategies.split import split_of
from distft.training.dropout_streams import split_streams

if TYPE_CHECKING:
    from torch import Tensor, nn


def separate_dropout(model: nn.Module) -> None:
    """Let dropout on split activations draw other masks on each rank of a tp group.

    Collective: none.
    """
    split = split_of(model)
    if split is None or split.dense["tp"].size() == 1:
        return
    columns, rows = (
        [path for path, style in split.styles.items() if style == kind] for kind in HALVES
    )
    rank = split.dense["tp"].get_local_rank()
    split_streams(base_model(model), columns, rows, rank, local_device())


def finish_partial_sums(model: Any) -> None:
    """Let blocks whose sum over replicas is deferred reduce in the next pass, used in it or not.

    A block without a gradient in the last micro-step would reduce nothing then, and what its
    earlier micro-steps left would be lost without a word.

    Collective: none.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = module._get_fsdp_state()._fsdp_param_groups
            pending = any(group._partial_reduce_output is not None for group in groups)
            module.set_reduce_scatter_unused_params(pending, recurse=False)


def split_again(model: Any) -> None:
    """Shard again what a forward pass without a backward pass leaves whole.

    That is the root, and every block where ``reshard_after_forward=False``.

    Collective: none.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host, whole.

    Collective: every rank of its mesh, where it is a DTensor.
    """
    from torch.distributed.tensor import DTensor

    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = gather_whole(whole)
    return whole.cpu().clone()


def split_gradients(model: nn.Module) -> None:
    """Keep of each gradient the part that belongs to the part of its parameter.

    torch hands every rank the whole gradient of an embedding that is split by rows;
    ``fully_shard`` cuts it, and where there is none it is done here.

    Collective: none.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    def cut(parameter: Any) -> None:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            part = gradient.redistribute(placements=parameter.placements)
            # A view would hold the whole gradient.
            parameter.grad = part if part is gradient else part.clone()

    if not isinstance(base_model(model), FSDPModule):
        parameters: list[Any] = list(model.parameters())
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(cut)


def submodule(model: nn.Module, path: str) -> nn.Module:
    """Return a module of the model by its path in the model without adapters.

    Collective: none.
    """
    found: nn.Module = base_model(model).get_submodule(path)
    return found


def groups_that_split(where: Any) -> list[Any]:
    """Return the process groups over which gradients of a layout are split.

    Raises:
        RuntimeError: They are sums of which each rank has a part only.

    Collective: none.
    """
    if where is None:
        return []
    mesh, placements = where
    partial = [placement for placement in placements if placement.is_partial()]
    if partial:
        raise RuntimeError(
            f"Gradients lie as {placements}: {len(partial)} of {len(placements)} axes hold sums "
            "that nobody finished. Report this with the model and its plan."
        )
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    ]


def host_policy() -> Any:
    """Return torch's policy that keeps shards and their gradients on the host.

    Collective: none.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    # Pinned memory is what a GPU copies from without waiting; there is none to pin without one.
    return CPUOffloadPolicy(pin_memory=local_device().type == "cuda")


def mixed_precision(precision: str) -> Any:
    """Return torch's policy of a precision.

    Collective: none.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return MixedPrecisionPolicy(cast_forward_inputs=False)
