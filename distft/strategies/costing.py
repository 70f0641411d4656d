"""What a strategy costs: bytes of memory, bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distft.adapted import with_adapters
from distft.mesh import Mesh
from distft.strategies.links import on_links
from distft.strategies.value import StrategyValue
from distft.strategies.working import with_scales, with_working_memory

if TYPE_CHECKING:
    from distft.formulas import MemoryReport, TrafficReport
    from distft.spec import ModelSpec, Workload
    from distft.topology import Cluster


@dataclass(frozen=True, kw_only=True, repr=False)
class Costing(StrategyValue):
    """The part of a strategy that states its memory and its traffic."""

    def _check_costs(self, spec: ModelSpec, mesh: Mesh) -> None:
        """Raise for what `apply` refuses, which has no costs."""
        quantized = sum(tensor.scales is not None for tensor in spec.tensors)
        if quantized and mesh.tp * mesh.ep > 1:
            raise ValueError(
                f"{self!r} splits layers over tp={mesh.tp} and ep={mesh.ep}, and {quantized} "
                "tensors are packed in 4 bits, which it does not train. Use FSDP2, HSDP, ZeRO or "
                "DDP for tuning='qlora'; distft.plan estimates quantized weights."
            )

    def memory(self, spec: ModelSpec, load: Workload, *, world_size: int) -> MemoryReport:
        """Return the bytes that each rank holds in the phases of a step.

        Model state to the byte, and buffers, activations and logits as estimates. Of a model
        whose widths are not known (`ModelSpec.shape`) activations are left out.

        Raises:
            ValueError: The degrees do not fit ``world_size``, or the workload is not covered.

        Collective: none.
        """
        mesh = self.mesh(world_size)
        report = self.state_memory(spec, load, world_size=world_size)
        return with_working_memory(report, self, spec, load, mesh)

    def state_memory(self, spec: ModelSpec, load: Workload, *, world_size: int) -> MemoryReport:
        """Return the bytes of model state and buffers alone, which no batch changes.

        Raises:
            ValueError: As `memory`.

        Collective: none.
        """
        mesh = self.mesh(world_size)
        trained = with_adapters(spec, load)
        self._check_costs(trained, mesh)
        report = self._memory(trained.stored(self.precision), load, mesh)
        return with_scales(report, trained)

    def traffic(
        self,
        spec: ModelSpec,
        load: Workload,
        *,
        world_size: int,
        cluster: Cluster | None = None,
    ) -> TrafficReport:
        """Return the bytes that one rank puts on the wire, by collective.

        With a `cluster` also the class of the slowest link of each, and its seconds there.

        Assumes one parameter group and one bound for the whole gradient. Where groups have bounds
        of their own, each group beyond the first adds a norm: one more all_reduce of 4 bytes a
        step over each axis that gradients are split on, none under DDP.

        Raises:
            ValueError: The degrees do not fit ``world_size``, or the workload is not covered.

        Collective: none.
        """
        mesh = self.mesh(world_size)
        trained = with_adapters(spec, load)
        self._check_costs(trained, mesh)
        report = self._traffic(trained.stored(self.precision), load, mesh)
        return report if cluster is None else on_links(report, mesh, cluster)
