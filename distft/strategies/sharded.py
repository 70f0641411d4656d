"""What FSDP2, HSDP, TP, EP and NDParallel share: ``fully_shard`` over the data ranks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distft.checkpoint.folder import DCP
from distft.checkpoint.pretrained import loaded_by
from distft.formulas import (
    MemoryReport,
    MicroStep,
    TrafficReport,
    parallel_memory,
    parallel_traffic,
    sharded_memory,
    sharded_traffic,
)
from distft.formulas.split_rules import Rules, with_factors
from distft.kept import modules_in_fp32
from distft.mesh import DENSE_AXES, Mesh
from distft.peft import base_model
from distft.process_group import check_host_collectives, local_device
from distft.spec import check_units, gathered_units, sharding_units
from distft.strategies._transformers import merge_rules
from distft.strategies.adapters import (
    attach_to_split,
    make_whole,
    split_adapters,
    split_with_adapters,
)
from distft.strategies.base import Strategy
from distft.strategies.precision import cast_inputs, copy_from_rank0
from distft.strategies.split import split_layers, split_of
from distft.strategies.units import (
    finish_partial_sums,
    gathered,
    groups_that_split,
    host_policy,
    mixed_precision,
    separate_dropout,
    split_again,
    split_gradients,
    submodule,
)
from distft.training.clip import GradientShards, bounds_of
from distft.training.layouts import layout, step_by_layout
from distft.training.optimizers import OptimizerFactory, ParamGroup, build_optimizer
from distft.training.wrappers import chosen_parameters

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from distft.checkpoint.capture import Captured, HostCopies
    from distft.checkpoint.folder import Manifest
    from distft.checkpoint.weights import Weights
    from distft.spec import ModelSpec, Workload


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharded(Strategy):
    """``fully_shard`` on a mesh of one or two axes, after layers and experts are split."""

    layout: ClassVar[str] = DCP

    reshard_after_forward: bool = True
    defer_reduce: bool = False

    def _check_model(self, model: nn.Module) -> None:
        if self.precision != "fp32":
            check_units(repr(self), model)

    def _split_modules(self, model: nn.Module, mesh: Mesh) -> None:
        if mesh.tp == mesh.ep == 1:
            return
        model.to(local_device())
        copy_from_rank0([*model.parameters(), *model.buffers()])
        split_with_adapters(repr(self), model, mesh, self._rules(), local_device().type)

    def _attach_adapters(self, model: nn.Module, peft_config: Any) -> nn.Module:
        split = split_of(model)
        if split is None:
            return super()._attach_adapters(model, peft_config)
        return attach_to_split(repr(self), model, split, peft_config, self._weight_dtype())

    def _rules(self) -> Mapping[str, str] | None:
        """Return rules that come over the model's own plans."""
        return None

    def _apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        if loaded_by(model) is None:
            # Offloaded, a model larger than the device never lies there whole: `fully_shard` takes
            # it one unit at a time, and puts the shards back.
            model.to(self._home())
            if split_of(model) is None:
                copy_from_rank0([*model.parameters(), *model.buffers()])
            self._shard(model, mesh)
        separate_dropout(model)
        if self.precision != "fp32":
            cast_inputs(model)
        built = build_optimizer(optimizer, dict(model.named_parameters()), groups)
        step_by_layout(built)
        split_gradients(model)
        return model, built

    def _load_weights(self, weights: Weights, mesh: Mesh) -> nn.Module:
        import torch
        from torch.distributed.tensor import DTensor

        from distft.checkpoint.skeleton import replace_parameters

        device = self._home()
        if mesh.tp * mesh.ep > 1:
            split_layers(repr(self), weights.model, mesh, self._rules(), local_device().type)
        self._attach_unread(weights)
        self._shard(weights.model, mesh)

        def read(name: str, parameter: Any) -> Tensor:
            if not isinstance(parameter, DTensor):
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                weights.fill(name, 0, whole)
                return whole
            shape = parameter.to_local().shape
            part = torch.empty(shape, dtype=parameter.dtype, device=device)
            weights.fill_part(name, parameter, part)
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

    def _attach_unread(self, weights: Weights) -> None:
        """Put on the adapters of `load_model`, after layers are split and before weights are."""
        split = split_of(weights.model)
        if split is None or weights.adapt is None:
            weights.attach()
            return
        weights.attach(partial(make_whole, f"load_model() of {self!r}", split))
        split_adapters(weights.model, split)

    def _check_installed(self) -> None:
        if self.offload is not None:
            check_host_collectives(repr(self))

    def _home(self) -> torch.device:
        """Return where this rank's shards live between passes."""
        import torch

        return local_device() if self.offload is None else torch.device("cpu")

    def _shard(self, model: nn.Module, mesh: Mesh) -> None:
        """Split the parameters of a model, which may be on the meta device."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        split = split_of(model)
        if split is not None and mesh.dp_size == 1 and self.precision != "bf16-mixed":
            # Nothing to gather; in mixed precision it is what casts weights, on one rank too.
            return
        policy: dict[str, Any] = {
            "mesh": self._device_mesh(model, mesh),
            "reshard_after_forward": self.reshard_after_forward,
        }
        if self.offload is not None:
            policy["offload_policy"] = host_policy()
        kept = modules_in_fp32(model)

        def shard(module: nn.Module, **changes: Any) -> None:
            precision = "fp32" if module in kept else self.precision
            fully_shard(module, **{**policy, "mp_policy": mixed_precision(precision), **changes})

        if split is not None:
            # What TP and EP hand on is a view, and nothing here or in transformers writes into it.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            axes = ("dp_replicate", "efsdp") if mesh.dp_replicate > 1 else ("efsdp",)
            for path in split.expert_modules:
                shard(submodule(model, path), mesh=split.expert[axes])
        units = sharding_units(model) if self.precision == "fp32" else gathered_units(model)
        for path in units:
            unit = model.get_submodule(path)
            if not isinstance(unit, FSDPModule):
                shard(unit)
        # The root holds the head, with which the backward pass begins: freeing it after the
        # forward pass would gather the largest unit again at once.
        # Below adapters, since `generate` of a PEFT model enters the base model itself.
        shard(base_model(model), reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # A sum, not a mean: shares are over the global number of loss tokens already.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _device_mesh(self, model: nn.Module, mesh: Mesh) -> DeviceMesh:
        """Return the mesh over which tensors that are no experts are split by rows."""
        from torch.distributed.device_mesh import init_device_mesh

        axes = ("dp_replicate", "dp_shard") if mesh.dp_replicate > 1 else ("dp_shard",)
        split = split_of(model)
        if split is not None:
            return split.dense[axes]
        sizes = tuple(getattr(mesh, axis) for axis in axes)
        return init_device_mesh(local_device().type, sizes, mesh_dim_names=axes)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _gradients(self, model: nn.Module) -> Sequence[GradientShards]:
        from torch.distributed.tensor import DTensor

        split_again(model)
        group_of = bounds_of(model).group_of
        parts: dict[Any, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                parts.setdefault((group_of.get(name), layout(gradient)), []).append(local)
            elif name in group_of:
                # A group without a gradient here still takes part in the sums over ranks.
                parts.setdefault((group_of[name], layout(parameter)), [])
        return [
            GradientShards(tensors, groups_that_split(where), index)
            for (index, where), tensors in parts.items()
        ]

    def _after_forward(self, model: nn.Module) -> None:
        split_again(model)

    def _gather_weights(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        split_again(model)
        return {name: gathered(p) for name, p in chosen_parameters(model, names)}

    def _gather_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        split_again(model)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: gathered(g) for name, g in gradients.items() if g is not None}

    @contextmanager
    def _no_sync(self, model: Any) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        model = base_model(model)
        if not isinstance(model, FSDPModule):
            yield
            return
        # Not the last backward pass: nobody waits yet for the reductions that it starts.
        model.set_is_last_backward(False)
        model.set_requires_all_reduce(False)
        if self.defer_reduce:
            model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_is_last_backward(True)
            if self.mesh().dp_replicate > 1:
                finish_partial_sums(model)
            model.set_requires_all_reduce(True)
            model.set_requires_gradient_sync(True)

    def _capture_state(
        self, model: nn.Module, optimizer: Optimizer, copies: HostCopies | None
    ) -> Captured:
        from distft.checkpoint.dcp_write import capture_dcp

        split_again(model)
        return capture_dcp(model, optimizer, copies)

    def _read_state(
        self,
        folder: Path,
        manifest: Manifest,
        scalars: Mapping[str, Mapping[str, Any]],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        from distft.checkpoint.dcp import read_dcp

        split_again(model)
        read_dcp(folder, model, optimizer, manifest.optimizer_state, scalars)

    def _memory(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> MemoryReport:
        if mesh.tp * mesh.ep > 1:
            return parallel_memory(
                spec.tensors,
                {axis: getattr(mesh, axis) for axis in (*DENSE_AXES, "ep")},
                self._split_rules(spec, mesh),
                self.precision,
                load.optimizer,
                self.reshard_after_forward,
                self.defer_reduce,
                load.grad_accum > 1,
            )
        return sharded_memory(
            spec.units_in(self.precision),
            mesh.dp_shard,
            mesh.dp_replicate,
            self.precision,
            load.optimizer,
            self.reshard_after_forward,
            self.defer_reduce,
            self.offload,
            load.grad_accum > 1,
        )

    def _split_rules(self, spec: ModelSpec, mesh: Mesh) -> tuple[Rules, Rules]:
        """Return the model's rules with this strategy's, adapters on split experts included."""
        tensor_rules, expert_rules = merge_rules(*spec.rules, self._rules())
        # Those of spread experts lie expert by expert, which their own rules say.
        if mesh.ep > 1:
            return tensor_rules, expert_rules
        return with_factors(spec.tensors, tensor_rules), expert_rules

    def _traffic(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> TrafficReport:
        if mesh.tp * mesh.ep > 1:
            return parallel_traffic(
                spec.units_in(self.precision),
                spec.ties,
                {axis: getattr(mesh, axis) for axis in (*DENSE_AXES, "ep")},
                self._split_rules(spec, mesh),
                self.precision,
                MicroStep(
                    load.micro_batch * load.seq_len,
                    spec.experts_per_token,
                    4 if spec.routes_in_fp32 else 0,
                    self.activation_checkpointing,
                ),
                load.grad_accum,
                self.reshard_after_forward,
                self.defer_reduce,
            )
        return sharded_traffic(
            spec.units_in(self.precision),
            mesh.dp_shard,
            mesh.dp_replicate,
            self.precision,
            load.grad_accum,
            self.reshard_after_forward,
            self.defer_reduce,
        )
