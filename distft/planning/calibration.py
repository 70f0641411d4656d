"""Factors of a plan fitted to one or two measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distft.formulas._numbers import amount, choice
from distft.planning.options import Option, Setting

_MEASURES = ("peak_bytes", "step_seconds")
# A factor for what lies beside model state is kept within what buffers and kernels can explain.
_LEAST, _MOST = 0.2, 5.0


@dataclass(frozen=True)
class Calibration:
    """Factors, and the errors of the measured runs with and without them.

    Args:
        memory_factor: Measured over predicted of what lies beside model state.
        time_factor: Measured over predicted seconds.
        errors: What was measured, with predicted over measured less 1 before and after.
    """

    memory_factor: float
    time_factor: float
    errors: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        """One line with every error before and after."""
        listed = ", ".join(
            f"{what} {100 * before:+.1f} % before and {100 * after:+.1f} % after"
            for what, before, after in self.errors
        )
        return (
            f"Calibrated: activations and buffers times {self.memory_factor:.3f}, seconds times "
            f"{self.time_factor:.3f}; {listed}."
        )


def calibrated(
    setting: Setting, options: Sequence[Option], measured: Mapping[str, Mapping[str, float]]
) -> tuple[Setting, Calibration]:
    """Return the setting with fitted factors, and the errors before and after.

    Raises:
        ValueError: Nothing is measured, no option has such a label, or a number is none.

    Collective: none.
    """
    runs = list(_runs(options, measured))
    memory = [factor for option, what, value in runs if what == "peak_bytes"
              for factor in [_memory_factor(option, value)]]  # fmt: skip
    times = [value / option.time.seconds for option, what, value in runs if what == "step_seconds"]
    fitted = replace(
        setting,
        memory_factor=setting.memory_factor * (sum(memory) / len(memory) if memory else 1.0),
        time_factor=setting.time_factor * (sum(times) / len(times) if times else 1.0),
    )
    errors = []
    for option, what, value in runs:
        after = Option(option.candidate, fitted)
        before_error, after_error = (_value(x, what) / value - 1 for x in (option, after))
        errors.append((f"{option.label} {what}", before_error, after_error))
    return fitted, Calibration(fitted.memory_factor, fitted.time_factor, tuple(errors))


def _runs(
    options: Sequence[Option], measured: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[Option, str, float]]:
    if not measured:
        raise ValueError("0 runs are measured. Pass one or two, by the labels of plan.options.")
    by_label = {option.label: option for option in options}
    for label, values in measured.items():
        option = by_label[choice("measured", label, by_label)]
        for what, value in values.items():
            choice("measured value", what, _MEASURES)
            if amount(f"{label} {what}", value) == 0:
                raise ValueError(f"{label}: {what} is 0, which no run is. Pass what was measured.")
            yield option, what, float(value)


def _value(option: Option, what: str) -> float:
    return float(option.peak_bytes) if what == "peak_bytes" else option.time.seconds


def _memory_factor(option: Option, measured: float) -> float:
    """Return the factor of what is no model state with which the peak is as measured."""
    low, high = _LEAST, _MOST
    setting = option.setting
    for _ in range(60):
        middle = (low + high) / 2
        tried = replace(setting, memory_factor=setting.memory_factor * middle)
        if Option(option.candidate, tried).peak_bytes < measured:
            low = middle
        else:
            high = middle
    return high
