"""Boxes of whole tensors are read as they are, by no byte that lies elsewhere."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distft.checkpoint.boxes import boxes_of_range, crop
from distft.checkpoint.mapped_run import saved_tensor
from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.stream import Stream
from tests.property.test_copy import store, stored_tensors
from tests.reading import counted_reads


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, numbers.size))
    last = data.draw(st.integers(first, numbers.size))
    found = []
    boxes = boxes_of_range(shape, first, last)
    for start, size in boxes:
        found += numbers[box(start, size)].reshape(-1).tolist()
    assert found == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=100)
@given(stored_tensors(), st.integers(1, 12), st.data())
def test_a_box_of_any_pieces_is_read_into_any_place(stored, words, data):
    with tempfile.TemporaryDirectory() as made:
        values, tensor = store(Path(made), *stored)
        spans = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in values.shape]
        start, size = [low for low, _ in spans], [high - low for low, high in spans]
        part = crop(tensor, start, size)
        assert part.check() == []
        assert part.shape == tuple(size)
        with Stream(Path(made), 8 * words) as stream:
            saved = saved_tensor(stream, tensor)
            # The place is a box of something larger, whose rows lie apart.
            target = torch.zeros([n + 1 for n in size], dtype=saved.dtype)
            saved.fill(start, target[box([0] * len(size), size)])
            first = data.draw(st.integers(0, values.size))
            flat = torch.zeros(data.draw(st.integers(0, values.size - first)), dtype=saved.dtype)
            saved.fill_range(first, flat)
        found = target[box([0] * len(size), size)].contiguous()
        assert bits(found) == values[box(start, size)].tobytes()
        stop = first + flat.numel()
        assert bits(flat) == values.reshape(-1)[first:stop].tobytes()


def box(start, size):
    return tuple(slice(low, low + many) for low, many in zip(start, size, strict=True))


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_columns_are_read_without_what_lies_between_them(tmp_path):
    values = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    (tmp_path / "f").write_bytes(values.tobytes())
    tensor = LogicalTensor("w", (64, 4096), "float32", [Piece("f", 0, (0, 0), (64, 4096))])
    with Stream(tmp_path, 1 << 16) as stream:
        found = torch.empty(64, 1024)
        with counted_reads() as read:
            saved_tensor(stream, tensor).fill((0, 1024), found)
    assert read.num_bytes == found.nbytes
    assert np.array_equal(found.numpy(), values[:, 1024:2048])
