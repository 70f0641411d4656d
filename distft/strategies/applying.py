"""`apply`: what is checked, and in which order a model is made and spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.formulas.architectures import expert_numbers
from distft.kept import kept_names, mark_kept
from distft.mesh import Mesh
from distft.process_group import base_seed, seed_everything
from distft.quantized import pack
from distft.strategies.blocks import check_compiler, compile_blocks
from distft.strategies.costing import Costing
from distft.strategies.guards import (
    check_loaded,
    check_same_model,
    check_shapes,
    check_undistributed,
    enable_checkpointing,
    mark_applied,
)
from distft.strategies.out_of_memory import explained, remember_optimizer
from distft.strategies.precision import cast_parameters, compute_kept_in_fp32
from distft.training.clip import keep_bounds, take_bounds
from distft.training.experts import count_tokens_of_experts
from distft.training.optimizers import (
    OptimizerFactory,
    ParamGroup,
    check_factory,
    follow_parameters,
    name_groups,
)
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, repr=False)
class Applying(Costing):
    """The part of a strategy that spreads a model over the ranks."""

    def apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        param_groups: Iterable[ParamGroup] | None = None,
        peft_config: Any = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Spread a model over the ranks, then build its optimizer: what you call, and what steps.

        Rank 0's values are used everywhere. Afterwards every rank draws random numbers from
        ``seed + dp_rank``.

        Args:
            model: A model that no other tool has distributed, its weights on the host or device; or
                one that `distft.load_model` made for an equal strategy.
            optimizer: How to build the optimizer, such as ``partial(AdamW, lr=1e-4)``. It is
                called after sharding; one built before would train tensors that are gone.
            param_groups: Groups as torch takes them, over the model's parameters or their names.
                A group with ``max_grad_norm`` is clipped to that norm of its own gradient.
            peft_config: A ``peft.LoraConfig``: adapters are attached, then the model is sharded,
                then the optimizer is built. Only adapters and ``modules_to_save`` train. A PEFT
                model is taken as it is, and its adapters are split with its layers.

        Raises:
            ValueError: The model is distributed already or on the meta device, ranks do not
                fit, the optimizer or the groups are unusable, or ranks hold different models.
            RuntimeError: There is no process group, or a package is missing.
            OutOfMemory: Memory ran out; so in every call here that holds tensors. It says what
                was predicted, what is held, and the smallest change that is predicted to fit.

        Collective: every rank.
        """
        mesh = self.mesh()
        self._check_installed()
        with explained(self, "apply", model):
            wrapped, built = self._spread(model, optimizer, param_groups, peft_config, mesh)
        seed_everything(base_seed() + self.dp_rank)
        return wrapped, built

    def _spread(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        param_groups: Iterable[ParamGroup] | None,
        peft_config: Any,
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        loaded = check_loaded(self, model, peft_config)
        if not loaded:
            check_undistributed(model)
        check_factory(optimizer)
        if self.compile is not None:
            check_compiler()
        check_same_model(model)
        self._check_quantized(model, peft_config)
        if mesh.dp_shard > 1:
            check_shapes(self, model)
        self._check_model(model)
        kept = sorted(kept_names(model)) if self.compile and self.precision != "fp32" else []
        if kept:
            raise ValueError(
                f"{self!r}: {len(kept)} parameters stay fp32, such as {kept[0]}, and a compiled "
                "block has 1 dtype. Leave compile out, or hand all weights over in one dtype."
            )
        return self._spread_checked(
            model, optimizer, param_groups, peft_config, mesh, loaded, check_same_model
        )

    def _spread_checked(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        param_groups: Iterable[ParamGroup] | None,
        peft_config: Any,
        mesh: Mesh,
        loaded: bool = False,
        check_adapted: Callable[[nn.Module], None] = lambda _: None,
    ) -> tuple[nn.Module, Optimizer]:
        """Do what `apply` does after its checks, in the one right order; a dry run has no ranks."""
        # Master weights are fp32 unless all of training is bf16; buffers keep their dtypes.
        dtype = "bfloat16" if self.precision == "bf16" else "float32"
        if not loaded:
            mark_kept(model)
            cast_parameters(model, dtype)
            before = dict(model.named_parameters())
            self._split_modules(model, mesh)
            param_groups = follow_parameters(param_groups, before, model)
        if peft_config is not None:
            model = self._attach_adapters(model, peft_config)
            check_adapted(model)
            cast_parameters(model, dtype)
        pack(model)
        groups, bounds = take_bounds(name_groups(model, param_groups))
        if self.activation_checkpointing:
            enable_checkpointing(model)
        if self.precision != "fp32":
            compute_kept_in_fp32(model)
        if self.compile is not None:
            compile_blocks(model)
        wrapped, built = self._apply(model, optimizer, groups, mesh)
        mark_applied(self, wrapped, built)
        remember_optimizer(wrapped, built)
        keep_bounds(wrapped, bounds)
        num_experts, _ = expert_numbers(getattr(unwrap(wrapped), "config", None))
        if num_experts:
            count_tokens_of_experts(wrapped, num_experts)
        return wrapped, built

    @contextmanager
    def _explained(self, call: str, model: nn.Module | None = None) -> Iterator[None]:
        with explained(self, call, model):
            yield
