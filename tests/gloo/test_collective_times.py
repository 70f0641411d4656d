"""`distft.topology.measure` on live ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

from distft.testing import RanksFailed
from distft.topology import Measurements, measure
from distft.topology.microbenchmark import MEASURED_OPS, in_processes_of_their_own


def test_every_collective_is_timed_over_sizes_and_groups_alike_on_all_ranks(pools):
    found = pools(3).run(measure, MEASURED_OPS, [4096, 100_000])
    assert found[0] == found[1] == found[2]
    measured = found[0]
    assert isinstance(measured, Measurements)
    assert (measured.backend, measured.world_size, measured.p2p) == ("gloo", 3, True)
    groups = [(op, ranks) for ranks in (2, 3) for op in MEASURED_OPS for _ in range(2)]
    assert [(point.op, point.ranks) for point in measured.points] == groups
    # Whole elements of 4 bytes for each rank.
    assert {point.num_bytes for point in measured.points if point.ranks == 3} == {4092, 99_996}
    assert all(1e-6 < point.seconds < 60 for point in measured.points)


def refused(kind):
    rank = dist.get_rank()
    arguments = {
        "differs": {"sizes": [4096 * (1 + rank)]},
        "too many": {"ranks": [3]},
        "no such op": {"ops": ["all_reduced"]},
        "too small": {"sizes": [2]},
        "nothing": {"sizes": []},
        "p2p": {"p2p": False},
    }[kind]
    return measure(**arguments)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("differs", r"sizes|\(4096,\).* on rank 0"),
        ("too many", "groups are of 2 to 2 ranks"),
        ("no such op", "Did you mean 'all_reduce'"),
        ("too small", "at least 4"),
        ("nothing", "sizes is empty"),
        ("p2p", "this group measures on the cpu"),
    ],
)
def test_arguments_that_cannot_be_measured_raise_on_every_rank(pools, kind, message):
    with pytest.raises(RanksFailed, match=message) as failed:
        pools(2).run(refused, kind)
    assert [type(error) for error in failed.value.errors] == [ValueError] * 2


def test_one_rank_is_told_how_to_start_more(pools):
    with pytest.raises(RanksFailed, match="needs at least 2 ranks, but there is 1"):
        pools(1).run(measure)


def measure_again():
    return in_processes_of_their_own({"NCCL_P2P_DISABLE": "1"}, ["all_reduce", "send"], [4096], [2])


def test_processes_of_their_own_measure_with_other_variables(pools):
    found = pools(2).run(measure_again)
    assert found[0] == found[1]
    assert not found[0].p2p
    assert [point.op for point in found[0].points] == ["all_reduce", "send"]


@pytest.mark.slow
def test_the_command_starts_ranks_prints_saves_and_draws(tmp_path):
    out, plot = tmp_path / "links.json", tmp_path / "links.png"
    command = f"bench-collectives --local 2 --sizes 4096 --json --out {out} --plot {plot}"
    done = subprocess.run(
        [sys.executable, "-m", "distft", *command.split()],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    printed = json.loads(done.stdout)
    assert [point["op"] for point in printed["points"]] == list(MEASURED_OPS)
    assert printed["points"] == json.loads(out.read_text())["points"]
    assert plot.stat().st_size > 10_000
