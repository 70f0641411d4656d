"""The rows that every run takes of a matrix meet each pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.matrix import every_pair

AXES = [range(11), "abcd", (1, 3), (0.1, None)]


def quick(rows):
    return [row.values for row in rows if not row.marks]


def test_the_whole_product_is_there():
    assert [row.values for row in every_pair(*AXES)] == list(product(*AXES))


@pytest.mark.parametrize("axes", [AXES, [range(6), range(3), range(3)], ["ab", (1, 2)]], ids=str)
def test_each_pair_of_values_is_in_a_row_that_is_not_slow(axes):
    found = {pair for row in quick(every_pair(*axes)) for pair in combinations(enumerate(row), 2)}
    wanted = {pair for row in product(*axes) for pair in combinations(enumerate(row), 2)}
    assert found == wanted


def test_the_quick_rows_are_few():
    # At least 11 * 4 rows: the two longest axes.
    assert len(quick(every_pair(*AXES))) <= 48


def test_a_tuple_gives_several_arguments():
    assert every_pair([("ddp", 2)], "L")[0].values == ("ddp", 2, "L")
