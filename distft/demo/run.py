"""The whole demo: prepare, train alone, train under every strategy, compare, answer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from distft.demo.answers import ask_about, consolidate_and_ask
from distft.demo.data import Example, examples
from distft.demo.errors import DemoError
from distft.demo.plan import Choice, Job, Sizes, choose
from distft.demo.plots import plot_losses, plot_memory
from distft.demo.progress import Bar, Bars
from distft.demo.ranks import Ranks
from distft.demo.report import print_answers, print_opening, print_report
from distft.demo.results import RESULTS, Result, write_json
from distft.demo.training import Run, train, train_alone

MARKER = ".distft-demo"
FEWEST_STEPS = 4


@dataclass(frozen=True)
class Settings:
    """What the command line chose.

    Attributes:
        strategies: Names; empty is all that fit.
        ranks: Ranks to start (HSDP gets twice as many), or the launcher's number.
        steps: Optimizer steps.
        out: Folder for pictures, numbers and models.
        under_launcher: Whether a launcher started this process.
        seed: Seed of weights and of the order of rows.
    """

    strategies: list[str]
    ranks: int
    steps: int
    out: Path
    under_launcher: bool
    seed: int = 0


def run_demo(settings: Settings, ranks: Ranks, console: Console) -> bool:
    """Run everything; whether every strategy trained as one process does.

    Collective: every rank of a launcher's job.
    """
    begun = time.perf_counter()
    if settings.steps < FEWEST_STEPS:
        raise DemoError(
            f"--steps {settings.steps} is below the {FEWEST_STEPS} that a stop in the middle and "
            f"a resume take. Give at least {FEWEST_STEPS}."
        )
    chosen, left_out = choose(settings.strategies, settings.ranks, settings.under_launcher)
    if not chosen:
        raise DemoError(f"No strategy fits {settings.ranks} ranks: {'; '.join(left_out)}.")
    ranks.check(lambda: _open_folder(settings.out))
    rows = examples()
    alone = _prepare(settings, rows, ranks)
    print_opening(console, alone, rows, chosen, left_out)
    bars = Bars(console, settings.steps)
    with bars.drawn():
        bar = bars.start(alone.name)
        reference = ranks.run(train_alone, alone, bar)[0]
        bar.finish(f"loss {reference.losses[-1]:.4f}")
        results = [
            _one_strategy(choice, alone, reference, rows, ranks, bars.start(choice.strategy.name))
            for choice in chosen
        ]
    print_report(console, reference, results)
    if ranks.is_first:
        epochs = alone.steps * alone.sizes.micro_batch * alone.sizes.micro_batches / len(rows)
        print_answers(console, ask_about(rows), results, epochs)
        plot_losses(settings.out / "losses.png", reference, results)
        plot_memory(settings.out / "memory.png", results)
        write_json(settings.out / RESULTS, reference, results)
    seconds = time.perf_counter() - begun
    console.print(
        f"\nWrote [bold]losses.png[/], [bold]memory.png[/], results.json and models/ to "
        f"{settings.out} after {seconds // 60:.0f} min {seconds % 60:.0f} s.",
        highlight=False,
    )
    return not any(result.faults() for result in results)


def _open_folder(out: Path) -> None:
    """Make the output folder, or empty the one of an earlier demo; no other folder is touched."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).exists())):
        raise DemoError(
            f"{out} is there already and is not of the demo. Name another folder with --out."
        )
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).touch()


def _prepare(settings: Settings, rows: Sequence[Example], ranks: Ranks) -> Job:
    """The job of one process: tokenizer trained, rows encoded; strategies only replace fields."""
    from distft.demo.model import model_config
    from distft.demo.tokenizer import row, train_tokenizer

    tokenizer = train_tokenizer(rows)
    folder = settings.out / "tokenizer"
    if ranks.is_first:
        tokenizer.save_pretrained(folder)
    return Job(
        strategy=None,
        ranks=1,
        config=model_config(tokenizer).to_dict(),
        rows=[row(tokenizer, example) for example in rows],
        sizes=Sizes.for_ranks(settings.ranks),
        steps=settings.steps,
        seed=settings.seed,
        folder=settings.out / "checkpoints",
        tokenizer=folder,
    )


def _one_strategy(
    choice: Choice,
    alone: Job,
    reference: Run,
    rows: Sequence[Example],
    ranks: Ranks,
    bar: Bar,
) -> Result:
    job = replace(
        alone,
        strategy=choice.strategy,
        ranks=choice.ranks,
        folder=alone.folder / choice.strategy.name,
    )
    runs = ranks.run(train, job, bar)
    bar.say("consolidating, asking")
    answers = {}
    if ranks.is_first:
        answers = _export(job, runs[0], [example.question for example in ask_about(rows)])
    result = Result.of(job, runs, reference, _formulas(job), answers)
    good = "same as one process" if not result.faults() else "[bold red]FAILED[/]"
    bar.finish(f"loss {result.losses[-1]:.4f}, {good}")
    return result


def _export(job: Job, run: Run, questions: list[str]) -> dict[str, str]:
    """Consolidate the last save, ask the model that comes out, and drop the checkpoints."""
    assert run.checkpoint is not None
    model = job.folder.parent.parent / "models" / job.name
    answers = consolidate_and_ask(run.checkpoint, model, questions)
    shutil.rmtree(job.folder)
    return answers


def _formulas(job: Job) -> tuple[int, float]:
    """Bytes of model state on the heaviest rank, and bytes sent per step, by distft's formulas."""
    from distft import ModelSpec, Workload

    assert job.strategy is not None
    spec = ModelSpec.from_config(job.config)
    longest = max(len(row["input_ids"]) for row in job.rows)
    load = Workload(micro_batch=job.sizes.micro_batch, seq_len=longest, grad_accum=job.grad_accum)
    memory = job.strategy.memory(spec, load, world_size=job.ranks)
    traffic = job.strategy.traffic(spec, load, world_size=job.ranks)
    return memory.model_state_bytes, float(traffic.bytes_per_step)
