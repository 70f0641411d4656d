"""LoRA of experts that are split: each rank folds its factors into its part of a weight.

Everything that is private to PEFT is used in this file alone, and `tests/unit/test_peft_names.py`
fails first when upstream moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.strategies._transformers import own_memory, sum_gradients

if TYPE_CHECKING:
    from torch import Tensor

# What the fold of experts takes from PEFT's wrapper of a parameter.
WRAPPER_NAMES = ("_activate_lora", "get_base_layer", "get_param")


def require_wrapper() -> Any:
    """Return PEFT's wrapper of a parameter.

    Raises:
        RuntimeError: This PEFT has none that works alike.

    Collective: none.
    """
    import peft

    try:
        from peft.tuners.lora.layer import ParamWrapper

        missing = [name for name in WRAPPER_NAMES if not hasattr(ParamWrapper, name)]
    except ImportError as error:
        missing = [str(error)]
    if missing:
        raise RuntimeError(
            f"peft {peft.__version__} has no ParamWrapper with {', '.join(missing)}, which "
            "adapters of experts need. Run pip install 'peft>=0.21'."
        )
    return ParamWrapper


def split_expert_factors(wrapper: Any) -> None:
    """Give each rank the factors that its part of a weight needs, and fold them into it.

    Where experts are spread, rows of A go expert by expert, and columns of B rank by rank of the
    adapter, each with all experts, so that a rank's columns are strided. Where each expert is
    split, B has the rows or A the columns of the rank's part, and the other factor is whole: its
    gradient is summed over the ranks.

    Collective: none.
    """
    import torch
    from torch.distributed.tensor import distribute_tensor

    weight = wrapper.get_param()
    for adapter in wrapper.lora_A:
        for side, placement in _placements(wrapper, adapter).items():
            factor = getattr(wrapper, side)[adapter]
            whole = factor.weight
            part = distribute_tensor(
                whole.detach(), weight.device_mesh, [placement], src_data_rank=None
            )
            own_memory(part)
            factor.weight = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
    wrapper._activate_lora = partial(_fold_locally, wrapper, weight.device_mesh)


def _placements(wrapper: Any, adapter: str) -> dict[str, Any]:
    """Return where the factors that are split lie, by their names in PEFT's wrapper."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    (found,) = wrapper.get_param().placements
    dim = found.dim % 3
    if dim == 0:
        return {
            "lora_A": Shard(0),
            "lora_B": _StridedShard(1, split_factor=wrapper.r[adapter]),
        }
    outputs = 2 if _is_transposed(wrapper) else 1
    side, own = ("lora_B", 0) if dim == outputs else ("lora_A", 1)
    groups = getattr(found, "split_factor", 1)
    return {side: Shard(own) if groups == 1 else _StridedShard(own, split_factor=groups)}


def _is_transposed(wrapper: Any) -> bool:
    return bool(getattr(wrapper.get_base_layer(), "is_transposed", False))


@contextmanager
def _fold_locally(wrapper: Any, mesh: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Let the experts' forward pass see ``W + scale * B A`` of this rank's part, as a tensor.

    PEFT's own way parametrizes the weight, where a `DTensor` would meet plain tensors.
    """
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    whole = experts._parameters[name]
    folded = whole.to_local() if hasattr(whole, "to_local") else whole
    for adapter in active_adapters:
        if adapter in wrapper.lora_A:
            a, b = (
                factor.to_local() if hasattr(factor, "to_local") else sum_gradients(factor, mesh)
                for factor in (wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight)
            )
            folded = fold(folded, a, b, wrapper.scaling[adapter], _is_transposed(wrapper))
    experts._parameters[name] = folded
    try:
        yield
    finally:
        experts._parameters[name] = whole


def fold(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return ``W_e + scale * B_e A_e`` for each expert.

    Args:
        weight: (experts, out, in), or (experts, in, out) where ``transposed``.
        a: (experts * rank, in): each expert's rows together.
        b: (out, rank * experts): each expert in every ``experts``-th column.
        scale: The adapter's factor.
        transposed: How the family stores its experts.

    Collective: none.
    """
    import torch

    num_experts = weight.shape[0]
    a = a.reshape(num_experts, -1, a.shape[-1]).to(weight.dtype)
    b = b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1).to(weight.dtype)
    left, right = (a.transpose(1, 2), b.transpose(1, 2)) if transposed else (b, a)
    return torch.baddbmm(weight, left, right, alpha=scale)
