"""ZeRO-1, ZeRO-2 and ZeRO-3: DeepSpeed's engine with every default that matters written out."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distft.checkpoint.folder import DEEPSPEED
from distft.checkpoint.pickles import refuse_code
from distft.formulas import (
    FetchLimits,
    MemoryReport,
    TrafficReport,
    ZeROPlus,
    zero_memory,
    zero_traffic,
)
from distft.formulas.deepspeed import SUB_GROUP_SIZE
from distft.kept import kept_names
from distft.mesh import Mesh
from distft.process_group import local_device
from distft.spec import sharding_units
from distft.strategies._deepspeed import load_deepspeed, stage3_module
from distft.strategies.base import Strategy
from distft.strategies.engine_config import engine_config
from distft.strategies.precision import cast_inputs, copy_from_rank0
from distft.training.clip import GradientShards, bounds_of
from distft.training.optimizers import (
    OptimizerFactory,
    ParamGroup,
    build_optimizer,
    num_moments,
    split_groups,
)
from distft.training.wrappers import chosen_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from distft.checkpoint.capture import Captured, HostCopies
    from distft.checkpoint.folder import Manifest
    from distft.checkpoint.whole_run import WholeRun
    from distft.spec import ModelSpec, Workload

# The folder inside ``deepspeed/`` that its engine calls a tag.
TAG = "state"


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeRO(Strategy):
    """What the three stages share: DeepSpeed's engine with every default that matters written out.

    Attributes:
        reduce_bucket_size: Gradient elements that are reduced together.
        allgather_bucket_size: Weight elements that are gathered together after the update
            (stages 1 and 2).
    """

    stage: ClassVar[int]
    layout: ClassVar[str] = DEEPSPEED
    offloads: ClassVar[tuple[str, ...]] = ("optimizer",)

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000

    def _check_fields(self) -> None:
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            self._check_count(name, minimum=1)
        if self.offload is not None and self.precision == "bf16":
            raise ValueError(
                f"{self!r}: with precision='bf16' and offload='{self.offload}' DeepSpeed takes no "
                "optimizer but its own DeepSpeedCPUAdam. Use bf16-mixed, or FSDP2's offload."
            )

    def _check_count(self, name: str, minimum: int, what: str = "elements") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"{type(self).__name__}({name}={value!r}) needs an integer of at least {minimum}: "
                f"it counts {what}."
            )

    def _check_model(self, model: nn.Module) -> None:
        kept = sorted(kept_names(model)) if self.precision != "fp32" else []
        if kept and self.offload is not None:
            raise ValueError(
                f"{self!r}: {len(kept)} parameters stay fp32, such as {kept[0]}, and what "
                "DeepSpeed moves to the host has 1 dtype, bf16 here. Leave offload out, or use "
                "FSDP2."
            )
        if kept and self.precision == "bf16":
            raise ValueError(
                f"{self!r}: {len(kept)} parameters stay fp32, such as {kept[0]}, and DeepSpeed has "
                "1 dtype for all gradients and moments, bf16 here. Use precision='bf16-mixed', or "
                "FSDP2."
            )

    def _check_installed(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise RuntimeError(
                f"{self!r} needs DeepSpeed, and it is not installed. "
                "Run pip install 'distft[deepspeed]'."
            )

    def _mesh(self, num_ranks: int) -> Mesh:
        return Mesh(dp_shard=num_ranks)

    def _apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        from distft.strategies import engine, on_disk

        deepspeed = load_deepspeed()
        # DeepSpeed updates the parameters in place and keeps the objects, so an optimizer over
        # them is valid before and after; it swaps in its flat partitions itself.
        kept = kept_names(model) if self.precision != "fp32" else frozenset()
        groups = self._groups_of_one_dtype(groups, kept)
        client = build_optimizer(optimizer, dict(model.named_parameters()), groups)
        config = engine_config(self)
        folder = self._disk_folder(client)
        if folder is not None:
            config["zero_optimization"]["offload_optimizer"] = {
                "device": "nvme",
                "nvme_path": str(folder),
                # A sub-group's weights, gradient and moments pass through one buffer each.
                "buffer_count": 2 + num_moments(optimizer, groups),
                "pin_memory": local_device().type == "cuda",
            }
        # The engine sends parameters alone.
        copy_from_rank0(list(model.buffers()))
        if self.precision != "fp32":
            cast_inputs(model)
        if self.stage == 3 and self.compile is not None:
            # Gathered and freed as one, outside of the graph.
            for path in sharding_units(model):
                deepspeed.utils.set_z3_leaf_module(model.get_submodule(path), True)
        parameters = [p for name, p in model.named_parameters() if name in kept]
        self._make_groups()
        with (
            engine.one_zero_optimizer(deepspeed.DeepSpeedEngine),
            engine.kept_in_fp32(deepspeed.DeepSpeedEngine, stage3_module(), parameters),
        ):
            made, _, _, _ = deepspeed.initialize(
                model=model, optimizer=client, config=config, dist_init_required=False
            )
        if folder is not None:
            on_disk.keep_gradients_in_memory(made.optimizer)
            on_disk.remove_at_exit(made, folder)
        if self.stage == 2 and kept:
            engine.stage_in_fp32(made.optimizer)
        if self.stage == 3:
            engine.sum_gradients(made.optimizer)
        elif self.stage == 1 and self.precision == "bf16-mixed":
            engine.free_accumulators(made.optimizer)
        return made, engine.EngineOptimizer(made)

    def _disk_folder(self, optimizer: Optimizer) -> Path | None:
        """Return the folder on a disk for this optimizer's state; None where it is in memory."""
        return None

    def _groups_of_one_dtype(
        self, groups: Sequence[ParamGroup], kept: Collection[str]
    ) -> list[dict[str, Any]]:
        """Return groups of one dtype each: the engine lays the weights of a group end to end."""
        made = split_groups(groups, kept)
        in_fp32 = [group["params"][0] in kept for group in made]
        if in_fp32[0] and not all(in_fp32):
            raise ValueError(
                f"{self!r}: of {len(groups)} parameter groups the first holds only what stays "
                f"fp32, such as {made[0]['params'][0]}, and DeepSpeed takes its dtype from the "
                "first. Put another group first."
            )
        return made

    def _stage_config(self) -> dict[str, Any]:
        return {
            # True all-reduces every gradient to every rank: three passes where the paper has two.
            "use_multi_rank_bucket_allreduce": False,
            "allgather_partitions": True,
            "round_robin_gradients": False,
            # The norm is computed once, by us; the engine refuses to leave its own out where
            # gradients lie on the host.
            "compute_grad_norm": self.offload is not None,
        }

    def _offload_config(self) -> dict[str, Any]:
        # The user's own optimizer updates on the host, with its own arithmetic: the engine's
        # wish for its DeepSpeedCPUAdam is off above.
        host = {"device": "cpu", "pin_memory": local_device().type == "cuda"}
        if self.offload is None:
            return {}
        if self.offload == "optimizer":
            return {"offload_optimizer": host}
        return {"offload_optimizer": host, "offload_param": host}

    def _backward(self, loss: Tensor) -> None:
        # The engine hooks the outputs of the forward pass, so a plain backward drives it.
        loss.backward()

    def _gradients(self, model: Any) -> Sequence[GradientShards]:
        import torch.distributed as dist

        from distft.strategies.engine import gradients_by_group

        bounds = bounds_of(model)
        # What stays fp32 is a group of the engine's own; its bound is that of the user's group.
        home = [
            bounds.group_of[group["param_names"][0]]
            for group in model.optimizer.optimizer.param_groups
            if bounds.bounds
        ]
        parts = gradients_by_group(model, home)
        return [GradientShards(part, [dist.group.WORLD], index) for index, part in parts.items()]

    def _gather_weights(
        self, model: Any, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        from distft.strategies import on_disk

        deepspeed = load_deepspeed()
        gathered = deepspeed.zero.GatheredParameters
        found = {}
        with on_disk.in_place(model):
            for name, parameter in chosen_parameters(model, names):
                if parameter.requires_grad:
                    whole = deepspeed.utils.safe_get_full_fp32_param(parameter)
                else:
                    with gathered([parameter], enabled=self.stage == 3):
                        whole = parameter.detach().clone()
                found[name] = whole.detach().cpu().clone()
        return found

    def _gather_gradients(self, model: Any) -> dict[str, Tensor]:
        from distft.strategies import on_disk

        safe_get_full_grad = load_deepspeed().utils.safe_get_full_grad

        with on_disk.in_place(model):
            gradients = {
                name: safe_get_full_grad(parameter)
                for name, parameter in model.module.named_parameters()
                if parameter.requires_grad
            }
        return {name: g.detach().cpu().clone() for name, g in gradients.items() if g is not None}

    @contextmanager
    def _no_sync(self, model: Any) -> Iterator[None]:
        model.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            model.set_gradient_accumulation_boundary(True)

    def _capture_state(
        self, model: Any, optimizer: Optimizer, copies: HostCopies | None
    ) -> Captured:
        from distft.strategies import on_disk
        from distft.strategies.engine_files import capture_files

        # DeepSpeed would write empty tensors and a copy of its files beside them.
        with on_disk.in_place(model):
            return capture_files(model, TAG, copies or on_disk.maps(model))

    def _read_state(
        self,
        folder: Path,
        manifest: Manifest,
        scalars: Mapping[str, Mapping[str, Any]],
        model: Any,
        optimizer: Optimizer,
    ) -> None:
        # The engine unpickles these files with nothing switched off.
        for file in sorted((folder / TAG).glob("*.pt")):
            refuse_code(file)
        loaded, _ = model.load_checkpoint(
            str(folder), tag=TAG, load_optimizer_states=True, load_lr_scheduler_states=False
        )
        if loaded is None:
            raise ValueError(
                f"DeepSpeed found no state of {self!r} in {folder}. Use another checkpoint."
            )
        self._after_new_weights(model)

    def _place_run(self, model: Any, optimizer: Optimizer, run: WholeRun) -> None:
        from distft.strategies import on_disk
        from distft.strategies.partitions import place_run

        with on_disk.in_place(model):
            place_run(model, run)
        self._after_new_weights(model)

    def _make_groups(self) -> None:
        """Make what groups of ranks the engine needs besides all ranks; none here."""

    def _after_new_weights(self, model: Any) -> None:
        """Drop what was copied from weights that a load has replaced; nothing here."""

    def _memory(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> MemoryReport:
        return zero_memory(
            spec.tensors,
            mesh.num_ranks,
            self.stage,
            self.precision,
            load.optimizer,
            self._fetch_limits(),
            self._offload_kind(),
            self._zero_plus().secondary,
            self._updated_at_once(),
        )

    def _traffic(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> TrafficReport:
        return zero_traffic(
            spec.tensors,
            mesh.num_ranks,
            self.stage,
            self.precision,
            load.grad_accum,
            spec.module_visits(self.activation_checkpointing, self.compile is not None),
            self._fetch_limits(),
            self._offload_kind(),
            self._zero_plus(),
            load.optimizer,
            self._updated_at_once(),
        )

    def _offload_kind(self) -> str | None:
        """Return what the formulas call the offload: without the folder of "nvme:PATH"."""
        return None if self.offload is None else self.offload.partition(":")[0]

    def _updated_at_once(self) -> int:
        """Return the elements of one optimizer call; stages 1 and 2 make one of a whole group."""
        return SUB_GROUP_SIZE

    def _fetch_limits(self) -> FetchLimits:
        """Return what bounds the gathering of weights; stages 1 and 2 gather none."""
        return FetchLimits()

    def _zero_plus(self) -> ZeROPlus:
        """Return what there is of ZeRO++; stages 1 and 2 have none."""
        return ZeROPlus()


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeRO1(ZeRO):
    """Moments and fp32 master weights split over ranks; weights and gradients whole on each.

    Memory: ``4P + 12P/N`` bytes in mixed precision. Traffic: gradients to their owners and updated
    weights back, ``2 (N-1)/N`` of their bytes a step.
    """

    name: ClassVar[str] = "zero1"
    stage: ClassVar[int] = 1
    forward_gathers: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeRO2(ZeRO):
    """ZeRO-1 with the gradients split too; they are reduced every micro-step.

    Memory: ``2P + 14P/N`` bytes in mixed precision. Traffic: ``(N-1)/N`` of the gradients each
    micro-step and of the weights once a step.
    """

    name: ClassVar[str] = "zero2"
    stage: ClassVar[int] = 2
    forward_gathers: ClassVar[bool] = False
