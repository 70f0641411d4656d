"""Runs of the Trainer that go on in mid-epoch on other ranks, batches and rounds."""

from __future__ import annotations

import pytest

from distft import DDP, FSDP2, ZeRO2
from tests.gloo.rest_jobs import rows_of_steps
from tests.gloo.trainer_jobs import ROWS

LOSSES = ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens")


def batches(size, rounds):
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": rounds}


def in_order(found):
    """Return the rows of a run in the order of the epoch: round by round, rank by rank."""
    return [
        row for one in zip(*(rank["rows"] for rank in found), strict=True) for b in one for row in b
    ]


def logged(run):
    return [{k: entry[k] for k in LOSSES} for entry in run[0]["log"] if "loss" in entry]


@pytest.fixture(scope="module")
def begun(pools, tmp_path_factory):
    """Return a run of 2 steps of 8 rows on two ranks, and the order of two epochs."""
    folder = tmp_path_factory.mktemp("begun")
    whole = pools(1).run(
        rows_of_steps, folder / "whole", DDP(), {**batches(1, 22), "max_steps": 2, "save_steps": 9}
    )
    order = in_order(whole)
    assert len(set(order)) == ROWS
    assert sorted(order[:ROWS]) == sorted(order[ROWS:])
    changes = {**batches(2, 2), "max_steps": 2, "save_steps": 2}
    found = pools(2).run(rows_of_steps, folder / "run", FSDP2(), changes)
    assert in_order(found) == order[:16]
    return folder / "run" / "checkpoint-2", order


@pytest.mark.parametrize(
    ("strategy", "ranks", "size", "rounds", "steps"),
    # Rows a step, and the steps that are left of this epoch and the next: 3, 2 + 8; 8, 1 + 3;
    # 4, 2 + 6.
    [(DDP(), 1, 3, 1, 10), (FSDP2(), 4, 1, 2, 4), (ZeRO2(), 2, 2, 1, 8)],
    ids=str,
)
def test_the_rest_of_the_epoch_is_trained_in_its_order_whatever_a_step_is(
    pools, tmp_path, begun, strategy, ranks, size, rounds, steps
):
    checkpoint, order = begun
    changes = {**batches(size, rounds), "max_steps": -1, "num_train_epochs": 2, "save_steps": 99}
    found = pools(ranks).run(rows_of_steps, tmp_path, strategy, changes, checkpoint)
    assert in_order(found) == order[16:]
    assert found[0]["last"] == 2 + steps
    lines = logged(found)
    # Two are of before.
    assert len(lines) == 2 + steps
    assert lines[-1]["epoch"] == 2.0
    first = min(16 + size * rounds * ranks, ROWS)
    assert lines[2]["epoch"] == pytest.approx(first / ROWS, abs=1e-4)
    # The schedule ends with the run.
    assert lines[-1]["learning_rate"] == pytest.approx(1e-3 / (2 + steps))


def test_a_run_that_changed_its_steps_goes_on_bit_by_bit_from_the_middle_of_the_rest(
    pools, tmp_path, begun
):
    checkpoint, order = begun
    changes = {**batches(2, 1), "max_steps": 6}
    first = pools(1).run(rows_of_steps, tmp_path / "a", DDP(), changes, checkpoint)
    middle = tmp_path / "a" / "checkpoint-4"
    second = pools(1).run(rows_of_steps, tmp_path / "b", DDP(), changes, middle)
    assert in_order(second) == order[20:24]
    assert logged(second)[-2:] == logged(first)[-2:]
    # A job that is started again after its last step makes no more.
    done = {**changes, "max_steps": 4}
    third = pools(1).run(rows_of_steps, tmp_path / "c", DDP(), done, middle)
    assert in_order(third) == []
    assert logged(third) == logged(first)[:4]


def test_rows_in_groups_of_a_length_keep_their_order_too(pools, tmp_path):
    grouped = {"train_sampling_strategy": "group_by_length", "save_steps": 2}
    first = {**batches(2, 2), **grouped, "max_steps": 2}
    begun = in_order(pools(2).run(rows_of_steps, tmp_path / "a", DDP(), first))
    checkpoint = tmp_path / "a" / "checkpoint-2"
    second = {**batches(3, 1), **grouped, "max_steps": 4}
    rest = in_order(pools(1).run(rows_of_steps, tmp_path / "b", DDP(), second, checkpoint))
    assert len({*begun, *rest}) == ROWS == len(begun) + len(rest)


def test_another_dataset_or_order_is_refused(pools, tmp_path, begun):
    checkpoint, _ = begun
    with pytest.raises(RuntimeError, match=r"had seed 3 and this one has 4.*ignore_data_skip"):
        pools(1).run(rows_of_steps, tmp_path, DDP(), {"data_seed": 4}, checkpoint)


def test_a_run_begins_in_no_folder_whose_checkpoints_it_would_write_again(pools, begun):
    checkpoint, _ = begun
    run = checkpoint.parent
    with pytest.raises(RuntimeError, match=r"has saved checkpoint-2.*begins after 0 steps"):
        pools(1).run(rows_of_steps, run, DDP(), {"max_steps": 1})
