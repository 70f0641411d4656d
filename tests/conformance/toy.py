"""A whole strategy of a third party in some lines: an all-reduce of every gradient by itself."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from distft import Strategy
from distft.checkpoint.dcp import read_dcp
from distft.checkpoint.dcp_write import capture_dcp
from distft.formulas import ddp_memory, ddp_traffic
from distft.mesh import Mesh
from distft.training.clip import GradientShards
from distft.training.optimizers import build_optimizer
from distft.training.wrappers import chosen_parameters


@dataclass(frozen=True, kw_only=True, repr=False)
class WholeModel(Strategy):
    """Every rank holds everything; a gradient is summed over ranks as soon as it is there."""

    name: ClassVar[str] = "whole"
    layout: ClassVar[str] = "dcp"

    forget_the_sum: bool = False

    def _mesh(self, num_ranks):
        return Mesh(dp_replicate=num_ranks)

    def _apply(self, model, optimizer, groups, mesh):
        import torch.distributed as dist

        model.more_follows = False

        def sum_over_ranks(parameter):
            if not model.more_follows and not self.forget_the_sum:
                dist.all_reduce(parameter.grad)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(sum_over_ranks)
        return model, build_optimizer(optimizer, dict(model.named_parameters()), groups)

    def _backward(self, loss):
        loss.backward()

    @contextmanager
    def _no_sync(self, model):
        model.more_follows = True
        yield
        model.more_follows = False

    def _gradients(self, model):
        return [GradientShards([p.grad for p in model.parameters()])]

    def _gather_weights(self, model, names=None):
        return {name: p.detach().clone() for name, p in chosen_parameters(model, names)}

    def _gather_gradients(self, model):
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    def _capture_state(self, model, optimizer, copies):
        return capture_dcp(model, optimizer, copies)

    def _read_state(self, folder, manifest, scalars, model, optimizer):
        read_dcp(folder, model, optimizer, manifest.optimizer_state, scalars)

    def _memory(self, spec, load, mesh):
        return ddp_memory(spec.tensors, mesh.num_ranks, self.precision, load.optimizer)

    def _traffic(self, spec, load, mesh):
        return ddp_traffic(spec.tensors, mesh.num_ranks, self.precision, load.grad_accum)
