"""Bytes on the wire: ring collectives, and what the papers say each strategy moves."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from distft.formulas._numbers import amount, choice, exact, whole

# Passes over the full buffer that one rank sends, in units of (N - 1) / N.
_PASSES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "reduce": 1,
    "broadcast": 1,
    "all_to_all": 1,
}


def ring_bytes(op: str, num_bytes: float, ranks: int) -> int | float:
    """Bytes that one rank sends in a ring collective over a full buffer of `num_bytes`.

    all_reduce: `2 (N - 1) / N`. all_gather, reduce_scatter: `(N - 1) / N` of the *full* buffer.
    reduce and broadcast: every rank but one sends the buffer once, `(N - 1) / N` as the mean over
    ranks. all_to_all: `(N - 1) / N` of what one rank holds.

    Source: Patarasuk and Yuan 2009; NCCL tests, PERFORMANCE.md. Ops carry NCCL's names.

    Args:
        op: Name of the collective.
        num_bytes: Bytes of the full buffer (the gathered output, the input of a reduce-scatter).
        ranks: Ranks in the group.

    Returns:
        An int where the value is whole, else the nearest float.

    Raises:
        ValueError: `op` is unknown, `num_bytes` is negative or `ranks` is below 1.

    Collective: none.

    >>> ring_bytes("all_reduce", 16e9, 8)
    28000000000
    """
    return exact(ring_fraction(op, num_bytes, ranks))


def ring_fraction(op: str, num_bytes: float, ranks: int) -> Fraction:
    """Exact value of `ring_bytes`, for sums that must not round on the way.

    Raises:
        ValueError: As `ring_bytes`.

    Collective: none.

    >>> ring_fraction("all_gather", 4, 3)
    Fraction(8, 3)
    """
    choice("op", op, _PASSES)
    ranks = whole("ranks", ranks, 1)
    return _PASSES[op] * Fraction(amount("num_bytes", num_bytes)) * (ranks - 1) / ranks


def sum_ring_bytes(collectives: Iterable[tuple[str, int, int]]) -> int | float:
    """Bytes that one rank sends in several ring collectives, rounded once at the end.

    Args:
        collectives: For each, its op, the bytes of the full buffer and the ranks in the group.

    Raises:
        ValueError: As `ring_bytes`.

    Collective: none.

    >>> sum_ring_bytes([("all_gather", 4, 3), ("all_gather", 8, 3)])
    8
    """
    return exact(sum((ring_fraction(*each) for each in collectives), Fraction(0)))


def zero_traffic_bytes(
    num_params: float, dp_shard: int, stage: int, grad_accum: int = 1, element_bytes: float = 2
) -> int | float:
    """Bytes that one rank sends per optimizer step under ZeRO, by the paper.

    Stages 0 and 1: one reduction of the gradients and one gathering, `2 P (N - 1) / N` a step.
    Stage 2 keeps no whole gradients, so it reduces every micro-step: `(g + 1) P (N - 1) / N`.
    Stage 3 (and FSDP) gathers twice and reduces once every micro-step: `3 g P (N - 1) / N`, which
    accumulation does not amortize.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7, which counts one micro-step.

    Args:
        num_params: Parameters P.
        dp_shard: Ranks N.
        stage: ZeRO stage, 0 is plain data parallelism.
        grad_accum: Micro-steps g of one step.
        element_bytes: Bytes of one weight or gradient on the wire.

    Raises:
        ValueError: `stage` is not 0..3, a count is below 1 or an amount is negative.

    Collective: none.

    >>> zero_traffic_bytes(8e9, 8, stage=0), zero_traffic_bytes(8e9, 8, stage=3)
    (28000000000, 42000000000)
    """
    stage = stage_number(stage)
    grad_accum = whole("grad_accum", grad_accum, 1)
    size = Fraction(amount("num_params", num_params)) * Fraction(
        amount("element_bytes", element_bytes)
    )
    passes = {0: 2, 1: 2, 2: grad_accum + 1, 3: 3 * grad_accum}[stage]
    ranks = whole("dp_shard", dp_shard, 1)
    return exact(passes * size * (ranks - 1) / ranks)


def tensor_parallel_bytes(
    layers: int, micro_batch: int, seq_len: int, hidden: int, tp: int, element_bytes: int = 2
) -> int | float:
    """Bytes that one rank sends per micro-step under tensor parallelism.

    Two all-reduces of a (B, T, d) activation per layer forward and two backward.

    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.

    Raises:
        ValueError: An argument is not a whole number of at least 1.

    Collective: none.

    >>> tensor_parallel_bytes(1, 1, 1024, 1024, 2)
    8388608
    """
    size = 4 * whole("layers", layers, 1) * whole("micro_batch", micro_batch, 1)
    size *= whole("seq_len", seq_len, 1) * whole("hidden", hidden, 1)
    return ring_bytes("all_reduce", size * whole("element_bytes", element_bytes, 1), tp)


def expert_parallel_bytes(
    layers: int, tokens: int, top_k: int, hidden: int, ep: int, element_bytes: int = 2
) -> int | float:
    """Bytes that one rank sends per micro-step under expert parallelism with even routing.

    All-to-all to dispatch and one to combine, each of `tokens * top_k` rows of width d, forward
    and again backward: it scales with tokens times top-k, not with parameters.

    Source: Lepikhin et al. 2020 (GShard), section 3.2.

    Raises:
        ValueError: An argument is not a whole number of at least 1.

    Collective: none.

    >>> expert_parallel_bytes(1, 10, 2, 32, 2)
    2560
    """
    size = 4 * whole("layers", layers, 1) * whole("tokens", tokens, 1) * whole("top_k", top_k, 1)
    size *= whole("hidden", hidden, 1) * whole("element_bytes", element_bytes, 1)
    return ring_bytes("all_to_all", size, ep)


def stage_number(stage: int) -> int:
    """Return `stage` where it is a ZeRO stage.

    Raises:
        ValueError: `stage` is not 0, 1, 2 or 3.
    """
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage is {stage!r}, but ZeRO has the stages 0, 1, 2 and 3. "
            "Pass stage=0 for plain data parallelism, stage=3 for everything sharded."
        )
    return int(stage)


def context_parallel_bytes(
    method: str,
    tokens: int,
    layers: int,
    query_width: int,
    key_width: int,
    ranks: int,
    element: int = 2,
) -> int | float:
    """Bytes that one rank sends in a micro-step where `ranks` ranks share each row's tokens.

    ulysses: all-to-alls of queries, keys, values and outputs in each layer, from a part of the
    tokens to a part of the heads and back: `2 (2 q + 2 k) tokens / N (N - 1) / N` elements forward
    and backward. ring: keys and values go round once forward and once backward, their gradients
    once: `3 * 2 k tokens / N (N - 1)`.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3.2; Liu et al. 2023 (Ring Attention),
    section 3. Assumes: at least `ranks` key-value heads for Ulysses; no recomputation.

    Args:
        method: "ulysses" or "ring".
        tokens: Tokens of the rows that the ranks share: rows times their whole length.
        layers: Attention layers.
        query_width: Width of all query heads.
        key_width: Width of all key-value heads.
        ranks: Ranks that share a row.
        element: Bytes of a number.

    Raises:
        ValueError: `method` is unknown or a number is below 1.

    Collective: none.

    >>> context_parallel_bytes("ulysses", 8192, 1, 4096, 4096, 8, element=2)
    58720256
    >>> context_parallel_bytes("ring", 8192, 1, 4096, 4096, 8, element=2)
    352321536
    """
    choice("method", method, ("ulysses", "ring"))
    numbers = (tokens, layers, query_width, key_width, ranks, element)
    names = ("tokens", "layers", "query_width", "key_width", "ranks", "element")
    for name, value in zip(names, numbers, strict=True):
        whole(name, value, 1)
    row = tokens * layers * element
    if method == "ulysses":
        passes = 2 * ring_fraction("all_to_all", 2 * (query_width + key_width) * row, ranks)
        return exact(passes / ranks)
    return exact(Fraction(3 * 2 * key_width * row * (ranks - 1), ranks))
