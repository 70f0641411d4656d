"""Folders in the layout of DeepSpeed's ZeRO, written by hand from whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")


def moment(weight: Tensor, key: str) -> Tensor:
    """Return a moment that tells its parameter, its place and its kind."""
    return -weight - MOMENTS.index(key) * 0.5


def dealt(group: Group, world: int) -> list[Tensor]:
    """Return each rank's vector as stage 3 deals it: every parameter to all ranks, padded."""
    parts: list[list[Tensor]] = [[] for _ in range(world)]
    for weight in group.values():
        per_rank = -(-weight.numel() // world)
        padded = torch.nn.functional.pad(weight.flatten(), (0, per_rank * world - weight.numel()))
        for rank, part in enumerate(padded.split(per_rank)):
            parts[rank].append(part)
    return [torch.cat(part) for part in parts]


def cut(group: Group, world: int, gaps: Sequence[int], keep_end: bool) -> list[Tensor]:
    """Return each rank's range of the group's vector, as stages 1 and 2 cut it.

    Args:
        group: Parameters.
        world: Number of ranks.
        gaps: Elements of padding behind each parameter.
        keep_end: Whether the padding of the last rank stays, as it does in moments.
    """
    padded = [
        torch.nn.functional.pad(weight.flatten(), (0, gap))
        for weight, gap in zip(group.values(), gaps, strict=True)
    ]
    vector = torch.cat(padded)
    end = -(-len(vector) // (2 * world)) * 2 * world
    ranks = list(torch.nn.functional.pad(vector, (0, end - len(vector))).split(end // world))
    if not keep_end:
        ranks[-1] = ranks[-1][: len(ranks[-1]) - (end - len(vector))]
    return ranks


def write_zero(
    folder: Path,
    stage: int,
    world: int,
    groups: Sequence[Group],
    *,
    frozen: Group | None = None,
    buffers: Group | None = None,
    ties: Mapping[str, str] | None = None,
    gaps: Sequence[Sequence[int]] | None = None,
) -> None:
    """Write the files of every rank, with moments as `moment` gives them and 3 updates."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen, buffers = dict(frozen or {}), dict(buffers or {})
    spaces = gaps or [[0] * len(group) for group in groups]

    def vectors(group: Group, number: int, keep_end: bool) -> list[Tensor]:
        if stage == 3:
            return dealt(group, world)
        return cut(group, world, spaces[number], keep_end)

    weights = [vectors(group, number, False) for number, group in enumerate(groups)]
    moments = {
        key: [
            vectors({n: moment(w, key) for n, w in group.items()}, number, True)
            for number, group in enumerate(groups)
        ]
        for key in MOMENTS
    }
    pieces = {name: dealt({name: weight}, world) for name, weight in frozen.items()}
    for rank in range(world):
        state = {
            number: {"step": torch.tensor(3.0)} | {k: moments[k][number][rank] for k in MOMENTS}
            for number in range(len(groups))
        }
        settings = [{"lr": 0.1 * (n + 1), "params": [n]} for n in range(len(groups))]
        inner = {"state": state, "param_groups": settings}
        flat = [weights[number][rank].clone() for number in range(len(groups))]
        optimizer = {"zero_stage": stage, "partition_count": world if stage == 3 else [world]}
        if stage == 3:
            optimizer |= {"fp32_flat_groups": flat, "optimizer_state_dict": inner}
        else:
            optimizer |= {"single_partition_of_fp32_groups": flat, "base_optimizer_state": inner}
            optimizer |= {"param_alignment_paddings": gaps}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / name)
        if stage == 3 or rank == 0:
            fragments = {n: pieces[n][rank].clone() if stage == 3 else frozen[n] for n in frozen}
            model = _model_states(stage, world, groups, frozen, buffers, ties or {}, fragments)
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")


def _model_states(
    stage: int,
    world: int,
    groups: Sequence[Group],
    frozen: Group,
    buffers: Group,
    ties: Mapping[str, str],
    fragments: Group,
) -> dict[str, Any]:
    whole = {name: w.half() for group in groups for name, w in group.items()} | dict(frozen)
    placeholders = {name: torch.zeros(0, dtype=torch.half) for name in whole}
    return {
        "module": {**(placeholders if stage == 3 else whole), **buffers},
        "buffer_names": list(buffers),
        "param_shapes": [{name: w.shape for name, w in group.items()} for group in groups],
        "frozen_param_shapes": {n: w.shape for n, w in frozen.items()} if stage > 1 else None,
        "frozen_param_fragments": dict(fragments) if stage > 1 else None,
        "shared_params": dict(ties),
        "lr_scheduler": {"last_epoch": 3},
        "global_steps": 3,
        "dp_world_size": world,
        "ds_config": {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}},
        "ds_version": "0.19",
    }
