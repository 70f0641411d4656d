"""Weights of 4 bits as bitsandbytes packs them: their bytes, and those of what scales them.

Source: Dettmers et al. 2023 (QLoRA), sections 2 and 3; bitsandbytes 0.50 `functional.py`,
`quantize_4bit`.
"""

from __future__ import annotations

# Weights that share a scale, and scales that share one where they are quantized too.
BLOCK, NESTED_BLOCK = 64, 256
# Values of a 4-bit and of an 8-bit type, fp32 each, which bitsandbytes keeps for every weight.
_CODE_BYTES, _NESTED_CODE_BYTES = 16 * 4, 256 * 4
# The mean of the scales, subtracted before they are quantized, fp32.
_OFFSET_BYTES = 4
# A text that says shape, dtype and kind, of one size for every layer.
FACTS_BYTES = 256


def packed_rows(numel: int, storage_bytes: int) -> int:
    """Rows of one element in which a weight's 4-bit values are stored.

    ``ceil(ceil(n / 2) / s)``: two values a byte, s bytes an element of the storage's dtype.

    Collective: none.

    >>> packed_rows(4096 * 4096, storage_bytes=2)
    4194304
    """
    num_bytes = (numel + 1) // 2
    return -(-num_bytes // storage_bytes)


def scale_bytes(numel: int, is_nested: bool = True) -> int:
    """Bytes of the scales of one packed weight, which every rank holds whole.

    ``4 n / 64`` bytes of fp32 scales; quantized in their turn, ``n / 64`` bytes and 4 more for
    every 256 of them; and a few constants.

    Source: Dettmers et al. 2023, section 3: 0.5 bits a weight, and 0.127 with double quantization.

    Collective: none.

    >>> [round(8 * scale_bytes(2**32, nested) / 2**32, 3) for nested in (True, False)]
    [0.127, 0.5]
    """
    blocks = -(-numel // BLOCK)
    if not is_nested:
        return 4 * blocks + _CODE_BYTES + FACTS_BYTES
    nested = -(-blocks // NESTED_BLOCK)
    constants = _CODE_BYTES + _NESTED_CODE_BYTES + _OFFSET_BYTES + FACTS_BYTES
    return blocks + 4 * nested + constants
