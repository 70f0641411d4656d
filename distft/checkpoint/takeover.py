"""Taking over the weights and the optimizer of a run that DeepSpeed's own engine saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.pickles import refuse_code
from distft.checkpoint.readers.torch_zip import read_torch_file
from distft.checkpoint.whole_run import ADDED
from distft.process_group import group_size, together

if TYPE_CHECKING:
    from torch.optim import Optimizer


def take_over(
    folder: Path, stage: int, num_ranks: int | None, model: Any, optimizer: Optimizer
) -> None:
    """Load a folder of DeepSpeed's into an engine of the same stage on as many ranks.

    Args:
        folder: The folder that holds the files, which DeepSpeed calls a tag.
        stage: Stage that wrote it.
        num_ranks: Ranks that wrote it.
        model: DeepSpeed's engine, as `Strategy.apply` returned it.
        optimizer: What `Strategy.apply` returned.

    Raises:
        ValueError: Stage, ranks, dtype, parameters or optimizer are not those of the folder, or a
            file asks for more than a checkpoint needs.

    Collective: every rank.
    """
    folder = folder.resolve()
    with together():
        _check_engine(folder, stage, num_ranks, model)
        # The engine unpickles these files with nothing switched off.
        for file in sorted(folder.glob("*.pt")):
            refuse_code(file)
        _check_parameters(folder, model, optimizer)
        _check_optimizer(folder, optimizer)
    names = [group["param_names"] for group in optimizer.param_groups]
    with together(), _own_clipping(model.optimizer):
        loaded, _ = model.load_checkpoint(
            str(folder.parent), tag=folder.name, load_lr_scheduler_states=False
        )
        if loaded is None:
            raise ValueError(f"DeepSpeed found no state in {folder}. Use another checkpoint.")
        for group, named in zip(optimizer.param_groups, names, strict=True):
            group["param_names"] = named


@contextmanager
def _own_clipping(zero: Any) -> Iterator[None]:
    """Keep the engine's clipping off while it loads the state of a run that it clipped.

    It takes the bound over, and refuses one where it computes no norm; the norm here is ours.
    """
    computes = getattr(zero, "compute_grad_norm", None)
    if computes is not None:
        zero.compute_grad_norm = True
    try:
        yield
    finally:
        zero.clip_grad = 0.0
        if computes is not None:
            zero.compute_grad_norm = computes


def _check_engine(folder: Path, stage: int, num_ranks: int | None, model: Any) -> None:
    ranks = group_size("Strategy.load")
    mine = model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else 0
    if (mine, ranks) != (stage, num_ranks):
        here = f"ZeRO-{mine}" if mine else type(model).__name__
        raise ValueError(
            f"{folder} was saved by ZeRO-{stage} on {num_ranks} ranks, and this is {here} on "
            f"{ranks}. Use distft.ZeRO{stage} on {num_ranks} ranks."
        )
    if model.zero_nvme_offload_optimizer():
        raise ValueError(
            f"{folder} was saved by DeepSpeed, and of an optimizer on a disk it reads 0 moments. "
            "Load it with offload='params', save, and load that."
        )


def _check_parameters(folder: Path, model: Any, optimizer: Optimizer) -> None:
    import torch

    state = _description(folder, "*_model_states.pt")
    shapes = {
        name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.module.named_parameters()
    }
    mine = [
        [(name, shapes[name]) for name in group["param_names"]] for group in optimizer.param_groups
    ]
    saved = [list(group.items()) for group in state["param_shapes"]]
    if mine != saved:
        different = [
            f"group {index} has {ours[0]} {ours[1]} here and {theirs[0]} {theirs[1]} there"
            for index, pair in enumerate(zip(mine, saved, strict=False))
            for ours, theirs in zip(*pair, strict=False)
            if ours != theirs
        ]
        raise ValueError(
            f"{folder} has {len(saved)} groups of {[len(group) for group in saved]} parameters, "
            f"and this run {len(mine)} of {[len(group) for group in mine]}"
            f"{'; ' + different[0] if different else ''}. Build the model and pass the "
            "param_groups of that run, in its order."
        )
    bf16 = bool((state["ds_config"].get("bf16") or {}).get("enabled"))
    if bf16 != (next(model.module.parameters()).dtype == torch.bfloat16):
        precision = "bf16-mixed" if bf16 else "fp32"
        raise ValueError(
            f"{folder} was trained with bf16 {'on' if bf16 else 'off'}, and this run is the other "
            f"way. Use precision={precision!r}."
        )


def _check_optimizer(folder: Path, optimizer: Optimizer) -> None:
    state = _description(folder, "*_optim_states.pt")
    inner: Mapping[str, Any] = state["optimizer_state_dict"]
    base = inner.get("base_optimizer_state") or inner.get("optimizer_state_dict") or {}
    groups = base.get("param_groups") or [{}]
    saved, mine = set(groups[0]) - ADDED, set(optimizer.param_groups[0]) - ADDED
    if saved != mine:
        raise ValueError(
            f"{folder} holds an optimizer with {len(saved)} settings {sorted(saved)}, and this "
            f"run's has {len(mine)}, {sorted(mine)}. Pass the class of that run to apply(), or "
            "start from the weights."
        )


def _description(folder: Path, pattern: str) -> Any:
    """Return what the first of these files describes."""
    return read_torch_file(folder, min(folder.glob(pattern)).name)
