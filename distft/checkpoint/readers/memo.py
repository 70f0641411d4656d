"""Places of a pickle's memo, which unpickling takes memory for: no more than it has bytes.

A pickle of 12 bytes may name the place 4,294,967,295, and Python makes room for all before it.
Source: ``pickletools`` of the standard library, protocols 0 to 5.
"""

from __future__ import annotations

import re

# Opcodes whose arguments are of a fixed size, but for those that name a place and for the stop.
_FIXED = re.compile(
    rb"(?:[()012NRQabdelostu}\]\x81\x85-\x89\x8f-\x94\x97\x98]"
    rb"|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|[G\x95].{8})*+",
    re.DOTALL,
)
_STOP, _LONG_BINPUT, _PUT = b".rp"
# Bytes of the length that stands before what an opcode holds.
_COUNTED = {
    **dict.fromkeys(b"UC\x8c\x8a", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
# Lines that follow an opcode.
_LINES = {**dict.fromkeys(b"ci", 2), **dict.fromkeys(b"FILSVgpP", 1)}


def check_memo(data: bytes) -> None:
    r"""Raise where a pickle names a place of its memo beyond its own number of bytes.

    >>> check_memo(b"\x80\x02]r\xff\xff\xff\xff.")
    Traceback (most recent call last):
        ...
    ValueError: it names the place 4294967295 of its memo and has 9 bytes

    Raises:
        ValueError: It does, or has an opcode that there is not.

    Collective: none.
    """
    at, place = 0, 0
    while True:
        found = _FIXED.match(data, at)
        at = found.end() if found else at
        # One that is cut is found by unpickling.
        if at >= len(data) or data[at] == _STOP:
            return
        opcode = data[at]
        if opcode == _LONG_BINPUT:
            place = int.from_bytes(data[at + 1 : at + 5], "little")
            at += 5
        elif opcode in _COUNTED:
            start = at + 1 + _COUNTED[opcode]
            at = start + int.from_bytes(data[at + 1 : start], "little")
        elif opcode in _LINES:
            begin = at + 1
            for _ in range(_LINES[opcode]):
                at = data.find(b"\n", at) + 1
                if not at:
                    return
            place = int(data[begin:at]) if opcode == _PUT else place
        elif found and len(data) - at > 8:
            raise ValueError(f"its opcode {opcode:#04x} at byte {at} is none of a pickle's")
        else:
            # A cut argument of a fixed size.
            return
        if place > len(data):
            raise ValueError(f"it names the place {place} of its memo and has {len(data)} bytes")
