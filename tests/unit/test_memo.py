"""A pickle of a few bytes takes no memory beyond them."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tracemalloc

import pytest
import torch

from distft.checkpoint.readers.memo import check_memo
from distft.checkpoint.readers.unpickle import read_pickle

FAR = struct.pack("<I", 1 << 27)
LONG = struct.pack("<Q", 1 << 40)
BOMBS = {
    "memo": b"\x80\x02]r" + FAR + b".",
    "memo in text": b"\x80\x02]p134217728\n.",
    "memo behind text": b"\x80\x02(X\x03\x00\x00\x00abcr" + FAR + b"t.",
    "bytes": b"\x80\x04\x8e" + LONG + b"x.",
    "text": b"\x80\x04\x8d" + LONG + b"x.",
    "frame": b"\x80\x04\x95" + LONG + b"N.",
    "integer": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_large_number_in_a_small_pickle_takes_no_memory(tmp_path, bomb):
    file = tmp_path / "x.pkl"
    file.write_bytes(BOMBS[bomb])
    tracemalloc.start()
    with pytest.raises(ValueError, match="is not a whole file of a checkpoint"):
        read_pickle(BOMBS[bomb], file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_of_python_passes(protocol):
    chance = random.Random(protocol)
    values = [
        [str(number) * chance.randrange(99) for number in range(2000)],
        {number: (float(number), -(number**9), b"r" * number, {number}) for number in range(600)},
        [None, True, 1 << 2000, "\n.r\xff" * 9000, bytearray(300), OSError(3, "x"), range(3)],
    ]
    check_memo(pickle.dumps(values, protocol))


def test_every_pickle_of_torch_passes():
    data = io.BytesIO()
    many = {f"layer.{number}": torch.ones(1) for number in range(400)}
    torch.save(many, data, _use_new_zipfile_serialization=False)
    check_memo(data.getvalue())
