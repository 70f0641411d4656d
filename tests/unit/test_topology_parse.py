"""Every kind of `nvidia-smi topo -m` that is out there gives the links that it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import distft
from distft import Cluster

FOLDER = Path(__file__).parents[1] / "topo"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
TABLES = [case for case in EXPECTED if not case.get("negative")]


def text_of(case):
    return (FOLDER / case["file"]).read_bytes().decode()


def column(values, num_gpus):
    return tuple(None if v == "N/A" else v for v in values or [None] * num_gpus)


@pytest.mark.parametrize("case", TABLES, ids=lambda case: case["file"])
def test_a_published_table_reads_as_expected(case):
    cluster = Cluster.parse(text_of(case))
    table = cluster.table
    assert cluster.num_gpus == case["n_gpus"]
    assert len(table.nics) == case["n_nics"]
    assert table.link_pairs() == case["link_pairs"]
    assert cluster.nvlink_groups == case["nvlink_groups"]
    assert cluster.fabric == case["expected_class"]
    if cluster.nvlink_groups:
        cliques = all(cluster.wiring.is_clique(group) for group in cluster.nvlink_groups)
        assert cliques == case["groups_are_cliques"]
    if case["cpu_affinity"]:
        assert table.cpu_affinity == column(case["cpu_affinity"], case["n_gpus"])
    assert table.numa_affinity == column(case["numa_affinity"], case["n_gpus"])
    assert table.gpu_numa_id == column(case["gpu_numa_id"], case["n_gpus"])
    assert cluster.warnings == ()


def test_an_error_of_nvidia_smi_is_one_clear_error():
    text = (FOLDER / "51-NEGATIVE-error-text.txt").read_text()
    with pytest.raises(ValueError, match=r"no row of any GPU: it starts with 'The -i command"):
        distft.Cluster.parse(text)
