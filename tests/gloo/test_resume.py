"""A run that was stopped and resumed is the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from tests.gloo.checkpoint_jobs import Course, resume_course, run_course

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
    # Case RESUME-02
    path, whole = stopped(saver, ranks)
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
