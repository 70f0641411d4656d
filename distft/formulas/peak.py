"""Memory of one rank by phase, from a few numbers: even shards, the heaviest pipeline stage.

`distft.formulas.native`, `deepspeed` and `parallel` say the model state to the byte, tensor by
tensor; this says all that a run holds beside it, and takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from distft.formulas._numbers import choice, whole
from distft.formulas.eager import Readers, eager_lines
from distft.formulas.reports import (
    ALWAYS,
    BACKWARD,
    FORWARD,
    FRAGMENTATION,
    FRAGMENTATION_OF_ADAPTERS,
    STATES,
    MemoryLine,
    MemoryReport,
)
from distft.formulas.shape import Shape
from distft.formulas.working import (
    CHECKPOINTING,
    LOGIT_BYTES,
    Kept,
    logit_bytes,
    mean_copies,
    norm_copies,
    score_bytes,
    whole_copies,
)

# DeepSpeed's defaults, in elements (its configuration's documentation).
BUCKET = 500_000_000
MAX_LIVE = 1_000_000_000
ENGINES = ("native", "deepspeed", "fsdp1", "whole", "sequential")


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis, and what is spread over `dp_shard`.

    Args:
        dp_replicate: Copies of the state.
        dp_shard: Ranks that share one copy, context-parallel ones not counted.
        tp: Ranks that share a layer.
        pp: Pipeline stages.
        cp: Ranks that share a row; they share one copy of the state too.
        ep: Ranks that share the experts.
        stage: 0 nothing is spread (DDP), 1 the optimizer, 2 also gradients, 3 also weights.
        engine: "native", "deepspeed", "fsdp1", "whole" (blocks stay gathered, as under pipelines)
            or "sequential" (stages work one after the other).
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    stage: int = 3
    engine: str = "native"

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"):
            whole(name, getattr(self, name), 1)
        choice("engine", self.engine, ENGINES)
        if (self.shards * self.tp) % self.ep and self.ep > 1:
            raise ValueError(
                f"ep is {self.ep}, which does not divide the {self.shards * self.tp} ranks of one "
                "copy. Choose a degree that does."
            )

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the state is spread."""
        return self.dp_shard * self.cp

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks that read rows of their own."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class Held:
    """Bytes per parameter.

    Args:
        weight: Of a trained weight.
        gradient: Of its gradient.
        optimizer: Of its optimizer state.
        frozen: Of a weight that is not trained; 0.53 is nf4 with its scales.
        frozen_root: Of the embedding and the head where they are not trained.
        temporary: Of what the step makes: a tensor of all weights for a foreach optimizer.
        gathered: Of a weight that layers compute with.
        reduced: Of a gradient on the wire.
    """

    weight: float = 4
    gradient: float = 4
    optimizer: float = 8
    frozen: float = 2
    frozen_root: float = 2
    temporary: float = 4
    gathered: float = 2
    reduced: float = 4


@dataclass(frozen=True)
class Run:
    """All that the memory of a rank depends on.

    Args:
        shape: The model.
        layout: How it is spread.
        held: Bytes per parameter.
        rows: Rows of a micro-step.
        seq_len: Tokens of a row, before `cp` splits it.
        kept: How layers are run.
        checkpointing: "none", "selective" or "full".
        loss: A key of `LOGIT_BYTES`.
        flash: Whether attention keeps no scores.
        adapters: Parameters of adapters; None trains all parameters.
        accumulates: Whether gradients of earlier micro-steps lie beside the loss.
        offload: "", "optimizer" or "params".
        in_backward: Whether the optimizer steps in the backward pass, one tensor at a time.
        paged: Whether optimizer state lies in host memory by paging.
        mixed_tokens: Tokens of a typical micro-step where rows differ in length, else 0.
        num_in_flight: Micro-steps whose activations the first pipeline stage holds.
        element: Bytes of an activation.
        imbalance: Rows of the busiest rank's experts over the mean.
        loads_whole: Whether each rank holds all weights once while they are loaded.
        root_split: Whether the embedding and the head are units of their own.
        splits_rows: Whether ranks of `tp` share the rows of norms and of the loss too (sequence
            parallelism); else each holds all of them.
        readers: Which layers keep what they read, for what `distft.formulas.eager` counts of
            transformers' own modules, moment by moment; None for what others' code keeps, in
            copies and by phase.
        autocasts: Whether weights and hidden states are fp32 and each linear layer casts its input.
    """

    shape: Shape
    layout: Layout = Layout()
    held: Held = Held()
    rows: int = 1
    seq_len: int = 4096
    kept: Kept = field(default_factory=Kept)
    checkpointing: str = "none"
    loss: str = "eager"
    flash: bool = True
    adapters: int | None = None
    accumulates: bool = False
    offload: str = ""
    in_backward: bool = False
    paged: bool = False
    mixed_tokens: int = 0
    num_in_flight: int = 1
    element: int = 2
    imbalance: float = 1.0
    loads_whole: bool = False
    root_split: bool = False
    splits_rows: bool = True
    readers: Readers | None = None
    autocasts: bool = False

    def __post_init__(self) -> None:
        whole("rows", self.rows, 1)
        whole("seq_len", self.seq_len, 1)
        choice("checkpointing", self.checkpointing, CHECKPOINTING)
        choice("loss", self.loss, LOGIT_BYTES)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step on one rank."""
        return -(-self.rows * self.seq_len // self.layout.cp)


def predicted_memory(run: Run) -> MemoryReport:
    """Return the memory of the heaviest rank, each line with its phases; the report has one rank.

    Source: the formulas of each line; Rajbhandari et al. 2020 (states), Korthikanti et al. 2022
    (activations). Assumes: even shards, gradients set to None by `zero_grad`.

    Collective: none.
    """
    stages = [_stage(run, True, run.layout.pp == 1)]
    if run.layout.pp > 1:
        stages.append(_stage(run, False, True))
    return max(stages, key=lambda report: report.peak_bytes)


def _stage(run: Run, is_first: bool, is_last: bool) -> MemoryReport:
    lines = [
        MemoryLine(name, kind, phases, (round(size),), on_host)
        for name, kind, phases, size, on_host in (
            *_states(run, is_first, is_last),
            *_buffers(run, is_first, is_last),
            *working_lines(run, is_first, is_last, _whole_gradients(run)),
        )
        if size >= 1
    ]
    states = sum(line.num_bytes for line in lines if line.kind in STATES)
    sharded = run.adapters is not None and run.layout.stage == 3 and run.layout.shards > 1
    return MemoryReport(
        tuple(lines),
        states,
        "P (w + g + k), each over its ranks",
        FRAGMENTATION_OF_ADAPTERS if sharded else FRAGMENTATION,
        run.layout.num_ranks > 1,
    )


_Line = tuple[str, str, tuple[str, ...], float, bool]


@dataclass(frozen=True)
class Parts:
    """Parameters of one rank before data ranks share them: blocks, embedding and head, experts."""

    dense: float
    root: float
    experts: float

    @classmethod
    def of(cls, run: Run, is_first: bool = True, is_last: bool = True) -> Parts:
        """Return the parameters of a pipeline stage on one rank."""
        shape, layout = run.shape, run.layout
        experts = shape.expert_params
        share = 1.0 if is_first and is_last else 0.5
        return cls(
            (shape.total - shape.embedding - experts) / layout.tp / layout.pp,
            shape.embedding * share / layout.tp,
            experts / layout.pp / max(layout.ep, layout.tp if layout.ep == 1 else 1),
        )

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.root + self.experts


def _expert_shards(layout: Layout) -> float:
    """Return the ranks over which experts of one rank are spread further (efsdp)."""
    return layout.shards * layout.tp / layout.ep if layout.ep > 1 else layout.shards


def _sharded(parts: Parts, layout: Layout, stage: int) -> float:
    """Return the parameters that stay on one rank where `stage` spreads them."""
    if layout.stage < stage:
        return parts.total
    return (parts.dense + parts.root) / layout.shards + parts.experts / _expert_shards(layout)


def _states(run: Run, is_first: bool, is_last: bool) -> Iterator[_Line]:
    held, layout = run.held, run.layout
    parts = Parts.of(run, is_first, is_last)
    weights = _sharded(parts, layout, 3)
    host = run.offload == "params"
    share = weights / parts.total if parts.total else 1.0
    if run.adapters is None:
        yield "parameters", "parameters", ALWAYS, held.weight * weights, host
        trained = parts.total
    else:
        root = parts.root * share
        size = held.frozen * (weights - root) + held.frozen_root * root
        yield "frozen parameters", "parameters", ALWAYS, size, host
        trained = run.adapters / layout.tp / layout.pp
        yield "adapters", "parameters", ALWAYS, held.weight * trained * share, host
    of_stage = {
        stage: trained * _sharded(parts, layout, stage) / parts.total if parts.total else 0.0
        for stage in (1, 2)
    }
    if run.in_backward:
        largest = max(parts.root / 2, _largest_matrix(run))
        phases: tuple[str, ...] = ("backward",)
        yield "gradient of one tensor", "gradients", phases, held.gradient * largest, False
    else:
        phases = ("forward", "loss", "backward", "step") if run.accumulates else ()
        phases = phases or _first_gradients(run)
        # DeepSpeed's stage 1 too has its partition of gradients, beside whole ones in backward.
        stage = 1 if layout.engine == "deepspeed" else 2
        yield "gradients", "gradients", phases, held.gradient * of_stage[stage], host
        if layout.engine == "deepspeed" and layout.stage == 1:
            yield "whole gradients", "buffer", ("backward",), held.gradient * trained, False
    moments = held.optimizer * of_stage[1]
    yield "optimizer", "optimizer", ALWAYS, moments, bool(run.offload) or run.paged
    if not run.in_backward:
        temporary = held.temporary * of_stage[1]
        yield "optimizer's temporary", "buffer", ("step",), temporary, bool(run.offload)


def _first_gradients(run: Run) -> tuple[str, ...]:
    """Return when gradients are held of which there are none before the backward pass."""
    if run.readers is None or run.layout.engine != "native":
        return ("backward", "step")
    # DDP's buckets are there from the first step on.
    return ALWAYS if run.layout.stage == 0 else (BACKWARD[2], "step")


def _whole_gradients(run: Run) -> float:
    """Return bytes of a block's gradient, whole, and of the one before it on its way."""
    layout = run.layout
    if run.adapters is not None or layout.stage < 3 or layout.shards == 1:
        return 0.0
    unit = _unit_params(run, Parts.of(run))
    return unit * (run.held.reduced + (run.held.gathered if run.shape.layers > 2 else 0))


def _unit_params(run: Run, parts: Parts) -> float:
    """Return the parameters that one block gathers; experts that nobody shares are not gathered."""
    experts = parts.experts if _expert_shards(run.layout) > 1 else 0.0
    return (parts.dense + experts) / max(run.shape.layers / run.layout.pp, 1)


def _largest_matrix(run: Run) -> float:
    shape = run.shape
    return shape.hidden * max(shape.width, shape.heads * shape.head_dim) / run.layout.tp


def _buffers(run: Run, is_first: bool, is_last: bool) -> Iterator[_Line]:
    layout, held = run.layout, run.held
    parts = Parts.of(run, is_first, is_last)
    trains = run.adapters is None
    quantized = not trains and held.frozen < 2
    if quantized:
        matrix = _largest_matrix(run)
        when = ("forward", "backward")
        yield "dequantized matrix", "buffer", when, held.gathered * matrix, False
    # On one data rank of a tp group `fully_shard` still casts fp32 weights.
    casts = run.readers is not None and layout.tp > 1 and held.gathered < held.weight
    if layout.stage < 3 or (layout.shards == 1 and not casts):
        if run.autocasts:
            yield from _cast_weights(run, parts)
        if layout.engine == "deepspeed" and layout.shards > 1 and trains:
            bucket = 2 * min(BUCKET, parts.total) * held.gathered
            yield "reduce buckets", "buffer", ("backward",), bucket, False
            bucket = min(BUCKET, parts.total) * held.gathered
            yield "gather bucket", "buffer", ("step",), bucket, False
        return
    per_weight = held.gathered if trains else min(held.gathered, held.frozen)
    unit = _unit_params(run, parts) * per_weight
    root = parts.root * held.gathered
    if layout.engine == "whole":
        whole_bytes = parts.total * held.gathered
        held_in = ("forward", "loss", "backward")
        yield "gathered weights of the stage", "buffer", held_in, whole_bytes, False
        if trains:
            grads = parts.total * held.reduced
            yield "whole gradients of the stage", "buffer", held_in, grads, False
        return
    if layout.engine == "deepspeed":
        live = min(MAX_LIVE, parts.total) * per_weight
        unit = max(unit, live / 2)
    if run.loads_whole:
        yield "whole weights", "buffer", ("load",), parts.total * held.gathered + 2 * root, False
    if run.root_split:
        root /= 2
    if layout.engine == "fsdp1":
        # Blocks that it has freed wait for record_stream (pytorch#117323).
        late = ("forward", "backward")
        yield "gathered blocks that are freed late", "buffer", late, 2 * unit, False
    if run.readers is not None and layout.engine == "native":
        yield from _counted_buffers(run, unit, root)
        return
    # The root stays whole from its forward pass, the first, to its backward pass.
    yield "gathered root", "buffer", ("forward", "loss", "backward"), root, False
    yield "gathered blocks, one fetched ahead", "buffer", ("forward",), 2 * unit, False
    gradient = 2 * unit if trains else 0.0
    both = 2 * unit + gradient
    yield "gathered blocks, gradient, reduce-scatter input", "buffer", ("backward",), both, False


def _counted_buffers(run: Run, unit: float, root: float) -> Iterator[_Line]:
    """Yield what `distft.formulas.native.buffer_lines` has, moment by moment, of even parts."""
    start, middle, end = BACKWARD
    begin, inside, _ = FORWARD
    yield "gathered root", "buffer", ("forward", "loss", start, middle), root, False
    if run.layout.shards > 1:
        yield "root as it arrives", "buffer", (begin,), root, False
    name = "gathered blocks: at work, fetched ahead"
    yield name, "buffer", (begin, inside, middle), 2 * unit, False
    if run.adapters is not None:
        return
    head = run.shape.vocab * run.shape.hidden / run.layout.tp * run.held.gathered
    yield "whole gradient of the head", "buffer", (middle,), head, False
    last = root / run.held.gathered * run.held.reduced
    if run.accumulates:
        held = ("forward", "loss", start, middle)
        yield "input of the root's reduce-scatter before", "buffer", held, last, False
    last *= 1 - 1 / run.layout.shards
    yield "whole gradients of the root, and their way", "buffer", (end,), root + last, False


def _cast_weights(run: Run, parts: Parts) -> Iterator[_Line]:
    """Yield the weights that autocast has cast, as `distft.formulas.native` does."""
    head = run.shape.vocab * run.shape.hidden / run.layout.tp
    blocks = parts.dense + parts.experts
    start, middle, _ = BACKWARD
    name, size = "weights that autocast has cast", run.held.gathered
    if run.checkpointing == "none":
        held = ("forward", "loss", start, middle)
        yield name, "buffer", held, size * (head + blocks), False
        return
    unit = blocks / max(run.shape.layers, 1)
    remembered = blocks if run.adapters is None else unit
    yield name, "buffer", ("forward",), size * (head + remembered), False
    yield "cast weights of the head", "buffer", ("loss", start), size * head, False
    yield "cast weights of one block", "buffer", (middle,), size * unit, False


def working_lines(
    run: Run, is_first: bool = True, is_last: bool = True, unit_bytes: float = 0
) -> Iterator[_Line]:
    """Yield what a micro-step keeps on one rank: name, kind, phases, bytes, whether on the host.

    Args:
        run: The run.
        is_first: Whether the rank has the first pipeline stage.
        is_last: Whether it has the last.
        unit_bytes: Bytes of gradients that lie whole when the backward pass of one block ends.

    Collective: none.
    """
    if run.readers is not None and run.shape.layers:
        yield from eager_lines(run, unit_bytes, run.readers)
        return
    shape, layout = run.shape, run.layout
    copy = run.tokens * shape.hidden * run.element
    layers = shape.layers / layout.pp
    per_layer = mean_copies(shape, run.kept, run.checkpointing, run.imbalance)
    whole_layer = whole_copies(shape, run.kept, run.imbalance)
    # Of these each rank of a tp group holds all, where rows are not split.
    unsplit = 0.0 if run.splits_rows else 1.0
    around = unsplit * norm_copies(shape, run.kept)
    per_rank = _split(per_layer, around if run.checkpointing == "none" else unsplit, layout.tp)
    again = _split(whole_layer, around, layout.tp) - per_rank
    # Where ranks share rows, what enters attention, the feed-forward layer and the head is gathered
    # and kept whole; Megatron's kernels gather it again.
    gathered = 0.0
    if run.splits_rows and layout.tp > 1 and run.kept.kernels != "fused":
        gathered = 1 - 1 / layout.tp
        again += 2 * gathered
        per_rank += 2 * gathered if run.checkpointing == "none" else 0.0
    in_flight = max(run.num_in_flight, 1) if is_first else 1
    scores = 0
    if not run.flash:
        scores = score_bytes(shape.heads, run.seq_len, run.rows) // layout.tp
    kept = copy * layers * per_rank * in_flight
    if run.checkpointing != "full":
        kept += scores * layers * in_flight
    when = ("forward", "loss", "backward")
    yield "activations", "activations", when, kept, False
    if run.checkpointing != "none":
        recomputed = copy * again + scores
        yield "one block computed again", "activations", ("backward",), recomputed, False
    if is_last and shape.vocab:
        parts = layout.tp if run.splits_rows else 1
        logits = logit_bytes(run.tokens, shape.vocab, run.loss, parts, run.element)
        # And their gradient, for the head.
        logits += round(2 * gathered * copy)
        yield "logits and loss", "logits", ("loss",), logits, False
        if run.mixed_tokens:
            cached = logit_bytes(run.mixed_tokens, shape.vocab, run.loss, parts, run.element)
            # Scores are in blocks as large.
            cached += round(scores * (run.mixed_tokens / run.tokens) ** 2)
            yield "blocks of rows of other lengths", "cached", ("loss",), cached, False


def _split(copies: float, unsplit: float, tp: int) -> float:
    """Return the copies that one rank of `tp` holds, where `unsplit` of them are on each."""
    return unsplit + (copies - unsplit) / tp
