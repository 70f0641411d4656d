"""Traffic on a machine: the link of each collective, and its seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distft import FSDP2, HSDP, ModelSpec, NDParallel, Workload
from distft.formulas.reports import TrafficReport
from distft.topology import Cluster

SPEC = ModelSpec.from_config("Llama-3.1-8B")
NVL = Cluster.preset("8xH200-NVL")


def links(report: TrafficReport) -> dict[str, str]:
    return {each.axis: each.link for each in report.collectives if each.what != "counts"}


def test_replicas_of_hsdp_go_over_the_slow_link_and_its_gathers_over_nvlink():
    strategy = HSDP(dp_replicate=2, dp_shard=4)
    found = links(strategy.traffic(SPEC, Workload(), world_size=8, cluster=NVL))
    assert found["dp_shard"].startswith("NV")
    assert found["dp_replicate"] == "SYS"


def test_groups_in_several_nodes_go_over_the_network_and_tp_stays_inside():
    cluster = Cluster.preset("8xH100-SXM", nodes=2)
    strategy = NDParallel(dp_shard=4, tp=4)
    found = links(strategy.traffic(SPEC, Workload(), world_size=16, cluster=cluster))
    assert found["tp"].startswith("NV")
    assert found["dp_shard"] == "network"


def test_seconds_are_bytes_over_the_bus_bandwidth_and_sum_by_link():
    cluster = Cluster.preset("8xH100-SXM")
    report = FSDP2().traffic(SPEC, Workload(grad_accum=2), world_size=8, cluster=cluster)
    gather = next(each for each in report.collectives if each.what == "parameters")
    assert gather.seconds == pytest.approx(
        gather.num_bytes / cluster.bus_bandwidth("all_gather", 8)
    )
    assert report.seconds_per_step == pytest.approx(sum(report.seconds_by_link().values()))
    assert report.seconds_per_step > 2 * gather.seconds


def test_across_quads_the_same_bytes_take_about_nine_times_as_long():
    load = Workload()
    seconds = [
        FSDP2().traffic(SPEC, load, world_size=4, cluster=replace(NVL, visible=gpus))
        for gpus in ((0, 1, 2, 3), (0, 1, 4, 5))
    ]
    assert seconds[0].bytes_per_step == seconds[1].bytes_per_step
    fast, slow = (each.seconds_per_step for each in seconds)
    assert fast is not None
    assert slow is not None
    assert 7 < slow / fast < 11


def test_a_report_without_a_machine_has_neither_links_nor_seconds():
    report = FSDP2().traffic(SPEC, Workload(), world_size=8)
    assert report.seconds_per_step is None
    assert " link" not in str(report)
    assert " link" in str(FSDP2().traffic(SPEC, Workload(), world_size=8, cluster=NVL))


def test_a_machine_with_fewer_gpus_than_ranks_is_refused():
    with pytest.raises(ValueError, match="16 ranks, but the cluster has 8 GPUs"):
        FSDP2().traffic(SPEC, Workload(), world_size=16, cluster=NVL)
