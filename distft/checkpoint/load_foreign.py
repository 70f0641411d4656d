"""`Strategy.load` of a folder that another tool wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distft.checkpoint.adopt import Adoption, adopt
from distft.checkpoint.folder import MANIFEST, latest
from distft.checkpoint.foreign_run import open_dcp_run, open_torch_run
from distft.checkpoint.groups import group_settings
from distft.checkpoint.pickles import load_values
from distft.checkpoint.randomness import derive_random_state
from distft.checkpoint.readers.dcp import read_items
from distft.checkpoint.records import TORCH_FILES, refuse_broken_records
from distft.checkpoint.shards import LogicalTensor
from distft.checkpoint.takeover import take_over
from distft.checkpoint.whole_run import IMPLEMENTATION, WholeRun, check_run
from distft.process_group import group_rank, group_size, together

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

logger = logging.getLogger("distft")


class RunLoader(Protocol):
    """What a strategy brings to the load of another tool's run."""

    @property
    def precision(self) -> str:
        """Precision of the training."""

    @property
    def dp_rank(self) -> int:
        """This rank's slice of the data."""

    @property
    def dp_size(self) -> int:
        """Number of data ranks."""

    def _place_run(self, model: nn.Module, optimizer: Optimizer, run: WholeRun) -> None:
        """Put another tool's weights and optimizer state where this strategy holds them."""


def find_foreign(path: str | Path) -> Adoption | None:
    """Return the report of a folder whose run goes on here and that `Strategy.save` did not write.

    Raises:
        ValueError: The folder is another tool's and holds no run that goes on, or a broken one.

    Collective: none.
    """
    folder = Path(path)
    # A folder of ours, whole or not: the load itself says what is wrong with it.
    if not folder.is_dir() or (folder / MANIFEST).is_file() or latest(folder) is not None:
        return None
    try:
        found = adopt(folder)
    except ValueError as error:
        if "nothing known" in str(error):
            return None
        raise
    if found.kind == "a checkpoint of distft":
        return None
    if not found.resumes:
        raise ValueError(
            f"{found.path} is {found.kind}, and {_reason(found)}. Instead:\n{found.how}"
        )
    return found


def _reason(found: Adoption) -> str:
    absent = [part for part in ("weights", "optimizer") if part in found.missing]
    if absent:
        return f"its {' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} missing"
    gone = f" ({found.missing[-1]} is missing)" if found.missing else ""
    return f"its optimizer cannot be taken over by this version{gone}"


def load_foreign(
    strategy: RunLoader,
    found: Adoption,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any,
    data: Any,
) -> int:
    """Load weights, optimizer and scheduler of another tool's run; return the steps it made.

    Collective: every rank.
    """
    with together():
        _refuse_damage(found)
        if data is not None:
            raise ValueError(
                f"load(data=...) was asked for, and {found.path} is {found.kind}: its position in "
                f"the data is none of the {len(found.parts)} parts taken over. Leave data out, and "
                "skip the rows of the steps made."
            )
        saved_scheduler = _saved_scheduler(found, scheduler, optimizer)
        if strategy.precision == "bf16" and found.dtype not in (None, "bfloat16"):
            raise ValueError(
                f"{found.path} holds weights in {found.dtype}, and {strategy!r} trains in 'bf16', "
                "which would round them. Use precision='bf16-mixed' or 'fp32'."
            )
    if found.stage and found.tag is not None:
        take_over(found.path / found.tag, found.stage, found.world_size, model, optimizer)
    else:
        _load_whole(strategy, found, model, optimizer)
    step = _steps_made(found, optimizer, saved_scheduler)
    with together():
        if scheduler is not None:
            scheduler.load_state_dict(saved_scheduler)
        derive_random_state(step, strategy.dp_rank, 0, strategy.dp_size)
    if group_rank() == 0:
        left = "" if scheduler is not None else "the scheduler, "
        logger.warning(
            "%s: weights and optimizer go on at step %d; not taken over: %sthe random state, the "
            "position in the data.",
            found.path,
            step,
            left,
        )
    return step


def _refuse_damage(found: Adoption) -> None:
    """Raise where files are not what their CRCs are of; each rank looks at its share of them."""
    names = {name for files in found.parts.values() for name in files}
    if found.tag is not None:
        names |= {f"{found.tag}/{file.name}" for file in (found.path / found.tag).glob("*.pt")}
    archives = [name for name in names if name.endswith(TORCH_FILES)]
    by_size = sorted(archives, key=lambda name: ((found.path / name).stat().st_size, name))
    tensors: list[LogicalTensor] = []
    if found.reader == "dcp":
        tensors += read_items(found.path, found.path).tensors.values()
    rank, ranks = group_rank(), group_size("Strategy.load")
    refuse_broken_records(found.path, by_size[rank::ranks], tensors[rank::ranks])


def _load_whole(
    strategy: RunLoader, found: Adoption, model: nn.Module, optimizer: Optimizer
) -> None:
    with ExitStack() as stack:
        with together():
            run = stack.enter_context(_open(found, model, optimizer))
            check_run(run, model, optimizer)
            saved = [_settings(group) for group in run.groups]
            settings = group_settings(saved, optimizer, found.path)
        with together():
            strategy._place_run(model, optimizer, run)
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)


@contextmanager
def _open(found: Adoption, model: nn.Module, optimizer: Optimizer) -> Iterator[WholeRun]:
    if found.reader == "dcp":
        with open_dcp_run(found.path, model) as run:
            yield run
        return
    by_trainer = found.reader == "trainer"
    with open_torch_run(found.path, found.parts, model, optimizer, by_trainer) as run:
        yield run


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in group.items() if key != "params" and key not in IMPLEMENTATION
    }


def _saved_scheduler(found: Adoption, scheduler: Any, optimizer: Optimizer) -> Any:
    """Return a scheduler's state, its numbers by group fitted to the groups of this run."""
    files: Sequence[str] = found.parts.get("scheduler", ())
    readable = [name for name in files if name.startswith("scheduler")]
    if scheduler is None and not readable:
        return None
    if len(readable) != 1:
        raise ValueError(
            f"load(scheduler=...) was asked for, and {found.path} holds {len(readable)} files of "
            "a scheduler. Leave scheduler out, and set it to the steps made."
        )
    state = load_values(found.path / readable[0])
    if scheduler is None:
        return state
    num_groups = len(optimizer.param_groups)
    for key in ("base_lrs", "_last_lr", "lr_lambdas"):
        values = state.get(key)
        if not isinstance(values, list) or len(values) == num_groups:
            continue
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{found.path} has a scheduler with {len(values)} {key} that differ, and this run "
                f"has {num_groups} groups. Pass apply() the param_groups of that run."
            )
        state[key] = values[:1] * num_groups
    return state


def _steps_made(found: Adoption, optimizer: Optimizer, scheduler: Any) -> int:
    """Return the steps by the folder, else by the optimizer's counter, else by the scheduler's."""
    if found.step is not None:
        return found.step
    counters = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    if counters:
        return int(max(counters))
    return int((scheduler or {}).get("last_epoch", 0))
