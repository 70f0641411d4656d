"""Saves that go on beside training, and how many checkpoints stay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.testing import RanksFailed
from tests.gloo.checkpoint_jobs import Recipe
from tests.gloo.save_jobs import (
    fail_beside_training,
    files_of,
    parts_of_two_tensors,
    save_beside_training,
    save_many_times,
)

QUICK = [(DDP(), 2), (ZeRO1(), 2), (ZeRO3(), 2), (FSDP2(), 2), (EP(ep=2), 2)]
MORE = [(ZeRO2(), 3), (HSDP(dp_replicate=2), 4), (TP(tp=2), 2), (NDParallel(tp=2, ep=2), 4)]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [*QUICK, *(pytest.param(*world, marks=pytest.mark.slow) for world in MORE)],
    ids=str,
)
def test_a_save_beside_training_holds_the_bytes_of_its_moment(pools, tmp_path, strategy, ranks):
    recipe = Recipe("M" if "EP" in str(strategy) or "ND" in str(strategy) else "L")
    for found in pools(ranks).run(save_beside_training, strategy, recipe, tmp_path):
        assert found["there"] == (False, False)
        assert found["moved"]
        assert found["loaded"]
        assert found["again"] == found["losses"]
        assert found["path"] == tmp_path / "beside" / "step-1"
    waited, beside = files_of(tmp_path / "waited"), files_of(tmp_path / "beside")
    assert waited.keys() == beside.keys()
    assert [name for name in waited if waited[name] != beside[name]] == []
    assert distft.verify(tmp_path / "beside", require="proven").holds
    assert sorted(os.listdir(tmp_path)) == ["beside", "waited"]


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3()], ids=str)
def test_a_save_waits_for_the_one_before_and_copies_to_the_same_memory(pools, tmp_path, strategy):
    for found in pools(2).run(save_many_times, strategy, Recipe(), tmp_path):
        assert found["done"] == [[], [True], [True, True]]
        first, second, third = found["places"]
        assert second == third
        assert set(first) <= set(second)
        assert len(first) >= 4
        assert found["last"]
        assert found["step"] == 2
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_an_error_beside_training_comes_out_once_on_every_rank(pools, tmp_path):
    ranks = pools(2).run(fail_beside_training, FSDP2(), Recipe(), tmp_path)
    assert ranks[0] == ranks[1]
    told, at_the_next, well = ranks[0]
    cause = "beside training, failed: OSError: [Errno 28] No space left on device (on rank 1)"
    assert told == ("RuntimeError", f"The save of step 1 to {tmp_path / 'a'}, {cause}")
    assert at_the_next == ("RuntimeError", f"The save of step 2 to {tmp_path / 'b'}, {cause}")
    assert well == ("", "")
    assert os.listdir(tmp_path) == ["d"]


def test_a_process_that_ends_waits_for_its_save_without_a_group(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import sys; from tests.gloo import save_jobs; save_jobs.train_and_leave(sys.argv[1])"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said
        assert "failed" not in said
    assert distft.latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_a_number_to_keep_below_one_is_refused(keep):
    from distft.checkpoint.save import _check_keep

    with pytest.raises(ValueError, match=r"needs the number of checkpoints that stay, at least 1"):
        _check_keep(keep)


def test_tensors_that_are_split_alike_are_cut_alike(pools):
    assert pools(2).run(parts_of_two_tensors, False) == [
        [("one", (0, 0)), ("other", (0, 0))],
        [("one", (2, 0)), ("other", (2, 0))],
    ]


def test_a_part_of_another_shape_than_its_like_is_refused(pools):
    with pytest.raises(RanksFailed, match=r"shape \(4, 3\) has 3 indices in dimension 0.*give 2"):
        pools(2).run(parts_of_two_tensors, True)
