"""The conformance suite: what any `Strategy` must do, ours and third parties' alike."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.testing.models import tiny_batches, tiny_model
from distft.testing.pool import WorkerPool
from distft.testing.runs import (
    LOSS_TOKENS,
    Training,
    TrainingRecord,
    differences,
    train_alone,
    train_under,
)

if TYPE_CHECKING:
    from distft.strategies.base import Strategy

# Called with a strategy, a pool, and the name of a tiny model or None for the default.
Check = Callable[..., None]


def default_model(strategy: Strategy, num_ranks: int) -> str:
    """Return the tiny model that shows what a strategy does: M where it spreads experts, else L.

    Collective: none.
    """
    return "M" if strategy.mesh(num_ranks).ep > 1 else "L"


def check_value(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """A strategy is a value: it pickles, compares equal, and cannot be changed."""
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy == strategy, f"{strategy!r} is not equal to its own pickled copy"
    assert hash(copy) == hash(strategy), f"{strategy!r} and its equal copy hash differently"
    try:
        object.__getattribute__(strategy, "__class__").__setattr__(strategy, "precision", "bf16")
    except AttributeError:
        return
    raise AssertionError(f"{strategy!r} lets its fields be changed: make it a frozen dataclass")


def check_data_ranks(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """Every data rank is there, and ``dp_size`` is the same everywhere."""
    found = pool.run(_data_rank, strategy)
    sizes = {size for _, size in found}
    assert len(sizes) == 1, f"dp_size differs between ranks: {sorted(sizes)}"
    ranks = {rank for rank, _ in found}
    size = sizes.pop()
    assert ranks == set(range(size)), f"dp_rank takes the values {sorted(ranks)} of {size}"


def _data_rank(strategy: Strategy) -> tuple[int, int]:
    return strategy.dp_rank, strategy.dp_size


def check_parity(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """Loss, norm, every gradient and every weight equal one process, rows uneven, clipped."""
    model = model or default_model(strategy, pool.world_size)
    for name in ("L", "Lt") if model == "L" else (model,):
        training = Training(name, num_micro_batches=2 * pool.world_size, max_norm=0.1)
        _assert_equal(pool.run(train_under, strategy, training), train_alone(training), name)


def check_uneven_window(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """A rank with fewer micro-batches than the others does not change the mean or hang."""
    model = model or default_model(strategy, pool.world_size)
    losses = pool.run(_uneven_step, strategy, model)
    num_micro_batches = strategy.mesh(pool.world_size).dp_size + 1
    training = Training(model, num_steps=1, num_micro_batches=num_micro_batches)
    expected = train_alone(training).losses[0]
    for rank, loss in enumerate(losses):
        error = abs(loss - expected) / expected
        assert error <= 1e-6, f"rank {rank}: loss {loss} against {expected}"


def _uneven_step(strategy: Strategy, model_name: str) -> float:
    from torch.optim import SGD

    from distft.process_group import init

    init()
    model, optimizer = strategy.apply(tiny_model(model_name), partial(SGD, lr=0.1))
    tokens = LOSS_TOKENS[: strategy.dp_size + 1]
    mine = tiny_batches(tokens, seed=0)[strategy.dp_rank :: strategy.dp_size]
    return strategy.train_step(model, optimizer, mine).loss


def check_save_and_load(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """A run that was saved and loaded goes on to the bit as one that was not."""
    model = model or default_model(strategy, pool.world_size)
    with tempfile.TemporaryDirectory(prefix="distft-check-") as folder:
        path = str(Path(folder, "checkpoint"))
        whole = pool.run(_train_and_save, strategy, model, path)
        resumed = pool.run(_load_and_train, strategy, model, path)
    for rank, (expected, found) in enumerate(zip(whole, resumed, strict=True)):
        assert found == expected, f"rank {rank}: losses {found} after the load, {expected} without"


def _train_and_save(strategy: Strategy, model_name: str, path: str) -> list[float]:
    model, optimizer = _fresh(strategy, model_name, seed=0)
    for step in range(2):
        strategy.train_step(model, optimizer, _batches(strategy, step))
    strategy.save(path, model, optimizer, step=2)
    return [strategy.train_step(model, optimizer, _batches(strategy, s)).loss for s in (2, 3)]


def _load_and_train(strategy: Strategy, model_name: str, path: str) -> list[float]:
    model, optimizer = _fresh(strategy, model_name, seed=1)
    state = strategy.load(path, model, optimizer)
    assert state.step == 2, f"the load says step {state.step}, and 2 were made"
    return [strategy.train_step(model, optimizer, _batches(strategy, s)).loss for s in (2, 3)]


def _fresh(strategy: Strategy, model_name: str, seed: int) -> tuple[Any, Any]:
    from torch.optim import AdamW

    from distft.process_group import init

    init()
    return strategy.apply(tiny_model(model_name, seed=seed), partial(AdamW, lr=1e-3))


def _batches(strategy: Strategy, step: int) -> list[Any]:
    rows = tiny_batches(LOSS_TOKENS[: strategy.dp_size], seed=step)
    return rows[strategy.dp_rank :: strategy.dp_size]


def check_memory(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """Bytes of model state on every rank, in memory and on a disk, are what ``memory`` says."""
    from distft.spec import ModelSpec, Workload

    model = model or default_model(strategy, pool.world_size)
    measured = [held for held, _ in pool.run(_measure, strategy, model)]
    report = strategy.memory(
        ModelSpec.from_model(tiny_model(model)), Workload(seq_len=16), world_size=pool.world_size
    )
    places = zip(report.per_rank, report.host_per_rank, report.disk_per_rank, strict=True)
    predicted = [(device + host, disk) for device, host, disk in places]
    assert predicted == measured, f"{predicted} predicted, {measured} measured"


def check_traffic(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """Bytes that each rank moves in a step, by collective, are what ``traffic`` says.

    Of what an all-to-all sends to experts, the sum over ranks: a router decides who gets it.
    """
    from distft.spec import ModelSpec, Workload

    model = model or default_model(strategy, pool.world_size)
    results = [moved for _, moved in pool.run(_measure, strategy, model)]
    report = strategy.traffic(
        ModelSpec.from_model(tiny_model(model)), Workload(seq_len=16), world_size=pool.world_size
    )
    predicted = report.payload_per_step()
    routed = [key for key in predicted if key[0] == "all_to_all"]
    for key in routed:
        measured = sum(moved.pop(key, 0) for moved in results)
        expected = pool.world_size * predicted.pop(key)
        assert measured == expected, f"{key}: {expected} bytes predicted, {measured} measured"
    for rank, moved in enumerate(results):
        assert moved == predicted, f"rank {rank}: {predicted} predicted, {moved} measured"


def _measure(
    strategy: Strategy, model_name: str
) -> tuple[tuple[int, int], dict[tuple[str, int], int]]:
    """Return bytes of state in memory and on a disk, gradients there, and what a step moves.

    That is bytes of full buffers by op and number of ranks.
    """
    from distft.measure import count_collectives, model_state_bytes
    from distft.training.loss import next_token_loss

    model, optimizer = _fresh(strategy, model_name, seed=0)
    # Engines trace their first steps and rebuild buckets in the second.
    for step in range(3):
        strategy.train_step(model, optimizer, _batches(strategy, step))
    with count_collectives() as made:
        strategy.train_step(model, optimizer, _batches(strategy, 3))
    moved: dict[tuple[str, int], int] = {}
    for (op, ranks), payload in made.payloads().items():
        moved[op, len(ranks)] = moved.get((op, len(ranks)), 0) + payload
    batch = _batches(strategy, 4)[0]
    optimizer.zero_grad()
    strategy.backward(next_token_loss(model, batch) / 10)
    held = model_state_bytes(model, optimizer)
    optimizer.zero_grad()
    return (held.total, held.on_disk), moved


def check_wrong_model(strategy: Strategy, pool: WorkerPool, model: str | None = None) -> None:
    """A model that is distributed already is refused with a ValueError on every rank."""
    model = model or default_model(strategy, pool.world_size)
    for rank, refused in enumerate(pool.run(_apply_twice, strategy, model)):
        assert refused, f"rank {rank}: a distributed model was accepted"


def _apply_twice(strategy: Strategy, model_name: str) -> bool:
    from torch.optim import AdamW

    model, _ = _fresh(strategy, model_name, seed=0)
    try:
        strategy.apply(model, partial(AdamW, lr=1e-3))
    except ValueError:
        return True
    return False


def _assert_equal(records: list[TrainingRecord], expected: TrainingRecord, what: str) -> None:
    for rank, found in enumerate(records):
        lines = differences(found, expected)
        assert not lines, f"{what}, rank {rank}: {'; '.join(lines[:5])}"


CHECKS: tuple[Check, ...] = (
    check_value,
    check_data_ranks,
    check_parity,
    check_uneven_window,
    check_save_and_load,
    check_memory,
    check_traffic,
    check_wrong_model,
)


def check_strategy(
    strategy: Strategy,
    world_size: int = 2,
    pool: WorkerPool | None = None,
    model: str | None = None,
) -> None:
    """Raise where a strategy breaks a promise that every strategy keeps.

    For authors of a `Strategy`: run it in a test. The class must live in a module that can be
    imported, since ranks of their own run it.

    Args:
        strategy: The strategy.
        world_size: Ranks to start, where no pool is given.
        pool: Ranks that run already.
        model: Name of the tiny model to train; default M, which has experts, for a strategy that
            spreads experts, else L.

    Raises:
        AssertionError: What differs, and by how much.

    Collective: none; it starts ranks of its own.
    """
    if pool is not None:
        for check in CHECKS:
            check(strategy, pool, model)
        return
    with WorkerPool(world_size) as started:
        check_strategy(strategy, pool=started, model=model)
