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


def table(*rows, header=""):
    return "\n".join(
        [header, *(f"GPU{i}\t" + "\t".join(row.split()) for i, row in enumerate(rows))]
    )


SINGLE = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPIX\t0-27\t0\t\tN/A\n"
UNUSUAL = {
    "escape after the tab": "\t\x1b[4mGPU0\tGPU1\x1b[0m\r\nGPU0\t X \tNV4\r\nGPU1\tNV4\t X \r\n",
    "escape byte lost": "[4m\tGPU0\tGPU1[0m\nGPU0\t X \tNV4\nGPU1\tNV4\t X ",
    "escapes in cells": "\tGPU0\tGPU1\n\x1b[1mGPU0\x1b[0m\tX\tNV\x1b[0m4\nGPU1\tNV4\tX",
    "no header": table("X NV4", "NV4 X"),
    "header glued": "GPU0GPU1NIC0NIC1CPU Affinity\nGPU0 X NV4 PIXSYS 0-7\nGPU1 NV4 X SYSPIX 0-7",
    "header glued in part": "\t  GPU0GPU1mlx5_0\tmlx5_2\nGPU0 X NV4 PIX SOC\nGPU1 NV4 X PIX SOC",
    "cells glued": "GPU0 GPU1\nGPU0 XNV4 0-7\nGPU1 NV4X 0-7",
    "columns permuted": "\tGPU1\tNIC0\tGPU0\nGPU0\tNV4\tPIX\tX\nGPU1\tX\tSYS\tNV4",
    "rows permuted": "\tGPU0\tGPU1\nGPU1\tNV4\tX\nGPU0\tX\tNV4",
    "labels of srun": "0: \tGPU0\tGPU1\n0: GPU0\tX\tNV4\n0: GPU1\tNV4\tX",
    "table of a page": "| | GPU0 | GPU1 |\n|---|---|---|\n| GPU0 | X | NV4 |\n| GPU1 | NV4 | X |",
    "a slice": "\tGPU0\tGPU1\nGPU0\tX\tNV4\n  MIG 1g.10gb Device 0: (UUID)\nGPU1\tNV4\tX",
    "quoted": "> \tGPU0\tGPU1\n> GPU0\tX\tNV4\n> GPU1\tNV4\tX",
}


@pytest.mark.parametrize("text", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_form_gives_the_same_links(text):
    cluster = Cluster.parse(text)
    assert cluster.table.links == (("X", "NV4"), ("NV4", "X"))
    assert cluster.nvlink_groups == [[0, 1]]


def test_one_gpu_has_no_pairs_and_its_cells_are_read():
    cluster = Cluster.parse(SINGLE + "NIC0\tPIX\t X \n\nNIC Legend:\n\n  NIC0: mlx5_bond_0\n")
    assert (cluster.fabric, cluster.nvlink_groups, cluster.table.link_pairs()) == ("single", [], {})
    assert cluster.table.nics == ("mlx5_bond_0",)
    assert cluster.table.nic_links == (("PIX",),)
    assert (cluster.table.cpu_affinity, cluster.table.numa_affinity) == (("0-27",), ("0",))
    assert cluster.place(1) == [0]


def test_gb200_shows_its_tray_with_memory_of_its_own():
    header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    rows = ("X NV18 0-71 0,3-9,11-17 2", "NV18 X 72-143 1,19-25,27-33 10")
    read = Cluster.parse(table(*rows, header=header)).table
    assert read.numa_affinity == ("0,3-9,11-17", "1,19-25,27-33")
    assert read.gpu_numa_id == ("2", "10")


def test_blank_affinity_is_not_known_rather_than_shifted():
    header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    text = f"{header}\nGPU0\t X \tNV4\t\t\t\tN/A\nGPU1\tNV4\t X \t0-7\t\t\t3"
    read = Cluster.parse(text).table
    assert read.cpu_affinity == (None, "0-7")
    assert read.numa_affinity == (None, None)
    assert read.gpu_numa_id == (None, "3")


FOREIGN = {
    "empty": ("", "no row of any GPU"),
    "a page": ("<html><body>502 GPU0 X NV18</body></html>", "no row of any GPU"),
    "a shell": ("bash: nvidia-smi: command not found", "command not found"),
    "of another maker": ("GPU0 GPU1\nGPU0 0 15\nGPU1 15 0", "no row of any GPU"),
    "topo -p2p": ("\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n\n  X = Self\n", "no link between any"),
    "two nodes": (table("X NV4", "NV4 X") + table("X SYS", "SYS X"), "two different rows of GPU0"),
    "rows missing": ("\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tNV4", "3 GPUs, but has rows of 1"),
    "row cut": ("GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4", "row of GPU1 has 1 links, but there are 2"),
    "no diagonal": ("GPU0 GPU1\nGPU0 NV4 NV4\nGPU1 NV4 X", "own column"),
    "fewer rows than links": (table("X NV4 NV4", "NV4 X NV4"), "rows of 2 GPUs, but links to 1"),
    "no text": (None, "of type NoneType"),
}


@pytest.mark.parametrize(("text", "message"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_or_truncated_text_is_one_clear_error(text, message):
    with pytest.raises(ValueError, match=message):
        Cluster.parse(text)


def test_what_cannot_be_read_is_unknown_and_counted():
    cluster = Cluster.parse(table("X ??? SYS", "??? X SYS", "SYS SYS X"), gpu="A100")
    assert cluster.fabric == "unknown"
    assert cluster.table.link_pairs() == {"unknown": 1, "SYS": 2}
    assert any("1 pairs of GPUs have no readable link" in line for line in cluster.warnings)
    assert cluster.place(2) == [0, 2]
    with pytest.raises(ValueError, match="cannot be read, so no bandwidth is known"):
        cluster.bus_bandwidth("all_reduce", [0, 1])


def test_rows_that_disagree_give_the_slower_link_and_a_count():
    cluster = Cluster.parse(table("X NV4", "SYS X"))
    assert cluster.table.link(0, 1) == "SYS"
    assert "1 pairs of GPUs" in cluster.warnings[0]


def test_rows_without_a_network_card_of_the_header_are_counted():
    cluster = Cluster.parse("\tGPU0\tGPU1\tNIC0\nGPU0\tX\tPIX\nGPU1\tPIX\tX\tSYS")
    assert cluster.table.link_pairs() == {"PIX": 1}
    assert "1 rows of GPUs have another number of links to network cards" in cluster.warnings[0]
