"""Means of an evaluation over its loss tokens, of the values that TRL notes for each batch."""

from __future__ import annotations

from typing import Any

# Each is a mean over the loss tokens of one round of batches.
OF_TOKENS = ("entropy", "mean_token_accuracy")


class WeighedMeans:
    """Means over the loss tokens of all batches, where TRL's log has means of batches' means."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0.0

    def add(self, noted: dict[str, list[Any]], count: float) -> None:
        """Take what was noted of the last round, which had so many loss tokens over all ranks."""
        for name in OF_TOKENS:
            if noted.get(name):
                self._sums[name] = self._sums.get(name, 0.0) + noted[name][-1] * count
        self._count += count

    def put(self, noted: dict[str, list[Any]]) -> None:
        """Put the means in the place of what was noted."""
        for name, total in self._sums.items():
            noted[name] = [total / self._count if self._count else 0.0]
