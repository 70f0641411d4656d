"""Rows in whole rounds of all data ranks, none of which counts twice."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, SequentialSampler

from distft.trainer_data import FilledBatches, LastRound, MaskedRows, in_whole_rounds


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


def test_loaders_that_drop_what_is_left_stay_as_they_are():
    loader = DataLoader(list(range(5)), batch_size=2, drop_last=True)
    assert in_whole_rounds(loader, 2) is loader
    filled = in_whole_rounds(DataLoader(list(range(4)), batch_size=2), 1)
    assert [batch.tolist() for batch in filled] == [[0, 1], [2, 3]]
