"""The parts of a whole tensor that ranks hold: disjoint, complete, cut as torch cuts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distft.checkpoint.placement import chunk_ranges, narrow, strided_ranges

parts = st.integers(1, 6)
rows = st.integers(0, 40)


def indices(ranges):
    return [index for start, stop in ranges for index in range(start, stop)]


@given(rows, parts)
def test_a_chunk_is_that_of_torch(length, number):
    whole = torch.arange(length)
    chunks = [*torch.chunk(whole, number), *[whole[:0]] * number][:number] if length else []
    for part, chunk in enumerate(chunks):
        assert indices(chunk_ranges(((0, length),), number, part)) == chunk.tolist()


@given(rows, parts, parts)
def test_strided_parts_cover_every_index_once(length, groups, number):
    found = [
        index
        for part in range(number)
        for index in indices(strided_ranges(((0, length),), groups, number, part))
    ]
    assert sorted(found) == list(range(length))


@given(rows, parts, parts)
def test_one_group_is_a_plain_chunk(length, number, part):
    part %= number
    assert strided_ranges(((0, length),), 1, number, part) == chunk_ranges(
        ((0, length),), number, part
    )


@given(rows, parts, parts)
def test_a_chunk_of_a_chunk_is_inside_it(length, outer, inner):
    for part in range(outer):
        mine = chunk_ranges(((0, length),), outer, part)
        split = [indices(chunk_ranges(mine, inner, place)) for place in range(inner)]
        assert [index for piece in split for index in piece] == indices(mine)


def test_a_box_is_a_view():
    whole = torch.arange(12).view(3, 4)
    box = narrow(whole, (1, 2), (2, 1))
    assert box.tolist() == [[6], [10]]
    box.zero_()
    assert int(whole[1, 2]) == 0
