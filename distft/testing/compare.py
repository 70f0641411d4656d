"""Numbers and tensors of two runs side by side: what differs by more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# fp32 against one process with the same micro-batches: what rounding alone can do.
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-5

Distance = Callable[["Tensor", "Tensor"], float]


@dataclass(frozen=True)
class Gap:
    """How far one number or tensor is from the reference.

    Attributes:
        name: The tensor, or the step of a number.
        error: Distance; infinite where the two cannot be compared.
        tolerance: The largest distance that is rounding.
        values: What was found and what was expected, of numbers and shapes; ``""`` of tensors.
    """

    name: str
    error: float
    tolerance: float
    values: str = ""

    @property
    def differs(self) -> bool:
        """Whether the distance is more than rounding; NaN is."""
        return not self.error <= self.tolerance

    def __str__(self) -> str:
        """One line with the distance."""
        if not self.values:
            return f"{self.name}: {self.error:.1e} off"
        return f"{self.name}: {self.values} ({self.error:.1e} off)"


def compare_numbers(
    found: Sequence[float], expected: Sequence[float], tolerance: float
) -> list[Gap]:
    """Return the relative distance of each number, named by its step.

    Collective: none.
    """
    gaps = []
    for index, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        error = abs(mine - reference) / max(abs(reference), 1e-30)
        gaps.append(Gap(f"of step {index}", error, tolerance, f"{mine} against {reference}"))
    return gaps


def compare_tensors(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    distance: Distance,
    tolerance: float,
) -> list[Gap]:
    """Return the distance of every tensor, in the reference's order; others come last.

    A tensor that is on one side only, or has another shape, is infinitely far.

    Collective: none.
    """
    gaps = []
    for name in dict.fromkeys((*expected, *found)):
        if name not in found or name not in expected:
            side = "here" if name in found else "in the reference"
            gaps.append(Gap(name, float("inf"), tolerance, f"there is one {side} only"))
        elif found[name].shape != expected[name].shape:
            shapes = f"shape {tuple(found[name].shape)} against {tuple(expected[name].shape)}"
            gaps.append(Gap(name, float("inf"), tolerance, shapes))
        else:
            gaps.append(Gap(name, distance(found[name], expected[name]), tolerance))
    return gaps


def relative(found: Tensor, expected: Tensor) -> float:
    """Return ``||found - expected|| / ||expected||``, absolutely where the reference is 0.

    Collective: none.
    """
    scale = float(expected.norm())
    return float((found - expected).norm()) / (scale if scale else 1.0)


def absolute(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element; of packed bytes 0 or infinity.

    Collective: none.
    """
    if not expected.is_floating_point():
        return 0.0 if bool((found == expected).all()) else float("inf")
    return float((found - expected).abs().max()) if expected.numel() else 0.0
