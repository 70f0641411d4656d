"""DDP: every rank holds the whole model, gradients are summed once a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from distft.checkpoint.folder import DCP
from distft.checkpoint.pretrained import loaded_by
from distft.formulas import MemoryReport, TrafficReport, ddp_memory, ddp_traffic
from distft.measure.fake import is_fake
from distft.mesh import Mesh
from distft.process_group import local_device
from distft.strategies.base import Strategy
from distft.strategies.precision import autocast_forward, cast_inputs
from distft.training.clip import GradientShards, bounds_of
from distft.training.optimizers import OptimizerFactory, ParamGroup, build_optimizer
from distft.training.wrappers import chosen_parameters, unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from distft.checkpoint.capture import Captured, HostCopies
    from distft.checkpoint.folder import Manifest
    from distft.spec import ModelSpec, Workload


@dataclass(frozen=True, kw_only=True, repr=False)
class DDP(Strategy):
    """Every rank holds the whole model; gradients are all-reduced once a step.

    Memory: 16 bytes a parameter on every rank (fp32 weights, gradients and AdamW's two moments).
    Traffic: one all-reduce of the gradients, ``2 (N-1)/N`` times their bytes a step.

    Attributes:
        find_unused_parameters: Whether some steps leave parameters without a gradient. Such a
            parameter, such as the mask token of DINOv2, then keeps its value, as in one process;
            without it torch raises in the step after. No other strategy needs it.
    """

    name: ClassVar[str] = "ddp"
    layout: ClassVar[str] = DCP
    forward_gathers: ClassVar[bool] = False

    find_unused_parameters: bool = False

    @property
    def autocasts(self) -> bool:
        """Whether each operation casts fp32 weights and hidden states."""
        return self.precision == "bf16-mixed"

    def _mesh(self, num_ranks: int) -> Mesh:
        return Mesh(dp_replicate=num_ranks)

    def _apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        from torch.nn.parallel import DistributedDataParallel

        device = local_device()
        model.to(device)
        if self.precision == "bf16-mixed":
            autocast_forward(model)
        elif self.precision == "bf16":
            cast_inputs(model)
        no_sync_of_buffers: dict[str, Any] = _no_buffer_traffic()
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            # Gradients live inside the buckets, which saves a copy of them all.
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            # What `load_model` read is the same on every rank already; a dry run has no values.
            init_sync=loaded_by(model) is None and not is_fake(next(model.parameters())),
            **no_sync_of_buffers,
        )
        wrapped.register_comm_hook(None, _sum_over_ranks())
        return wrapped, build_optimizer(optimizer, dict(model.named_parameters()), groups)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _gradients(self, model: nn.Module) -> Sequence[GradientShards]:
        group_of = bounds_of(model).group_of
        by_group: dict[int | None, list[Tensor]] = {}
        for name, parameter in unwrap(model).named_parameters():
            if parameter.grad is not None:
                by_group.setdefault(group_of.get(name), []).append(parameter.grad)
        return [GradientShards(tensors, (), index) for index, tensors in by_group.items()]

    def _gather_weights(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in chosen_parameters(model, names)}

    def _gather_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        gradients = {name: p.grad for name, p in unwrap(model).named_parameters()}
        return {name: g.detach().cpu().clone() for name, g in gradients.items() if g is not None}

    @contextmanager
    def _no_sync(self, model: nn.Module) -> Iterator[None]:
        with cast("DistributedDataParallel", model).no_sync():
            yield

    def _capture_state(
        self, model: nn.Module, optimizer: Optimizer, copies: HostCopies | None
    ) -> Captured:
        from distft.checkpoint.dcp_write import capture_dcp

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

        read_dcp(folder, model, optimizer, manifest.optimizer_state, scalars)

    def _memory(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> MemoryReport:
        blocks = [unit.tensors for unit in spec.units if unit.name]
        return ddp_memory(
            spec.tensors,
            mesh.num_ranks,
            self.precision,
            load.optimizer,
            blocks if self.activation_checkpointing else None,
        )

    def _traffic(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> TrafficReport:
        return ddp_traffic(
            spec.tensors,
            mesh.num_ranks,
            self.precision,
            load.grad_accum,
            self.find_unused_parameters,
        )


def _sum_over_ranks() -> Any:
    """Return a hook that sums a bucket of gradients over ranks.

    DistributedDataParallel's own way divides by their number. Compensating for it in the loss
    would round every value of the backward pass anew, and AdamW magnifies that where gradients
    are near its epsilon.
    """
    import torch.distributed as dist

    # Lambdas: torch compares a hook's annotations with classes, and here they are strings.
    return lambda _, bucket: _summed(dist, bucket.buffer())


def _summed(dist: Any, buffer: Tensor) -> Any:
    """Return a future of a buffer that holds the sum over ranks then, in place."""
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda _: buffer)


def _no_buffer_traffic() -> dict[str, bool]:
    """Keep buffers from being sent before every forward pass.

    They are the same on every rank from the start, and no other strategy sends them.
    """
    from inspect import signature

    from torch.nn.parallel import DistributedDataParallel

    # The newer name, where torch has it: the older one warns there.
    known = signature(DistributedDataParallel.__init__).parameters
    newer = "forward_sync_buffers" in known
    return {"forward_sync_buffers" if newer else "broadcast_buffers": False}
