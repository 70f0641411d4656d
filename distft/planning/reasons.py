"""Why a strategy is where it is in a plan: rules of thumb with the numbers that they rest on."""

from __future__ import annotations

from collections.abc import Iterator

from distft.planning.machine import wires_of
from distft.planning.options import Option

GB = 1e9


def reasons(option: Option) -> list[str]:
    """Return sentences on memory, wires, accumulation and placement of one option.

    Collective: none.
    """
    return [*_memory(option), *_wires(option), *_axes(option), *_files(option)]


def _memory(option: Option) -> Iterator[str]:
    report, setting = option.memory, option.setting
    largest = max(report.lines, key=lambda line: 0 if line.on_host else line.num_bytes)
    verb = "fits" if option.fits else "does not fit"
    yield (
        f"{option.label} {verb}: {report.peak_bytes / GB:.1f} GB of live tensors in "
        f"{report.peak_phase}, {option.needed_bytes / GB:.1f} GB with margin and context, of "
        f"{setting.capacity / GB:.1f} GB. The largest line is {largest.name}, "
        f"{largest.num_bytes / GB:.1f} GB."
    )
    if option.host_bytes:
        yield f"A node's host holds {option.host_bytes / GB:.1f} GB of it."
    if option.change is not None:
        yield (
            f"It fits with {option.change.what}, at {option.change.tokens_per_second:,.0f} "
            "tokens/s."
        )


def _wires(option: Option) -> Iterator[str]:
    time, layout = option.time, option.candidate.layout
    if option.setting.num_ranks == 1:
        return
    wires = wires_of(option.setting.cluster, layout)
    share = time.exposed / time.seconds
    if layout.shards > 1:
        kind = "Gathers and reductions" if layout.stage == 3 else "Sums of gradients"
        yield (
            f"{kind} run at {wires.shard / GB:.0f} GB/s; {100 * share:.0f} % of the step waits for "
            "communication."
        )
    if option.hidden_at is None:
        yield "No micro-batch up to 4096 rows hides the communication behind compute."
    elif option.hidden_at > option.setting.load.micro_batch:
        yield f"From micro_batch={option.hidden_at} on, compute hides it."
    if layout.stage == 3 and option.setting.load.grad_accum > 1 and layout.shards > 1:
        yield (
            f"Its gathers are paid in each of {option.setting.load.grad_accum} micro-steps; DDP "
            "sums gradients once a step."
        )


def _axes(option: Option) -> Iterator[str]:
    layout = option.candidate.layout
    if layout.tp > 1:
        yield (
            f"tp={layout.tp} stays inside a node: four sums of hidden states a layer wait on its "
            "wires, which nothing hides."
        )
    if layout.ep > 1:
        yield (
            f"ep={layout.ep} sends tokens times experts per token, not parameters; its time grows "
            "with the busiest rank's share."
        )
    if layout.dp_replicate > 1:
        yield (
            f"Groups of {layout.dp_shard * layout.tp} ranks gather among themselves; only reduced "
            "gradients go between the groups, once a step."
        )


def _files(option: Option) -> Iterator[str]:
    spec = option.setting.spec
    trained = option.setting.adapters or spec.total_params
    saved = (12 if option.setting.precision != "bf16" else 6) * trained
    yield (
        f"A checkpoint with optimizer is {saved / GB:.1f} GB, the consolidated model "
        f"{2 * spec.total_params / GB:.1f} GB in bf16, written within 2 GB of one process."
    )
