"""Splitting layers over `tp` and experts over `ep`, before adapters and `fully_shard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.formulas.split_rules import DISPATCH, why_not
from distft.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from distft.strategies._transformers import (
    Plan,
    find_plans,
    split_experts,
    split_tensors,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

# Set on a model whose layers or experts are split.
_MARK = "_distft_split"


@dataclass(frozen=True)
class Split:
    """How a model's layers and experts are split.

    Attributes:
        dense: Mesh of `dp_replicate, dp_shard, tp`.
        expert: Mesh of `dp_replicate, efsdp, ep`.
        expert_modules: Paths of the modules whose experts are spread over `ep`.
        styles: From the path of every module whose forward pass is fitted to the name of its style.
        parameters: The same for every parameter that has one.
    """

    dense: DeviceMesh
    expert: DeviceMesh
    expert_modules: tuple[str, ...]
    styles: Mapping[str, str]
    parameters: Mapping[str, str]


def split_of(model: Any) -> Split | None:
    """Return how a model is split, None where it is not.

    Collective: none.
    """
    found: Split | None = getattr(model, _MARK, None)
    return found


def split_layers(
    caller: str, model: nn.Module, mesh: Mesh, rules: Mapping[str, str] | None, device_type: str
) -> None:
    """Split a model's layers over `tp` and its experts over `ep`, in place.

    The model has the same values on every rank, or is on the meta device.

    Raises:
        ValueError: The plan or a size does not fit, with the numbers; nothing is split then.

    Collective: every rank: process groups are made.
    """
    from torch.distributed.device_mesh import init_device_mesh

    tensors, experts = find_plans(caller, model, mesh.tp, mesh.ep, rules)
    _check_heads(caller, model, mesh.tp, tensors)
    _check_sizes(caller, model, mesh, tensors, experts)
    dense, expert = (
        init_device_mesh(
            device_type, tuple(getattr(mesh, axis) for axis in axes), mesh_dim_names=axes
        )
        for axes in (DENSE_AXES, EXPERT_AXES)
    )
    if tensors:
        split_tensors(model, dense["tp"], tensors)
    if experts:
        split_experts(model, expert["ep"], dense["tp"], experts)
    spread = tuple(name for name, style in experts.items() if style == DISPATCH)
    paths = {path for path, _ in model.named_modules()}
    both = tensors | experts
    styles = {name: style for name, style in both.items() if name in paths}
    parameters = {name: style for name, style in both.items() if name not in paths}
    object.__setattr__(model, _MARK, Split(dense, expert, spread, styles, parameters))


def _check_heads(caller: str, model: nn.Module, tp: int, plan: Plan) -> None:
    """Raise where attention heads do not divide: each rank works on whole heads."""
    for path, module in model.named_modules():
        size = getattr(module, "head_dim", None)
        if not isinstance(size, int) or size < 1:
            continue
        heads = {
            name: child.out_features // size
            for name, child in module.named_children()
            if plan.get(f"{path}.{name}") == "colwise" and hasattr(child, "out_features")
        }
        if any(number % tp for number in heads.values()):
            query, key = max(heads.values()), min(heads.values())
            fit = [degree for degree in range(2, key + 1) if query % degree == key % degree == 0]
            raise ValueError(
                f"{caller}: {path} has {query} heads and {key} key-value heads, and tp is {tp}: "
                "each rank works on whole heads, so tp must divide both. "
                + (f"Use tp={fit[-1]}." if fit else "Use another axis than tp for this model.")
            )


def _check_sizes(caller: str, model: nn.Module, mesh: Mesh, tensors: Plan, experts: Plan) -> None:
    """Raise where experts, or the halves of packed tensors, do not divide."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for plan, ranks in ((experts, mesh.ep), (tensors, mesh.tp)):
            reason = why_not(name, parameter.shape, plan.get(name), ranks)
            if reason:
                raise ValueError(f"{caller} on {mesh.num_ranks} ranks: {reason}")
