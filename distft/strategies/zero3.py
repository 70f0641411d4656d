"""ZeRO-3: parameters split too, fetched where they are used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distft.formulas import FetchLimits, ZeROPlus
from distft.formulas.deepspeed import SUB_GROUP_SIZE
from distft.mesh import Mesh
from distft.process_group import group_rank, local_device, together
from distft.strategies import ops
from distft.strategies._deepspeed import groups_module, load_deepspeed
from distft.strategies.engine_config import engine_config
from distft.strategies.zero import ZeRO

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from distft.checkpoint.weights import Weights


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeRO3(ZeRO):
    """Weights, gradients, moments all split; each module's weights gathered when it works.

    Memory: ``16P/N`` bytes in mixed precision. Traffic: gather, gather, reduce-scatter: three
    passes of ``(N-1)/N`` each micro-step.

    Attributes:
        persistence_threshold: Parameters of fewer elements stay whole on every rank; 100,000 (as
            DeepSpeed does by default) saves small gathers, 0 splits everything.
        prefetch_bucket_size: Elements gathered ahead of the module at work.
        max_live_parameters: Gathered elements held at once, beyond which nothing is prefetched.
        max_reuse_distance: Parameters used again within so many elements stay gathered; 0 frees
            them after each use, which is what the formulas say.
        sub_group_size: Elements updated by one optimizer call; so many of weights, gradient and
            each moment are in memory at a time with ``offload="nvme:PATH"``.
        secondary_partition: Ranks that share one more copy of the weights (hpZ of ZeRO++), best
            those of one machine: weights are then gathered from all ranks once a step, and else
            within the group. It costs the weights' bytes divided by it.
        quantized_weights: Weights travel as int8 (qwZ of ZeRO++), half of bf16: no longer the
            same training. Needs DeepSpeed's quantizer, CUDA kernels; not run by our tests.
        quantized_gradients: Gradients travel as int4 (qgZ of ZeRO++). `traffic` knows it; `apply`
            refuses it, since DeepSpeed's kernel reads fp16 whatever gradients are.
    """

    name: ClassVar[str] = "zero3"
    stage: ClassVar[int] = 3
    offloads: ClassVar[tuple[str, ...]] = ("optimizer", "params", "nvme:PATH")

    persistence_threshold: int = 0
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 0
    sub_group_size: int = SUB_GROUP_SIZE
    secondary_partition: int | None = None
    quantized_weights: bool = False
    quantized_gradients: bool = False

    def _check_fields(self) -> None:
        ZeRO._check_fields(self)
        if self.secondary_partition is not None:
            self._check_count("secondary_partition", minimum=2, what="ranks")
            if self.offload not in (None, "optimizer"):
                raise ValueError(
                    f"{self!r}: with offload={self.offload!r} the copy for "
                    f"{self.secondary_partition} ranks would lie on the host too. Leave one of "
                    "the two out."
                )
        for name in (
            "persistence_threshold",
            "prefetch_bucket_size",
            "max_reuse_distance",
        ):
            self._check_count(name, minimum=0)
        for name in ("max_live_parameters", "sub_group_size"):
            self._check_count(name, minimum=1)

    def _stage_config(self) -> dict[str, Any]:
        return {
            "stage3_param_persistence_threshold": self.persistence_threshold,
            "stage3_prefetch_bucket_size": self.prefetch_bucket_size,
            "stage3_max_live_parameters": self.max_live_parameters,
            "stage3_max_reuse_distance": self.max_reuse_distance,
            "sub_group_size": self.sub_group_size,
            "zero_hpz_partition_size": self.secondary_partition or 1,
            "zero_quantized_weights": self.quantized_weights,
        }

    def _mesh(self, num_ranks: int) -> Mesh:
        if self.secondary_partition is not None and num_ranks % self.secondary_partition:
            raise ValueError(
                f"{self!r} needs a number of ranks that {self.secondary_partition} divides, and "
                f"there are {num_ranks}. Use the ranks of one machine."
            )
        return ZeRO._mesh(self, num_ranks)

    def _check_installed(self) -> None:
        ZeRO._check_installed(self)
        if self.quantized_weights or self.quantized_gradients:
            ops.check_quantizer(self, load_deepspeed().accelerator.get_accelerator())
        if self._offload_kind() == "nvme":
            ops.check_async_io(self, load_deepspeed().accelerator.get_accelerator())

    def _engine_loads(self, saved_by: str) -> bool:
        # DeepSpeed reads no moments and no counter into optimizer state on a disk, and sub-groups
        # only where they end at the same parameters.
        size = re.search(r"sub_group_size=(\d+)", saved_by)
        same = (
            int(size[1]) == self.sub_group_size if size else self.sub_group_size == SUB_GROUP_SIZE
        )
        return same and self._offload_kind() != "nvme"

    def _disk_folder(self, optimizer: Optimizer) -> Path | None:
        from distft.strategies import on_disk

        kind, _, path = (self.offload or "").partition(":")
        if kind != "nvme":
            return None
        if type(optimizer).__name__ == "Adagrad":
            raise ValueError(
                f"{self!r}: Adagrad makes its 1 moment when it is built, where the weights on the "
                "disk have 0 elements. Use another optimizer, or offload='params'."
            )
        return on_disk.make_folder(self, Path(path).absolute())

    def _updated_at_once(self) -> int:
        return self.sub_group_size

    def _check_model(self, model: nn.Module) -> None:
        ZeRO._check_model(self, model)
        if self.quantized_weights:
            ops.check_parts(self, model, self.mesh().num_ranks)

    def _make_groups(self) -> None:
        from distft.strategies import engine

        engine.use_secondary_group(groups_module(), self.secondary_partition)

    def _after_new_weights(self, model: Any) -> None:
        from distft.strategies import engine

        engine.forget_copies(model)

    def _weight_dtype(self) -> str:
        # The engine computes in bf16 with both, and makes its fp32 masters of what it is given.
        return "float32" if self.precision == "fp32" else "bfloat16"

    def _load_weights(self, weights: Weights, mesh: Mesh) -> nn.Module:
        import torch

        from distft.checkpoint.skeleton import replace_parameters

        deepspeed = load_deepspeed()
        weights.attach()
        device = local_device()
        first: list[Any] = []
        parameters = list(weights.model.parameters())
        most = max((p.numel() * p.element_size() for p in parameters), default=0)
        # Every tensor passes through this one place: memory asked for and freed for each of them
        # would stay with the process, the parts that are kept lying in between.
        passage = torch.empty(most, dtype=torch.uint8, device=device)

        def read(name: str, parameter: Tensor) -> Tensor:
            num_bytes = parameter.numel() * parameter.element_size()
            whole = passage[:num_bytes].view(parameter.dtype).view(parameter.shape)
            # The engine sends each tensor from rank 0 before it cuts it up. The others would wait
            # for one that rank 0 could not read.
            with together():
                # Of a packed weight every rank keeps the scales.
                if group_rank() == 0 or name in weights.packed:
                    weights.fill(name, 0, whole)
            # `.data`: views of one place would share one version counter, and autograd would take
            # a write to any of them for one to all.
            new = torch.nn.Parameter(whole.data, requires_grad=parameter.requires_grad)
            if first:
                first[0].convert_to_zero_parameters(param_list=[new])
            else:
                self._make_groups()
                alone = torch.nn.ParameterList([new])
                deepspeed.zero.Init(
                    module=alone,
                    config_dict_or_path=engine_config(self),
                    zero_param_parallel_group=groups_module()._get_zero_param_intra_parallel_group(),
                )
                first.append(new)
            return new

        replace_parameters(weights.model, read)
        weights.fill_buffers()
        return weights.model

    def _fetch_limits(self) -> FetchLimits:
        return FetchLimits(
            prefetch=self.prefetch_bucket_size,
            live=self.max_live_parameters,
            reuse=self.max_reuse_distance,
            persistence=self.persistence_threshold,
        )

    def _zero_plus(self) -> ZeROPlus:
        return ZeROPlus(self.secondary_partition, self.quantized_weights, self.quantized_gradients)
