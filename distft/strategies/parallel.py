"""TP, EP and products of axes: layers and experts split over ranks that work on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distft.mesh import Mesh, check_degree, resolve_axes
from distft.strategies.sharded import Sharded


class Rules(dict[str, str]):
    """Rules of a plan, as a value that can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash the rules, whatever their order."""
        return hash(frozenset(self.items()))


@dataclass(frozen=True, kw_only=True, repr=False)
class Parallel(Sharded):
    """What TP, EP and NDParallel share: rules of one's own.

    Attributes:
        plan: Rules that come over the model's own: the name of a module or parameter, ``*`` for a
            layer's number, to the name of a style, such as
            ``{"model.layers.*.mlp.up_proj": "colwise"}``. Empty leaves every tensor whole that is
            not an expert's. Default the model's rules alone.
    """

    plan: Mapping[str, str] | None = None

    def _check_fields(self) -> None:
        if self.compile is not None:
            raise ValueError(
                f"{type(self).__name__}(compile={self.compile!r}): blocks split over tp or ep are "
                "not compiled in this version. Leave it out, or use FSDP2, HSDP, DDP or ZeRO."
            )
        if self.plan is not None:
            wrong = not isinstance(self.plan, Mapping) or not all(
                isinstance(part, str) for rule in self.plan.items() for part in rule
            )
            if wrong:
                raise ValueError(
                    f"{type(self).__name__}(plan={self.plan!r}) is no mapping of names to styles. "
                    "Pass one such as {'model.layers.*.mlp.up_proj': 'colwise'}."
                )
            object.__setattr__(self, "plan", Rules(self.plan))
        for axis in ("dp_replicate", "dp_shard", "tp", "ep"):
            check_degree(repr(self), axis, getattr(self, axis, None))

    def _rules(self) -> Mapping[str, str] | None:
        return self.plan

    def _with_experts(self, num_ranks: int, axes: Mapping[str, int], ep: int) -> Mesh:
        """Return a mesh after checking that ``ep`` fits it."""
        dp_shard, tp = axes.get("dp_shard", 1), axes.get("tp", 1)
        if ep > 1 and (ep % tp or (dp_shard * tp) % ep):
            raise ValueError(
                f"{self!r} on {num_ranks} ranks has dp_shard={dp_shard}, tp={tp} and ep={ep}: ep "
                f"must be a multiple of tp ({tp}) and divide dp_shard * tp ({dp_shard * tp}). "
                "Choose another ep, or start another number of ranks."
            )
        return Mesh(**axes, ep=ep)


@dataclass(frozen=True, kw_only=True, repr=False)
class TP(Parallel):
    """Each layer's matrices split over ranks that work on the same rows.

    Memory: ``1/tp`` of what the plan splits; norms and the like are whole on every rank. Traffic:
    all-reduces of a block's activations, two forward and one for each column-split layer backward.
    Ranks beyond ``tp`` split the rows, as FSDP2.

    Attributes:
        tp: Ranks that share a layer; default all.
        plan: As for `Parallel`.
    """

    name: ClassVar[str] = "tp"

    tp: int | None = None

    def _mesh(self, num_ranks: int) -> Mesh:
        tp = num_ranks if self.tp is None else self.tp
        return Mesh(**resolve_axes(repr(self), num_ranks, dp_shard=None, tp=tp))


@dataclass(frozen=True, kw_only=True, repr=False)
class EP(Parallel):
    """Experts spread over ranks, tokens sent to them by all-to-all; the rest as under FSDP2.

    Every rank has its own rows. Memory: dense tensors ``1/N``; experts ``1/ep``, and split again
    over the ``efsdp = N / ep`` ranks that hold the same ones. Traffic: for each expert layer two
    all-to-alls of ``tokens * top_k`` vectors forward and two backward.

    Attributes:
        ep: Ranks over which the experts are spread; default all.
        plan: As for `Parallel`.
    """

    name: ClassVar[str] = "ep"

    ep: int | None = None

    def _mesh(self, num_ranks: int) -> Mesh:
        ep = num_ranks if self.ep is None else self.ep
        return self._with_experts(num_ranks, {"dp_shard": num_ranks}, ep)


@dataclass(frozen=True, kw_only=True, repr=False)
class NDParallel(Parallel):
    """A product of axes in one mesh: copies, shards, tensor and expert parallelism.

    Axes outer to inner: ``dp_replicate, dp_shard, tp``; experts see the same ranks as
    ``dp_replicate, efsdp, ep`` with ``efsdp = dp_shard * tp / ep``. FSDP2, HSDP, TP and EP are its
    special cases.

    Attributes:
        dp_replicate: Copies of everything; default 1.
        dp_shard: Ranks over which parameters are split by rows; default the ranks that remain.
        tp: Ranks that share a layer and read the same rows; default 1.
        ep: Ranks over which experts are spread; default 1: experts are as all other tensors.
        plan: As for `Parallel`.
    """

    name: ClassVar[str] = "nd"

    dp_replicate: int = 1
    dp_shard: int | None = None
    tp: int = 1
    ep: int = 1

    def _mesh(self, num_ranks: int) -> Mesh:
        axes = resolve_axes(
            repr(self),
            num_ranks,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
        )
        return self._with_experts(num_ranks, axes, self.ep)
