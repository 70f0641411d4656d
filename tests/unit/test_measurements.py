"""Measured times of collectives: kept as JSON, read instead of predictions, drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distft import Cluster
from distft.topology import Measurements, Point
from distft.topology.measurements import load_measurements

TOPOLOGY = (Path(__file__).parents[1] / "topo" / "49-SYNTHETIC-h200nvl-two-quads.txt").read_text()
MEASURED = Measurements(
    (
        Point("all_reduce", 4, 1_000, 10e-6),
        Point("all_reduce", 4, 1_000_000, 20e-6),
        Point("all_reduce", 4, 1_000_000_000, 5e-3),
        Point("all_gather", 8, 1_000_000_000, 20e-3),
    ),
    backend="nccl",
    device="NVIDIA H200 NVL",
    world_size=8,
    local_world_size=8,
    topology=TOPOLOGY,
)


def test_bandwidths_are_those_of_nccl_tests():
    point = Point("all_reduce", 8, 2**30, 4e-3)
    assert point.algorithm_bandwidth == 2**30 / 4e-3
    assert point.bus_bandwidth == pytest.approx(point.algorithm_bandwidth * 1.75)
    assert Point("send", 2, 1000, 1.0).bus_bandwidth == 1000
    lines = str(MEASURED).splitlines()
    assert lines[0] == "# nccl on 8 ranks, 8 per node, NVIDIA H200 NVL"
    assert lines[5].split() == ["all_reduce", "4", "1000000000", "5000.0", "200.000", "300.000"]


def test_what_was_measured_stands_before_what_is_predicted(tmp_path):
    predicted = Cluster.preset("8xH200-NVL")
    cluster = predicted.with_measured(MEASURED.save(tmp_path / "links.json"))
    assert cluster.bus_bandwidth("all_reduce", 4) == pytest.approx(300e9)
    assert cluster.bus_bandwidth("all_reduce", 2) == predicted.bus_bandwidth("all_reduce", 2)
    assert cluster.time("all_reduce", 10, 4) == 10e-6
    assert cluster.time("all_reduce", 500_500, 4) == pytest.approx(15e-6)
    assert cluster.time("all_reduce", 2e9, 4) == pytest.approx(10e-3)
    # A mesh axis whose ranks lie apart is another group than the one that was measured.
    apart = cluster.bus_bandwidth("all_reduce", 4, stride=2)
    assert apart == predicted.bus_bandwidth("all_reduce", 4, stride=2)


def test_a_file_of_measurements_is_a_cluster_by_itself(tmp_path):
    cluster = Cluster.load(MEASURED.save(tmp_path / "links.json"))
    assert (cluster.gpu.name, cluster.num_gpus) == ("H200-NVL", 8)
    assert cluster.nvlink_groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    on_cpu = replace(MEASURED, device="2 processor cores", backend="gloo", topology=None)
    cluster = Cluster.load(on_cpu.save(tmp_path / "cpu.json"))
    assert (cluster.gpu, cluster.num_gpus, cluster.fabric) == (None, 8, "unknown")
    assert cluster.bus_bandwidth("all_gather", 8) == pytest.approx(7 / 8 * 1e9 / 20e-3)


def test_measurements_of_nodes_need_no_wire_but_other_groups_do(tmp_path):
    nodes = replace(MEASURED, world_size=16, points=(Point("all_reduce", 16, 1000, 1e-3),))
    cluster = Cluster.load(nodes.save(tmp_path / "links.json"))
    assert cluster.nodes == 2
    assert cluster.time("all_reduce", 1000, 16) == 1e-3
    with pytest.raises(ValueError, match="all_gather over 16 ranks crosses 2 nodes, whose wire"):
        cluster.time("all_gather", 1000, 16)


def saved(**changes):
    fields = {
        "format": "distft.topology.measurements/1",
        "backend": "nccl",
        "device": "NVIDIA H200",
    }
    point = {"op": "all_reduce", "ranks": 2, "num_bytes": 8, "seconds": 1e-3}
    fields |= {"world_size": 2, "local_world_size": 2, "points": [point]}
    for name, value in changes.items():
        (point if name in point else fields)[name] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\x00",
        '{"format": "other"}',
        saved(op="allreduce"),
        saved(seconds=0),
        saved(seconds="1 ms"),
        saved(num_bytes=-8),
        saved(ranks=1),
        saved(points=[]),
        saved(points=None),
        saved(gbps=400),
    ],
)
def test_a_file_that_holds_no_measurements_is_one_clear_error(tmp_path, text):
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"links.json holds .*distft.topology.measure"):
        load_measurements(path)
    with pytest.raises(ValueError, match=r"links.json holds"):
        Cluster.preset("p5").with_measured(path)


def test_a_plot_has_a_panel_for_each_number_of_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    slow = replace(MEASURED, p2p=False)
    picture = MEASURED.plot(tmp_path / "links.svg", slow).read_text()
    # Text is drawn as paths, whose comments name it.
    for word in ("4 ranks", "8 ranks", "bus bandwidth (GB/s)", "dashed: without NVLink"):
        assert word in picture
