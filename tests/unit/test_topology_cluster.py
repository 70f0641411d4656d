"""What links amount to: groups, the slowest hop, the best GPUs, bandwidth against measurements."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distft import Cluster
from distft.commands import main
from distft.topology import GPUS, PRESETS, bus_factor

TEXTS = Path(__file__).parents[1] / "topo"
H200_NVL = (TEXTS / "49-SYNTHETIC-h200nvl-two-quads.txt").read_text()
CROSSED = (TEXTS / "27-h100pcie-8-crossed-pairs.txt").read_text()
CUBE_MESH = (TEXTS / "19-v100-cube-mesh-slurm.txt").read_text()


def matrix(rows):
    return "\n".join(f"GPU{i} {row}" for i, row in enumerate(rows))


def full(count, link, without=()):
    return matrix(
        " ".join(
            "X" if i == j else "SYS" if i in without or j in without else link for j in range(count)
        )
        for i in range(count)
    )


# Bus bandwidth in GB/s as published: H200 pairs, quads and across quads; stas00/ml-engineering;
# the Smol training playbook; NVIDIA/nccl#1374, #1639; NVIDIA/nccl-tests#149, #331.
MEASURED = [
    ("8xH200-SXM", "all_reduce", 2, 330),
    ("8xH200-SXM", "all_reduce", 4, 363.3),
    ("8xH200-SXM", "all_reduce", 5, 414.2),
    ("8xH200-SXM", "all_reduce", 6, 435.6),
    ("8xH200-SXM", "all_reduce", 7, 460),
    ("8xH200-SXM", "all_reduce", 8, 473.1),
    ("8xH200-SXM", "all_gather", 8, 361.4),
    ("8xH200-SXM", "reduce_scatter", 8, 362.9),
    ("8xB200-SXM", "all_reduce", 4, 673),
    ("8xB200-SXM", "all_reduce", 8, 838),
    ("8xH800-SXM", "all_reduce", 8, 215),
    ("8xA100-SXM", "all_reduce", 4, 228),
    ("8xA100-SXM", "all_reduce", 8, 234.9),
    ("p5", "all_reduce", 8, 480),
    ("p5", "all_to_all", 8, 340),
    ("p5", "send", 2, 364.9),
    ("8xH200-NVL", "all_reduce", 2, 114),
    ("8xH200-NVL", "all_reduce", 4, 322),
    ("8xH200-NVL", "all_reduce", [0, 4], 28),
    ("8xH200-NVL", "all_reduce", [0, 1, 4, 5], 35),
    ("8xH200-NVL", "all_reduce", 8, 39),
]


@pytest.mark.parametrize(("name", "op", "ranks", "measured"), MEASURED)
def test_bandwidth_in_a_node_is_within_a_fifth_of_what_was_measured(name, op, ranks, measured):
    bandwidth = Cluster.preset(name).bus_bandwidth(op, ranks) / 1e9
    assert bandwidth == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("name", "nodes", "gbps", "op", "ranks", "measured"),
    [
        ("8xH200-SXM", 4, 3200, "all_reduce", 32, 369),
        ("8xB200-SXM", 4, 3200, "all_reduce", 32, 381.8),
        ("8xA100-SXM", 4, 800, "all_reduce", 32, 91.7),
        ("8xH100-SXM", 2, 1600, "all_reduce", 16, 193),
        ("p5", 2, 3200, "all_reduce", 16, 335),
    ],
)
def test_bandwidth_of_nodes_is_within_a_fifth_of_what_was_measured(
    name, nodes, gbps, op, ranks, measured
):
    bandwidth = Cluster.preset(name, nodes, gbps).bus_bandwidth(op, ranks) / 1e9
    assert bandwidth == pytest.approx(measured, rel=0.2)


def test_bandwidth_of_bridged_pairs_follows_the_links_of_the_card():
    pair = full(2, "NV4")
    a100 = Cluster.parse(pair, "A100-PCIe-80GB").bus_bandwidth("all_reduce", 2)
    a40 = Cluster.parse(pair, "A40").bus_bandwidth("all_reduce", 2)
    assert a100 == pytest.approx(72e9, rel=0.2)
    assert a40 == pytest.approx(47.5e9, rel=0.2)


@pytest.mark.parametrize(("ranks", "measured"), [(4, 35), (8, 28)])
def test_bandwidth_over_the_host_is_within_a_fifth_of_what_was_measured(ranks, measured):
    # RTX 5090 on PCIe 5, whose driver has no peer access (NVIDIA/nccl#1639).
    cluster = Cluster.parse(full(8, "NODE"), gpu="RTX5090")
    bandwidth = cluster.bus_bandwidth("all_reduce", ranks) / 1e9
    assert bandwidth == pytest.approx(measured, rel=0.2)


def test_a_send_between_nodes_has_one_gpus_share_of_the_wire():
    bandwidth = Cluster.preset("p5", nodes=2).bus_bandwidth("send", 2, stride=8) / 1e9
    assert bandwidth == pytest.approx(38.2, rel=0.2)


def test_a_small_all_reduce_takes_as_long_as_measured():
    # 107 GB/s of bus bandwidth at 4 MiB on 8 H200 (stas00/ml-engineering).
    seconds = Cluster.preset("8xH200-SXM").time("all_reduce", 4 * 2**20, 8)
    assert 4 * 2**20 * bus_factor("all_reduce", 8) / seconds == pytest.approx(107e9, rel=0.1)


def test_the_wire_between_quads_is_ten_times_slower_and_the_hop_is_named():
    cluster = Cluster.parse(H200_NVL, gpu="H200-NVL")
    inside, across = [0, 1, 2, 3], [0, 1, 4, 5]
    assert cluster.slowest_hop(inside).link == "NV6"
    assert cluster.slowest_hop(across).link == "SYS"
    ratio = cluster.bus_bandwidth("all_reduce", inside) / cluster.bus_bandwidth(
        "all_reduce", across
    )
    assert 8 < ratio < 12


def test_a_pair_of_a_quad_leaves_two_thirds_of_its_links_idle():
    cluster = Cluster.parse(H200_NVL, gpu="H200-NVL")
    quad, pair = (cluster.bus_bandwidth("all_gather", n) for n in (4, 2))
    assert quad == pytest.approx(3 * pair)


def test_a_hybrid_cube_mesh_is_no_clique_but_has_a_ring_with_all_six_links():
    cluster = Cluster.parse(CUBE_MESH, gpu="V100-32GB")
    assert not cluster.wiring.is_clique(cluster.nvlink_groups[0])
    assert cluster.slowest_hop(range(8)).link == "NV2"
    assert cluster.wiring.ring_links(range(8)) == 6
    # Three GPUs of it that are joined in a row, but not in a ring.
    assert cluster.slowest_hop([0, 7, 4]).link == "SYS"


def test_placements_keep_to_a_quad_to_bridges_and_to_sockets():
    quads = Cluster.parse(H200_NVL)
    assert quads.place(4) == [0, 1, 2, 3]
    assert str(quads.place(4)) == "CUDA_VISIBLE_DEVICES=0,1,2,3"
    assert quads.place(4).hop.link == "NV6"
    crossed = Cluster.parse(CROSSED)
    assert set(crossed.place(2)) in ({0, 5}, {1, 2}, {3, 4}, {6, 7})
    assert crossed.place(4) == [3, 4, 6, 7]
    # Bridged GPUs are neighbours, so that groups of two consecutive ranks are bridged.
    assert crossed.place(8) == [0, 5, 1, 2, 3, 4, 6, 7]
    seven = Cluster.parse((TEXTS / "17-seven-gpu-pix-phb.txt").read_text())
    assert seven.place(4) == [3, 4, 5, 6]


def test_a_better_pair_is_preferred_to_one_whose_bridge_lost_links():
    text = matrix(["X NV10 NODE NODE", "NV10 X NODE NODE", "NODE NODE X NV12", "NODE NODE NV12 X"])
    cluster = Cluster.parse(text)
    assert cluster.place(2) == [2, 3]
    assert "The group 0-1 (1 in all) share 10 NVLinks where others have 12" in cluster.warnings[0]


DEFECTS = {
    "a link of a mesh": (
        matrix(["X NV5 NV6 NV6", "NV5 X NV6 NV6", "NV6 NV6 X NV6", "NV6 NV6 NV6 X"]),
        r"GPUs 0-1 \(1 in all\) share 5 NVLinks where others have 6",
    ),
    "a GPU of a switch": (
        matrix(["X NV18 NV16", "NV18 X NV16", "NV16 NV16 X"]),
        r"GPUs 0-2, 1-2 \(2 in all\) share 16 NVLinks where others have 18",
    ),
    "none of a cube mesh": (CUBE_MESH, ""),
    "none of half a cube mesh": (
        matrix(["X NV1 NV1 NV2", "NV1 X NV2 NV1", "NV1 NV2 X NV2", "NV2 NV1 NV2 X"]),
        "",
    ),
}


@pytest.mark.parametrize(("text", "warning"), DEFECTS.values(), ids=DEFECTS)
def test_broken_links_are_named_and_uneven_designs_are_not(text, warning):
    warnings = Cluster.parse(text).warnings
    assert len(warnings) == bool(warning)
    assert all(re.match(warning, found) for found in warnings)


def test_a_gpu_that_fell_off_the_switch_is_named_and_left_out():
    cluster = Cluster.parse(full(8, "NV18", without=[3]), gpu="H100-80GB")
    assert cluster.nvlink_groups == [[0, 1, 2, 4, 5, 6, 7]]
    assert cluster.fabric == "nvl-groups"
    assert cluster.warnings == ("1 of 8 GPUs have no NVLink while others do: 3.",)
    assert 3 not in cluster.place(7)


@pytest.mark.parametrize(
    ("text", "gpu", "fabric", "kinds"),
    [
        (full(8, "NV12"), "A100", "nvswitch", ["switch"]),
        (full(8, "NV8"), "A800", "nvswitch", ["switch"]),
        (full(3, "NV8"), "A800", "nvswitch", ["switch"]),
        (full(16, "NV6"), "V100", "nvswitch", ["switch"]),
        (full(4, "NV6"), "H100", "nvl-groups", ["mesh"]),
        (full(4, "NV4"), "A100", "nvl-groups", ["mesh"]),
        (full(2, "NV12"), "H100-NVL", "nvl-groups", ["bridge"]),
        (CUBE_MESH, "V100", "nvl-groups", ["partial mesh"]),
        (CROSSED, "H100-PCIe", "nvl-groups", ["bridge"] * 4),
        (full(4, "NODE"), "L40S", "pcie", []),
    ],
)
def test_the_links_of_the_card_tell_a_switch_from_a_mesh(text, gpu, fabric, kinds):
    cluster = Cluster.parse(text, gpu=gpu)
    assert (cluster.fabric, cluster.nvlink_kinds) == (fabric, kinds)


def test_two_gpus_with_all_links_are_a_pair_at_full_speed_with_a_warning():
    cluster = Cluster.parse(full(2, "NV18"), gpu="H100-80GB")
    assert cluster.bus_bandwidth("all_gather", 2) == pytest.approx(0.78 * 450e9)
    assert "a bridge, or a part of a switch's node" in cluster.warnings[0]


def test_modules_without_nvlink_and_trays_without_a_rack_are_warned_of():
    hidden = Cluster.parse((TEXTS / "41-all-sys-8nic.txt").read_text(), gpu="H100-80GB")
    assert "no NVLink between 8 H100-80GB, whose modules have 18" in hidden.warnings[0]
    assert Cluster.parse(full(4, "SYS"), gpu="H100-PCIe").warnings == ()
    trays = Cluster.parse(full(4, "NV18"), gpu="GB200", nodes=2, internode_gbps=1600)
    assert "Pass nvlink_nodes=18" in trays.warnings[0]


def test_the_nearest_network_cards_of_a_gpu_are_named():
    table = Cluster.parse((TEXTS / "01-a100-sxm-nv12-8nic.txt").read_text()).table
    assert table.nearest_nics(0) == ("mlx5_0", "mlx5_1")
    assert table.nearest_nics(7) == ("mlx5_6", "mlx5_7")
    assert Cluster.preset("p5").table.nearest_nics(0) == ()


def test_visible_devices_keep_the_numbers_of_nvidia_smi():
    cluster = Cluster.parse(H200_NVL, visible_devices="6,7,0,1,2")
    assert cluster.num_gpus == 5
    assert cluster.nvlink_groups == [[0, 1, 2], [6, 7]]
    assert cluster.usable[0] == 6
    assert str(cluster.place(3)) == "CUDA_VISIBLE_DEVICES=0,1,2"
    across = Cluster.preset("8xH200-NVL").with_visible([0, 1, 4, 5])
    assert across.bus_bandwidth("all_reduce", 4) < 40e9


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_whole_and_its_whole_node_is_no_faster_than_its_best_pair_of_links(name):
    cluster = Cluster.preset(name)
    assert cluster.warnings == ()
    assert cluster.fabric in ("nvswitch", "nvl-groups", "pcie")
    assert cluster.gpu in GPUS.values()
    seconds = cluster.time("all_gather", 1e9, cluster.num_gpus)
    assert 1e-3 < seconds < 1


def test_presets_are_the_machines_they_are_called():
    assert [Cluster.preset(name).num_gpus for name in ("DGX-2", "p4d", "p5", "GB200")] == [
        16,
        8,
        8,
        4,
    ]
    assert Cluster.preset("8xH100-PCIe").nvlink_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Cluster.preset("2x4090").fabric == "pcie"
    assert Cluster.preset("DGX-1").wiring.ring_links(range(8)) == 6
    assert Cluster.preset("4xH100-SXM").num_gpus == 4
    # Eighteen trays of a rack share one switch: no network is crossed.
    assert Cluster.preset("GB200", nodes=18).bus_bandwidth("all_gather", 72) > 600e9


def test_a_mesh_axis_that_crosses_nodes_shares_the_wire_with_its_siblings():
    cluster = Cluster.preset("8xH100-SXM", nodes=4)
    alone = cluster.bus_bandwidth("all_gather", 32)
    replicas = cluster.bus_bandwidth("all_reduce", 4, stride=8)
    assert alone == pytest.approx(351e9)
    assert replicas == pytest.approx(0.9 * 400e9 / 8)
    assert cluster.bus_bandwidth("all_reduce", 2, stride=4) == pytest.approx(351e9)


REFUSED = {
    "no such preset": (lambda: Cluster.preset("9xH100"), r"known presets are 8xH100-SXM, .*GB200"),
    "no such GPU": (lambda: Cluster.parse(full(2, "SYS"), gpu="H1000"), "Did you mean 'H100"),
    "no wire": (lambda: Cluster.preset("8xH200-NVL", nodes=2), "internode_gbps is not given"),
    "too many": (lambda: Cluster.preset("p5").place(9), r"place\(9\) wants more GPUs than the 8"),
    "uneven": (lambda: Cluster.preset("p5", nodes=2).place(9), "falls unevenly on 2 nodes"),
    "too wide": (lambda: Cluster.preset("p5").bus_bandwidth("all_reduce", 4, 4), "spans 16 GPUs"),
    "no such op": (lambda: Cluster.preset("p5").time("allreduce", 1, 8), "mean 'all_reduce'"),
    "twice": (lambda: Cluster.preset("p5").slowest_hop([1, 1]), "each once"),
    "not there": (lambda: Cluster.preset("p5").slowest_hop([1, 8]), "GPU 8 is not of this node"),
    "unknown GPU": (lambda: Cluster.parse(CUBE_MESH).bus_bandwidth("reduce", 2), "not known"),
    "not visible": (lambda: Cluster.parse(CUBE_MESH, visible_devices="8"), "name '8'"),
    "seen twice": (lambda: Cluster.parse(CUBE_MESH, visible_devices=[1, 1]), "a GPU twice"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_cluster_does_not_have_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of that name on the path, which prints a table and a list."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        f"print(pathlib.Path({str(tmp_path)!r}, sys.argv[1].strip('-')[:5]).read_text())\n"
    )
    program.chmod(0o755)
    (tmp_path / "topo").write_text(H200_NVL)
    names = "".join(f"{i}, NVIDIA H200 NVL, GPU-{i}abc\n" for i in range(8))
    (tmp_path / "query").write_text(names)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_detect_reads_nvidia_smi_and_the_visible_devices(nvidia_smi, monkeypatch):
    assert Cluster.detect().gpu == GPUS["H200-NVL"]
    assert Cluster.detect().num_gpus == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5,GPU-4abc,7")
    assert Cluster.detect().usable == (5, 4, 7)
    mixed = "4, NVIDIA H200 NVL, GPU-4abc\n5, NVIDIA H300, GPU-5abc\n7, X, GPU-7abc\n"
    (nvidia_smi / "query").write_text(mixed)
    assert Cluster.detect().gpu is None
    assert "are 3 kinds" in Cluster.detect().warnings[-1]


def test_detect_without_nvidia_smi_says_what_else_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no nvidia-smi.*Cluster\.preset"):
        Cluster.detect()


def test_topo_on_the_command_line_prints_groups_placements_and_json(tmp_path, capsys):
    file = tmp_path / "topo.txt"
    file.write_text(H200_NVL)
    assert main(["topo", str(file), "--gpu", "H200-NVL"]) == 0
    printed = capsys.readouterr().out
    assert "8 x H200-NVL on 1 node: nvl-groups" in printed
    assert "4  NV6               351.0       351.0  CUDA_VISIBLE_DEVICES=0,1,2,3" in printed
    assert main(["topo", "--preset", "p5", "--nodes", "2", "--ranks", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_gpus"], report["placements"][0]["slowest_hop"]) == (16, "network")
    assert main(["topo", "--preset", "p5", "--gpu", "A100"]) == 1


def test_planning_links_loads_no_torch():
    code = (
        "import sys; from distft import Cluster; Cluster.preset('p5').time('all_reduce', 1e9, 8);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
