"""What ranks hold and send, measured to the byte, equals what a strategy says beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.spec import ModelSpec, Workload
from distft.testing import WorkerPool, tiny_batches, tiny_model
from tests.matrix import every_pair

MODELS = ("L", "Lt", "Q", "M")
ACCUMULATIONS = (1, 3)
HSDP_2X2 = HSDP(dp_replicate=2, dp_shard=2)
PLAIN = [
    *every_pair([DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2()], [2, 3], MODELS),
    *every_pair([HSDP_2X2], [4], MODELS),
]
POLICIES = [
    ZeRO3(prefetch_bucket_size=3_000, max_live_parameters=9_000),
    FSDP2(reshard_after_forward=False),
    FSDP2(defer_reduce=True),
    FSDP2(activation_checkpointing=True),
    ZeRO3(activation_checkpointing=True),
    ZeRO3(activation_checkpointing=True, prefetch_bucket_size=0),
    ZeRO3(prefetch_bucket_size=0),
    ZeRO3(prefetch_bucket_size=500, max_reuse_distance=5_000),
    ZeRO3(prefetch_bucket_size=2_000, persistence_threshold=1_000),
    ZeRO1(reduce_bucket_size=5_000),
    ZeRO2(reduce_bucket_size=5_000),
]
PRECISE = [
    *(kind(precision="bf16") for kind in (DDP, ZeRO1, ZeRO2, ZeRO3, FSDP2)),
    *(kind(precision="bf16-mixed") for kind in (DDP, ZeRO1, ZeRO2, ZeRO3, FSDP2)),
]
# Until its third micro-step ZeRO-3 has no record to look ahead along.
STEPS_BEFORE = 2


def measure(
    strategy: Any, name: str, accumulations: tuple[int, ...], frozen: str | None
) -> dict[str, Any]:
    """Return this rank's bytes of state, and its collectives of one step per accumulation."""
    import torch

    from distft.measure import count_collectives, model_state_bytes

    distft.init()
    model = tiny_model(name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in key)
    spec = ModelSpec.from_model(model)
    model, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=1e-3))

    def step(grad_accum: int) -> None:
        batches = tiny_batches([9, 12, 7][:grad_accum], seed=strategy.dp_rank)
        strategy.train_step(model, optimizer, batches, max_grad_norm=0.1)

    for _ in range(STEPS_BEFORE):
        step(1)
    collectives, wire_bytes = {}, {}
    for grad_accum in accumulations:
        with count_collectives() as counted:
            step(grad_accum)
        wire_bytes[grad_accum] = counted.wire_bytes
        collectives[grad_accum] = [
            (record.op, record.num_bytes, record.group_size) for record in counted.records
        ]
    optimizer.zero_grad()
    strategy.backward(model(**tiny_batches([9])[0]).loss)
    return {
        "spec": spec,
        "state": model_state_bytes(model, optimizer),
        "collectives": collectives,
        "wire_bytes": wire_bytes,
    }


class Measured:
    """What the ranks of the pools measured: each case runs once for all tests."""

    def __init__(self, pools: Callable[[int], WorkerPool]) -> None:
        self.pools = pools
        self.results: dict[Any, list[dict[str, Any]]] = {}

    def __call__(
        self,
        strategy: Any,
        ranks: int,
        name: str,
        accumulations: tuple[int, ...] = ACCUMULATIONS,
        frozen: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return what each rank measured."""
        case = (strategy, name, accumulations, frozen)
        if (ranks, case) not in self.results:
            self.results[ranks, case] = self.pools(ranks).run(measure, *case)
        return self.results[ranks, case]


@pytest.fixture(scope="module")
def measured(pools: Callable[[int], WorkerPool]) -> Measured:
    return Measured(pools)


def check_memory(strategy: Any, results: list[dict[str, Any]]) -> None:
    report = strategy.memory(results[0]["spec"], Workload(), world_size=len(results))
    for kind in ("parameters", "gradients", "optimizer"):
        held = tuple(getattr(result["state"], kind) for result in results)
        assert held == report.kind_bytes(kind), kind
    assert tuple(result["state"].total for result in results) == report.per_rank
    assert max(result["state"].total for result in results) == report.model_state_bytes


def check_traffic(strategy: Any, results: list[dict[str, Any]], grad_accum: int) -> None:
    load = Workload(grad_accum=grad_accum)
    report = strategy.traffic(results[0]["spec"], load, world_size=len(results))
    for result in results:
        records = result["collectives"][grad_accum]
        payloads: dict[tuple[str, int], int] = {}
        for op, num_bytes, group_size in records:
            payloads[op, group_size] = payloads.get((op, group_size), 0) + num_bytes
        assert payloads == report.payload_per_step()
        assert result["wire_bytes"][grad_accum] == report.bytes_per_step


@pytest.mark.parametrize(("strategy", "ranks", "name"), PLAIN, ids=str)
def test_bytes_held_by_each_rank_equal_the_memory_report(measured, strategy, ranks, name):
    check_memory(strategy, measured(strategy, ranks, name))


@pytest.mark.parametrize("grad_accum", ACCUMULATIONS)
@pytest.mark.parametrize(("strategy", "ranks", "name"), PLAIN, ids=str)
def test_bytes_sent_by_each_rank_equal_the_traffic_report(
    measured, strategy, ranks, name, grad_accum
):
    check_traffic(strategy, measured(strategy, ranks, name), grad_accum)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [*((policy, "M") for policy in POLICIES), *((policy, "Lt") for policy in POLICIES[:6:3])],
    ids=str,
)
def test_both_reports_hold_under_every_policy(measured, strategy, name):
    results = measured(strategy, 3, name, (3,))
    check_memory(strategy, results)
    check_traffic(strategy, results, 3)


@pytest.mark.parametrize("strategy", PRECISE, ids=str)
def test_both_reports_hold_in_every_precision(measured, strategy):
    results = measured(strategy, 3, "Q", (3,))
    check_memory(strategy, results)
    check_traffic(strategy, results, 3)


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2()], ids=str)
def test_both_reports_hold_for_a_model_that_is_frozen_in_part(measured, strategy):
    results = measured(strategy, 3, "L", (1,), frozen="mlp")
    check_memory(strategy, results)
    check_traffic(strategy, results, 1)


def test_deferred_hsdp_reduces_once_a_step(measured):
    strategy = HSDP(dp_replicate=2, dp_shard=2, defer_reduce=True)
    results = measured(strategy, 4, "L", (3,))
    reductions = [
        record for record in results[0]["collectives"][3] if record[0] == "reduce_scatter"
    ]
    assert len(reductions) == len(results[0]["spec"].units)
    check_traffic(strategy, results, 3)
