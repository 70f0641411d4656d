"""Counting the bytes of model state that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.quantized import scale_tensors
from distft.training.wrappers import is_engine, unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of model state on this rank: parameters, gradients, optimizer tensors.

    ``parameters`` counts the scales of packed weights too; ``on_disk`` is what ZeRO-3 holds of the
    optimizer's tensors in files, and nowhere else.
    """

    parameters: int
    gradients: int
    optimizer: int
    on_disk: int = 0

    @property
    def total(self) -> int:
        """Bytes in memory."""
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(model: nn.Module, optimizer: Optimizer | None) -> ModelStateBytes:
    """Return the bytes of model state of this rank: live tensors, counted once each.

    Call it after a backward pass to see gradients, after an update to see moments. ZeRO's flat
    partitions count where they are: whole flat weights (stages 1 and 2) and partitioned weights
    (stage 3) as parameters, fp32 master partitions as optimizer tensors. Without an optimizer, as
    before `apply` has made one, its tensors count 0.

    Collective: none.
    """
    seen: set[tuple[int, int, int]] = set()
    parameters = _count(_parameter_tensors(model), seen)
    gradients = _count(_gradient_tensors(model), seen)
    by_parameter = optimizer.state.values() if optimizer is not None else ()
    states: list[Any] = [value for state in by_parameter for value in state.values()]
    masters = _master_tensors(model)
    held = _count([*masters, *states], seen)
    on_disk = sum(
        info.numel() * info.num_tensors() * info.dtype().itemsize for info in _in_files(model)
    )
    return ModelStateBytes(parameters, gradients, held, on_disk)


def trained_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what a step changes on this rank, by a name: trained weights, masters, moments.

    Parts of this rank as plain tensors; what ZeRO-3 holds of the optimizer in files is left out.

    Collective: none.
    """
    import torch
    from torch.distributed.tensor import DTensor

    found: dict[str, Any] = {}
    for name, parameter in unwrap(model).named_parameters():
        if parameter.requires_grad:
            # A partitioned parameter of ZeRO-3 is empty; its part hangs on it.
            part = getattr(parameter, "ds_tensor", None)
            found[f"weight {name}"] = parameter.data if part is None else part
    for number, master in enumerate(_master_tensors(model)):
        found[f"master weights {number}"] = master.data
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda x: x[0]):
            found[f"optimizer {key} {number}"] = value
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
    }


def _count(tensors: Iterable[Any], seen: set[tuple[int, int, int]]) -> int:
    import torch
    from torch.distributed.tensor import DTensor

    total = 0
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            continue
        num_bytes = local.numel() * local.element_size()
        # The memory of fake tensors has no address.
        key = (local.untyped_storage()._cdata, int(local.storage_offset()), num_bytes)
        if num_bytes and key not in seen:
            seen.add(key)
            total += num_bytes
    return total


def _parameter_tensors(model: Any) -> list[Any]:
    scales: list[Any] = scale_tensors(unwrap(model))
    return [*_weight_tensors(model), *scales]


def _weight_tensors(model: Any) -> list[Any]:
    parameters: list[Any] = list(unwrap(model).parameters())
    if not is_engine(model):
        # Of a model that `load_model` has cut up and no engine has, parts hang on parameters too.
        hung = ("ds_tensor", "ds_secondary_tensor")
        return [*parameters, *(getattr(p, name, None) for p in parameters for name in hung)]
    if model.zero_optimization_stage() == 3:
        # A partitioned parameter is empty; its part hangs on it, and its part of a secondary copy.
        # Persistent ones are whole.
        return [t for p in parameters for t in (p.data, p.ds_tensor, p.ds_secondary_tensor)]
    frozen = [p for p in parameters if not p.requires_grad]
    return [*model.optimizer.bit16_groups_flat, *frozen]


def _gradient_tensors(model: Any) -> list[Any]:
    whole: list[Any] = [p.grad for p in unwrap(model).parameters() if p.grad is not None]
    if not is_engine(model):
        return whole
    averaged = model.optimizer.averaged_gradients.values()
    # Offloaded, they are on the host, each on its master partition.
    whole += [partition.grad for partition in _master_tensors(model)]
    whole += [
        gradient for info in _in_files(model) for gradient in info.unswapped_gradients.values()
    ]
    # Stage 1 in mixed precision accumulates in fp32 beside the parameter.
    whole += [getattr(p, "grad_accum", None) for p in unwrap(model).parameters()]
    return [*whole, *[tensor for group in averaged if group for tensor in group]]


def _master_tensors(model: Any) -> list[Any]:
    if not is_engine(model):
        return []
    zero = model.optimizer
    if model.zero_optimization_stage() == 3:
        return list(zero.fp32_partitioned_groups_flat)
    return list(zero.single_partition_of_fp32_groups)


def _in_files(model: Any) -> list[Any]:
    """Return what DeepSpeed knows of each sub-group whose optimizer state is on a disk."""
    if not is_engine(model) or not model.zero_nvme_offload_optimizer():
        return []
    return list(model.optimizer.optimizer_swapper.swap_params_info.values())
