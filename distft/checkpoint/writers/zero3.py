"""Folders as DeepSpeed's stage 3 itself writes them, for any number of ranks.

Rank ``r`` of ``n`` holds ``ceil(numel / n)`` elements of every parameter, zeros after its end, and
those of a sub-group lie end to end. Source: ``_rigid_state_dict`` and ``_create_fp16_sub_groups``
of ``deepspeed/runtime/zero/stage3.py``, ``_save_checkpoint`` of ``engine.py``, DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distft.checkpoint.shards import LogicalTensor, OptimizerState, ParamGroup, ShardMap
from distft.checkpoint.writers.pickled import Call, Global, Part, Stored, ordered, size_of
from distft.checkpoint.writers.torch_zip import Archives
from distft.checkpoint.writers.universal import VERSION, common_step, stored_number

# What DeepSpeed looks for, with the name of the tag, where it is given none.
LATEST = "latest"
# DeepSpeed's own default.
SUB_GROUP_SIZE = 1_000_000_000


def plan_zero3(
    found: ShardMap,
    groups: Sequence[ParamGroup],
    world_size: int,
    tag: str,
    bf16: bool,
    sub_group_size: int = SUB_GROUP_SIZE,
) -> Archives:
    """Return the archives of a folder that the stage-3 engine of as many ranks loads.

    Args:
        found: A map with an optimizer.
        groups: Settings of its groups, in the order of the engine's parameters.
        world_size: Number of ranks that will load it.
        tag: Folder of the files.
        bf16: Whether that engine computes in bf16, which the names of its files say.
        sub_group_size: Its ``sub_group_size``, elements of one rank.

    Raises:
        ValueError: Parameters of one group were updated another number of times: DeepSpeed keeps
            one counter for all of them; or state has another shape than its parameter.

    Collective: none.
    """
    assert found.optimizer is not None
    plan = _Plan(found, found.optimizer, groups, world_size, sub_group_size)
    archives = Archives()
    config = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": found.optimizer.kind or "AdamW"},
    }
    said = {"ds_config": config, "ds_version": VERSION}
    for rank in range(world_size):
        name = f"{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        archives.add(name, {**plan.model_states(rank), **said})
    for rank in range(world_size):
        name = f"{tag}/{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        archives.add(name, {"optimizer_state_dict": plan.optimizer_state(rank), **said})
    return archives


@dataclass(frozen=True)
class _Plan:
    """What each rank holds."""

    found: ShardMap
    state: OptimizerState
    groups: Sequence[ParamGroup]
    world_size: int
    sub_group_size: int

    def model_states(self, rank: int) -> dict[str, Any]:
        found = self.found
        trained = {name for group in self.groups for name in group.names}
        frozen = [n for n in found.tensors if n not in trained and n not in found.buffers]
        module = {
            name: Stored(tensor.dtype, tensor.shape, tensor)
            # What is dealt to ranks has no element here; every name is there, tied ones too.
            if name in found.buffers
            else Stored(tensor.dtype, (0,), b"")
            for name, tensor in found.tensors.items()
        }
        module |= {alias: module[kept] for alias, kept in found.ties.items()}
        return {
            "module": ordered(module),
            "buffer_names": sorted(found.buffers),
            "optimizer": None,
            "param_shapes": [
                ordered({name: size_of(found.tensors[name].shape) for name in names})
                for _, names in self._sub_groups()
            ],
            "frozen_param_shapes": ordered(
                {name: size_of(found.tensors[name].shape) for name in frozen}
            )
            if frozen
            else None,
            "frozen_param_fragments": ordered(
                {name: self._vector([found.tensors[name]], rank, None) for name in frozen}
            )
            if frozen
            else None,
            "shared_params": dict(found.ties),
            "lr_scheduler": found.extras.get("scheduler"),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": found.step or 0,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
        }

    def optimizer_state(self, rank: int) -> dict[str, Any]:
        states, weights = dict[int, Any](), []
        numbers: list[list[int]] = [[] for _ in self.groups]
        for number, (index, names) in enumerate(self._sub_groups()):
            numbers[index].append(number)
            tensors = [self.found.tensors[name] for name in names]
            weights.append(self._vector(tensors, rank, "float32"))
            held = self._moments(index, names, tensors, rank)
            if held:
                states[number] = held
        settings = [
            {**group.settings, "params": own}
            for group, own in zip(self.groups, numbers, strict=True)
        ]
        scaler = Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
        return {
            "zero_stage": 3,
            # It is there whatever the precision, and scales by nothing.
            "loss_scaler": Call(scaler, (), {"cur_scale": 1.0, "dynamic": False}, new=True),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": self.world_size,
            "optimizer_state_dict": {"state": states, "param_groups": settings},
            "fp32_flat_groups": weights,
        }

    def _moments(
        self, index: int, names: Sequence[str], tensors: Sequence[LogicalTensor], rank: int
    ) -> dict[str, Any]:
        """Return the state of a sub-group; of a parameter that has none yet it is zeros."""
        step = common_step(self.state, self.groups, index)
        keys = dict.fromkeys(key for name in names for key in self.state.moments.get(name, {}))
        held: dict[str, Any] = {} if step is None else {"step": stored_number(step)}
        for key in keys:
            parts: list[LogicalTensor | int] = []
            for name, tensor in zip(names, tensors, strict=True):
                moment = self.state.moments.get(name, {}).get(key)
                if moment is not None and moment.shape != tensor.shape:
                    raise ValueError(
                        f"{key} of {name} has shape {list(moment.shape)}, the parameter "
                        f"{list(tensor.shape)}, and ZeRO cuts both at the same places. "
                        "Reshard to fsdp2 or ddp."
                    )
                parts.append(tensor.num_elements if moment is None else moment)
            held[key] = self._vector(parts, rank, "float32")
        return held

    def _vector(
        self, tensors: Iterable[LogicalTensor | int], rank: int, dtype: str | None
    ) -> Stored:
        """Return a rank's part of tensors, or of as many zeros, laid end to end."""
        parts, kinds = list[Part](), set[str]()
        for tensor in tensors:
            source = None if isinstance(tensor, int) else tensor
            count = tensor if isinstance(tensor, int) else tensor.num_elements
            if source is not None:
                kinds.add(source.dtype)
            per_rank = -(-count // self.world_size)
            first = min(rank * per_rank, count)
            held = min(per_rank, count - first)
            parts += [Part(source, first, held)] if held else []
            parts += [Part(None, 0, per_rank - held)] if held < per_rank else []
        size = sum(part.count for part in parts)
        return Stored(dtype or kinds.pop(), (size,), parts)

    def _sub_groups(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each sub-group's group, and its parameters."""
        for index, group in enumerate(self.groups):
            sizes = [
                -(-math.prod(self.found.tensors[name].shape) // self.world_size)
                for name in group.names
            ]
            if self.sub_group_size >= sum(sizes):
                yield index, list(group.names)
                continue
            names, size = list[str](), 0
            for name, held in zip(group.names, sizes, strict=True):
                names.append(name)
                size += held
                if size >= self.sub_group_size:
                    yield index, names
                    names, size = [], 0
            if names:
                yield index, names
