"""What a parity check found: pass or fail, by how much, and where the first difference is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"
# The columns of a report: what is compared, in the order of a run.
QUANTITIES = ("loss", "gradient", "norm", "clipped gradient", "weight", "buffer", "moment")


@dataclass(frozen=True)
class Difference:
    """A number or tensor that is further from one process than rounding brings it.

    Attributes:
        when: Stage of the run, such as ``"at step 0"``.
        quantity: One of `QUANTITIES`.
        name: The tensor; ``""`` of a loss or norm.
        error: Distance: of weights and buffers the largest difference of an element, else relative.
        tolerance: The largest distance that counts as rounding.
        ranks: The ranks that have it.
        values: Both values, of numbers and shapes.
    """

    when: str
    quantity: str
    name: str
    error: float
    tolerance: float
    ranks: tuple[int, ...]
    values: str = ""

    def __str__(self) -> str:
        """One sentence."""
        of = f" of {self.name}" if self.name else ""
        values = f", {self.values}" if self.values else ""
        return (
            f"{self.quantity}{of} {self.when} is {self.error:.1e} off (tolerance "
            f"{self.tolerance:.0e}){values}, on {_ranks(self.ranks)}"
        )


@dataclass(frozen=True)
class StrategyResult:
    """What became of one strategy.

    Attributes:
        strategy: Its constructor.
        status: ``"passed"``, ``"failed"`` or ``"not applicable"``.
        reason: Why it is not applicable, or what it failed with where that is no difference.
        differences: What differs, first causes first.
        largest: The largest error by stage and quantity.
        num_loads: Checkpoints that it loaded: its own, and those of other strategies.
        seconds: Time that it took.
    """

    strategy: str
    status: str
    reason: str = ""
    differences: tuple[Difference, ...] = ()
    largest: Mapping[tuple[str, str], float] = field(default_factory=dict)
    num_loads: int = 0
    seconds: float = 0.0

    @property
    def first(self) -> str:
        """What is wrong first, in one sentence; ``""`` where nothing is."""
        return str(self.differences[0]) if self.differences else self.reason

    def __str__(self) -> str:
        """One line, and one more for each of the first differences."""
        lines = [f"{self.strategy}: {self.status}"]
        lines += [f"  {self.reason}"] if self.reason else []
        lines += [f"  {difference}" for difference in self.differences[:3]]
        if len(self.differences) > 3:
            lines.append(f"  and {len(self.differences) - 3} more differences")
        return "\n".join(lines)


@dataclass(frozen=True)
class Certificate:
    """Whether every strategy trains one model as one process does, in fp32.

    Attributes:
        model: Class of the model.
        num_parameters: Of the model that was trained.
        config_digest: SHA-256 of the config that was trained, the first 16 digits.
        cut: What of the user's config was cut, from name to old and new value.
        adapters: The adapters that strategies attached; ``""`` where they did not.
        world_size: Number of ranks.
        num_steps: Optimizer steps before the save.
        results: One for each strategy.
        versions: Of Python and the packages that took part.
        seconds: Time that all took.
    """

    model: str
    num_parameters: int
    config_digest: str
    cut: Mapping[str, Sequence[Any]]
    adapters: str
    world_size: int
    num_steps: int
    results: tuple[StrategyResult, ...]
    versions: Mapping[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no strategy failed and at least one could be applied."""
        statuses = [result.status for result in self.results]
        return FAILED not in statuses and PASSED in statuses

    def result(self, strategy: Any) -> StrategyResult:
        """Return the result of a strategy, given itself or its constructor.

        Raises:
            ValueError: It was not checked.

        Collective: none.
        """
        for result in self.results:
            if result.strategy == str(strategy):
                return result
        raise ValueError(
            f"The certificate has {len(self.results)} strategies, and {strategy} is none of them. "
            f"Choose one of {', '.join(result.strategy for result in self.results)}."
        )

    def to_json(self) -> str:
        """Return the certificate as one JSON object; a distance that is no number is null.

        Collective: none.
        """
        return json.dumps({"passed": self.passed, **_plain(asdict(self))}, indent=2)

    def to_markdown(self) -> str:
        """Return the certificate as a page: verdict, a table, differences, versions.

        Collective: none.
        """
        columns = [
            quantity
            for quantity in QUANTITIES
            if any(_worst(result, quantity) is not None for result in self.results)
        ]
        lines = [
            f"# Parity of {self.model}: {'passed' if self.passed else 'FAILED'}",
            "",
            f"{self.num_parameters:,} parameters in fp32, {self.num_steps} steps on "
            f"{self.world_size} ranks against one process, then saved, loaded, and loaded by every "
            "other strategy. The largest errors of all stages:",
            "",
            f"| strategy | verdict | {' | '.join(columns)} | loads | s |",
            f"|---|---|{'---|' * len(columns)}---|---|",
        ]
        for result in self.results:
            errors = " | ".join(_shown(_worst(result, quantity)) for quantity in columns)
            lines.append(
                f"| `{result.strategy}` | {result.status} | {errors} | {result.num_loads} | "
                f"{result.seconds:.1f} |"
            )
        told = [result for result in self.results if result.first]
        if told:
            lines += ["", *(f"- {str(result).replace(chr(10), chr(10) + '  ')}" for result in told)]
        if self.cut:
            cut = ", ".join(f"{name} {old} → {new}" for name, (old, new) in self.cut.items())
            lines += ["", f"Cut of the config: {cut}."]
        if self.adapters:
            lines += ["", f"Adapters: {self.adapters}."]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines += ["", f"Config {self.config_digest}; {versions}; {self.seconds:.0f} s.", ""]
        return "\n".join(lines)

    def __str__(self) -> str:
        """Verdict, then what became of each strategy."""
        verdict = "passed" if self.passed else "FAILED"
        head = (
            f"Parity of {self.model} ({self.num_parameters:,} parameters) on {self.world_size} "
            f"ranks against one process: {verdict} in {self.seconds:.0f} s"
        )
        return "\n".join([head, *map(str, self.results)])


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no infinity."""
    if isinstance(value, Mapping):
        return {
            ": ".join(name) if isinstance(name, tuple) else name: _plain(inner)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if isinstance(value, (int, str)) or value is None else str(value)


def _worst(result: StrategyResult, quantity: str) -> float | None:
    found = [error for (_, of), error in result.largest.items() if of == quantity]
    return max(found, default=None)


def _shown(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
