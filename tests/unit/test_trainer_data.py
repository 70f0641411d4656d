"""Rows in whole rounds of all data ranks, none of which counts twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler

from distft.trainer.data import (
    FilledBatches,
    LastRound,
    MaskedRows,
    SeededOrder,
    in_whole_rounds,
)
from distft.trainer.progress import Dealing, Position


@pytest.mark.parametrize(
    ("number", "size", "ranks"), [(22, 2, 4), (24, 2, 4), (1, 3, 2), (7, 1, 3)]
)
def test_an_epoch_is_whole_rounds_and_has_every_row_once(number, size, ranks):
    batches = FilledBatches(SequentialSampler(range(number)), size, ranks)
    found = list(batches)
    assert len(found) == len(batches)
    assert len(found) % ranks == 0
    assert {len(batch) for batch in found} == {size}
    flat = [index for batch in found for index in batch]
    assert [index for index in flat if index >= 0] == list(range(number))
    last = LastRound(number, size, ranks)
    assert sum(index < 0 for index in flat) == last.num_filled
    assert sum(any(i >= 0 for i in batch) for batch in found[-ranks:]) == last.num_ranks


def test_a_row_that_fills_is_one_token_without_a_loss():
    rows = MaskedRows([{"input_ids": [4, 5, 6], "labels": [4, 5, 6], "seq_lengths": [2, 1]}])
    masked = {"input_ids": [4], "labels": [-100], "seq_lengths": [1]}
    assert rows[-1] == masked
    assert rows.__getitems__([0, -1]) == [rows.rows[0], masked]


def test_a_row_that_is_not_tokenized_cannot_fill():
    with pytest.raises(ValueError, match="with the columns image has no input_ids"):
        MaskedRows([{"image": 1}])[-1]


def test_a_loader_that_drops_an_incomplete_round_drops_nothing_else():
    rows = list(range(11))
    for drop, expected in ((False, 12), (True, 8)):
        loader = in_whole_rounds(DataLoader(rows, batch_size=2, drop_last=drop), 2)
        found = [index for batch in loader.batch_sampler for index in batch]
        assert len(found) == expected == 2 * len(loader.batch_sampler)
        assert found[:8] == rows[:8]
    filled = in_whole_rounds(DataLoader(rows[:4], batch_size=2), 1)
    assert [batch.tolist() for batch in filled] == [[0, 1], [2, 3]]


@given(
    st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans(),
    st.integers(0, 40),
)  # fmt: skip
def test_where_a_run_is_after_its_steps_is_where_its_batches_are(
    n, size, ranks, accum, drop, steps
):
    dealing = Dealing(n, size, ranks, accum, drop)
    if not dealing.rounds_from(0):
        return
    here, left = Position(), steps
    while left:
        batches = FilledBatches(SequentialSampler(range(n)), size, ranks, drop)
        batches.first_row = here.row
        rounds = len(list(batches)) // ranks
        assert rounds == dealing.rounds_from(here.row)
        windows = -(-rounds // accum)
        assert windows == dealing.steps_from(here.row)
        done = min(left, windows)
        left -= done
        row = here.row + done * dealing.rows_per_step
        here = Position(here.epoch + 1) if done == windows else Position(here.epoch, row)
    assert dealing.after(Position(), steps) == here
    assert dealing.steps_to(here) == steps


def test_lengths_are_grouped_in_one_order_on_every_rank():
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = [3, 9, 1, 7, 5, 8, 2, 6, 4, 11, 10, 12]
    orders = []
    for rank in range(2):
        torch.manual_seed(rank)
        order = SeededOrder(LengthGroupedSampler(2, lengths=lengths), seed=3)
        order.set_epoch(1)
        orders.append(list(order))
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == list(range(12))
    order.set_epoch(2)
    assert list(order) != orders[0]
