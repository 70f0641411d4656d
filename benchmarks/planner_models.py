"""Models, GPUs and amounts that rows of a points file name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distft.formulas.shape import Shape
from distft.presets import preset
from distft.spec import ModelSpec
from distft.topology import Gpu
from distft.topology.gpus import gpu_by_name

Row = Mapping[str, Any]
UNITS = {"MB": 1e6, "GB": 1e9, "GiB": 2**30, "MiB": 2**20, "GiB/GB as logged": 2**30}

# Models whose tensors no configuration here says: total, active, layers, hidden, heads, kv heads,
# head width, width of an expert, experts, experts of a token, vocabulary, from their model cards.
BY_COUNTS: Mapping[str, tuple[float, float, int, int, int, int, int, int, int, int, int]] = {
    "nemotron3nano": (31.6e9, 3.6e9, 52, 2688, 32, 2, 128, 1856, 128, 6, 131072),
    "nemotronv3nano30b": (31.6e9, 3.6e9, 52, 2688, 32, 2, 128, 1856, 128, 6, 131072),
    "nemotron3super": (120e9, 12.7e9, 88, 4096, 32, 2, 128, 2688, 512, 22, 131072),
    "nemotronv3ultra550b": (550e9, 55e9, 108, 8192, 64, 2, 128, 5120, 512, 22, 131072),
    "dbrx": (132e9, 36e9, 40, 6144, 48, 8, 128, 10752, 16, 4, 100352),
    "llama4scout": (109e9, 17e9, 48, 5120, 40, 8, 128, 8192, 16, 1, 202048),
}
# Other spellings of a name in tables.
SPELLINGS = {
    "qwen3moe30b": "Qwen3-30B-A3B",
    "qwen330ba3b": "Qwen3-30B-A3B",
    "qwen3235ba22b": "Qwen3-235B-A22B",
    "llama370b": "Llama-3-70B",
    "llama370b2node": "Llama-3-70B",
    "llama38b": "Llama-3-8B",
    "llama31405b": "Llama-3.1-405B",
    "deepseekv3671b": "DeepSeek-V3",
    "openbuddyzephyr7b": "Zephyr-7B",
    "openbuddyzephyr7bchat": "Zephyr-7B",
    "qwen3omni30b": "Qwen3-30B-A3B",
    "mixtral8x7b": "Mixtral-8x7B",
}


class Unmapped(Exception):
    """A row that says too little, and why."""


@contextmanager
def readable() -> Iterator[None]:
    """Turn what a row of junk runs into to `Unmapped`."""
    try:
        yield
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unmapped(f"it cannot be read: {error}") from error


def shape_of(row: Row, models: Mapping[str, Any]) -> Shape:
    """Return the shape of a row's model: of the file's own table, of a preset, of its counts."""
    name = str(row.get("model", ""))
    for known, numbers in models.items():
        if _key(known) == _key(name) and {"hidden", "layers", "vocab"} <= set(numbers):
            return _from_table(numbers)
    # Variants of a model for code or pictures have the same decoder.
    plain = re.sub(r"[- ](coder|vl|math|audio)(?=\b)", "", name, flags=re.IGNORECASE)
    spelled = SPELLINGS.get(_key(plain), plain)
    try:
        shape = ModelSpec.from_config(preset(spelled)).shape
    except ValueError:
        shape = None
    if shape is not None:
        return shape
    counts = BY_COUNTS.get(_key(re.sub(r"\(.*?\)", "", name)))
    if counts is None:
        return _like_llama(row)
    total, active, layers, hidden, heads, kv, head, width, experts, each, vocab = counts
    embedding = 2 * vocab * hidden
    # Hybrid models have experts in some layers only: as many as make the total.
    sparse = min(layers, round((total - active) / ((experts - each) * 2 * hidden * width)))
    return Shape(
        layers, hidden, heads, kv, head, width, vocab, int(total), int(active), embedding,
        experts=experts, experts_per_token=each, expert_width=width, sparse_layers=sparse,
    )  # fmt: skip


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _from_table(numbers: Mapping[str, Any]) -> Shape:
    config = {
        "model_type": "llama",
        "num_hidden_layers": numbers["layers"],
        "hidden_size": numbers["hidden"],
        "num_attention_heads": numbers["heads"],
        "num_key_value_heads": numbers.get("kv_heads") or numbers["heads"],
        "head_dim": numbers.get("head_dim"),
        "intermediate_size": numbers["ffn"],
        "vocab_size": numbers["vocab"],
        "tie_word_embeddings": numbers.get("tied", False),
    }
    shape = ModelSpec.from_config(config).shape
    assert shape is not None
    return shape


def _like_llama(row: Row) -> Shape:
    """Return a dense model of Llama's proportions with as many parameters as the row says."""
    name = str(row.get("model", "")).lower()
    said = re.search(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b\b", name)
    billions = row.get("params_b") or (float(said[1]) if said else None)
    if not isinstance(billions, (int, float)) or isinstance(billions, bool) or billions <= 0:
        raise Unmapped(f"the architecture of {row.get('model')!r} is not known")
    if re.search(r"moe|a\d+b|x\d+b|oss|deepseek|kimi|glm", name):
        raise Unmapped(f"the experts of {row.get('model')!r} are not known")
    # Llama's hidden width is about 128 times its depth, a block has 12.5 h^2 parameters.
    layers = max(1, round((billions * 1e9 / (12.5 * 128 * 128)) ** (1 / 3)))
    hidden = max(64, 64 * round((billions * 1e9 / 12.5 / layers) ** 0.5 / 64))
    numbers = {"layers": layers, "hidden": hidden, "heads": max(1, hidden // 128)}
    return _from_table({**numbers, "head_dim": 128, "ffn": int(2.7 * hidden), "vocab": 32000})


def measured_bytes(row: Row) -> float:
    """Return the measured peak in bytes: the heaviest rank, the middle of a range.

    Raises:
        Unmapped: It is no amount of memory.
    """
    measured = row["measured"]
    unit = UNITS.get(str(measured.get("mem_unit")))
    if unit is None:
        raise Unmapped(f"its unit {measured.get('mem_unit')!r} is not known")
    said = str(measured["peak_mem"])
    try:
        if "+" in said:
            return unit * max(float(part) for part in said.split("+"))
        parts = [float(part) for part in said.split("-")]
    except ValueError:
        raise Unmapped(f"its peak {said!r} is no number") from None
    value = unit * sum(parts) / len(parts)
    if not 1e8 < value < 1e12:
        raise Unmapped(f"its peak of {value:.3g} bytes is that of no GPU: a wrong unit?")
    return value


def gpu_of(row: Row) -> Gpu | None:
    """Return the GPU that a row names; None where it names none, or a class of them."""
    name = re.sub(r"\(.*?\)|~.*", "", str(row.get("gpu") or "")).lower().replace("dgx-", "")
    name = re.sub(r"(?<=\d)_(?=\d)", "-", name.strip())
    name = {"blackwell": "b200", "4090": "rtx4090", "5090": "rtx5090"}.get(name, name)
    try:
        return gpu_by_name(name)
    except ValueError:
        return None


def capacity_bytes(row: Row) -> float:
    """Return the memory of the row's GPU, infinity where it is not known."""
    gpu = gpu_of(row)
    if gpu is not None:
        return float(gpu.memory_bytes)
    found = re.search(r"(\d+)\s*g(?:i?b)", str(row.get("gpu") or "").lower())
    return 0.985 * float(found[1]) * 2**30 if found else float("inf")
