"""From one floating dtype to another with numpy, as torch rounds.

numpy has no bfloat16: its numbers are the upper halves of fp32 numbers, so both ways are integer
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from distft.checkpoint.shards import CASTABLE, ITEM_BYTES

# Elements cast at once: 256 KiB of fp32, so that temporaries stay in the processor's cache.
_STEP = 1 << 16
# What a bfloat16 that is no number is written as, torch's own pattern.
_BF16_NAN = 0x7FC0

# Bytes to read, bytes to write.
Cast = Callable[[memoryview, memoryview], None]


def storage_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy dtype that holds elements of a dtype of torch, bits untouched.

    >>> storage_dtype("bfloat16")
    dtype('uint16')

    Collective: none.
    """
    if dtype in ("float16", "float32", "float64"):
        return np.dtype(dtype)
    size = ITEM_BYTES[dtype]
    return np.dtype(f"u{size}") if size <= 8 else np.dtype("V16")


def cast_bytes(source: str, target: str) -> Cast:
    """Return what turns bytes of one floating dtype into bytes of another.

    Both arguments of what is returned are contiguous and hold the same number of elements. Rounds
    to nearest, ties to even; what is too large becomes infinite and NaN stays NaN, with another
    payload. Source: IEEE 754-2019, 4.3.1; bf16 as ``c10/util/BFloat16.h``.

    Raises:
        ValueError: One of them is no floating dtype of 16 bits or more.

    Collective: none.
    """
    for dtype in (source, target):
        if dtype not in CASTABLE:
            raise ValueError(
                f"{source} cannot be cast to {target}: {dtype} is none of the {len(CASTABLE)} "
                f"dtypes {', '.join(CASTABLE)}. Leave the dtype as it is."
            )

    def cast(raw: memoryview, out: memoryview) -> None:
        numbers = np.frombuffer(raw, storage_dtype(source))
        made = np.frombuffer(out, storage_dtype(target))
        with np.errstate(over="ignore", invalid="ignore"):
            for low in range(0, len(numbers), _STEP):
                part = numbers[low : low + _STEP]
                if source == "bfloat16":
                    part = _from_bf16(part)
                if target == "bfloat16":
                    _to_bf16(part.astype(np.float32, copy=False), made[low : low + _STEP])
                else:
                    made[low : low + _STEP] = part

    return cast


def _from_bf16(numbers: NDArray[np.generic]) -> NDArray[np.generic]:
    wide = numbers.astype(np.uint32)
    np.left_shift(wide, 16, out=wide)
    return wide.view(np.float32)


def _to_bf16(numbers: NDArray[np.float32], out: NDArray[np.generic]) -> None:
    """Round: add half of the last kept place, or just less where the kept part is even."""
    bits = numbers.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    # The sum would carry a NaN into infinity or zero.
    if np.isnan(numbers.max()):
        out[np.isnan(numbers)] = _BF16_NAN
