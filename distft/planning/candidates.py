"""Every strategy and sensible product of axes on so many ranks, as what the formulas want."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distft.formulas.peak import Held, Layout
from distft.formulas.shape import Shape
from distft.topology import Cluster

# Bytes per parameter of torch's strategies and of DeepSpeed's, by precision; tests hold them equal
# to what `strategy.memory` says tensor by tensor.
NATIVE: Mapping[str, Held] = {
    "fp32": Held(4, 4, 8, 4, 4, 4, 4, 4),
    "bf16-mixed": Held(4, 4, 8, 4, 4, 4, 2, 4),
    "bf16": Held(2, 2, 4, 2, 2, 2, 2, 2),
}
DEEPSPEED: Mapping[str, Held] = {
    "fp32": Held(4, 4, 12, 4, 4, 4, 4, 4),
    "bf16-mixed": Held(2, 4, 12, 2, 2, 4, 2, 4),
    "bf16": Held(2, 2, 6, 2, 2, 2, 2, 2),
}
_OFFLOADS = {
    "ZeRO1": "optimizer",
    "ZeRO2": "optimizer",
    "ZeRO3": "params",
    "FSDP2": "params",
    "HSDP": "params",
}
_DEGREES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """One strategy with its degrees.

    Args:
        name: Class of the strategy.
        fields: Its degrees.
        layout: Ranks along each axis.
    """

    name: str
    fields: tuple[tuple[str, int], ...]
    layout: Layout

    @property
    def label(self) -> str:
        """Short name for tables."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.fields)])

    def offload(self, precision: str) -> str:
        """What the strategy can hold on the host: "params", "optimizer", or "" for nothing."""
        if self.layout.engine == "deepspeed" and precision == "bf16":
            # DeepSpeed's host optimizer takes no moments in bf16.
            return ""
        return _OFFLOADS.get(self.name, "")

    def on_more(self, times: int) -> Candidate:
        """Return it on so many times the ranks, all of which share the state."""
        layout = replace(self.layout, dp_shard=self.layout.dp_shard * times)
        fields = tuple(
            (name, value * times if name == "dp_shard" else value) for name, value in self.fields
        )
        return Candidate(self.name, fields, layout)

    def held(self, precision: str) -> Held:
        """Bytes per parameter in a precision."""
        table = DEEPSPEED if self.layout.engine == "deepspeed" else NATIVE
        return table[precision]

    def strategy(self, **policies: Any) -> Any:
        """Return the strategy as an instance; imports `distft.strategies`."""
        import distft

        return getattr(distft, self.name)(**dict(self.fields), **policies)


def candidates(shape: Shape, cluster: Cluster, ranks: int) -> list[Candidate]:
    """Return the layouts that fit a model and a machine, the plainest first.

    Replicas of HSDP go to other NVLink groups or nodes; `tp` stays inside a node and divides the
    heads; `ep` divides the experts.

    Collective: none.
    """
    found = [
        _data("DDP", ranks, 0),
        *(_data(f"ZeRO{stage}", ranks, stage, "deepspeed") for stage in (1, 2, 3)),
        _data("FSDP2", ranks, 3),
    ]
    if ranks == 1:
        return found[:1] + found[3:4]
    found += _replicated(cluster, ranks)
    found += _tensor_parallel(shape, cluster, ranks)
    if shape.experts:
        found += _expert_parallel(shape, cluster, ranks)
    return found


def _data(name: str, ranks: int, stage: int, engine: str = "native") -> Candidate:
    return Candidate(name, (), Layout(dp_shard=ranks, stage=stage, engine=engine))


def _replicated(cluster: Cluster, ranks: int) -> Iterator[Candidate]:
    for shard in _degrees(ranks, min(ranks // 2, cluster.gpus_per_node)):
        copies = ranks // shard
        fields = (("dp_replicate", copies), ("dp_shard", shard))
        yield Candidate("HSDP", fields, Layout(copies, shard))


def _tensor_parallel(shape: Shape, cluster: Cluster, ranks: int) -> Iterator[Candidate]:
    for tp in _degrees(ranks, cluster.gpus_per_node):
        if shape.heads % tp or shape.kv_heads % tp:
            continue
        rest = ranks // tp
        if rest == 1:
            yield Candidate("TP", (("tp", tp),), Layout(tp=tp))
            continue
        yield Candidate("NDParallel", (("dp_shard", rest), ("tp", tp)), Layout(1, rest, tp))
        for shard in _degrees(rest, rest // 2):
            if shard * tp > cluster.gpus_per_node:
                continue
            fields = (("dp_replicate", rest // shard), ("dp_shard", shard), ("tp", tp))
            yield Candidate("NDParallel", fields, Layout(rest // shard, shard, tp))


def _expert_parallel(shape: Shape, cluster: Cluster, ranks: int) -> Iterator[Candidate]:
    for ep in _degrees(ranks, ranks):
        if shape.experts % ep:
            continue
        yield Candidate("EP", (("ep", ep),), Layout(dp_shard=ranks, ep=ep))
        for tp in _degrees(ranks, min(cluster.gpus_per_node, ranks // 2)):
            if ep % tp or shape.heads % tp or shape.kv_heads % tp or tp > ep:
                continue
            fields = (("dp_shard", ranks // tp), ("tp", tp), ("ep", ep))
            yield Candidate("NDParallel", fields, Layout(1, ranks // tp, tp, ep=ep))


def _degrees(ranks: int, most: int) -> Iterator[int]:
    yield from (degree for degree in _DEGREES if degree <= most and ranks % degree == 0)
