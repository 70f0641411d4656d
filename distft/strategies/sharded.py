"""FSDP2 and HSDP: every parameter split by rows over ranks, gathered block by block."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distft.checkpoint.folder import DCP
from distft.checkpoint.pretrained import loaded_by, shard_rows
from distft.formulas import MemoryReport, TrafficReport, sharded_memory, sharded_traffic
from distft.mesh import Mesh, check_degree, resolve_axes
from distft.process_group import local_device
from distft.spec import sharding_units
from distft.strategies.base import Strategy
from distft.strategies.precision import cast_inputs, copy_from_rank0
from distft.training.clip import GradientShards
from distft.training.optimizers import OptimizerFactory, ParamGroup, build_optimizer
from distft.training.wrappers import chosen_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from distft.checkpoint.folder import Manifest
    from distft.checkpoint.weights import Weights
    from distft.spec import ModelSpec, Workload


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharded(Strategy):
    """What FSDP2 and HSDP share: ``fully_shard`` on a mesh of one or two axes."""

    layout: ClassVar[str] = DCP

    reshard_after_forward: bool = True
    defer_reduce: bool = False

    def _apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        if loaded_by(model) is None:
            model.to(local_device())
            copy_from_rank0([*model.parameters(), *model.buffers()])
            self._shard(model, mesh)
        if self.precision != "fp32":
            cast_inputs(model)
        return model, build_optimizer(optimizer, dict(model.named_parameters()), groups)

    def _load_weights(self, weights: Weights, mesh: Mesh) -> nn.Module:
        import torch
        from torch.distributed.tensor import DTensor

        from distft.checkpoint.skeleton import replace_parameters

        device = local_device()
        self._shard(weights.model, mesh)

        def read(name: str, parameter: Any) -> Tensor:
            axis = parameter.device_mesh["dp_shard"]
            rows, *rest = parameter.shape
            first, count = shard_rows(rows, axis.size(), axis.get_local_rank())
            part = torch.empty((count, *rest), dtype=parameter.dtype, device=device)
            weights.fill(name, first * math.prod(rest), part)
            return DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

        replace_parameters(weights.model, read)
        weights.fill_buffers()
        return weights.model

    def _shard(self, model: nn.Module, mesh: Mesh) -> None:
        """Split the parameters of a model, which may be on the meta device."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        policy: dict[str, Any] = {
            "mesh": self._device_mesh(mesh, local_device().type),
            "mp_policy": _mixed_precision(self.precision),
            "reshard_after_forward": self.reshard_after_forward,
        }
        for path in sharding_units(model):
            fully_shard(model.get_submodule(path), **policy)
        # The root holds the head, with which the backward pass begins: freeing it after the
        # forward pass would gather the largest unit again at once.
        fully_shard(model, **{**policy, "reshard_after_forward": False})
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # A sum, not a mean: shares are over the global number of loss tokens already.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _device_mesh(self, mesh: Mesh, device_type: str) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {axis: getattr(mesh, axis) for axis in self._mesh_axes()}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @abstractmethod
    def _mesh_axes(self) -> tuple[str, ...]:
        """Return the names of the axes that ``fully_shard`` gets, outer first."""

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _gradients(self, model: nn.Module) -> Sequence[GradientShards]:
        from torch.distributed.tensor import DTensor

        _split_again(model)
        by_mesh: dict[DeviceMesh, list[Tensor]] = {}
        for parameter in model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                by_mesh.setdefault(gradient.device_mesh, []).append(gradient.to_local())
        return [
            GradientShards(tensors, [mesh.get_group("dp_shard")])
            for mesh, tensors in by_mesh.items()
        ]

    def _after_forward(self, model: nn.Module) -> None:
        _split_again(model)

    def _gather_weights(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        _split_again(model)
        return {name: _whole(p) for name, p in chosen_parameters(model, names)}

    def _gather_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        _split_again(model)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: _whole(g) for name, g in gradients.items() if g is not None}

    @contextmanager
    def _no_sync(self, model: Any) -> Iterator[None]:
        # Not the last backward pass: nobody waits yet for the reductions that it starts.
        model.set_is_last_backward(False)
        model.set_requires_all_reduce(False)
        if self.defer_reduce:
            model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_is_last_backward(True)
            if "dp_replicate" in self._mesh_axes():
                _finish_partial_sums(model)
            model.set_requires_all_reduce(True)
            model.set_requires_gradient_sync(True)

    def _write_state(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from distft.checkpoint.dcp import write_dcp

        _split_again(model)
        write_dcp(folder, model, optimizer)

    def _read_state(
        self,
        folder: Path,
        manifest: Manifest,
        scalars: Mapping[str, Mapping[str, Any]],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        from distft.checkpoint.dcp import read_dcp

        _split_again(model)
        read_dcp(folder, model, optimizer, manifest.optimizer_state, scalars)

    def _memory(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> MemoryReport:
        return sharded_memory(
            spec.units,
            mesh.dp_shard,
            mesh.dp_replicate,
            self.precision,
            load.optimizer,
            self.reshard_after_forward,
            self.defer_reduce,
        )

    def _traffic(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> TrafficReport:
        return sharded_traffic(
            spec.units,
            mesh.dp_shard,
            mesh.dp_replicate,
            self.precision,
            load.grad_accum,
            self.reshard_after_forward,
            self.defer_reduce,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class FSDP2(Sharded):
    """Weights, gradients and moments split by rows over all ranks; blocks gathered on the fly.

    Memory: ``1/N`` of each tensor, by whole rows; the block at work is whole for a moment.
    Traffic: gather, gather, reduce-scatter: three passes of ``(N-1)/N`` each micro-step.

    Attributes:
        dp_shard: Ranks to split over; default all.
        reshard_after_forward: Free a block's whole weights after its forward pass (True), or keep
            them for the backward pass: one gather less, the whole model in memory. The root
            (embedding, last norm, head) is kept either way: its backward pass comes first.
        defer_reduce: Keep whole gradients until the last micro-step and reduce once (True), or
            reduce every micro-step and hold ``1/N`` of them.
    """

    name: ClassVar[str] = "fsdp2"

    dp_shard: int | None = None

    def _check_fields(self) -> None:
        check_degree(repr(self), "dp_shard", self.dp_shard)

    def _mesh(self, num_ranks: int) -> Mesh:
        return Mesh(**resolve_axes(repr(self), num_ranks, dp_shard=self.dp_shard))

    def _mesh_axes(self) -> tuple[str, ...]:
        return ("dp_shard",)


@dataclass(frozen=True, kw_only=True, repr=False)
class HSDP(Sharded):
    """FSDP2 inside groups of ranks, DDP between the groups.

    Memory: that of FSDP2 on ``dp_shard`` ranks. Traffic: FSDP2's inside a group, and once a step
    an all-reduce of a rank's shard between groups.

    Attributes:
        dp_replicate: Number of groups; default the ranks that remain.
        dp_shard: Ranks of a group; default ``LOCAL_WORLD_SIZE``, the ranks of one machine, where
            neither is given.
        reshard_after_forward: As for `FSDP2`.
        defer_reduce: As for `FSDP2`.
    """

    name: ClassVar[str] = "hsdp"

    dp_replicate: int | None = None
    dp_shard: int | None = None

    def _check_fields(self) -> None:
        check_degree(repr(self), "dp_replicate", self.dp_replicate)
        check_degree(repr(self), "dp_shard", self.dp_shard)

    def _mesh(self, num_ranks: int) -> Mesh:
        dp_shard = self.dp_shard
        if self.dp_replicate is None and dp_shard is None:
            import os

            dp_shard = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        axes = resolve_axes(
            repr(self), num_ranks, dp_replicate=self.dp_replicate, dp_shard=dp_shard
        )
        return Mesh(**axes)

    def _mesh_axes(self) -> tuple[str, ...]:
        return ("dp_replicate", "dp_shard")


def _finish_partial_sums(model: Any) -> None:
    """Let blocks whose sum over replicas is deferred reduce in the next pass, used in it or not.

    A block without a gradient in the last micro-step would reduce nothing then, and what its
    earlier micro-steps left would be lost without a word.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = module._get_fsdp_state()._fsdp_param_groups
            pending = any(group._partial_reduce_output is not None for group in groups)
            module.set_reduce_scatter_unused_params(pending, recurse=False)


def _split_again(model: Any) -> None:
    """Shard again what a forward pass without a backward pass leaves whole.

    That is the root, and every block where ``reshard_after_forward=False``.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.cpu().clone()


def _mixed_precision(precision: str) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return MixedPrecisionPolicy(cast_forward_inputs=False)
