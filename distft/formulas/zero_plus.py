"""ZeRO++: a second copy of the weights nearby, and fewer bits on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from distft.formulas._numbers import amount, exact, whole
from distft.formulas.reports import Collective, Parameter

# DeepSpeed's aim for elements that share one scale; a group has a multiple of 8.
GROUP_NUMEL = 8_000
SCALE_BYTES = 4


@dataclass(frozen=True)
class ZeROPlus:
    """What a run has of ZeRO++.

    Args:
        secondary: Ranks h that share one more copy of the weights (hpZ); None for no copy.
        quantized_weights: Whether weights travel as int8 (qwZ).
        quantized_gradients: Whether gradients travel as int4 in two exchanges (qgZ).
    """

    secondary: int | None = None
    quantized_weights: bool = False
    quantized_gradients: bool = False


def zero_plus_bytes(
    num_params: float,
    secondary: bool = True,
    quantized_weights: bool = True,
    quantized_gradients: bool = True,
    element_bytes: float = 2,
) -> int | float:
    """Bytes that cross between groups of ranks in one micro-step of ZeRO-3 with ZeRO++.

    Gathering forward `P w`, or `P` as int8; gathering backward the same, or 0 from the copy within
    the group; gradients `P w`, or `P / 2` as int4. Scales and the ring's `(N - 1) / N` left out.

    Source: Wang et al. 2023 (ZeRO++), arXiv 2306.10209, section 3 and table 1: 3 M without, and
    0.75 M with all three.

    Args:
        num_params: Parameters P.
        secondary: Whether there is a copy within the group (hpZ).
        quantized_weights: Whether weights travel as int8 (qwZ).
        quantized_gradients: Whether gradients travel as int4 (qgZ).
        element_bytes: Bytes w of one weight or gradient as it is.

    Raises:
        ValueError: An amount is negative.

    Collective: none.

    >>> zero_plus_bytes(4e9, False, False, False), zero_plus_bytes(4e9)
    (24000000000, 6000000000)
    """
    params = Fraction(amount("num_params", num_params))
    element = Fraction(amount("element_bytes", element_bytes))
    gather = params if quantized_weights else params * element
    gradients = params / 2 if quantized_gradients else params * element
    return exact(gather + (0 if secondary else gather) + gradients)


def ring_with_zero_plus(
    num_params: int, ranks: int, element_bytes: int, plus: ZeROPlus
) -> Fraction:
    """Bytes that one rank sends in a micro-step of ZeRO-3 with ZeRO++, over whatever axis.

    Weights forward over N ranks, backward over h; gradients over N, each `(n - 1) / n` of their
    bytes: w, or 1 for weights and 1/2 for gradients that are quantized.

    Source: as `zero_plus_bytes`, and rings as in `zero_traffic_bytes`.

    Collective: none.

    >>> float(ring_with_zero_plus(1_000, 4, 2, ZeROPlus()))
    4500.0
    """
    group = plus.secondary or ranks
    far, near = Fraction(ranks - 1, ranks), Fraction(group - 1, group)
    gather = num_params * (1 if plus.quantized_weights else element_bytes)
    gradients = num_params * (Fraction(1, 2) if plus.quantized_gradients else element_bytes)
    return gather * far + gather * near + gradients * far


def quantization_groups(numel: int) -> int:
    """Number of scales of `numel` elements that are quantized at once.

    The smallest number of equal groups of at most 8,000 elements, each a multiple of 8.

    Source: DeepSpeed 0.19 `partition_parameters.py`, `CUDAQuantizer.quantize`.

    Raises:
        ValueError: `numel` is no multiple of 8.

    Collective: none.

    >>> quantization_groups(16_000), quantization_groups(24_008)
    (2, 3001)
    """
    whole("numel", numel, 1)
    if numel % 8:
        raise ValueError(
            f"{numel} elements cannot be quantized, since int8 weights travel in groups of a "
            "multiple of 8. Leave quantized_weights out, or choose a number of ranks that leaves "
            "each a multiple of 8."
        )
    groups = -(-numel // GROUP_NUMEL)
    while numel % (8 * groups):
        groups += 1
    return groups


def gathers(
    tensors: Sequence[Parameter],
    parts: Sequence[int],
    weights: Sequence[int],
    counts: Sequence[int],
    ranks: int,
    grad_accum: int,
    plus: ZeROPlus,
) -> list[Collective]:
    """Return what gathers the weights of modules in one step.

    Without a secondary copy each gather is over all ranks. With one, a trained parameter is
    gathered over all ranks once after each update, and all else from the copy, over h ranks; the
    copy of a frozen one lasts.

    Source: DeepSpeed 0.19 `partition_parameters.py`, `all_gather_coalesced`. Assumes: quantized
    weights have scales of their own for each parameter; the engine quantizes what it gathers in
    one call together, which has about as many.

    Args:
        tensors: Parameters.
        parts: Elements of each on one rank.
        weights: Bytes of an element of each.
        counts: How often each is gathered in a micro-step.
        ranks: Ranks N.
        grad_accum: Micro-steps g of one step.
        plus: What there is of ZeRO++.

    Collective: none.
    """
    group = plus.secondary or ranks
    far = near = 0
    for tensor, part, weight, count in zip(tensors, parts, weights, counts, strict=True):
        if plus.secondary is None:
            far += count * _gathered(part, weight, ranks, plus)
        else:
            once = 1 if tensor.trainable and count else 0
            copy = part * ranks // group
            far += once * _gathered(part, weight, ranks, plus)
            near += (grad_accum * count - once) * _gathered(copy, weight, group, plus)
    if plus.secondary is None:
        return [Collective.of("all_gather", "dp_shard", far, ranks, "micro_step", "parameters")]
    return [
        Collective.of(
            "all_gather", "dp_shard", far, ranks, "step", "parameters, first after an update"
        ),
        Collective.of("all_gather", "secondary", near, group, "step", "parameters, from the copy"),
    ]


def _gathered(part: int, weight: int, ranks: int, plus: ZeROPlus) -> int:
    """Return the bytes of a gathered buffer of `ranks` parts."""
    if not plus.quantized_weights:
        return ranks * part * weight
    return ranks * (part + SCALE_BYTES * quantization_groups(part))


def reductions(
    tensors: Sequence[Parameter],
    parts: Sequence[int],
    gradient: int,
    ranks: int,
    plus: ZeROPlus,
) -> list[Collective]:
    """Return what reduces the gradients of one micro-step.

    As int4, a matrix whose elements are a multiple of 2 N is exchanged in two all-to-alls: within
    the h ranks of a group, reduced there, then between the N / h groups, each with its scales. All
    else is reduce-scattered as it is.

    Source: Wang et al. 2023 (ZeRO++), section 3.3; DeepSpeed 0.19 `coalesced_collectives.py`,
    `all_to_all_quant_reduce`. Assumes: a secondary group is one machine.

    Collective: none.
    """
    group = plus.secondary or ranks
    plain = within = between = 0
    for tensor, part in zip(tensors, parts, strict=True):
        if not tensor.trainable:
            continue
        if plus.quantized_gradients and group < ranks and _has_int4(tensor, ranks):
            scales = max(*tensor.shape[:2], ranks)
            within += tensor.numel // 2 + SCALE_BYTES * scales
            between += tensor.numel // group // 2 + SCALE_BYTES * (scales // group)
        else:
            plain += ranks * part * gradient
    sent = [Collective.of("reduce_scatter", "dp_shard", plain, ranks, "micro_step", "gradients")]
    if within:
        sent += [
            Collective.of(
                "all_to_all", "secondary", within, group, "micro_step", "gradients, int4"
            ),
            Collective.of(
                "all_to_all", "between groups", between, ranks // group, "micro_step",
                "gradients, int4",
            ),
        ]  # fmt: skip
    return sent


def _has_int4(tensor: Parameter, ranks: int) -> bool:
    return len(tensor.shape) > 1 and tensor.numel % (2 * ranks) == 0
