"""Time of an optimizer step: arithmetic, memory traffic, launches, links and what overlaps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distft.formulas._numbers import amount, whole
from distft.formulas.peak import Run
from distft.formulas.working import score_bytes

# Matrix products reach `w / (w + HALF_WIDTH)` of what wide ones reach, w their smallest dimension:
# llm-foundry's tables, 125M to 7B parameters on A100 at 2,048 tokens, 0.43 to 0.64 of the peak.
HALF_WIDTH = 450.0
# What recomputing a block's forward pass costs over forward and backward: 1/3 by FLOPs; measured
# 5 to 30 % of time (Automodel, torchtune, Megatron), since attention's output need not be kept.
RECOMPUTED = {"none": 0.0, "selective": 0.08, "full": 0.22}
# Speed of low-precision products over bf16, quantization and what stays bf16 included; the
# hardware's is 2 for fp8 and 4 for 4 bits (torchtitan and NVIDIA's performance summaries;
# torchtitan's fp8 with a scale a row is as fast as bf16).
LOW_PRECISION = {"bf16": 1.0, "fp8": 1.45, "fp8-rowwise": 1.0, "mxfp8": 1.45, "nvfp4": 2.0}
# Seconds in which the host launches the kernels of one pass of one block.
LAUNCH = {"eager": 1.3e-3, "compiled": 0.4e-3, "fused": 0.25e-3}
# Share of what runs beside the gathers of `fully_shard` that hides them; DDP's buckets overlap
# with the backward pass, DeepSpeed's stages 1 and 2 reduce after it on one stream.
HIDDEN = {"native": 0.9, "whole": 0.9, "deepspeed": 0.0, "fsdp1": 0.9, "sequential": 0.0}
# Bytes of a bucket of DistributedDataParallel (its default of 25 MiB).
DDP_BUCKET = 25 * 2**20
# Seconds in which DeepSpeed's stage 3 fetches and frees the parameters of one block, each pass.
HOOKS = 0.3e-3
# What adapters on all linear layers add to their time: small products, dropout, launches.
ADAPTERS = 1.2
# Share of its memory's speed that a GPU reaches in kernels that unpack 4 and 8 bit weights.
UNPACKING = 1 / 3


@dataclass(frozen=True)
class Chip:
    """What one GPU does.

    Args:
        peak_flops: Dense bf16 FLOP/s of the data sheet.
        hbm_bytes: Bytes of its memory that it reads or writes in a second.
        efficiency: Share of the peak that wide matrix products of a training step reach.
        attention: Share of the peak that attention reaches, counted without the causal mask.
    """

    peak_flops: float
    hbm_bytes: float
    efficiency: float = 0.6
    attention: float = 0.4

    def __post_init__(self) -> None:
        for name in ("peak_flops", "hbm_bytes", "efficiency", "attention"):
            amount(name, getattr(self, name))


@dataclass(frozen=True)
class Wires:
    """Bus bandwidth in bytes/s that collectives of each axis reach on one rank.

    Args:
        shard: Gathers and reductions over `dp_shard` and `cp`.
        replicate: Sums over `dp_replicate`.
        tp: Sums over `tp`.
        ep: Exchanges over `ep`.
        pp: Sends between pipeline stages.
        host: Copies between host and device.
        start: Seconds until a collective over `dp_shard` begins to move bytes.
    """

    shard: float = 400e9
    replicate: float = 400e9
    tp: float = 400e9
    ep: float = 300e9
    pp: float = 50e9
    host: float = 25e9
    start: float = 20e-6


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of one rank.

    Args:
        compute: Arithmetic, or the launches where they take longer.
        exposed: Communication that nothing hides.
        communication: All of it.
        bubble: Idle time of the pipeline.
        update: The optimizer's update and copies to the host.
        tokens: Tokens of one step over all ranks, divided by the ranks.
        flops: FLOPs of the model for them, recomputation left out.
        launch_bound: Whether launches take longer than arithmetic.
    """

    compute: float
    exposed: float
    communication: float
    bubble: float
    update: float
    tokens: float
    flops: float
    launch_bound: bool

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed + self.bubble + self.update

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one second on one GPU."""
        return self.tokens / self.seconds

    def scaled(self, factor: float) -> StepTime:
        """Return the time with all seconds times a factor, as a measured run calibrates it."""
        return replace(
            self,
            compute=factor * self.compute,
            exposed=factor * self.exposed,
            communication=factor * self.communication,
            bubble=factor * self.bubble,
            update=factor * self.update,
        )

    def mfu(self, chip: Chip) -> float:
        """Share of the GPU's peak that the model's FLOPs are (Chowdhery et al. 2022, PaLM)."""
        return self.flops / self.seconds / chip.peak_flops


def step_time(
    run: Run,
    chip: Chip,
    wires: Wires,
    grad_accum: int = 1,
    precision: str = "bf16",
    interleave: int = 1,
    asynchronous: bool = False,
    row_tokens: float | None = None,
) -> StepTime:
    """Return the time of one optimizer step.

    Compute is `2 N` FLOPs a token forward, `4 N` backward (`2 N` where weights are frozen), and
    `4 L q s` and `8 L q s` of attention. FSDP gathers weights twice and reduces gradients each
    micro-step, DDP sums gradients once a step. A pipeline idles `(p-1)/(m v)` of its work.

    Source: Kaplan et al. 2020; Narayanan et al. 2021 (interleaved pipelines); Zhao et al. 2023.

    Args:
        run: The run.
        chip: The GPU.
        wires: Bandwidths.
        grad_accum: Micro-steps of one step.
        precision: "bf16", "fp8", "mxfp8" or "nvfp4" for matrix products.
        interleave: Parts of one pipeline stage.
        asynchronous: Whether tensor-parallel sums overlap with their products.
        row_tokens: Tokens of a mean row, where rows differ.

    Raises:
        ValueError: `grad_accum` is below 1.

    Collective: none.
    """
    steps = whole("grad_accum", grad_accum, 1)
    layout = run.layout
    seq_len = row_tokens or float(run.seq_len)
    tokens = run.rows * seq_len / layout.cp
    arithmetic, flops = _arithmetic(run, chip, tokens, seq_len, precision)
    passes = _passes(run)
    blocks = passes * run.shape.layers / layout.pp
    launches = LAUNCH[run.kept.kernels] * blocks
    compute = max(arithmetic, launches)
    if layout.engine == "deepspeed" and layout.stage == 3:
        compute += HOOKS * blocks
    sums = _tensor_sums(run, wires, tokens)
    exposed_sums = sums * (0.3 if asynchronous else 1.0)
    exchange = _exchange(run, wires, tokens)
    ring = _ring(run, wires, tokens)
    per_micro, per_step = _gathers(run, wires)
    share = HIDDEN[layout.engine]
    # What must be there before the work begins is never hidden: the first gathers.
    exposed = max(per_micro * (1 - share), per_micro - share * compute)
    exposed_step = max(per_step * (1 - share), per_step - share * compute * 2 / 3)
    ring_exposed = max(0.0, ring - compute / 2)
    work = steps * (compute + exposed + exposed_sums + exchange + ring_exposed)
    bubble = 0.0
    if layout.engine == "sequential":
        bubble = (layout.pp - 1) * work
    elif layout.pp > 1:
        bubble = (layout.pp - 1) / (steps * interleave) * work
    ranks = layout.tp * layout.pp * layout.cp
    return StepTime(
        steps * compute,
        work - steps * compute + exposed_step,
        steps * (per_micro + sums + exchange + ring) + per_step,
        bubble,
        _update(run, chip, wires, steps),
        steps * run.rows * seq_len / (layout.tp * layout.pp * layout.cp),
        steps * flops / ranks,
        launches > arithmetic,
    )


def _passes(run: Run) -> int:
    """Return passes over the blocks: forward, backward twice as long, and forward again."""
    return 3 + (1 if run.checkpointing == "full" else 0)


def _arithmetic(
    run: Run, chip: Chip, tokens: float, seq_len: float, precision: str
) -> tuple[float, float]:
    """Return seconds of arithmetic of a micro-step, and the FLOPs of its rows over all ranks."""
    shape, layout = run.shape, run.layout
    lookup = shape.vocab * shape.hidden if shape.embedding > shape.vocab * shape.hidden else 0
    share = shape.experts_per_token / shape.experts if shape.experts else 0.0
    experts = shape.expert_params * share
    dense = shape.active - lookup - experts
    times = 3.0 if run.adapters is None else 2.0
    again = 3 * RECOMPUTED[run.checkpointing]
    fast = LOW_PRECISION[precision]
    rate = chip.peak_flops * chip.efficiency * fast
    width = min(shape.hidden, max(shape.width, shape.hidden) / layout.tp)
    per_rank = layout.tp * layout.pp
    # Narrow products gain less of low precision: its fixed costs are the same.
    half = HALF_WIDTH * fast
    seconds = 2 * (times + again) * tokens * dense / per_rank / rate * (1 + half / width)
    if experts:
        narrow = half / max(shape.expert_width, 1)
        work = 2 * (times + again) * tokens * experts / per_rank * run.imbalance
        seconds += work / rate * (1 + narrow)
        # Sorting rows to experts and back reads and writes them about six times a pass.
        rows = tokens * shape.experts_per_token * shape.hidden * 2
        seconds += 6 * 4 * rows * shape.sparse_layers / per_rank / chip.hbm_bytes
    if run.kept.adapters == "all":
        seconds *= ADAPTERS
    heads = shape.heads * shape.head_dim
    attention = 4 * shape.layers * heads * seq_len
    rate = chip.peak_flops * chip.attention
    seconds += (3 + again / 3) * tokens * attention / per_rank / rate
    if run.adapters is not None and run.held.frozen < 1.5:
        # Weights are dequantized in each pass: read, written in bf16, read again.
        moved = (run.held.frozen + 4) * (shape.total - shape.embedding) / per_rank
        seconds += (_passes(run) - 1) * moved / (UNPACKING * chip.hbm_bytes)
    if not run.flash:
        # Scores go through memory six times a pass, in kernels that read and write them.
        scores = score_bytes(shape.heads, 1, 1) * seq_len * tokens * layout.cp / per_rank
        seconds += 6 * _passes(run) * shape.layers * scores / chip.hbm_bytes
    flops = (2 * times * (dense + experts) + 3 * attention) * run.rows * seq_len
    return seconds, flops


def _tensor_sums(run: Run, wires: Wires, tokens: float) -> float:
    shape, tp = run.shape, run.layout.tp
    if tp == 1:
        return 0.0
    # Two sums of the hidden states of each layer forward, two backward, and those recomputed.
    sums = 4 + (1 if run.checkpointing != "none" else 0)
    moved = sums * shape.layers / run.layout.pp * tokens * shape.hidden * run.element
    return 2 * (tp - 1) / tp * moved / wires.tp


def _exchange(run: Run, wires: Wires, tokens: float) -> float:
    shape, ep = run.shape, run.layout.ep
    if ep == 1 or not shape.experts:
        return 0.0
    times = 4 + (1 if run.checkpointing != "none" else 0)
    rows = tokens / run.layout.tp * min(shape.experts_per_token, ep) * shape.hidden * run.element
    moved = times * shape.sparse_layers / run.layout.pp * rows * run.imbalance
    return (ep - 1) / ep * moved / wires.ep


def _ring(run: Run, wires: Wires, tokens: float) -> float:
    shape, cp = run.shape, run.layout.cp
    if cp == 1:
        return 0.0
    keys = 2 * tokens * shape.kv_heads * shape.head_dim * run.element / run.layout.tp
    return 3 * shape.layers / run.layout.pp * (cp - 1) * keys / wires.shard


def _gathers(run: Run, wires: Wires) -> tuple[float, float]:
    """Return seconds of the data axes' collectives each micro-step, and each step."""
    layout, held, shape = run.layout, run.held, run.shape
    experts = shape.expert_params
    local = (shape.total - experts) / layout.tp / layout.pp
    local += experts / layout.pp / max(layout.ep, layout.tp if layout.ep == 1 else 1)
    ring = (layout.shards - 1) / layout.shards
    frozen = min(held.frozen, held.gathered)
    weights = local * (held.gathered if run.adapters is None else frozen)
    trained = local if run.adapters is None else run.adapters / layout.tp / layout.pp
    gradients = trained * held.reduced
    # A collective for each block and each of its three passes, or for each bucket of DDP.
    starts = wires.start if layout.shards > 1 else 0.0
    blocks = 3 * starts * (shape.layers / layout.pp + 1)
    copies = (layout.dp_replicate - 1) / layout.dp_replicate
    over_copies = 2 * copies * gradients / wires.replicate
    if layout.stage == 3 and layout.engine == "whole":
        return 0.0, ring * (weights + gradients) / wires.shard + over_copies / layout.shards
    if layout.stage == 3:
        per_micro = ring * (2 * weights + gradients) / wires.shard + blocks
        return per_micro, over_copies / layout.shards
    if layout.stage == 0:
        buckets = starts * gradients / DDP_BUCKET
        return 0.0, 2 * ring * gradients / wires.shard + buckets + over_copies
    moved = ring * gradients / wires.shard
    gathered = ring * (trained * held.gathered) / wires.shard
    if layout.stage == 1:
        return 0.0, moved + gathered + over_copies
    return moved, gathered + over_copies


def _update(run: Run, chip: Chip, wires: Wires, steps: int) -> float:
    layout, held = run.layout, run.held
    trained = float(run.shape.total) if run.adapters is None else float(run.adapters)
    local = trained / layout.tp / layout.pp / (layout.shards if layout.stage else 1)
    moved = 2 * local * (held.weight + held.gradient / 2 + held.optimizer)
    seconds = moved / chip.hbm_bytes
    if run.offload:
        copies = 2 * held.gathered if run.offload == "params" else held.gathered
        frozen = run.shape.total / layout.tp / layout.pp / layout.shards
        moved = (frozen if run.offload == "params" else local) * copies * steps
        # The host's Adam moves about 20 GB/s of weights a socket (DeepSpeed, ZeRO-Offload).
        seconds += moved / wires.host + local * (held.weight + held.optimizer) / 20e9
    return seconds


def hidden_micro_batch(run: Run, chip: Chip, wires: Wires, most: int = 4096) -> int | None:
    """Return the smallest micro-batch whose compute hides the gathers, None if none up to `most`.

    Collective: none.
    """
    per_micro, per_step = _gathers(run, wires)
    seq_len = float(run.seq_len)
    tokens = seq_len / run.layout.cp
    one, _ = _arithmetic(run, chip, tokens, seq_len, "bf16")
    seconds = per_micro + per_step * 1.5
    needed = seconds / HIDDEN["native"] * run.rows / (one * run.rows)
    rows = max(1, -(-int(needed * 1000) // 1000))
    return rows if rows <= most else None
