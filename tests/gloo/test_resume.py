"""A run that was stopped and resumed is the run that was never stopped."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing import RanksFailed, tiny_batches, tiny_model


@dataclass(frozen=True)
class Course:
    """A training with two groups, a frozen part, a schedule and data that ends in mid-window."""

    model: str = "L"
    dropout: float = 0.0
    frozen: str | None = "mlp"
    rows_per_step: int = 12
    num_rows: int = 12 * 5 + 7

    def start(self, strategy: Any, seed: int) -> tuple[Any, Any, Any, Any, list[int]]:
        """Return model, optimizer, scheduler, data, and the list of rows that it will fill."""
        distft.init(seed=3)
        model = tiny_model(self.model, seed, attention_dropout=self.dropout)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.frozen is None or self.frozen not in name)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [n for n, p in trained.items() if p.dim() > 1], "weight_decay": 0.1},
            {
                "params": [n for n, p in trained.items() if p.dim() == 1],
                "weight_decay": 0.0,
                "lr": 2e-3,
            },
        ]
        model, optimizer = strategy.apply(
            model, partial(torch.optim.AdamW, lr=1e-3), param_groups=groups
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        rows_read: list[int] = []
        data = strategy.batches(
            self._dataset(),
            grad_accum=self.rows_per_step // strategy.dp_size,
            seed=5,
            collate=partial(_collate, rows_read),
        )
        return model, optimizer, scheduler, data, rows_read

    def _dataset(self) -> list[tuple[int, Any]]:
        tokens = [3 + (5 * row) % 12 for row in range(self.num_rows)]
        return list(enumerate(tiny_batches(tokens)))


def _collate(rows_read: list[int], rows: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    [(index, batch)] = rows
    rows_read.append(index)
    return dict(batch)


def _draws() -> tuple[float, float, float]:
    import numpy as np

    return random.random(), float(np.random.rand()), float(torch.rand(1))


def _run(
    strategy: Any, parts: Any, start: int, stop: int, save_at: int | None, path: Path
) -> dict[str, Any]:
    model, optimizer, scheduler, data, rows_read = parts
    steps, step = [], start
    while step < stop:
        for micro_batches in data:
            rates = [group["lr"] for group in optimizer.param_groups]
            result = strategy.train_step(model, optimizer, micro_batches, max_grad_norm=1.0)
            scheduler.step()
            step += 1
            steps.append((result.loss, result.grad_norm, rates, _draws(), rows_read[:]))
            rows_read.clear()
            if step == save_at:
                options = {"scheduler": scheduler, "data": data, "extra": {"run": [1, None]}}
                strategy.save(path, model, optimizer, step=step, **options)
            if step == stop:
                break
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    return {"steps": steps, "decay": decay, "weights": strategy.gather_weights(model)}


def run_course(
    strategy: Any, course: Course, path: Path, stop: int, save_at: int
) -> dict[str, Any]:
    """Train to step `stop` without a break, saving at `save_at` on the way."""
    return _run(strategy, course.start(strategy, seed=0), 0, stop, save_at, path)


def resume_course(strategy: Any, course: Course, path: Path, stop: int) -> dict[str, Any]:
    """Load into a run of another seed and train to step `stop`; also return the log."""
    model, optimizer, scheduler, data, rows_read = course.start(strategy, seed=77)
    lines: list[str] = []
    listener = _Listener(lines)
    logger = logging.getLogger("distft")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        state = strategy.load(path, model, optimizer, scheduler=scheduler, data=data)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    parts = model, optimizer, scheduler, data, rows_read
    found = _run(strategy, parts, state.step, stop, None, path)
    return {**found, "state": state, "log": lines}


class _Listener(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def read_a_stream(strategy: Any, path: Path, steps: int, resume: bool) -> list[int]:
    """Read each rank's own stream for some steps, saving or having loaded; return the rows."""
    distft.init(seed=3)
    factory = partial(torch.optim.SGD, lr=0.1)
    model, optimizer = strategy.apply(torch.nn.Linear(3, 2), factory)
    rows = [10 * strategy.dp_rank + row for row in range(3 + 4 * strategy.dp_rank)]
    data = strategy.batches(iter(rows), collate=lambda rows: {"rows": rows})
    if resume:
        strategy.load(path, model, optimizer, data=data)
    read = []
    for _, micro_batches in zip(range(steps), data, strict=False):
        read += [row for batch in micro_batches for row in batch["rows"]]
    if not resume:
        strategy.save(path, model, optimizer, step=steps, data=data)
    return read


SIX = [
    (DDP(), 2),
    (ZeRO1(), 2),
    (ZeRO2(), 2),
    (ZeRO3(), 2),
    (FSDP2(), 2),
    (HSDP(dp_replicate=2), 4),
]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in SIX]
# An epoch ends in a short window at step 7.
EXACT = [
    Course("L", dropout=0.3, frozen="mlp", rows_per_step=8, num_rows=51),
    Course("Lt", dropout=0.3, frozen=None, rows_per_step=8, num_rows=51),
    Course("M", dropout=0.3, frozen="experts", rows_per_step=8, num_rows=51),
]
CHANGED = Course()
STOP, LAST = 3, 6


# ---- the same number of ranks -------------------------------------------------------------------


@pytest.mark.parametrize("course", EXACT, ids=["L", "Lt", "M"])
@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=IDS)
def test_steps_6_to_10_after_a_stop_are_bit_equal(pools, tmp_path, strategy, ranks, course):
    whole = pools(ranks).run(run_course, strategy, course, tmp_path / "step-5", 10, 5)
    resumed = pools(ranks).run(resume_course, strategy, course, tmp_path / "step-5", 10)
    for before, after in zip(whole, resumed, strict=True):
        assert after["state"].step == 5
        assert after["state"].extra == {"run": [1, None]}
        # Loss, norm, learning rates, what three generators drew, the rows that were read.
        assert after["steps"] == before["steps"][5:]
        assert after["decay"] == before["decay"] == [0.1, 0.0]
        assert set(after["weights"]) == set(before["weights"])
        for name, weight in after["weights"].items():
            assert torch.equal(weight, before["weights"][name]), name
        assert not any("re-derived" in line for line in after["log"])


def test_every_rank_goes_on_in_its_own_stream(pools, tmp_path):
    before = pools(2).run(read_a_stream, FSDP2(), tmp_path / "step-5", 5, False)
    assert before == [[0, 1, 2], [10, 11, 12, 13, 14]]
    after = pools(2).run(read_a_stream, FSDP2(), tmp_path / "step-5", 9, True)
    assert after == [[], [15, 16]]


def test_streams_of_two_ranks_are_not_split_over_three(pools, tmp_path):
    pools(2).run(read_a_stream, FSDP2(), tmp_path / "step-5", 5, False)
    with pytest.raises(RanksFailed, match="Start 2 ranks, or leave data out") as failed:
        pools(3).run(read_a_stream, FSDP2(), tmp_path / "step-5", 9, True)
    assert len({str(error) for error in failed.value.errors}) == 1
    assert "for each of 2 ranks, and this run has 3" in str(failed.value.errors[2])


# ---- another number of ranks --------------------------------------------------------------------


def sharded(ranks: int) -> HSDP:
    """Return HSDP with two groups where ranks allow it."""
    return HSDP(dp_replicate=2 if ranks % 2 == 0 else 1)


class Stopped:
    """Runs saved at step 3 and trained on to step 6; each runs once for all tests."""

    def __init__(self, pools: Any, folder: Path) -> None:
        self.pools = pools
        self.folder = folder
        self.runs: dict[Any, list[dict[str, Any]]] = {}

    def __call__(self, strategy: Any, ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        """Return the checkpoint and what each rank did."""
        path = self.folder / f"{strategy.name}-{ranks}"
        if path not in self.runs:
            self.runs[path] = self.pools(ranks).run(run_course, strategy, CHANGED, path, LAST, STOP)
        return path, self.runs[path]


@pytest.fixture(scope="module")
def stopped(pools, tmp_path_factory) -> Stopped:
    return Stopped(pools, tmp_path_factory.mktemp("stopped"))


def rows_read(ranks: list[dict[str, Any]], steps: slice) -> list[int]:
    return sorted(row for rank in ranks for step in rank["steps"][steps] for row in step[4])


WAYS = [
    *[(DDP(), a, DDP(), b) for a, b in ((2, 3), (3, 2), (1, 4), (4, 1))],
    *[(FSDP2(), a, FSDP2(), b) for a, b in ((2, 3), (3, 2), (1, 4), (4, 1))],
    *[(sharded(a), a, sharded(b), b) for a, b in ((2, 3), (3, 2), (1, 4), (4, 1))],
    (DDP(), 2, FSDP2(), 3),
    (FSDP2(), 3, DDP(), 2),
    (DDP(), 3, sharded(4), 4),
    (sharded(4), 4, DDP(), 3),
    (FSDP2(), 2, sharded(4), 4),
    (sharded(4), 4, FSDP2(), 2),
]


@pytest.mark.parametrize(
    ("saver", "ranks", "loader", "others"),
    WAYS,
    ids=[f"{saver}@{ranks}->{loader}@{others}" for saver, ranks, loader, others in WAYS],
)
def test_another_number_of_ranks_goes_on_with_the_same_losses(
    stopped, saver, ranks, loader, others
):
    # Cases RESUME-02 and RESH-11
    path, whole = stopped(saver, ranks)
    for number, step in enumerate(whole[0]["steps"]):
        assert step[2] == pytest.approx([rate * (1 - number / 20) for rate in (1e-3, 2e-3)])
    resumed = stopped.pools(others).run(resume_course, loader, CHANGED, path, LAST)
    for rank in resumed:
        assert rank["state"].strategy == repr(saver)
        assert rank["state"].world_size == ranks
        for found, expected in zip(rank["steps"], whole[0]["steps"][STOP:], strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-6)
            assert found[1] == pytest.approx(expected[1], rel=1e-5)
            assert found[2] == expected[2]
    # The epoch has 67 rows: 36 were read before the stop, each other one is read once after it.
    before, after = rows_read(whole, slice(0, STOP)), rows_read(resumed, slice(None))
    assert len(before) == 36
    assert sorted(before + after) == list(range(67))
    draws = [rank["steps"][0][3] for rank in resumed]
    assert len(set(draws)) == others
    for rank in resumed:
        [line] = [line for line in rank["log"] if "re-derived" in line]
        assert f"of {ranks} data ranks, and this run has {others}" in line


@pytest.mark.parametrize(
    ("saver", "loader"), [(DDP(), FSDP2()), (FSDP2(), sharded(4)), (sharded(4), DDP())], ids=str
)
def test_another_strategy_on_as_many_ranks_keeps_each_ranks_random_numbers(stopped, saver, loader):
    path, whole = stopped(saver, 4)
    resumed = stopped.pools(4).run(resume_course, loader, CHANGED, path, LAST)
    for before, after in zip(whole, resumed, strict=True):
        assert [step[3:] for step in after["steps"]] == [
            step[3:] for step in before["steps"][STOP:]
        ]
        for found, expected in zip(after["steps"], before["steps"][STOP:], strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert not any("re-derived" in line for line in after["log"])
