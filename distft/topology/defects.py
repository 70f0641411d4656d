"""What a user should know of the wires of a node: broken bridges, unlike ones, missing ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from distft.topology.gpus import Gpu
from distft.topology.wiring import Wiring

# Pairs with fewer links than others are a defect below this share of a group's pairs.
_BY_DESIGN = 0.4


def wiring_warnings(wiring: Wiring, gpu: Gpu | None) -> list[str]:
    """Return one sentence for each thing that does not fit, with counts."""
    return [
        *_too_many(wiring, gpu),
        *_fewer_links(wiring),
        *_left_out(wiring),
        *_ambiguous(wiring, gpu),
        *_hidden(wiring, gpu),
    ]


def _too_many(wiring: Wiring, gpu: Gpu | None) -> list[str]:
    shown = max((wiring.nvlinks(*pair) for pair in combinations(wiring.table.gpus, 2)), default=0)
    if gpu is None or shown <= gpu.nvlinks:
        return []
    return [f"The table shows {shown} NVLinks between two GPUs, but {gpu.name} has {gpu.nvlinks}."]


def _fewer_links(wiring: Wiring) -> list[str]:
    """Name pairs with fewer links than others of their group, and groups with fewer than others.

    A cube mesh, or a part of one, has single and double links by design, as many of each.
    """
    found = []
    totals: dict[int, int] = {}
    for group in wiring.groups:
        links = {pair: wiring.nvlinks(*pair) for pair in combinations(group, 2)}
        most = max(links.values())
        fewer = [pair for pair in links if links[pair] < most]
        if fewer and (wiring.is_switched(group) or len(fewer) < _BY_DESIGN * len(links)):
            low = min(links[pair] for pair in fewer)
            found.append(_says("GPUs", fewer, low, most))
        totals[len(group)] = max(totals.get(len(group), 0), sum(links.values()))
    for group in wiring.groups:
        total = sum(wiring.nvlinks(*pair) for pair in combinations(group, 2))
        if total < totals[len(group)]:
            found.append(_says("The group", [tuple(group)], total, totals[len(group)]))
    return found


def _says(what: str, sets: Sequence[tuple[int, ...]], low: int, most: int) -> str:
    names = ", ".join("-".join(map(str, gpus)) for gpus in sets)
    return (
        f"{what} {names} ({len(sets)} in all) share {low} NVLinks where others have {most}: a "
        "bridge or a link is down, or of another kind. Collectives fall to the slowest."
    )


def _left_out(wiring: Wiring) -> list[str]:
    joined = {gpu for group in wiring.groups for gpu in group}
    alone = [gpu for gpu in wiring.table.gpus if gpu not in joined]
    if not joined or not alone:
        return []
    return [
        f"{len(alone)} of {len(wiring.table.gpus)} GPUs have no NVLink while others do: "
        f"{', '.join(map(str, alone))}."
    ]


def _ambiguous(wiring: Wiring, gpu: Gpu | None) -> list[str]:
    """Say where a table cannot tell a bridge from two GPUs of a switch."""
    gpus = wiring.table.gpus
    chip = gpu.nvlinks if gpu else 0
    if len(gpus) != 2 or not wiring.groups or wiring.nvlinks(*gpus) != (chip or 18):
        return []
    return [
        "The two GPUs share all links of a card: a bridge, or a part of a switch's node. "
        "They are taken for a pair at full speed."
    ]


def _hidden(wiring: Wiring, gpu: Gpu | None) -> list[str]:
    """Say that modules show no NVLink, which their board has."""
    num = len(wiring.table.gpus)
    if gpu is None or not gpu.is_module or num < 2 or wiring.fabric != "pcie":
        return []
    return [
        f"The table shows no NVLink between {num} {gpu.name}, whose modules have {gpu.nvlinks}: "
        "`topo -mp` hides them, or they are down or not passed through."
    ]
