"""Whether a run fits a GPU, and by how much."""

from __future__ import annotations

from distft.formulas import MemoryReport

# The margin on predicted live tensors within which a run is not said to fit: with it none of the
# peaks that `benchmarks/planner.py` compares lies more than 10 % above what was predicted.
MARGIN = 1.18


def needed_bytes(report: MemoryReport) -> float:
    """Return the bytes that a GPU must have: live tensors with the margin, and the context.

    What the allocator only keeps it gives back before it fails, so that it does not count.

    Collective: none.
    """
    return MARGIN * report.peak_bytes + report.context_bytes
