"""Cases of published reports, through the Trainer: schedules, short windows, sums, streams."""

from __future__ import annotations

import pytest

from distft import DDP, FSDP2
from distft.testing import RanksFailed
from tests.gloo.rest_jobs import (
    evaluation_of_nine_rows,
    rows_of_steps,
    streams_after_resume,
    train_attached,
)
from tests.gloo.trainer_jobs import lora, train, train_plainly


def logged(history, *keys):
    return [tuple(entry[key] for key in keys) for entry in history if "loss" in entry]


def batches(size, rounds, **changes):
    return {
        "per_device_train_batch_size": size, "gradient_accumulation_steps": rounds, **changes
    }  # fmt: skip


def test_the_rate_of_a_step_depends_on_no_ranks_and_no_resume(pools, tmp_path):  # case 41
    ten = {"max_steps": 10, "save_steps": 5}
    expected = [1e-3 * (1 - step / 10) for step in range(10)]
    alone = pools(1).run(rows_of_steps, tmp_path / "1", DDP(), batches(4, 1, **ten))
    two = pools(2).run(rows_of_steps, tmp_path / "2", FSDP2(), batches(2, 1, **ten))
    stopped = tmp_path / "2" / "checkpoint-5"
    four = pools(4).run(rows_of_steps, tmp_path / "4", FSDP2(), batches(1, 1, **ten), stopped)
    for ranks in (alone, two, four):
        found = [rate for (rate,) in logged(ranks[0]["log"], "learning_rate")]
        assert found == pytest.approx(expected)


def test_a_short_last_window_is_divided_by_its_own_tokens(pools, tmp_path):  # case 44
    changes = {"max_steps": -1, "num_train_epochs": 1}
    rows = {"number": 10}
    alone = pools(1).run(train_plainly, tmp_path, "L", batches(2, 4, **changes), None, rows)[0]
    for history in pools(2).run(
        train, tmp_path, FSDP2(), "L", batches(1, 4, **changes), None, rows
    ):
        assert logged(history, "loss", "grad_norm") == [
            pytest.approx(entry, rel=1e-6) for entry in logged(alone, "loss", "grad_norm")
        ]
        # 8 rows, and 2.
        assert len(logged(history, "loss")) == 2


def test_a_model_that_comes_with_an_adapter_trains_it(pools, tmp_path):
    # Initial factors of zero, so the first loss is the base model's; the second one is not.
    expected = logged(pools(1).run(train_attached, tmp_path, None, 4)[0], "loss", "grad_norm")
    for history in pools(2).run(train_attached, tmp_path, FSDP2(), 2):
        found = logged(history, "loss", "grad_norm")
        assert found == [pytest.approx(entry, rel=1e-6) for entry in expected]
    with pytest.raises(RanksFailed, match=r"PeftModel.*peft_config"):
        pools(1).run(train_attached, tmp_path, DDP(), 4, lora())


def test_nine_rows_in_batches_of_five_count_once_each(pools, tmp_path):  # case 51
    whole = pools(1).run(evaluation_of_nine_rows, tmp_path, 9)[0]
    for found in pools(2).run(evaluation_of_nine_rows, tmp_path, 5):
        assert found == pytest.approx(whole, rel=1e-6)


def test_a_stream_whose_last_round_is_left_out_counts_each_row_once(pools, tmp_path):  # case 52
    changes = {"max_steps": 4, "dataloader_drop_last": True, "max_grad_norm": 1e9}
    # Three files, which two ranks could share unevenly; nine rows, one of which fills no round.
    data = {"number": 9, "stream": 3}
    alone = pools(1).run(train_plainly, tmp_path, "L", batches(2, 1, **changes), None, data)[0]
    for history in pools(2).run(train, tmp_path, DDP(), "L", batches(1, 1, **changes), None, data):
        found = logged(history, "loss", "grad_norm")
        assert len(found) == 4
        assert found == [
            pytest.approx(entry, rel=1e-6) for entry in logged(alone, "loss", "grad_norm")
        ]


def test_a_stream_that_would_fill_its_last_round_with_its_first_rows_is_refused(pools, tmp_path):
    data = {"number": 9, "stream": 1}
    with pytest.raises(RanksFailed, match=r"stream.*2 data ranks.*dataloader_drop_last=True"):
        pools(2).run(train, tmp_path, DDP(), "L", batches(1, 1, max_steps=4), None, data)


@pytest.mark.parametrize("ranks", [3, 1])
def test_ranks_that_were_not_there_get_streams_of_their_own(pools, tmp_path, ranks):  # case 76
    three = {"max_steps": 3, "save_steps": 3}
    begun = pools(2).run(rows_of_steps, tmp_path, DDP(), batches(3, 1, **three))
    changes = batches(6 // ranks, 1, max_steps=4)
    found = pools(ranks).run(streams_after_resume, tmp_path, changes)
    trained = [row for rank in (*begun, *found) for step in rank["rows"] for row in step]
    # The exact rest of 22 rows, in one step.
    assert len(trained) == len(set(trained)) == 22
    assert len({rank["drawn"] for rank in found}) == ranks
    assert all("re-derived" in rank["said"] for rank in found)
