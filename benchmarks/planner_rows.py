"""What a row of a points file says of a run: sizes, layout, and what its framework keeps.

A framework's habits (dtype of states, kernels, loss, what counts as memory) are those of its code
at the time of the source; they hold for all its rows. Nothing here is fitted to a single row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from planner_models import Row, Unmapped, readable, shape_of

from distft.formulas.peak import Held, Layout, Run
from distft.formulas.shape import Shape
from distft.formulas.working import Kept

FP32 = Held(4, 4, 8, 2, 2, 0, 2, 4)
BF16 = Held(2, 2, 4, 2, 2, 2, 2, 2)

# Of the models in ms-swift's table of 2023 Qwen's own code and that of Baichuan2-7B had kernels
# without a score matrix; transformers' Llama and Mistral did not use them yet.
FLASH_OF_2023 = ("qwen", "baichuan2-7b")
# The steps of torchtune's ladder, each on top of those before.
LADDER = (
    "baseline",
    "packed",
    "compile",
    "chunked",
    "activation checkpointing",
    "activation offloading",
    "optim in bwd",
    "8-bit",
    "lora",
    "qlora",
)


@dataclass(frozen=True)
class Mapped:
    """A run that a row describes.

    Args:
        run: What memory and time depend on.
        kind: "allocated", "reserved" or "process".
        fp8: Precision of matrix products: "bf16", "fp8", "mxfp8", "nvfp4".
        framework: Whose habits hold.
        grad_accum: Micro-steps of a step.
        interleave: Parts of a pipeline stage.
        asynchronous: Whether tensor-parallel collectives overlap.
        row_tokens: Tokens of a mean row, less than `seq_len` where rows differ.
        gpu: Name of the GPU.
    """

    run: Run
    kind: str
    precision: str
    framework: str
    grad_accum: int
    interleave: int
    asynchronous: bool
    row_tokens: float
    gpu: str


def framework_of(row: Row) -> str:
    """Return the framework that a source measured."""
    source = str(row.get("source", "")).lower()
    known = ("torchtitan", "automodel", "swift", "torchtune", "axolotl", "litgpt", "accelerate")
    known += ("llm-foundry", "megatron", "peft", "deepspeed")
    return next((name for name in known if name in source), "transformers")


def layout_of(row: Row, framework: str, full: bool) -> Layout:
    """Return the ranks along each axis."""
    ranks = _count(row, "n_gpus")
    words = " ".join(str(row.get(key) or "") for key in ("strategy", "mesh"))
    table = row.get("row") if isinstance(row.get("row"), Mapping) else {}
    degree = {
        axis: _degree(words, axis) or _number(table.get(axis)) or 1
        for axis in ("TP", "PP", "CP", "EP")
    }
    cp = max(degree["CP"], _degree(words, "SP") or 1)
    lower = words.lower()
    if "device_map" in lower:
        return Layout(pp=ranks, stage=0, engine="sequential")
    if "deepep" in str(row.get("extra")).lower() and degree["EP"] == 1:
        # DeepEP spreads the experts over all ranks.
        degree["EP"] = ranks
    data = ranks // (degree["TP"] * degree["PP"] * cp)
    if data * degree["TP"] * degree["PP"] * cp != ranks:
        raise Unmapped(f"its degrees do not make up {ranks} GPUs")
    stage = next((n for n in (1, 2, 3) if f"zero-{n}" in lower), 0)
    engine = "deepspeed" if stage else "native"
    if "shard_grad_op" in lower:
        stage = 2
    elif "fsdp" in lower or "full_shard" in lower or degree["EP"] > 1:
        stage = 3
    elif framework == "megatron":
        # Megatron's distributed optimizer.
        stage = 3 if _number(table.get("FSDP")) else 1
    if degree["PP"] > 1 and stage == 3:
        engine = "whole"
    elif stage == 3 and "fsdp1" in lower:
        engine = "fsdp1"
    try:
        return Layout(1, data, degree["TP"], degree["PP"], cp, degree["EP"], stage, engine)
    except ValueError as error:
        raise Unmapped(str(error)) from None


def _degree(words: str, axis: str) -> int:
    found = re.search(rf"\b{axis}(\d+)\b", words)
    return int(found[1]) if found else 0


def _number(value: Any) -> int:
    found = re.match(r"\s*(\d+)", str(value)) if value is not None else None
    return int(found[1]) if found else 0


def _count(row: Row, key: str) -> int:
    value = row.get(key)
    if value is None and isinstance(row.get("row"), Mapping):
        names = {"mbs": "MBS", "seq": "Sequence Length", "n_gpus": "#-GPUs"}
        value = _number(row["row"].get(names.get(key, key))) or None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unmapped(f"{key} is {value!r}")
    return value


def is_stated(row: Row) -> bool:
    """Whether a source states micro-batch, row length and GPUs."""
    return all(row.get(key) is not None for key in ("mbs", "seq", "n_gpus"))


def with_assumed_sizes(row: Row) -> Row:
    """Return a row with 1 row, 4,096 tokens and 1 GPU where it does not say."""
    assumed = {"mbs": 1, "seq": 4096, "n_gpus": 1}
    return {**row, **{key: value for key, value in assumed.items() if row.get(key) is None}}


def mapped(row: Row, models: Mapping[str, Any]) -> Mapped:
    """Return the run that a row describes.

    Raises:
        Unmapped: The row says too little, or something that cannot be.
    """
    with readable():
        return _mapped(row, models)


def _mapped(row: Row, models: Mapping[str, Any]) -> Mapped:
    framework = framework_of(row)
    words = _words(row)
    tuning = str(row.get("tuning") or "full").lower()
    full = tuning.startswith("full")
    shape = shape_of(row, models)
    layout = layout_of(row, framework, full)
    rows, seq_len = _count(row, "mbs"), _count(row, "seq")
    accumulated = _accumulated(row, layout, rows)
    run = Run(
        shape,
        layout,
        _held(row, framework, tuning, words),
        rows,
        seq_len,
        _kept(row, framework, tuning, words),
        _checkpointing(row, framework, tuning, words),
        _loss(row, framework, words),
        flash=_is_flash(row, framework),
        adapters=None if full else _adapters(row, shape),
        accumulates=bool(accumulated and accumulated > 1 and full),
    )
    run = _with_habits(run, row, framework, tuning, words)
    table = row.get("row") if isinstance(row.get("row"), Mapping) else {}
    virtual = _number(table.get("VP")) or _degree(str(row.get("mesh")), "VP")
    row_tokens = float(seq_len)
    lengths = _lengths(row)
    if lengths:
        run = replace(run, mixed_tokens=round(rows * clipped_mean(*lengths, seq_len)))
        row_tokens = kept_mean(*lengths, seq_len, rows)
    return Mapped(
        run,
        _kind(row),
        _precision(row, words),
        framework,
        accumulated * max(1, rows // run.rows),
        max(2 if "interleaved" in words else 1, virtual),
        "async" in words or framework == "megatron",
        row_tokens,
        str(row.get("gpu") or ""),
    )


def _accumulated(row: Row, layout: Layout, rows: int) -> int:
    """Return the micro-steps of a step: as said, or those that make up the global batch."""
    table = row.get("row") if isinstance(row.get("row"), Mapping) else {}
    whole = row.get("gbs") or _number(table.get("GBS"))
    said = row.get("ga")
    if isinstance(whole, int) and whole > 0 and (layout.pp > 1 or not isinstance(said, int)):
        return max(1, whole // (rows * layout.data_ranks))
    return said if isinstance(said, int) and said > 0 else 1


def _is_flash(row: Row, framework: str) -> bool:
    name, said = str(row.get("model")).lower(), str(row.get("attn") or "").lower()
    if "eager" in said or _cell(row, "Use Flash Attn") == "✘":
        return False
    return framework != "swift" or "row" not in row or any(each in name for each in FLASH_OF_2023)


def _words(row: Row) -> str:
    keys = ("extra", "note", "dtype", "quant", "optimizer", "strategy")
    return " ".join(str(row.get(key) or "") for key in keys).lower()


def _cell(row: Row, name: str) -> str:
    table = row.get("row")
    return str(table.get(name, "")) if isinstance(table, Mapping) else ""


def _rung(row: Row) -> int:
    """Return the step of the ladder, or -1."""
    extra = str(row.get("extra") or "").lower()
    if not extra.startswith("cumulative"):
        return -1
    found = [place for place, name in enumerate(LADDER) if name in extra]
    return found[-1] if found else -1


def _held(row: Row, framework: str, tuning: str, words: str) -> Held:
    held = BF16
    pure = "pure" in words or "bf16-true" in words
    if "fp32 param" in words or ("mp default" in words and not pure):
        held = FP32 if "torchtitan" in str(row.get("source")) else replace(FP32, temporary=4)
    if framework == "megatron":
        # bf16 weights, fp32 gradients, master and moments.
        held = Held(2, 4, 12, 2, 2, 0, 2, 4)
    if "8-bit" in words or _rung(row) >= LADDER.index("8-bit"):
        held = replace(held, optimizer=2, temporary=0)
    if framework == "torchtune" and "full" in tuning:
        # Its recipes use 8-bit or fused optimizers.
        held = replace(held, temporary=0)
    bits = _cell(row, "Quantization").lower() + str(row.get("quant") or "").lower()
    if "qlora" in tuning or "int4" in bits or "nf4" in bits:
        # nf4 with a scale for 64 weights, itself quantized by default outside litgpt.
        size = 0.53 if framework == "litgpt" and "dq" not in bits else 0.516
        held = replace(held, frozen=size)
        if framework == "litgpt":
            held = replace(held, frozen_root=(2 + size) / 2)
        if "bnb" in bits:
            # PEFT's prepare_model_for_kbit_training casts what is not quantized to fp32.
            held = replace(held, frozen_root=4)
    elif "int8" in bits or "8-bit" in tuning:
        held = replace(held, frozen=1.03)
    return held


def _kept(row: Row, framework: str, tuning: str, words: str) -> Kept:
    kernels = "eager"
    if "compile" in words or _rung(row) >= LADDER.index("compile"):
        kernels = "compiled"
    if framework in ("automodel", "megatron"):
        kernels = "fused"
    if tuning.startswith("full"):
        return Kept(kernels)
    dropout = framework not in ("torchtune", "automodel")
    inputs = "qlora" in tuning or "bnb" in _cell(row, "Quantization")
    if tuning.startswith("adapter"):
        return Kept(kernels, "", outputs="v2" in tuning)
    lora = row.get("lora") if isinstance(row.get("lora"), Mapping) else {}
    targets = str(lora.get("targets", "all")).lower() + _cell(row, "LoRA Target Modules").lower()
    some = "all" not in targets and ("q,v" in targets or "c_attn" in targets)
    return Kept(kernels, "attention" if some else "all", dropout, inputs)


def _checkpointing(row: Row, framework: str, tuning: str, words: str) -> str:
    said = str(row.get("gc") or "").lower()
    if _cell(row, "Gradient Checkpointing") == "✘":
        return "none"
    if "selective" in said or (framework == "torchtitan" and "see file" in said):
        # Where a source does not say, torchtitan's default.
        return "selective"
    if "full" in said or "ac+" in words:
        return "full"
    if framework == "litgpt" and "fsdp" in words:
        # Its FSDP strategy sets activation_checkpointing_policy to blocks.
        return "full"
    if framework == "torchtune" and "none" not in said:
        # Its recipes checkpoint, those of LoRA on one device do not.
        return "none" if tuning == "lora" and "single" in words else "full"
    if framework in ("axolotl", "peft", "swift"):
        return "full"
    return "none"


def _loss(row: Row, framework: str, words: str) -> str:
    if re.search(r"\bcce\b|fused linear|liger", words):
        return "fused"
    if "chunked" in words or (framework == "torchtune" and _rung(row) != 2):
        return "chunked"
    if framework == "swift":
        return "trainer"
    if framework == "torchtune":
        return "compiled"
    if framework == "torchtitan" and "compile" in words:
        # The loss is compiled too since the start of 2025.
        return "eager" if "2024" in str(row.get("source")) else "compiled"
    if framework == "megatron":
        return "compiled"
    if framework == "peft":
        return "trainer"
    return "bf16" if framework == "litgpt" else "eager"


def _with_habits(run: Run, row: Row, framework: str, tuning: str, words: str) -> Run:
    """Return the run with what only some frameworks do."""
    full, layout = tuning.startswith("full"), run.layout
    offload = str(row.get("offload") or "").lower() + words
    if ("offload" in offload and "act offload" not in offload) or "cpu" in offload:
        run = replace(run, offload="params")
    if framework == "torchtune":
        rung = _rung(row)
        if rung == 0:
            raise Unmapped("its rows are not packed yet, their lengths are not stated")
        if full and (rung >= LADDER.index("optim in bwd") or (rung < 0 and layout.num_ranks == 1)):
            # The recipe of full tuning on one device.
            run = replace(run, in_backward=True, paged=rung < 0)
    if framework == "torchtune":
        run = replace(run, root_split=True)
    if framework == "litgpt" and "fsdp" in words:
        # Its checkpoints load through summon_full_params.
        run = replace(run, loads_whole=True)
    if layout.pp > 1 and layout.stage == 3:
        # torchtitan splits the local batch into as many micro-batches as stages.
        if framework == "torchtitan":
            run = replace(run, rows=max(1, run.rows // layout.pp))
        run = replace(run, num_in_flight=layout.pp)
    if "not fixed" in words:
        # accelerate's benchmark: an optimizer made before sharding holds the whole weights.
        run = replace(run, held=replace(run.held, weight=run.held.weight * (1 + layout.shards)))
    return run


def _adapters(row: Row, shape: Shape) -> int:
    """Return the parameters of adapters of the row's rank on q and v, or on all layers."""
    lora = row.get("lora") if isinstance(row.get("lora"), Mapping) else {}
    rank = _number(_cell(row, "LoRA Rank")) or _number(lora.get("r")) or 8
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    pairs = [(shape.hidden, q), (shape.hidden, k)]
    if "q,v" not in str(lora.get("targets")):
        pairs += [(shape.hidden, k), (q, shape.hidden)] + 3 * [(shape.hidden, shape.width)]
    return shape.layers * sum(rank * (a + b) for a, b in pairs)


def _kind(row: Row) -> str:
    measured = row.get("measured")
    said = str(measured.get("mem_kind", "") if isinstance(measured, Mapping) else "").lower()
    if "nvidia-smi" in said:
        return "process"
    return "allocated" if "alloc" in said or "active" in said else "reserved"


def _precision(row: Row, words: str) -> str:
    said = f"{_cell(row, 'Precision').lower()} {words}"
    if "fp8" in said and "rowwise" in said:
        return "fp8-rowwise"
    return next((name for name in ("nvfp4", "mxfp8", "fp8") if name in said), "bf16")


def _lengths(row: Row) -> tuple[float, float] | None:
    """Return mean and deviation of the rows' lengths where the source says them."""
    found = re.search(r"(\d+)\+-(\d+) tokens", str(row.get("note")))
    return (float(found[1]), float(found[2])) if found else None


def clipped_mean(mean: float, deviation: float, most: float) -> float:
    """Return the mean of `min(length, most)` for normally distributed lengths above 0."""
    normal = NormalDist(mean, deviation)
    steps = 200
    ends = [most * (step + 0.5) / steps for step in range(steps)]
    # The mean of a clipped variable is the integral of what lies above.
    low = normal.cdf(0)
    return sum((1 - normal.cdf(end)) / (1 - low) for end in ends) * most / steps


def kept_mean(mean: float, deviation: float, most: float, rows: int = 1) -> float:
    """Return the mean length of batches of `rows`, padded to their longest row.

    Rows longer than `most` are left out, as ms-swift does by default.
    """
    normal = NormalDist(mean, deviation)
    low, high, steps = normal.cdf(0), normal.cdf(most), 200
    ends = [most * (step + 0.5) / steps for step in range(steps)]
    # The mean of the longest row is the integral of the chance that one lies above.
    below = [((normal.cdf(end) - low) / (high - low)) ** rows for end in ends]
    return sum(1 - share for share in below) * most / steps
