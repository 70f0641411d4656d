"""Steps of the Trainer that cannot be made as they are: left out alike, or refused."""

from __future__ import annotations

import math

import pytest
import torch

from distft import DDP, FSDP2, TP, ZeRO1, ZeRO2, ZeRO3
from tests.gloo.odd_steps_jobs import (
    resume_of_another_model,
    with_a_bad_loss,
    without_loss_tokens,
)


@pytest.mark.parametrize(
    ("strategy", "value", "at"),
    [
        (FSDP2(), math.nan, 1),
        (ZeRO2(), math.inf, 0),
        pytest.param(DDP(), math.inf, 1, marks=pytest.mark.slow),
        pytest.param(ZeRO1(), math.nan, 2, marks=pytest.mark.slow),
        (ZeRO3(), math.nan, 1),
        pytest.param(TP(tp=2), math.nan, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_whose_norm_is_not_finite_is_left_out(pools, tmp_path, strategy, value, at):
    first, other = pools(2).run(with_a_bad_loss, tmp_path, strategy, value, at)
    norms = [entry["grad_norm"] for entry in first["log"] if "grad_norm" in entry]
    assert [math.isfinite(norm) for norm in norms] == [step != at for step in range(4)]
    rates = [entry["learning_rate"] for entry in first["log"] if "grad_norm" in entry]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    weights = first["weights"]
    assert all(torch.isfinite(weight).all() for weight in weights)
    for step in range(1, 4):
        assert torch.equal(weights[step], weights[step - 1]) == (step == at)
    assert all(torch.equal(a, b) for a, b in zip(weights, other["weights"], strict=True))


def test_rows_without_loss_tokens_are_fine_and_a_dataset_of_them_is_not(pools, tmp_path):
    losses = pools(2).run(without_loss_tokens, tmp_path, False)
    assert losses[0] == losses[1]
    assert 4 < losses[0] < 6
    with pytest.raises(RuntimeError, match="0 loss tokens"):
        pools(2).run(without_loss_tokens, tmp_path, True)


def test_a_checkpoint_of_another_model_is_refused(pools, tmp_path):
    with pytest.raises(RuntimeError, match=r"q_norm|not in the model|not in the checkpoint"):
        pools(1).run(resume_of_another_model, tmp_path)
