"""DeepSpeed's universal layout, which its own loading reads on any number of ranks.

Every trained parameter has a folder with its whole fp32 values and moments. Source:
``deepspeed/checkpoint/ds_to_universal.py`` and both ``load_hp_checkpoint_state`` of DeepSpeed 0.19.
DeepSpeed itself restores what is trained alone; frozen parameters and buffers, which it leaves as
the model has them, are here for distft.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from distft.checkpoint.readers.universal import OPTIMIZER_FILE, ZERO
from distft.checkpoint.shards import OptimizerState, ParamGroup, ShardMap
from distft.checkpoint.writers.pickled import Stored, ordered, size_of
from distft.checkpoint.writers.torch_zip import Archives

TAG = "state"
# What DeepSpeed looks for, with the name of the tag, where it is given none.
LATEST = "latest_universal"
# Stages 1 and 2 read the one, stage 3 the other.
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
# Whose format this is; stages 1 and 2 refuse a state without a version.
VERSION = "0.19.8"


def plan_universal(found: ShardMap, groups: Sequence[ParamGroup], world_size: int) -> Archives:
    """Return the archives of a folder in the universal layout.

    Args:
        found: A map with an optimizer.
        groups: Settings of its groups, in the order of the parameters in DeepSpeed's vectors.
        world_size: Number of ranks that the folder says wrote it.

    Raises:
        ValueError: Parameters of one group were updated another number of times: DeepSpeed keeps
            one counter for all of them.

    Collective: none.
    """
    assert found.optimizer is not None
    state = found.optimizer
    archives = Archives()
    for name in (name for group in groups for name in group.names):
        parts = {"fp32": found.tensors[name], **state.moments.get(name, {})}
        for key, tensor in parts.items():
            # The engine's vectors are fp32, whatever the dtype that it computes in.
            stored = Stored("float32", tensor.shape, tensor)
            archives.add(f"{TAG}/{ZERO}/{name}/{key}.pt", {"param": stored})
        if name in state.steps:
            archives.add(f"{TAG}/{ZERO}/{name}/step.pt", stored_number(state.steps[name]))
    settings, steps, first = [], {}, 0
    for index, group in enumerate(groups):
        counter = common_step(state, groups, index)
        if counter is not None:
            steps[index] = {"step": stored_number(counter)}
        numbers = list(range(first, first + len(group.names)))
        settings.append({**group.settings, "params": numbers})
        first += len(group.names)
    optimizer: dict[str, Any] = {
        "ds_version": VERSION,
        "param_groups": settings,
        "optimizer_state_dict": {"state": steps, "param_groups": settings},
    }
    archives.add(f"{TAG}/{ZERO}/{OPTIMIZER_FILE}", optimizer)
    model = _model_state(found, groups, world_size)
    for file in _MODEL_FILES:
        archives.add(f"{TAG}/{file}", model)
    return archives


def common_step(state: OptimizerState, groups: Sequence[ParamGroup], index: int) -> float | None:
    """Return how often the parameters of a group were updated, None where none was.

    Raises:
        ValueError: They differ.

    Collective: none.
    """
    names = groups[index].names
    counters = {state.steps[name] for name in names if name in state.steps}
    if len(counters) > 1:
        raise ValueError(
            f"Group {index} of {len(groups)} has parameters that were updated "
            f"{min(counters):g} and {max(counters):g} times, and ZeRO keeps 1 counter for "
            "them. Reshard to fsdp2 or ddp, which keep one for each."
        )
    return counters.pop() if counters else None


def stored_number(value: float) -> Stored:
    """Return an fp32 tensor of no dim with a number.

    Collective: none.
    """
    return Stored("float32", (), struct.pack("<f", value))


def _model_state(
    found: ShardMap, groups: Sequence[ParamGroup], world_size: int
) -> Mapping[str, Any]:
    trained = {name for group in groups for name in group.names}
    return {
        "module": {
            name: Stored(tensor.dtype, tensor.shape, tensor)
            for name, tensor in found.tensors.items()
            if name not in trained
        },
        "buffer_names": sorted(found.buffers),
        "param_shapes": [
            ordered({name: size_of(found.tensors[name].shape) for name in group.names})
            for group in groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(found.ties),
        "optimizer": None,
        "lr_scheduler": None,
        "sparse_tensor_module_names": [],
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "global_steps": found.step or 0,
        "skipped_steps": 0,
        "ds_config": {},
        "ds_version": VERSION,
    }
