"""DeepSpeed's universal layout: one folder for each parameter, whole whatever the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.state_dict import described, tie
from distft.checkpoint.readers.torch_zip import plain_values, read_torch_file
from distft.checkpoint.readers.unpickle import StoredTensor
from distft.checkpoint.shards import LogicalTensor, OptimizerState, ParamGroup, ShardMap

ZERO, OPTIMIZER_FILE = "zero", "optimizer_state.pt"
_WEIGHT, _STEP, _PARAM = "fp32", "step", "param"
_NOT_SETTINGS = frozenset({"params", "param_names"})


def is_universal(folder: Path) -> bool:
    """Return whether a folder that DeepSpeed calls a tag has the universal layout.

    Collective: none.
    """
    return (folder / ZERO / OPTIMIZER_FILE).is_file()


def read_universal(root: Path, folder: Path, kind: str = "") -> ShardMap:
    """Return the map of a folder in the universal layout.

    Args:
        root: Folder that the map's files are relative to.
        folder: The tag's folder, in it or the same.
        kind: Class name of the optimizer, where something beside the files says it.

    Raises:
        ValueError: A file is missing or broken, or asks for more than a checkpoint needs.

    Collective: none.
    """
    above = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    models = sorted(folder.glob("*_model_states.pt"))
    files = [f"{above}{models[0].name}", f"{above}{ZERO}/{OPTIMIZER_FILE}"]
    model, state = (read_torch_file(root, name) for name in files)
    names = [name for group in model["param_shapes"] for name in group]
    tensors: dict[str, LogicalTensor] = {}
    moments: dict[str, dict[str, LogicalTensor]] = {}
    steps: dict[str, float] = {}
    common = _common_step(root, state)
    for name in names:
        held = folder / ZERO / name
        if not (held / f"{_WEIGHT}.pt").is_file():
            raise ValueError(
                f"{held} lacks {_WEIGHT}.pt, and {files[0]} names {name} among {len(names)} "
                "parameters. Copy the folder again."
            )
        for file in sorted(held.glob("*.pt")):
            path = f"{above}{ZERO}/{name}/{file.name}"
            files.append(path)
            found = read_torch_file(root, path)
            if file.stem == _STEP:
                steps[name] = float(plain_values(root, found))
                continue
            tensor = _described(root, path, name, found)
            if file.stem == _WEIGHT:
                tensors[name] = tensor
            else:
                moments.setdefault(name, {})[file.stem] = tensor
        if common is not None:
            steps.setdefault(name, common)
    rest = {
        name: tensor
        for name, tensor in model["module"].items()
        if isinstance(tensor, StoredTensor) and name not in tensors
    }
    buffers = frozenset(model.get("buffer_names") or ()) & rest.keys()
    whole, ties = tie(rest)
    ties |= dict(model.get("shared_params") or {})
    others = {n: described(n, t) for n, t in whole.items() if n not in ties}
    groups = [
        ParamGroup(
            plain_values(root, {k: v for k, v in group.items() if k not in _NOT_SETTINGS}),
            list(shapes),
        )
        for group, shapes in zip(state["param_groups"], model["param_shapes"], strict=True)
    ]
    return ShardMap(
        root,
        "deepspeed",
        {**tensors, **others},
        optimizer=OptimizerState(kind, moments, steps, groups),
        ties=ties,
        frozen=frozenset(others) - buffers,
        buffers=buffers,
        files={name: (root / name).stat().st_size for name in files},
        step=model.get("global_steps"),
        strategy="the universal layout of DeepSpeed",
    )


def _common_step(root: Path, state: Mapping[str, Any]) -> float | None:
    """Return the counter that stage 3 keeps once for all parameters."""
    for held in ((state.get("optimizer_state_dict") or {}).get("state") or {}).values():
        if _STEP in held:
            return float(plain_values(root, held[_STEP]))
    return None


def _described(root: Path, path: str, name: str, found: Any) -> LogicalTensor:
    tensor = found.get(_PARAM) if isinstance(found, dict) else None
    if not isinstance(tensor, StoredTensor):
        raise ValueError(
            f"{root / path} holds a {type(found).__name__} without a tensor {_PARAM!r}. "
            "Use another checkpoint."
        )
    return described(name, tensor)
