"""Strategies with one fault each, as they come about, for parity to find."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from distft import DDP, FSDP2, TP
from distft.strategies.precision import copy_from_rank0
from distft.training.clip import GradientShards
from distft.training.optimizers import build_optimizer
from distft.training.wrappers import unwrap

NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def named(model: Any, name: str) -> Any:
    """Return this rank's part of a parameter."""
    return local(dict(unwrap(model).named_parameters())[name].data)


# ---- gradients --------------------------------------------------------------------------------


class AveragedTwice(DDP):
    """Shares are over the global number of loss tokens, and are divided by the ranks again."""

    def _backward(self, loss):
        super()._backward(loss / self.dp_size)


class MeanOfEachRank(FSDP2):
    """A rank divides by its own loss tokens: a mean of means."""

    def count_loss_tokens(self, batches, count_fn=None):
        from distft.training.loss import count_next_tokens

        return self.dp_size * sum(map(count_next_tokens, batches))


class NeverReduced(DDP):
    """The last micro-step is inside no_sync as the others: nothing is ever reduced."""

    def _apply(self, model, optimizer, groups, mesh):
        wrapped, built = super()._apply(model, optimizer, groups, mesh)
        wrapped.require_backward_grad_sync = False
        return wrapped, built


class KeepsOnlyTheLast(DDP):
    """Gradients are zeroed between micro-steps."""

    @contextmanager
    def _no_sync(self, model):
        with super()._no_sync(model):
            yield
        for parameter in model.parameters():
            parameter.grad = None


class ForgetsTheNorms(DDP):
    """The gradient of a replicated parameter, a norm, is not summed over ranks."""

    def _apply(self, model, optimizer, groups, mesh):
        from torch.nn.parallel import DistributedDataParallel

        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [NORM])
        return super()._apply(model, optimizer, groups, mesh)


class Divides(FSDP2):
    """`fully_shard` divides by the ranks, as it does unless it is told otherwise."""

    def _apply(self, model, optimizer, groups, mesh):
        wrapped, built = super()._apply(model, optimizer, groups, mesh)
        for module in wrapped.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(dist.get_world_size()))
        return wrapped, built


class SumsInTP(TP):
    """The gradient of a norm, complete already, is summed over tp once more."""

    def _gather_gradients(self, model):
        gradient = dict(model.named_parameters())[NORM].grad
        dist.all_reduce(local(gradient))
        return super()._gather_gradients(model)


class ComputesInBf16(DDP):
    """What says fp32 computes in bf16."""

    def _apply(self, model, optimizer, groups, mesh):
        from distft.strategies.precision import autocast_forward

        autocast_forward(model)
        return super()._apply(model, optimizer, groups, mesh)


class OtherRowsInTP(TP):
    """Ranks of a tp group read different rows."""

    @property
    def dp_size(self):
        return dist.get_world_size()

    @property
    def dp_rank(self):
        return dist.get_rank()


# ---- adapters and order -----------------------------------------------------------------------


class AdaptersLast(FSDP2):
    """Adapters go on after `fully_shard`, which does not know them: nobody sums their gradients."""

    def _apply(self, model, optimizer, groups, mesh):
        copy_from_rank0([*model.parameters(), *model.buffers()])
        factors = [
            module
            for name, module in model.named_modules()
            if ".lora_" in name and "weight" in module._parameters
        ]
        kept = [module._parameters.pop("weight") for module in factors]
        self._shard(model, mesh)
        for module, weight in zip(factors, kept, strict=True):
            module.register_parameter("weight", weight)
        return model, build_optimizer(optimizer, dict(model.named_parameters()), groups)


class OptimizerFirst(FSDP2):
    """The optimizer is built before sharding, and holds tensors that are gone."""

    def _apply(self, model, optimizer, groups, mesh):
        early = build_optimizer(optimizer, dict(model.named_parameters()), groups)
        wrapped, _ = super()._apply(model, optimizer, groups, mesh)
        return wrapped, early


class Unties(FSDP2):
    """The head is an embedding of its own after sharding."""

    def _split_modules(self, model, mesh):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


class EveryRankItsOwn(DDP):
    """Rank 0's values are not sent to the others."""

    def _apply(self, model, optimizer, groups, mesh):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        wrapped, built = super()._apply(model, optimizer, groups, mesh)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        return wrapped, built


class StaleBuffer(DDP):
    """A buffer of rank 1 is from another length: no strategy sends buffers later on."""

    def _apply(self, model, optimizer, groups, mesh):
        wrapped, built = super()._apply(model, optimizer, groups, mesh)
        if dist.get_rank() == 1:
            model.model.rotary_emb.inv_freq *= 0.5
        return wrapped, built


class ExpertsSwapped(FSDP2):
    """Experts are in another order than the router's."""

    def _split_modules(self, model, mesh):
        with torch.no_grad():
            experts = model.model.layers[0].mlp.experts.gate_up_proj
            experts.copy_(experts.roll(1, 0))


# ---- norm, update, steps ----------------------------------------------------------------------


class PartialNorm(FSDP2):
    """The norm is that of this rank's shards."""

    def _gradients(self, model):
        return [GradientShards([t for part in super()._gradients(model) for t in part.tensors])]


class DoesNotClip(DDP):
    """The norm is reported and no gradient is scaled."""

    def clip_grad_norm_(self, model, max_norm):
        return super().clip_grad_norm_(model, None)

    def train_step(self, model, optimizer, micro_batches, max_grad_norm=None, *more):
        return super().train_step(model, optimizer, micro_batches, None, *more)


class NoDecay(DDP):
    """Weight decay gets lost between the factory and the optimizer."""

    def _apply(self, model, optimizer, groups, mesh):
        wrapped, built = super()._apply(model, optimizer, groups, mesh)
        for group in built.param_groups:
            group["weight_decay"] = 0.0
        return wrapped, built


class MomentsInBf16(DDP):
    """Moments are rounded after each step."""

    def _apply(self, model, optimizer, groups, mesh):
        wrapped, built = super()._apply(model, optimizer, groups, mesh)

        def to_bf16(*_):
            for state in built.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].bfloat16())

        built.register_step_post_hook(to_bf16)
        return wrapped, built


class SkipsABatch(FSDP2):
    """Rank 1 leaves out its last micro-batch."""

    def train_step(self, model, optimizer, micro_batches, *more):
        if dist.get_rank() == 1 and len(micro_batches) > 1:
            micro_batches = micro_batches[:-1]
        return super().train_step(model, optimizer, micro_batches, *more)


class DriftsApart(DDP):
    """One rank skips an update, as for a norm that it alone finds infinite."""

    def train_step(self, model, optimizer, *more):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        result = super().train_step(model, optimizer, *more)
        if dist.get_rank() == 1:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(before[name])
        return result


# ---- save and load ----------------------------------------------------------------------------


class SavesOnOneRank(FSDP2):
    """The save is below `if rank == 0`."""

    def save(self, *arguments, **more):
        if dist.get_rank() == 0:
            return super().save(*arguments, **more)
        return None


class SavesInBf16(DDP):
    """Weights are rounded on their way to the files."""

    def _capture_state(self, model, optimizer, copies):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        return super()._capture_state(model, optimizer, copies)


class WrongRanksFile(FSDP2):
    """Each rank reads the shard of its neighbour."""

    def _read_state(self, *arguments):
        super()._read_state(*arguments)
        part = named(arguments[3], DOWN)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        part.copy_(parts[dist.get_rank() - 1])


class LoadsNoWeights(DDP):
    """A load changes nothing and says nothing, as with strict=False."""

    def _read_state(self, *arguments):
        pass


class LoadsNoMoments(FSDP2):
    """A load leaves the moments at zero."""

    def _read_state(self, *arguments):
        super()._read_state(*arguments)
        for state in arguments[4].state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                local(state[key]).zero_()


class ForgetsTheStep(DDP):
    """A load starts the optimizer's counter, and with it the bias correction, anew."""

    def _read_state(self, *arguments):
        super()._read_state(*arguments)
        for state in arguments[4].state.values():
            state["step"].zero_()


class LoadsOthersWrongly(FSDP2):
    """What ZeRO wrote is placed with two experts exchanged."""

    def _place_run(self, model, optimizer, run):
        super()._place_run(model, optimizer, run)
        part = named(model, "model.layers.0.mlp.experts.down_proj")
        part.copy_(part.roll(1, 0))


# ---- ranks ------------------------------------------------------------------------------------


class Raises(DDP):
    """One rank raises in its step."""

    def train_step(self, *arguments):
        if dist.get_rank() == 1:
            raise ArithmeticError("rank 1 had enough")
        return super().train_step(*arguments)


class Dies(DDP):
    """One rank is killed in its step, as when the machine is out of memory."""

    def train_step(self, *arguments):
        if dist.get_rank() == 1:
            os._exit(9)
        return super().train_step(*arguments)


class Hangs(DDP):
    """One rank does not come to its step, and the others wait in a collective."""

    def train_step(self, *arguments):
        while dist.get_rank() == 1:
            time.sleep(1)
        return super().train_step(*arguments)
