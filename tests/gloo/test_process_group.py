"""`init`, with and without a launcher, and the small collectives that guards use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import distft
from distft.process_group import (
    RENDEZVOUS_TIMEOUT_VARIABLE,
    from_rank0,
    raise_together,
    rendezvous,
    together,
)

ALONE = """
import torch, distft
from functools import partial
from distft.testing import tiny_batches, tiny_model
device = distft.init(seed=3)
strategy = distft.strategy({name!r})
model, optimizer = strategy.apply(tiny_model("L"), partial(torch.optim.AdamW, lr=1e-3))
result = strategy.train_step(model, optimizer, tiny_batches([5, 9]), max_grad_norm=1.0)
# One write, so that lines of two ranks do not mix.
line = f"{{device}} {{strategy.dp_rank}} {{strategy.dp_size}} {{round(result.loss, 4)}}"
print(line + chr(10), end="", flush=True)
"""


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    # Also where the tests run from a checkout that is not installed.
    "PYTHONPATH": str(Path(distft.__file__).parents[1]),
}


@pytest.mark.parametrize("name", ["ddp", "zero3", "hsdp"])
def test_without_a_launcher_the_same_script_runs_on_one_rank(name):
    env = {k: v for k, v in ENVIRONMENT.items() if k not in ("RANK", "WORLD_SIZE")}
    code = ALONE.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu", "0", "1", "4.8992"], done.stderr


def test_under_torchrun_the_same_script_joins_its_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ALONE.format(name="fsdp2"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:3] for line in lines] == [["cpu", "0", "2"], ["cpu", "1", "2"]]
    assert lines[0][3] == lines[1][3]


@pytest.mark.parametrize("seed", [-1, 1.5, True, None])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(ValueError, match="needs an integer of at least 0"):
        distft.init(seed=seed)


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(ValueError, match="more than 0 seconds"):
        distft.init(timeout=0)


def seeds_after_apply():
    from functools import partial

    distft.init(seed=7)
    before = torch.rand(1).item()
    distft.init(seed=7)
    distft.DDP().apply(distft.testing.tiny_model("L"), partial(torch.optim.SGD, lr=1.0))
    return before, torch.initial_seed()


def test_ranks_build_from_one_seed_and_train_from_their_own(pools):
    answers = pools(2).run(seeds_after_apply)
    assert answers[0][0] == answers[1][0]
    assert [seed for _, seed in answers] == [7, 8]


def different_models():
    from functools import partial

    distft.init()
    model = distft.testing.tiny_model("L", seed=dist.get_rank())
    wrapped, _ = distft.FSDP2().apply(model, partial(torch.optim.SGD, lr=1.0))
    return float(distft.FSDP2().gather_weights(wrapped)["lm_head.weight"].sum())


def test_values_of_rank_0_are_used_everywhere(pools):
    expected = float(distft.testing.tiny_model("L", seed=0).lm_head.weight.detach().sum())
    assert pools(2).run(different_models) == pytest.approx([expected, expected])


def raise_on_rank_1():
    try:
        raise_together(ValueError("a and b") if dist.get_rank() == 1 else None)
    except ValueError as error:
        return str(error)


def test_an_error_on_one_rank_is_raised_on_all(pools):
    assert pools(3).run(raise_on_rank_1) == ["a and b (on rank 1)"] * 3


def fail_in_a_block():
    try:
        with together():
            if dist.get_rank() == 0:
                raise OSError("disk full")
    except RuntimeError as error:
        return str(error)


def test_a_block_fails_on_all_ranks_or_none(pools):
    assert pools(2).run(fail_in_a_block) == ["OSError: disk full (on rank 0)"] * 2


def take_rank_0s_value():
    return from_rank0(f"rank {dist.get_rank()}")


def test_rank_0s_value_reaches_all(pools):
    assert pools(3).run(take_rank_0s_value) == ["rank 0"] * 3


def come_alone_then_together():
    if dist.get_rank() == 0:
        try:
            with patch.dict(os.environ, {RENDEZVOUS_TIMEOUT_VARIABLE: "5"}):
                rendezvous("a test")
        except RuntimeError as error:
            text = str(error)
    else:
        text = ""
    dist.barrier()
    rendezvous("a test")
    return text


def test_a_rank_alone_at_a_rendezvous_leaves_and_may_come_again(pools):
    first, second = pools(2).run(come_alone_then_together)
    assert "called on 1 of 2 ranks within 5 s" in first
    assert "Call a test on every rank" in first
    assert second == ""


def come_with_one_missing():
    if dist.get_rank() == 2:
        text = ""
    else:
        try:
            with patch.dict(os.environ, {RENDEZVOUS_TIMEOUT_VARIABLE: "10"}):
                rendezvous("a second test")
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    return text


def test_ranks_that_come_without_one_all_count_the_same(pools):
    first, second, _ = pools(3).run(come_with_one_missing)
    assert "called on 2 of 3 ranks" in first
    assert first == second
