"""The streaming copy on random shapes, cuts and layouts: copying is the identity, bit for bit."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distft.checkpoint.copy import Budget, copy_outputs, make_files, whole
from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.stream import Stream

KINDS = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8, "int64": np.uint64}


@st.composite
def cuts(draw, size):
    """Return the borders of a dim that is cut into pieces, some of them empty."""
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return sorted([0, *inner, size])


@st.composite
def stored_tensors(draw):
    """Return values, their dtype, and how they are cut and laid out in two files."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    dtype = draw(st.sampled_from(sorted(KINDS)))
    if draw(st.booleans()):
        size = int(np.prod(shape))
        return shape, dtype, [draw(cuts(size))], True, random.Random(draw(st.integers(0, 99)))
    borders = [draw(cuts(size)) for size in shape]
    return shape, dtype, borders, False, random.Random(draw(st.integers(0, 99)))


def store(folder, shape, dtype, borders, flat, chance):
    """Write random values as blocks or ranges into two files; return them and the tensor."""
    kind = KINDS[dtype]
    values = np.array(
        [chance.getrandbits(8 * kind().itemsize) for _ in range(int(np.prod(shape)))], kind
    ).reshape(shape)
    contents, pieces = {"a": bytearray(b"?" * 5), "b": bytearray()}, []
    source = values.reshape(-1) if flat else values
    spans = [list(itertools.pairwise(border)) for border in borders]
    for block in itertools.product(*spans):
        part = source[tuple(slice(*span) for span in block)]
        # Saved as it lies, or as a view of a transposed storage with gaps between its rows.
        order = list(range(part.ndim))
        chance.shuffle(order)
        gap = chance.randint(0, 2)
        stored = np.transpose(part, order) if not flat else part
        padded = np.zeros((*stored.shape[:-1], stored.shape[-1] + gap), kind) if order else stored
        if order:
            padded[..., : stored.shape[-1]] = stored
        view = padded[..., : stored.shape[-1]] if order else stored
        view = np.transpose(view, np.argsort(order)) if order and not flat else view
        file = chance.choice("ab")
        offset = len(contents[file])
        contents[file] += padded.tobytes()
        strides = None if flat else tuple(step // kind().itemsize for step in view.strides)
        start = tuple(span[0] for span in block)
        pieces.append(Piece(file, offset, start, part.shape, flat, strides))
        contents[file] += b"?" * chance.randint(0, 3)
    chance.shuffle(pieces)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return values, LogicalTensor("t", shape, dtype, pieces)


@settings(max_examples=50, deadline=None)
@given(stored_tensors(), st.integers(1, 12), st.data())
def test_a_copy_is_the_tensor_whatever_its_pieces_and_the_buffer(stored, words, data):
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        values, tensor = store(folder, *stored)
        assert tensor.check() == []
        start = data.draw(st.integers(0, values.size))
        count = data.draw(st.integers(0, values.size - start))
        with Stream(folder, 8 * words) as stream:
            found = b"".join(bytes(part) for _, part in stream.windows(tensor, tensor.dtype))
            firsts, part = [], b""
            for first, window in stream.windows(tensor, tensor.dtype, start, count):
                assert first == start + len(part) // tensor.item_bytes
                firsts.append(first)
                part += bytes(window)
        assert found == values.tobytes()
        assert part == values.reshape(-1)[start : start + count].tobytes()


@settings(max_examples=15, deadline=None)
@given(st.lists(stored_tensors(), min_size=1, max_size=4), st.integers(1, 3))
def test_several_tensors_fill_one_file_with_any_number_of_threads(many, threads):
    with tempfile.TemporaryDirectory() as made:
        folder, expected, outputs, offset = Path(made), b"head", [], 4
        for number, stored in enumerate(many):
            (folder / str(number)).mkdir()
            values, tensor = store(folder / str(number), *stored)
            moved = [
                Piece(f"{number}/{p.file}", p.offset, p.start, p.shape, p.flat, p.strides)
                for p in tensor.pieces()
            ]
            outputs.append(whole("out", offset, LogicalTensor("t", *_kind(tensor), moved)))
            expected += values.tobytes()
            offset += values.nbytes
        make_files(folder, {"out": offset}, {"out": b"head"})
        copied: list[int] = []
        copy_outputs(folder, folder, outputs, Budget(threads, 48), copied.append)
        assert (folder / "out").read_bytes() == expected
        assert sum(copied) == offset - 4


def _kind(tensor):
    return tensor.shape, tensor.dtype
