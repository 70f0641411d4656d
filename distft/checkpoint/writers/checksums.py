"""The CRC-32 of a storage that several copies fill, from those of its parts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

# Number of the output, or None for zeros, and bytes.
Range = tuple[int | None, int]


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of an archive: two places in its file for its CRC-32, and what that is of."""

    file: str
    places: tuple[int, int]
    ranges: tuple[Range, ...]

    def crc32(self, sums: Sequence[int]) -> int:
        """Return the CRC-32, from those of all outputs.

        Collective: none.
        """
        crc = 0
        for number, num_bytes in self.ranges:
            if number is None:
                crc = zlib.crc32(bytes(num_bytes), crc)
            else:
                crc = join_crc32(crc, sums[number], num_bytes)
        return crc


def join_crc32(first: int, second: int, num_bytes: int) -> int:
    """Return the CRC-32 of two ranges that follow each other, from those of each.

    >>> join_crc32(zlib.crc32(b"check"), zlib.crc32(b"point"), 5) == zlib.crc32(b"checkpoint")
    True

    The first is multiplied by ``x ** (8 * num_bytes)`` modulo the polynomial. Source: zlib 1.3,
    ``crc32_combine``.

    Args:
        first: CRC-32 of the first range.
        second: CRC-32 of the second.
        num_bytes: Bytes of the second.

    Collective: none.
    """
    # Bit 31 is the coefficient of 1, so this is x ** 8.
    power = 1 << 23
    while num_bytes:
        if num_bytes & 1:
            first = _times(first, power)
        power, num_bytes = _times(power, power), num_bytes >> 1
    return first ^ second


def _times(a: int, b: int) -> int:
    """Return a product of polynomials over two elements, modulo that of CRC-32."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product
