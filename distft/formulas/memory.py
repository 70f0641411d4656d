"""Bytes of model state on one rank: the papers' values, and chunks as the libraries cut them."""

from __future__ import annotations

from fractions import Fraction

from distft.formulas._numbers import amount, exact, whole
from distft.formulas.traffic import stage_number


def model_state_bytes(
    num_params: float,
    dp_shard: int,
    stage: int,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> int | float:
    """Bytes of model state (weights, gradients, optimizer) that one rank holds.

    `P (w + g + k)` for stage 0; stage 1 divides `k` by N, stage 2 also `g`, stage 3 also `w`. FSDP
    is stage 3; HSDP is stage 3 with `dp_shard` the size of one group.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5 and figure 1. Assumes: paper, even shards;
    excludes activations, buffers, fragmentation.

    Args:
        num_params: Parameters P.
        dp_shard: Ranks N that share one copy of the state.
        stage: 0 (DDP), 1, 2 or 3.
        weight_bytes: Bytes w per parameter of weights.
        gradient_bytes: Bytes g per parameter of gradients.
        optimizer_bytes: Bytes k per parameter of optimizer state; 12 is mixed-precision Adam
            (fp32 master, momentum, variance).

    Returns:
        An int where the value is whole, else the nearest float.

    Raises:
        ValueError: `stage` is not 0..3, `dp_shard` is below 1 or an amount is negative.

    Collective: none.

    >>> model_state_bytes(7.5e9, 64, stage=3)
    1875000000
    """
    stage = stage_number(stage)
    ranks = whole("dp_shard", dp_shard, 1)
    terms = (
        (1 if stage < 3 else ranks, amount("weight_bytes", weight_bytes)),
        (1 if stage < 2 else ranks, amount("gradient_bytes", gradient_bytes)),
        (1 if stage < 1 else ranks, amount("optimizer_bytes", optimizer_bytes)),
    )
    per_param = sum((Fraction(size) / parts for parts, size in terms), Fraction(0))
    return exact(Fraction(amount("num_params", num_params)) * per_param)


def lora_state_bytes(
    base_params: float,
    trainable_params: float,
    dp_shard: int,
    weight_bytes: float = 2,
    trainable_bytes: float = 16,
) -> int | float:
    """Bytes of model state of one rank with LoRA under FSDP2: `2 P_base / N + 16 P_trainable / N`.

    Frozen weights have neither gradients nor optimizer state.

    Source: Hu et al. 2021 (LoRA) with Zhao et al. 2023 (FSDP).

    Raises:
        ValueError: `dp_shard` is below 1 or an amount is negative.

    Collective: none.

    >>> lora_state_bytes(8e9, 42e6, 8)
    2084000000
    """
    base = Fraction(amount("base_params", base_params)) * Fraction(
        amount("weight_bytes", weight_bytes)
    )
    trained = Fraction(amount("trainable_params", trainable_params)) * Fraction(
        amount("trainable_bytes", trainable_bytes)
    )
    return exact((base + trained) / whole("dp_shard", dp_shard, 1))


def chunk_rows(rows: int, ranks: int) -> tuple[int, ...]:
    """Rows that each of `ranks` ranks holds of a tensor cut along its first dimension.

    As `torch.chunk`: `ceil(rows / ranks)` each until none are left, so the last ranks may hold
    fewer rows, or none.

    Source: torch 2.13 `Shard.split_tensor`, which `fully_shard` uses.

    Raises:
        ValueError: `rows` is negative or `ranks` below 1.

    Collective: none.

    >>> chunk_rows(6, 4)
    (2, 2, 2, 0)
    """
    rows, ranks = whole("rows", rows), whole("ranks", ranks, 1)
    size = -(-rows // ranks)
    return tuple(max(0, min(size, rows - rank * size)) for rank in range(ranks))
