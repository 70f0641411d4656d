"""What a strategy is made of: the methods that an author of one writes.

`Strategy` has the public methods; each checks its arguments and then calls one of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distft.mesh import Mesh
from distft.peft import attach_adapters
from distft.process_group import base_seed
from distft.strategies.packed import check_quantized, compute_dtype
from distft.training.clip import GradientShards
from distft.training.optimizers import OptimizerFactory, ParamGroup

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from distft.checkpoint.capture import Captured, HostCopies
    from distft.checkpoint.folder import Manifest
    from distft.checkpoint.weights import Weights
    from distft.checkpoint.whole_run import WholeRun
    from distft.formulas import MemoryReport, TrafficReport
    from distft.spec import ModelSpec, Workload


class StrategyHooks(ABC):
    """The part of a strategy that differs from one to another.

    In a run they are called in this order, each on every rank: `_mesh`, `_check_installed`,
    `_check_model`, `_split_modules`, `_apply`; for every micro-step `_backward`, inside `_no_sync`
    while more follow; then `_gradients`. `_capture_state` and `_read_state` at any time between
    steps.

    Attributes:
        name: What `distft.strategy` calls it.
        layout: Folder and format of its saved state: ``"dcp"`` or ``"deepspeed"``.
        forward_gathers: Whether a forward pass is a collective, so that ranks that generate keep
            in step; the default is the safe one.
        offloads: Kinds of `offload` that it has; default none.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    forward_gathers: ClassVar[bool] = True
    offloads: ClassVar[tuple[str, ...]] = ()

    @property
    def autocasts(self) -> bool:
        """Whether each operation casts fp32 weights and hidden states; the default casts before."""
        return False

    @abstractmethod
    def _mesh(self, num_ranks: int) -> Mesh:
        """Return the axis sizes on this many ranks, or raise ValueError."""

    @abstractmethod
    def _apply(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
    ) -> tuple[nn.Module, Optimizer]:
        """Shard the model, then build the optimizer over the groups of parameter names."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradients of a share whose sum over ranks is the loss."""

    @abstractmethod
    def _gradients(self, model: nn.Module) -> Sequence[GradientShards]:
        """Return this rank's part of the reduced gradients, after the last micro-step."""

    @abstractmethod
    def _gather_weights(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return parameters whole, on the host: those named, or every one."""

    @abstractmethod
    def _gather_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Return every reduced gradient whole, on the host."""

    @abstractmethod
    @contextmanager
    def _no_sync(self, model: nn.Module) -> Iterator[None]:
        """Defer what this strategy can defer while more micro-steps follow."""
        yield

    @abstractmethod
    def _memory(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> MemoryReport:
        """Return the bytes of model state by rank."""

    @abstractmethod
    def _traffic(self, spec: ModelSpec, load: Workload, mesh: Mesh) -> TrafficReport:
        """Return the bytes on the wire by collective."""

    @abstractmethod
    def _capture_state(
        self, model: nn.Module, optimizer: Optimizer, copies: HostCopies | None
    ) -> Captured:
        """Return weights and optimizer state, ready to be written; every rank calls.

        With ``copies`` training goes on before they are written: each tensor is copied there.
        """

    @abstractmethod
    def _read_state(
        self,
        folder: Path,
        manifest: Manifest,
        scalars: Mapping[str, Mapping[str, Any]],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        """Read what `_capture_state` of a strategy with the same layout wrote."""

    def _engine_loads(self, saved_by: str) -> bool:
        """Return whether `_read_state` reads files of a strategy of this layout and constructor.

        Those that it does not read go to `_place_run`, one tensor after another.
        """
        return True

    def _place_run(self, model: nn.Module, optimizer: Optimizer, run: WholeRun) -> None:
        """Put another tool's run in its places; the default knows plain tensors and DTensors."""
        from distft.checkpoint.whole_run import place_run

        self._after_forward(model)
        place_run(model, optimizer, run)

    def _split_modules(self, model: nn.Module, mesh: Mesh) -> None:
        """Split layers in place, before adapters go on them; default nothing."""

    def _attach_adapters(self, model: nn.Module, peft_config: Any) -> nn.Module:
        """Return a PEFT model around a model that `_split_modules` has left whole or split."""
        return attach_adapters(model, peft_config, base_seed())

    def _check_model(self, model: nn.Module) -> None:
        """Raise ValueError where this strategy cannot spread a model; the default takes any."""

    def _check_fields(self) -> None:
        """Raise ValueError where a field of this strategy is wrong; the default has no more."""

    def _after_forward(self, model: nn.Module) -> None:
        """Split again what forward passes without a backward pass left whole; default nothing."""

    def _weight_dtype(self) -> str:
        """Return the dtype in which `load_model` reads weights for this strategy."""
        return "bfloat16" if getattr(self, "precision", "fp32") == "bf16" else "float32"

    def _compute_dtype(self) -> str:
        """Return the dtype of compute, in which packed weights are stored."""
        return compute_dtype(getattr(self, "precision", "fp32"))

    def _check_quantized(self, model: nn.Module, peft_config: Any) -> None:
        """Raise ValueError where a model's quantized weights cannot be spread."""
        check_quantized(self, model, peft_config)

    def _load_weights(self, weights: Weights, mesh: Mesh) -> nn.Module:
        """Return the model of `load_model` with its values; the default reads it whole."""
        from distft.checkpoint.pretrained import load_whole

        return load_whole(weights)

    @contextmanager
    def _explained(self, call: str, model: nn.Module | None = None) -> Iterator[None]:
        """Say what would fit where memory runs out inside; for `load_model`, in a layer below."""
        yield

    def _check_installed(self) -> None:
        """Raise RuntimeError where a package is missing; the default needs none."""
