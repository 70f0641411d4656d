"""Reading a topology: the same whatever its form, and never another one than was printed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distft import Cluster

FILES = sorted((Path(__file__).parents[1] / "topo").glob("*.txt"))
TEXTS = {file.name: file.read_bytes().decode() for file in FILES if "NEGATIVE" not in file.name}
WHOLE = {name: Cluster.parse(text).table for name, text in TEXTS.items()}
NAMES = st.sampled_from(sorted(TEXTS))
LINKS = ["NV1", "NV2", "NV6", "NV12", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"]
CHANCES = st.integers(0, 2**32).map(random.Random)
STYLES = ["\x1b[0m", "\x1b[4m", "\x1b[1;31m", "\x1b[K"]


@given(NAMES, st.data())
def test_a_part_of_a_table_gives_its_links_or_one_error(name, data):
    text = TEXTS[name]
    cut = data.draw(st.integers(0, len(text)))
    part = data.draw(st.sampled_from([text[:cut], text[cut:]]))
    try:
        table = Cluster.parse(part).table
    except ValueError:
        return
    assert (table.gpus, table.links) == (WHOLE[name].gpus, WHOLE[name].links)


@given(NAMES, CHANCES)
def test_a_table_without_some_of_its_lines_gives_its_links_or_one_error(name, chance):
    lines = [line for line in TEXTS[name].splitlines() if chance.random() < 0.9]
    try:
        table = Cluster.parse("\n".join(lines)).table
    except ValueError:
        return
    assert (table.gpus, table.links) == (WHOLE[name].gpus, WHOLE[name].links)


@given(NAMES, CHANCES, st.sampled_from(["\n", "\r\n"]))
def test_styles_blanks_prefixes_and_line_ends_change_nothing(name, chance, end):
    prefix = chance.choice(["", "# ", "> ", "  ", "0: "])
    lines = []
    for line in TEXTS[name].splitlines():
        words = re.split(r"([ \t]+)", line)
        styled = (chance.choice(STYLES) + word if chance.random() < 0.1 else word for word in words)
        lines.append(prefix + "".join(styled) + chance.choice(["", " ", "\t"]))
    table = Cluster.parse(end.join(lines)).table
    assert (table.gpus, table.links, table.nics) == (
        WHOLE[name].gpus,
        WHOLE[name].links,
        WHOLE[name].nics,
    )


@st.composite
def matrices(draw):
    """Return a symmetric matrix of links, and some network cards' links of each GPU."""
    size = draw(st.integers(1, 8))
    links = [["X"] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            links[i][j] = links[j][i] = draw(st.sampled_from(LINKS))
    nics = draw(st.integers(0, 3))
    return links, [[draw(st.sampled_from(LINKS[5:])) for _ in range(nics)] for _ in range(size)]


@given(matrices(), CHANCES)
def test_columns_and_rows_in_any_order_give_the_matrix(matrix, chance):
    links, nics = matrix
    size, num_nics = len(links), len(nics[0])
    columns = [("GPU", i) for i in range(size)] + [("NIC", i) for i in range(num_nics)]
    rows = list(range(size))
    chance.shuffle(columns)
    chance.shuffle(rows)
    lines = ["\t" + "\t".join(f"{kind}{i}" for kind, i in columns) + "\tCPU Affinity"]
    for row in rows:
        cells = [links[row][i] if kind == "GPU" else nics[row][i] for kind, i in columns]
        lines.append(f"GPU{row}\t" + chance.choice(["\t", "  "]).join(cells) + f"\t{row}-9")
    table = Cluster.parse("\n".join(lines)).table
    assert table.links == tuple(map(tuple, links))
    assert table.cpu_affinity == tuple(f"{i}-9" for i in range(size))
    named = [i for kind, i in columns if kind == "NIC"]
    assert table.nic_links == tuple(tuple(nics[row][i] for i in named) for row in range(size))


@given(st.text(alphabet="GPU01NVX \tSYSIC?-\n\x1b[4m", max_size=200))
@settings(max_examples=300)
def test_any_text_is_a_cluster_or_one_error(text):
    try:
        cluster = Cluster.parse(text, gpu="H100-80GB")
    except ValueError:
        return
    assert cluster.fabric in ("nvswitch", "nvl-groups", "pcie", "single", "unknown")
    hop = cluster.slowest_hop(cluster.usable)
    if hop is None or hop.link != "unknown":
        assert cluster.time("all_reduce", 1e9, cluster.num_gpus) >= 0


@given(matrices(), st.data())
def test_the_best_gpus_have_no_slower_hop_than_any_others(matrix, data):
    rows = "\n".join(f"GPU{i} {' '.join(row)}" for i, row in enumerate(matrix[0]))
    cluster = Cluster.parse(rows, gpu="V100-32GB")
    count = data.draw(st.integers(1, cluster.num_gpus))
    best = cluster.place(count)
    others = data.draw(st.permutations(cluster.usable))[:count]
    if count > 1:
        speeds = [cluster.bus_bandwidth("all_gather", gpus) for gpus in (tuple(best), others)]
        assert speeds[0] >= speeds[1] * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_group_of_more_ranks_takes_no_less_time(seed):
    chance = random.Random(seed)
    links = [["X"] * 6 for _ in range(6)]
    for i in range(6):
        for j in range(i):
            links[i][j] = links[j][i] = chance.choice(["SYS", "NODE", "PIX"])
    rows = "\n".join(f"GPU{i} {' '.join(row)}" for i, row in enumerate(links))
    cluster = Cluster.parse(rows, gpu="L40S")
    seconds = [cluster.time("all_reduce", 1e9, ranks) for ranks in range(1, 7)]
    assert seconds == sorted(seconds)
