"""Runs that other tools saved go on here, whatever the strategy: the next losses are equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distft
from distft import DDP, FSDP2, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.readers import read_map
from distft.testing import RanksFailed, WorkerPool
from tests.gloo.adopt_jobs import (
    SAVED,
    Steps,
    go_on,
    run_accelerate,
    run_dcp,
    run_trainer,
    run_trainer_with_deepspeed,
    run_trl,
)

EACH = (DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2())


@pytest.fixture(scope="module")
def writer() -> Iterator[WorkerPool]:
    """Return a rank of its own, since Trainer and Accelerate leave much behind in a process."""
    with WorkerPool(1) as pool:
        yield pool


def assert_goes_on(pool: Any, path: Path, kind: str, steps: Steps, strategies: Any = EACH) -> None:
    expected = [loss for _, loss in steps]
    for rank in pool.run(go_on, strategies, path, kind, steps):
        for strategy, (step, losses) in rank.items():
            assert step == SAVED, strategy
            assert losses == pytest.approx(expected, rel=1e-6), strategy


def test_a_run_of_trainer_goes_on_under_every_strategy(writer, pools, tmp_path):
    [steps] = writer.run(run_trainer, tmp_path)
    path = tmp_path / "checkpoint-2"
    assert distft.adopt(path).resumes
    assert_goes_on(pools(3), path, "trainer", steps)


def test_a_lora_run_of_trl_goes_on_under_every_strategy(writer, pools, tmp_path):
    pytest.importorskip("trl")
    [steps] = writer.run(run_trl, tmp_path)
    found = distft.adopt(tmp_path / "checkpoint-2")
    assert (found.kind, found.step, found.resumes) == ("a checkpoint of TRL", 2, True)
    assert "load_adapter" in found.how
    assert_goes_on(pools(2), found.path, "trl", steps)


def test_a_run_of_accelerate_goes_on_under_every_strategy(writer, pools, tmp_path):
    [steps] = writer.run(run_accelerate, tmp_path / "state")
    assert_goes_on(pools(2), tmp_path / "state", "accelerate", steps)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_run_saved_with_torchs_distributed_checkpoint_goes_on(pools, tmp_path, flatten):
    steps = pools(2).run(run_dcp, tmp_path / "step-2", flatten)[0]
    found = distft.adopt(tmp_path)
    assert found.resumes
    assert_goes_on(pools(3), found.path, "dcp", steps)


def test_a_run_of_trainer_with_deepspeed_goes_on_with_its_stage(pools, tmp_path):
    with WorkerPool(2) as pair:
        ranks = pair.run(run_trainer_with_deepspeed, tmp_path, 2)
    # Rows alternate between the ranks, as they are dealt out below.
    steps: Steps = [
        (
            [batch for pair in zip(*(rows for rows, _ in step), strict=True) for batch in pair],
            sum(loss for _, loss in step) / 2,
        )
        for step in zip(*ranks, strict=True)
    ]
    found = distft.adopt(tmp_path / "checkpoint-2")
    assert found.kind == "a checkpoint of Trainer, with DeepSpeed"
    assert (found.stage, found.step) == (2, 2)
    assert_goes_on(pools(2), found.path, "trainer", steps, (ZeRO2(),))


def test_a_flipped_bit_in_another_tools_file_is_refused_on_every_rank(pools, writer, tmp_path):
    [steps] = writer.run(run_accelerate, tmp_path / "state")
    pools(2).run(run_dcp, tmp_path / "dcp", True)
    file = tmp_path / "state" / "optimizer.bin"
    torch.save({**torch.load(file, weights_only=True), "mark": torch.full((64,), 123.5)}, file)
    marked = torch.full((64,), 123.5).numpy().tobytes()
    flip(file, file.read_bytes().index(marked))
    with pytest.raises(
        RanksFailed, match=r"optimizer\.bin is damaged in its record data/\d+ "
    ) as no:
        pools(2).run(go_on, (FSDP2(),), tmp_path / "state", "accelerate", steps)
    assert None not in no.value.errors
    tensor = max(read_map(tmp_path / "dcp").tensors.values(), key=lambda t: t.num_elements)
    piece = next(tensor.pieces())
    flip(tmp_path / "dcp" / piece.file, piece.offset + 8)
    with pytest.raises(RanksFailed, match=rf"{tensor.name} is damaged at byte \d+ of"):
        pools(3).run(go_on, (ZeRO3(),), tmp_path / "dcp", "dcp", steps)


def flip(file: Path, at: int) -> None:
    """Let one bit of a file be another."""
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_numbers_that_cannot_be_this_models_parameters_are_refused(pools, writer, tmp_path):
    [steps] = writer.run(run_accelerate, tmp_path)
    # A tied head is one parameter; here it is two.
    with pytest.raises(RanksFailed, match=r"have \[20\] parameters, here \[21\]"):
        pools(2).run(go_on, (FSDP2(),), tmp_path, "other", steps)


def test_a_moment_of_another_shape_is_named_with_both(pools, writer, tmp_path):
    [steps] = writer.run(run_accelerate, tmp_path)
    saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    saved["state"][2]["exp_avg"] = torch.zeros(5, 7)
    torch.save(saved, tmp_path / "optimizer.bin")
    with pytest.raises(RanksFailed, match=r"exp_avg of number 2 has the shape \(5, 7\)"):
        pools(2).run(go_on, (FSDP2(),), tmp_path, "accelerate", steps)


def test_an_optimizer_file_that_would_run_code_is_refused(pools, writer, tmp_path):
    [steps] = writer.run(run_accelerate, tmp_path)
    torch.save({"state": partial(print, "gotcha"), "param_groups": []}, tmp_path / "optimizer.bin")
    with pytest.raises(RanksFailed, match=r"functools\.partial.*Nothing was loaded"):
        pools(2).run(go_on, (FSDP2(),), tmp_path, "accelerate", steps)
