from __future__ import annotations

import math
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distft.checkpoint.shards import LogicalTensor, Piece, ShardMap, row_major


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece], np.ndarray]:
    """A tensor cut along every dim, its blocks stored one after another in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    extents = [list(pairwise(points)) for points in cuts]
    blocks = draw(st.permutations(list(product(*extents))))
    return shape, *_store(shape, blocks, draw)


def _store(shape, blocks, draw):
    whole = np.arange(math.prod(shape)).reshape(shape)
    stored, pieces, offset = [], [], 0
    for block in blocks:
        part = whole[tuple(slice(a, b) for a, b in block)]
        order = draw(st.permutations(range(part.ndim)))
        laid = part.transpose(order)
        strides = [0] * part.ndim
        for axis, step in zip(order, row_major(laid.shape), strict=True):
            strides[axis] = step
        dense = tuple(strides) == row_major(part.shape)
        start = tuple(a for a, _ in block)
        pieces.append(Piece("f", offset, start, part.shape, strides=None if dense else (*strides,)))
        stored.append(laid.reshape(-1))
        offset += part.size * 8
    return pieces, np.concatenate(stored)


def _flat(shape, points):
    ends = [*points, math.prod(shape)]
    return [
        Piece("f", a * 8, (a,), (b - a,), flat=True)
        for a, b in zip([0, *points], ends, strict=True)
    ]


def _tensor(shape, pieces):
    return LogicalTensor("w", shape, "int64", pieces)


@given(grids())
def test_runs_put_every_element_of_a_grid_back_in_its_place(grid):
    shape, pieces, stored = grid
    found = np.full(math.prod(shape), -1)
    for piece in pieces:
        runs = list(piece.runs(shape))
        assert runs == sorted(runs)
        for first, at, count in runs:
            assert (found[first : first + count] == -1).all()
            begin = piece.offset // 8 + at
            found[first : first + count] = stored[begin : begin + count]
    assert (found == np.arange(math.prod(shape))).all()
    assert _tensor(shape, pieces).check() == []


@given(grids(), st.data())
def test_a_lost_and_a_doubled_block_are_found(grid, data):
    shape, pieces, _ = grid
    index = data.draw(st.integers(0, len(pieces) - 1))
    lost = pieces[:index] + pieces[index + 1 :]
    assert any("a gap" in text for text in _tensor(shape, lost).check())
    doubled = [*pieces, pieces[index]]
    assert any("twice" in text for text in _tensor(shape, doubled).check())


@given(st.lists(st.integers(0, 30), max_size=4).map(sorted))
def test_ranges_of_the_flattened_tensor_cover_it(points):
    pieces = _flat((5, 6), points)
    assert _tensor((5, 6), pieces).check() == []
    assert sum(count for p in pieces for _, _, count in p.runs((5, 6))) == 30


@given(grids(), st.integers(1, 4))
def test_a_block_that_leaves_the_tensor_is_found(grid, by):
    shape, pieces, _ = grid
    if shape:
        moved = (pieces[0].start[0] + shape[0] - pieces[0].shape[0] + by, *pieces[0].start[1:])
        beyond = Piece("f", 0, moved, pieces[0].shape)
        assert any("outside" in text for text in _tensor(shape, [beyond, *pieces[1:]]).check())


def test_overlapping_blocks_of_different_extents_are_found():
    pieces = [Piece("f", 0, (0, 0), (2, 4)), Piece("f", 0, (1, 3), (3, 1))]
    assert "twice" in _tensor((4, 4), pieces).check()[0]


def test_a_map_names_the_file_that_is_too_short():
    tensor = _tensor((2, 2), [Piece("f", 8, (0, 0), (2, 2))])
    whole = ShardMap(Path("x"), "dcp", {"w": tensor}, files={"f": 40})
    short = ShardMap(Path("x"), "dcp", {"w": tensor}, files={"f": 39})
    assert whole.check() == []
    assert short.check() == ["w needs 40 bytes of f, which has 39"]
