"""The hang doctor with real ranks: one message within 10 s, exit codes that say it, no orphans."""

from __future__ import annotations

import os

import pytest

from tests.gloo import hang_jobs as jobs


def ended(fault, folder, **more):
    found = jobs.run_ranks(jobs.faulty(fault), folder, **more)
    assert not found["late"], found
    assert found["seconds"] < 10, found
    assert all(found["codes"]), found["codes"]
    reports = [text for text in found["printed"] if "distft:" in text]
    assert len(reports) == 1, found["printed"]
    assert reports[0].count("distft:") == 1
    return found, reports[0]


def test_a_rank_that_sleeps_is_named_with_its_stack_and_leaves_no_process(tmp_path):
    found, text = ended(jobs.sleeps, tmp_path)
    assert "rank 2: after train_step 2" in text
    assert "ranks 0-1: train_step 3" in text
    assert "time.sleep(600)" in text
    # torch's flight recorder: the two are one collective ahead.
    assert "ranks 0-1: all_gather" in text
    assert found["codes"] == [70, 70, 70]
    for pid in found["children"]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("fault", "rank"), [(jobs.dies, 1), (jobs.first_dies, 0)], ids=["rank 1", "with the store"]
)
def test_a_rank_that_dies_is_named(tmp_path, fault, rank):
    found, text = ended(fault, tmp_path)
    assert f"the process of rank {rank} is gone" in text
    assert "train_step 3" in text
    assert found["codes"] == [-9 if each == rank else 70 for each in range(3)]


def test_a_rank_that_is_stopped_is_named_and_ended(tmp_path):
    found, text = ended(jobs.stops, tmp_path)
    assert "rank 1: no answer" in text
    assert found["codes"] == [70, -9, 70]


@pytest.mark.parametrize(("fault", "rank"), [(jobs.raises, 1), (jobs.first_raises, 0)])
def test_a_rank_that_raises_ends_all_with_its_error(tmp_path, fault, rank):
    found, text = ended(fault, tmp_path)
    assert f"rank {rank} raised KeyError: 'labels of row 7'" in text
    assert "train_step 3" in text
    assert found["codes"] == [1 if each == rank else 70 for each in range(3)]
    assert "Traceback" in found["printed"][rank]


def test_an_error_that_all_ranks_raise_is_left_alone(tmp_path):
    found = jobs.run_ranks(jobs.faulty(jobs.raise_alike), tmp_path)
    assert found["codes"] == [1, 1, 1]
    assert "distft:" not in "".join(found["printed"])


@pytest.mark.parametrize(
    ("fault", "few", "many"),
    [
        (jobs.saves_alone, "rank 0: save 1, step 2", "ranks 1-2: train_step 3"),
        (jobs.evaluates_alone, "rank 1: evaluate 1, 40 rows", "train_step 3"),
    ],
)
def test_ranks_in_two_branches_are_named_with_what_they_do(tmp_path, fault, few, many):
    _, text = ended(fault, tmp_path)
    assert few in text
    assert many in text


def test_a_rank_with_fewer_batches_is_named(tmp_path):
    _, text = ended(jobs.has_fewer_batches, tmp_path)
    assert "rank 1: left the watched block, after train_step 3" in text
    assert "fewer batches" in text


def test_a_run_without_a_fault_ends_as_without_a_watch(tmp_path):
    found = jobs.run_ranks(jobs.faulty(jobs.trains), tmp_path)
    assert found["codes"] == [0, 0, 0]
    assert "distft" not in "".join(found["printed"])


def test_ranks_that_wait_in_torchs_own_collectives_are_named_too(tmp_path):
    found = jobs.run_ranks(jobs.waits_in_a_barrier, tmp_path, ranks=2)
    assert found["codes"] == [70, 70]
    assert found["seconds"] < 10
    assert "dist.barrier()" in "".join(found["printed"])
