"""What the ranks of a parity check do: the reference, a training, loads; and what differs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.diagnose.recipe import Recipe
from distft.diagnose.reference import read_reference, stdout_to_stderr
from distft.testing.compare import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    WEIGHT_TOLERANCE,
    Distance,
    Gap,
    absolute,
    compare_numbers,
    compare_tensors,
)
from distft.testing.runs import step_by_pieces

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distft.strategies.base import Strategy

# Rounding of a gradient whose terms cancel is that of the terms: of the key's bias in attention
# nothing but it is left.
NOISE = 1e-7
# Second moments are squares, whose rounding is twice that of a gradient.
MOMENT_TOLERANCE = 2 * GRADIENT_TOLERANCE


@dataclass(frozen=True)
class Found:
    """One comparison on one rank.

    Attributes:
        when: Stage of the run, such as ``"at step 0"``.
        quantity: Loss, gradient, norm, weight, buffer or moment.
        gap: The largest of the kind, or the first that is more than rounding.
    """

    when: str
    quantity: str
    gap: Gap


@dataclass
class Report:
    """What a rank has seen, in the order in which causes come before consequences."""

    found: list[Found] = field(default_factory=list)
    not_applicable: str | None = None

    def add(self, when: str, quantity: str, gaps: Sequence[Gap]) -> None:
        """Keep every gap that is more than rounding, or else the largest."""
        wrong = [gap for gap in gaps if gap.differs]
        kept = wrong or sorted(gaps, key=lambda gap: gap.error)[-1:]
        self.found += [Found(when, quantity, gap) for gap in kept]

    @property
    def differs(self) -> bool:
        """Whether anything was more than rounding."""
        return any(found.gap.differs for found in self.found)


@contextmanager
def stage(folder: Path, what: str) -> Iterator[None]:
    """Write down what this rank is at, for the case that it does not come back."""
    path = folder / f"stage-{os.environ.get('RANK', '0')}"
    path.write_text(what)
    yield
    path.write_text("")


def train_under(strategy: Strategy, recipe: Recipe, folder: Path, path: Path) -> Report:
    """Train under a strategy, save to ``path``, and say what differs from the reference.

    Collective: every rank.
    """
    import torch.distributed as dist

    from distft.training.wrappers import unwrap

    stdout_to_stderr()
    report, expected = Report(), read_reference(folder)
    with stage(folder, "apply"):
        applied = _apply(strategy, recipe, report)
    if applied is None:
        return report
    model, optimizer = applied
    with stage(folder, "gather_weights after apply"):
        start = strategy.gather_weights(model)
    report.add("after apply", "weight", compare_tensors(start, expected["start"], absolute, 0.0))
    report.add("after apply", "buffer", _buffers(unwrap(model), expected["buffers"]))
    for step in range(recipe.num_steps):
        with stage(folder, f"step {step}"):
            _step(strategy, recipe, model, optimizer, step, expected, report)
    with stage(folder, "save"):
        strategy.save(path, model, optimizer, step=recipe.num_steps)
        if dist.get_rank() == 0:
            _compare_saved(path, expected, report)
        dist.barrier()
    return report


def _apply(strategy: Strategy, recipe: Recipe, report: Report) -> tuple[Any, Any] | None:
    """Return what `apply` makes of the model, None where the strategy refuses it."""
    import torch
    import torch.distributed as dist

    from distft.process_group import init

    init(seed=0)
    model, _ = recipe.build()
    if dist.get_rank():
        # Rank 0's values are to be used everywhere.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1.5)
    try:
        return strategy.apply(model, recipe.factory(), peft_config=recipe.peft_config)
    except ValueError as error:
        report.not_applicable = str(error)
        return None


def _step(
    strategy: Strategy,
    recipe: Recipe,
    model: Any,
    optimizer: Any,
    step: int,
    expected: Mapping[str, Any],
    report: Report,
) -> None:
    """Make one step, the first of the pieces of `train_step`, and compare what it gives."""
    mine = recipe.batches(_inner(model), step)[strategy.dp_rank :: strategy.dp_size]
    gradients: dict[str, Tensor] = {}
    clipped: dict[str, Tensor] = {}
    if step == 0:
        loss, norm, gradients = step_by_pieces(
            strategy,
            model,
            optimizer,
            mine,
            recipe.max_norm,
            recipe.loss_fn,
            recipe.count_fn,
            clipped,
        )
    else:
        result = strategy.train_step(
            model, optimizer, mine, recipe.max_norm, recipe.loss_fn, recipe.count_fn
        )
        loss, norm = result.loss, result.grad_norm
    when = f"at step {step}"
    _add_number(report, when, "loss", loss, expected["losses"][step], LOSS_TOLERANCE)
    if step == 0:
        report.add(when, "gradient", _gradients(gradients, expected["gradients"]))
    _add_number(report, when, "norm", norm, expected["norms"][step], NORM_TOLERANCE)
    if step == 0:
        report.add(when, "clipped gradient", _gradients(clipped, expected["clipped"]))
    weights = strategy.gather_weights(model)
    gaps = compare_tensors(weights, expected["weights"][step], absolute, WEIGHT_TOLERANCE)
    report.add(f"after step {step}", "weight", gaps)


def load_under(
    strategy: Strategy, recipe: Recipe, folder: Path, sources: Sequence[tuple[str, Path]]
) -> Report:
    """Load checkpoints into a strategy one after another, each time going on for a step.

    Collective: every rank.
    """
    stdout_to_stderr()
    report, expected = Report(), read_reference(folder)
    last = recipe.num_steps - 1
    with stage(folder, "apply before a load"):
        applied = _apply(strategy, recipe, report)
    if applied is None:
        return report
    model, optimizer = applied
    for name, path in sources:
        with stage(folder, f"load of the checkpoint of {name}"):
            strategy.load(path, model, optimizer)
            weights = strategy.gather_weights(model)
        when = f"after the load of the checkpoint of {name}"
        gaps = compare_tensors(weights, expected["weights"][last], absolute, WEIGHT_TOLERANCE)
        report.add(when, "weight", gaps)
        when = f"{when} and a step"
        with stage(folder, f"a step after the load of the checkpoint of {name}"):
            late = Report()
            _step(strategy, recipe, model, optimizer, recipe.num_steps, expected, late)
        report.found += [replace(found, when=when) for found in late.found]
    return report


def _compare_saved(path: Path, expected: Mapping[str, Any], report: Report) -> None:
    """Compare the files of a checkpoint, read without its strategy, with the reference."""
    from distft.checkpoint.copy import BUFFER_BYTES
    from distft.checkpoint.mapped_run import read_tensor
    from distft.checkpoint.readers import read_map
    from distft.checkpoint.stream import Stream

    found, last = read_map(path), expected["weights"][-2]
    state = found.optimizer.moments if found.optimizer is not None else {}
    with Stream(found.root, BUFFER_BYTES) as stream:
        weights = {
            name: read_tensor(stream, tensor)
            for name, tensor in found.tensors.items()
            if name in last
        }
        moments = {
            name: {k: read_tensor(stream, t) for k, t in tensors.items() if len(t.shape)}
            for name, tensors in state.items()
        }
    gaps = compare_tensors(weights, last, absolute, WEIGHT_TOLERANCE)
    report.add("in the saved files", "weight", gaps)
    gaps = []
    for key in dict.fromkeys(key for values in expected["moments"].values() for key in values):
        saved = {n: tensors[key] for n, tensors in moments.items() if key in tensors}
        gaps += _compare_moments(key, saved, expected["moments"])
    report.add("in the saved files", "moment", gaps)


def _compare_moments(
    key: str, saved: Mapping[str, Tensor], expected: Mapping[str, Mapping[str, Tensor]]
) -> list[Gap]:
    import torch

    wanted = {name: values[key] for name, values in expected.items() if key in values}
    gaps = []
    for gap in compare_tensors(saved, wanted, _above_noise(wanted), MOMENT_TOLERANCE):
        dtype = saved[gap.name].dtype if gap.name in saved else torch.float32
        other = "" if dtype == torch.float32 else f"kept in {str(dtype).removeprefix('torch.')}"
        gaps.append(replace(gap, name=f"{key} of {gap.name}", values=other or gap.values))
    return gaps


def _gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Gap]:
    return compare_tensors(found, expected, _above_noise(expected), GRADIENT_TOLERANCE)


def _above_noise(expected: Mapping[str, Tensor]) -> Distance:
    """Return a relative distance that takes the rounding of all tensors together for rounding."""
    whole = sum(float(tensor.norm()) ** 2 for tensor in expected.values()) ** 0.5

    def distance(found: Tensor, reference: Tensor) -> float:
        apart, size = float((found.float() - reference).norm()), float(reference.norm())
        error = apart / (size or 1.0)
        return min(error, GRADIENT_TOLERANCE) if apart <= NOISE * whole else error

    return distance


def _buffers(model: nn.Module, expected: Mapping[str, Tensor]) -> list[Gap]:
    found = {
        name: buffer.detach().cpu()
        for name, buffer in model.named_buffers()
        if name in expected and buffer.shape == expected[name].shape
    }
    return compare_tensors(found, {name: expected[name] for name in found}, absolute, 0.0)


def _add_number(
    report: Report, when: str, quantity: str, found: float, expected: float, tolerance: float
) -> None:
    gap = compare_numbers([found], [expected], tolerance)[0]
    report.add(when, quantity, [replace(gap, name="")])


def _inner(model: Any) -> Any:
    from distft.training.wrappers import unwrap

    return unwrap(model)
