"""The worker pool: real ranks that cannot hang a suite."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from distft.testing import RanksFailed, RanksTimedOut, WorkerPool


def rank_and_sum():
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), float(value), os.getpid()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 says no")
    return dist.get_rank()


def fail_on_rank_1_while_others_wait():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 says no")
    dist.barrier()


def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.barrier()


def end_the_process():
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.get_rank()


def test_ranks_return_in_order_and_live_on_between_runs():
    with WorkerPool(2, timeout=300) as pool:
        first = pool.run(rank_and_sum)
        second = pool.run(rank_and_sum)
    assert [answer[:2] for answer in first] == [(0, 3.0), (1, 3.0)]
    assert [answer[2] for answer in first] == [answer[2] for answer in second]


def make_groups(number):
    for _ in range(number):
        dist.new_group(list(range(dist.get_world_size())))
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_new_ranks_take_over_where_groups_have_piled_up():
    with WorkerPool(2, timeout=300, max_threads=20) as pool:
        processes = [pool.run(make_groups, 3)[0] for _ in range(5)]
    # 4 threads, and 3 more for each group: 13 after the first run, 22 after the second.
    assert [processes.index(each) for each in processes] == [0, 0, 2, 2, 4]


def test_an_error_on_one_rank_comes_back_with_its_traceback(pools):
    with pytest.raises(RanksFailed, match=r"(?s)Ranks \[1\] of 2.*fail_on_rank_1.*says no") as info:
        pools(2).run(fail_on_rank_1)
    assert isinstance(info.value.errors[1], ValueError)
    assert pools(2).run(rank_and_sum)[0][1] == 3.0


def test_ranks_left_waiting_by_an_error_are_ended_and_new_ones_start():
    with WorkerPool(2, timeout=300) as pool:
        before = pool.run(rank_and_sum)[0][2]
        with pytest.raises(RanksFailed, match=r"(?s)says no.*Ranks \[0\] did not come back"):
            pool.run(fail_on_rank_1_while_others_wait)
        answers = pool.run(rank_and_sum)
        assert answers[0][1] == 3.0
        assert answers[0][2] != before


def test_a_hang_ends_in_time_with_the_stack_of_every_rank():
    with WorkerPool(2, timeout=300) as pool:
        pool.run(rank_and_sum)
        started = time.monotonic()
        with pytest.raises(RanksTimedOut, match=r"(?s)1 of 2 ranks.*rank 0.*wait_for_nobody"):
            pool.run(wait_for_nobody, timeout=3)
        assert time.monotonic() - started < 120
        assert pool.run(rank_and_sum)[1][1] == 3.0


def test_a_process_that_ends_is_reported():
    with WorkerPool(2, timeout=300) as pool:
        with pytest.raises(RanksFailed, match="process ended"):
            pool.run(end_the_process)
        assert pool.run(rank_and_sum)[0][1] == 3.0


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match=r"WorkerPool\(0\)"):
        WorkerPool(0)
