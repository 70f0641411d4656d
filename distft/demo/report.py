"""The table at the end, with a line under it for every column."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distft.demo.data import Example
from distft.demo.plan import TOLERANCE, Choice, Job
from distft.demo.results import Result
from distft.demo.training import COUNTED_STEP, Run
from distft.spec import ModelSpec
from distft.strategies.zero import ZeRO

_HEADS = (
    "\nstrategy", "\nranks", "final\nloss", "\ndiffers", "grad\nnorm", "MB\nheld", "by\nformula",
    "MB\nsent", "by\nformula", "\nresume", "sec-\nonds",
)  # fmt: skip


def print_opening(
    console: Console,
    alone: Job,
    rows: Sequence[Example],
    chosen: Sequence[Choice],
    left_out: Sequence[str],
) -> None:
    """Say what is about to happen, and which strategies are left out.

    Collective: none
    """
    calls = ", ".join(repr(choice.strategy) for choice in chosen)
    console.print(
        f"Fine-tuning one Qwen3 of {ModelSpec.from_config(alone.config).total_params:,} parameters "
        f"on {len(rows):,} questions about the Python standard library, {alone.steps} steps of "
        f"{alone.sizes.micro_batch * alone.sizes.micro_batches} rows: first in one process in "
        f"plain torch, then under {calls}. The strategy is the only argument that changes.",
        highlight=False,
    )
    for sentence in left_out:
        console.print(f"[yellow]left out:[/] {sentence}", highlight=False)
    if any(isinstance(choice.strategy, ZeRO) for choice in chosen):
        console.print(
            "[dim]DeepSpeed's shared-memory op stays off: only inference uses it, and no C++ "
            "compiler is needed without it.[/]",
            highlight=False,
        )
    console.print()


def print_answers(
    console: Console, asked: Sequence[Example], results: Sequence[Result], epochs: float
) -> None:
    """Print what a consolidated model answers, ZeRO-3's if it ran, and whether the others agree.

    Collective: none
    """
    shown = next((result for result in results if result.name == "zero3"), results[-1])
    console.print(
        f"\nSaved under [bold]{shown.name}[/] on {shown.ranks} ranks, consolidated to safetensors, "
        "loaded by AutoModelForCausalLM.from_pretrained, and asked:",
        highlight=False,
    )
    grid = Table.grid(padding=(0, 1), pad_edge=True)
    for example in asked:
        grid.add_row("[bold]question[/]", Text(example.question, style="bold"))
        grid.add_row("model", Text(shown.answers[example.question]))
        grid.add_row("[dim]docstring[/]", Text(example.answer, style="dim"))
    console.print(grid)
    others = [result for result in results if result is not shown]
    agreeing = sum(result.answers == shown.answers for result in others)
    if others:
        console.print(
            f"The models consolidated from {agreeing} of the other {len(others)} runs answer word "
            "for word the same.",
            highlight=False,
        )
    console.print(
        f"[dim]It has seen each answer {epochs:.1f} times: enough to sound like a docstring, not "
        "to know one. Try --steps 1000.[/]",
        highlight=False,
    )


def print_report(console: Console, reference: Run, results: Sequence[Result]) -> None:
    """Print the table, what its columns mean, and what does not hold.

    Collective: none
    """
    console.print()
    console.print(_table(reference, results))
    console.print()
    legend = Table.grid(padding=(0, 1))
    for name, meaning in _meanings(results[0]):
        legend.add_row(f"[bold]{name}[/]", meaning)
    console.print(legend, highlight=False)
    for result in results:
        for miss in result.misses():
            console.print(f"[yellow]formula off:[/] {miss}", highlight=False)
        for fault in result.faults():
            console.print(f"[bold red]FAILED[/] {fault}", highlight=False)


def _table(reference: Run, results: Sequence[Result]) -> Table:
    # 79 columns, so that it fits the narrowest terminal in use.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for head in _HEADS:
        table.add_column(head, justify="left" if head == _HEADS[0] else "right", no_wrap=True)
    table.add_row(
        "one process", "1", f"{reference.losses[-1]:.4f}", "", f"{reference.grad_norms[-1]:.3f}",
        "", "", "", "", "", f"{reference.seconds:.0f}",
    )  # fmt: skip
    for result in results:
        good = result.difference <= TOLERANCE
        table.add_row(
            result.name,
            str(result.ranks),
            f"{result.losses[-1]:.4f}",
            f"[{'green' if good else 'bold red'}]{result.difference:.0e}[/]",
            f"{result.grad_norm:.3f}",
            _megabytes(result.state.total),
            _formula(result.state.total, result.state_formula),
            "-" if result.wire is None else _megabytes(result.wire),
            _formula(result.wire, result.wire_formula),
            "[green]exact[/]" if result.resumed_equal else "[bold red]differs[/]",
            f"{result.seconds:.0f}",
        )
    return table


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f}"


def _formula(measured: float | None, formula: float) -> str:
    same = measured == formula
    return f"[{'green' if same else 'yellow'}]{'=' if same else ''}{_megabytes(formula)}[/]"


def _meanings(result: Result) -> list[tuple[str, str]]:
    """What each column says, with its unit."""
    return [
        ("final loss", "mean cross-entropy of the last step, in nats per token of the answers"),
        (
            "differs",
            "largest difference of any step's loss from one process, divided by that loss: 1e-07 "
            f"is the rounding of 32-bit numbers, above {TOLERANCE:.0e} the demo fails",
        ),
        ("grad norm", "length (2-norm) of the whole gradient in the last step, before clipping"),
        (
            "MB held",
            "megabytes (1,000,000 bytes) of weights, gradients and optimizer state on the fullest "
            "rank after a backward pass, measured; beside it what strategy.memory() says, = where "
            "it is the same to the byte. ZeRO keeps a second 32-bit copy of its part of the "
            "weights in the optimizer, which FSDP2 has no need of in fp32",
        ),
        (
            "MB sent",
            f"megabytes that one rank sends to others in one step, counted in step {COUNTED_STEP} "
            "as a ring sends them; beside it what strategy.traffic() says, = as above",
        ),
        (
            "resume",
            f"saved after step {result.resumed_from} and loaded into another model; exact: the "
            f"next {result.resumed_steps} losses equal those of the run that went on, to the bit",
        ),
        (
            "seconds",
            "wall time of the steps; all ranks share the cores of this machine, so it says "
            "nothing about GPUs",
        ),
    ]
