"""What `nvidia-smi topo -m` prints, as a value: links between GPUs, network cards, affinity.

Its columns are never relied on to be aligned. Rows are found by their name, cells by their words,
and the header gives names alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from distft.topology.links import UNKNOWN, slower
from distft.topology.table import Table

_LINK = r"NV[1-9][0-9]?|SYS|SOC|NODE|PHB|PXB|PIX|PSB|X"
_LINKS = re.compile(_LINK)
_LINK_WORD = re.compile(rf"(?:{_LINK})+")
# Colours and underlines; the escape byte itself is lost in some logs.
_STYLE = re.compile(r"(?:\x1b|\^\[|\\x1b|\\033|\\e)?\[\d*(?:;\d+)*[mK]")
# What logs and comments put before a line: "# ", "> ", "3: ".
_PREFIX = re.compile(r"^[\s#>*]*(?!NIC)(?:\[?\w[\w.-]*\]?:\s+)?[\s#>*]*")
# A line of the legend of network cards.
_DEVICE = re.compile(r"(NIC[0-9]+):\s*(\S+)")
_AFFINITY = re.compile(r"(CPU\s*Affinity)|(GPU\s*NUMA\s*ID)|(NUMA(?:\s*Affinity)?)")
_LIST = re.compile(r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_NAMES = re.compile(r"GPU[0-9]+|NIC[0-9]+|mlx[0-9]+_(?:bond_)?[0-9]+")


@dataclass(frozen=True)
class _Row:
    """One row: its link cells, "?" where a word is none, and the text after the last of them."""

    cells: tuple[str, ...]
    tail: str


@dataclass(frozen=True)
class _Read:
    """The lines of a text, its header ("" without one), and the rows of GPUs by number."""

    lines: tuple[str, ...]
    header: str
    rows: dict[int, _Row]

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(sorted(self.rows))


def parse_table(text: str) -> Table:
    r"""Read what `nvidia-smi topo -m` printed, of any driver, out of a log or a comment too.

    Raises:
        ValueError: The text holds no such table, or a part of one.

    Collective: none.

    >>> parse_table("GPU0 GPU1 CPU Affinity\nGPU0 X NV18 0-55\nGPU1 NV18 X 0-55").link(0, 1)
    'NV18'
    """
    if not isinstance(text, str):
        raise ValueError(
            f"The topology is of type {type(text).__name__}, but it must be text. "
            "Pass what `nvidia-smi topo -m` prints."
        )
    warnings: list[str] = []
    lines = tuple(_plain(line) for line in text.splitlines())
    header = max(filter(_is_header, lines), key=_num_gpus, default="")
    read = _Read(lines, header, _gpu_rows(lines, warnings))
    _check_whole(text, read)
    columns = _columns(read)
    links = _links(read, columns, warnings)
    nics, nic_links = _nics(read, columns, warnings)
    cpu, numa, own = zip(
        *(_affinity(header, read.rows[gpu].tail) for gpu in read.gpus), strict=True
    )
    return Table(read.gpus, links, nics, nic_links, cpu, numa, own, tuple(warnings))


def _plain(line: str) -> str:
    """Take styles, prefixes and borders away; tabs stay, since blank cells lie between them."""
    line = _STYLE.sub("", line).replace("\xa0", " ").replace("\ufeff", "").replace("|", "\t")
    return _PREFIX.sub("", line.replace("\x00", "")).rstrip()


def _is_header(line: str) -> bool:
    """Say whether a line names the columns: GPUs, but none of them with cells of links."""
    return _num_gpus(line) > 0 and "=" not in line and _row(line) is None


def _num_gpus(line: str) -> int:
    return len(_GPU.findall(line))


def _row(line: str) -> tuple[str, _Row] | None:
    """Split a line into its name, the words up to the last link, and the rest."""
    match = re.match(r"\S+", line)
    if not match:
        return None
    name, rest = match.group(), line[match.end() :]
    words = list(re.finditer(r"\S+", rest))
    are_links = [bool(_LINK_WORD.fullmatch(word.group())) for word in words]
    if True not in are_links or _GPU.search(rest) or "=" in rest:
        return None
    last = len(are_links) - 1 - are_links[::-1].index(True)
    cells: list[str] = []
    for word, is_link in zip(words[: last + 1], are_links, strict=False):
        cells += _LINKS.findall(word.group()) if is_link else ["?"]
    return name, _Row(tuple(cells), rest[words[last].end() :])


def _gpu_rows(lines: Sequence[str], warnings: list[str]) -> dict[int, _Row]:
    rows: dict[int, _Row] = {}
    repeated = 0
    for found in map(_row, lines):
        if not found or not _GPU.fullmatch(found[0]):
            continue
        gpu, row = int(found[0][3:]), found[1]
        if gpu in rows and rows[gpu].cells != row.cells:
            raise ValueError(
                f"The topology has two different rows of GPU{gpu}, so it holds tables of several "
                "nodes. Pass the table of one node, and the number of nodes."
            )
        repeated += gpu in rows
        rows.setdefault(gpu, row)
    if repeated:
        warnings.append(f"{repeated} rows of GPUs are there twice, and the same.")
    return rows


def _check_whole(text: str, read: _Read) -> None:
    """Raise where rows are missing or end before the last GPU."""
    rows, named = read.rows, {int(name[3:]) for name in _GPU.findall(read.header)}
    if not rows:
        start = " ".join(text.split())[:60]
        raise ValueError(
            f"The topology has no row of any GPU: it starts with {start!r}. "
            "Pass all that `nvidia-smi topo -m` prints."
        )
    if named - set(rows) and len(named) > len(rows):
        raise ValueError(
            f"The topology names {len(named)} GPUs, but has rows of {len(rows)}: it was cut off. "
            "Pass all that `nvidia-smi topo -m` prints."
        )
    seen = {cell for row in rows.values() for cell in row.cells}
    if len(rows) > 1 and seen <= {"X", "?"}:
        raise ValueError(
            f"The topology has {len(rows)} GPUs, but no link between any two. "
            "Pass what `nvidia-smi topo -m` prints, with -m."
        )
    for gpu, row in sorted(rows.items()):
        if len(row.cells) < len(rows):
            raise ValueError(
                f"The row of GPU{gpu} has {len(row.cells)} links, but there are {len(rows)} GPUs: "
                "it was cut off. Pass all that `nvidia-smi topo -m` prints."
            )


def _columns(read: _Read) -> dict[int, int]:
    """Return the column of each GPU: where the header says, if "X" of each row agrees."""
    rows, names = read.rows, _column_names(read.header)
    by_header = {int(name[3:]): i for i, name in enumerate(names) if _GPU.fullmatch(name)}
    orders = [by_header, dict(zip(sorted(rows), range(len(rows)), strict=True))]
    orders.append(dict(zip(rows, range(len(rows)), strict=True)))
    for order in orders:
        if set(order) == set(rows) and all(
            order[gpu] < len(row.cells)
            and row.cells[order[gpu]] == "X"
            and row.cells.count("X") == 1
            for gpu, row in rows.items()
        ):
            return order
    raise ValueError(
        f"The topology of {len(rows)} GPUs does not have each row's X in that GPU's own column. "
        "Pass all that `nvidia-smi topo -m` prints, unchanged."
    )


def _column_names(header: str) -> list[str]:
    """Return the names of GPUs and network cards in a header, glued ones apart."""
    names: list[str] = []
    for word in _AFFINITY.sub(" ", header).split():
        glued = _NAMES.findall(word)
        names += glued if "".join(glued) == word else [word]
    return names


def _links(
    read: _Read, columns: dict[int, int], warnings: list[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the matrix, each pair read from both of its rows."""
    gpus, rows = read.gpus, read.rows
    unequal = unreadable = 0
    matrix = [["X"] * len(gpus) for _ in gpus]
    for i, first in enumerate(gpus):
        for j in range(i + 1, len(gpus)):
            there = rows[first].cells[columns[gpus[j]]]
            back = rows[gpus[j]].cells[columns[first]]
            unequal += there != back
            known = [link for link in (there, back) if link not in ("?", "X")]
            unreadable += not known
            matrix[i][j] = matrix[j][i] = slower(known) if known else UNKNOWN
    if unequal:
        warnings.append(
            f"{unequal} pairs of GPUs have one link in one row and another in the other; "
            "the slower one is taken."
        )
    if unreadable:
        warnings.append(f"{unreadable} pairs of GPUs have no readable link.")
    return tuple(map(tuple, matrix))


def _nics(
    read: _Read, columns: dict[int, int], warnings: list[str]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the network cards and each GPU's links to them."""
    named = [name for name in _column_names(read.header) if not _GPU.fullmatch(name)]
    own_rows = [found[0] for found in map(_row, read.lines) if found and not _GPU.match(found[0])]
    taken = set(columns.values())
    extra = {
        gpu: [cell for i, cell in enumerate(row.cells) if i not in taken]
        for gpu, row in sorted(read.rows.items())
    }
    names = named if read.header else own_rows
    count = len(names)
    legend = [match for match in map(_DEVICE.fullmatch, read.lines) if match]
    devices = {match[1]: match[2] for match in legend}
    most = max(map(len, extra.values()))
    if any("NV" in cell for cells in extra.values() for cell in cells) or (
        most > count and not read.header
    ):
        raise ValueError(
            f"The topology has rows of {len(read.rows)} GPUs, but links to {most} more that are "
            "not network cards. Pass all that `nvidia-smi topo -m` prints."
        )
    wrong = sum(len(cells) != count for cells in extra.values())
    if wrong:
        warnings.append(
            f"{wrong} rows of GPUs have another number of links to network cards than the "
            f"{count} of the header; they are left out."
        )
    with_row = len(set(own_rows) & set(names))
    if 0 < with_row < count:
        warnings.append(f"{with_row} of {count} network cards have a row.")
    devices_of = tuple(devices.get(name, name) for name in names)
    return devices_of, () if wrong else tuple(map(tuple, extra.values()))


def _affinity(header: str, tail: str) -> tuple[str | None, str | None, str | None]:
    """Return processors, NUMA nodes and own NUMA node of a row, None where it has no such cell."""
    fields = [match.lastindex - 1 for match in _AFFINITY.finditer(header) if match.lastindex]
    # Groups of the pattern are processors, own node, nodes.
    fields = [{0: 0, 1: 2, 2: 1}[field] for field in fields]
    words = re.sub(r",\s+(?=[0-9])", ",", tail).split()
    values: dict[int, str] = {}
    if len(words) == len(fields):
        values = dict(zip(fields, words, strict=True))
    elif len(words) == 3:
        values = dict(enumerate(words))
    elif "\t" in tail:
        cells = [cell.strip() for cell in tail.split("\t")[1:]]
        # Two tabs stand before the last column.
        places = [*fields[:2], -1, 2] if len(fields) == 3 and len(cells) > 3 else fields
        values = {field: cell for field, cell in zip(places, cells, strict=False) if cell}
    elif words and re.search("[-,]", words[0]):
        values = {0: words[0]}
    read = [values.get(field) for field in range(3)]
    cpu, numa, own = (value if value and _LIST.fullmatch(value) else None for value in read)
    return cpu, numa, own
