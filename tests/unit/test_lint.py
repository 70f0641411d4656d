"""The lint for collectives that not every rank makes: what it finds, and what it lets pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distft.diagnose.lint import lint, lint_text

HEAD = """
import time
import torch
import torch.distributed as dist
import distft
from distft import FSDP2
from accelerate import Accelerator
accelerator = Accelerator()
strategy = FSDP2()
"""
LOOP = "for batch in loader:\n    result = strategy.train_step(model, optimizer, [batch])\n    "
TRUE = [
    ("if dist.get_rank() == 0:\n    dist.barrier()", "collective-by-rank"),
    ("main = dist.get_rank() == 0\nif main:\n    dist.all_reduce(x)", "collective-by-rank"),
    ("if rank != 0:\n    pass\nelse:\n    torch.distributed.barrier()", "collective-by-rank"),
    (
        "import os\nif int(os.environ['RANK']) == 0:\n    w = model.weight.full_tensor()",
        "save-by-rank",
    ),
    (
        "if accelerator.is_main_process:\n    strategy.save('run', model, optimizer, step=1)",
        "save-by-rank",
    ),
    ("if accelerator.is_main_process:\n    accelerator.save_state('run')", "save-by-rank"),
    (
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
        "if rank == 0:\n    state = get_model_state_dict(model)",
        "save-by-rank",
    ),
    (
        "def log(rank):\n    if rank != 0:\n        return\n    dist.all_reduce(x)",
        "collective-by-rank",
    ),
    (LOOP + "if loss.item() > 10:\n        break", "rank-leaves-loop"),
    (LOOP + "if torch.isnan(loss):\n        continue", "rank-leaves-loop"),
    (LOOP + "late = time.time() > end\n    if late:\n        break", "rank-leaves-loop"),
    (
        "for batch in loader:\n    loss = model(batch).loss\n    if not torch.isfinite(loss):\n"
        "        continue\n    loss.backward()\n    optimizer.step()",
        "rank-leaves-loop",
    ),
    (
        "for batch in loader:\n    try:\n        strategy.train_step(model, optimizer, batch)\n"
        "    except torch.OutOfMemoryError:\n        continue",
        "rank-swallows-error",
    ),
]
# Ways to write the same, beside those above.
TRUE += [
    (
        "class Run:\n    def __init__(self):\n        self.ours = FSDP2()\n    def end(self):\n"
        "        if rank == 0:\n            self.ours.save('run', model, optimizer, step=1)",
        "save-by-rank",
    ),
    ("ours: FSDP2 = FSDP2()\nif rank == 0:\n    ours.evaluate(m, d)", "collective-by-rank"),
    ("def end(strategy):\n    if rank == 0:\n        strategy.save('run', m, o)", "save-by-rank"),
    (
        "class Run:\n    def end(self):\n"
        "        if rank == 0:\n            self.trainer.save_model()",
        "save-by-rank",
    ),
    ("match dist.get_rank():\n    case 0:\n        dist.barrier()", "collective-by-rank"),
    (
        "match dist.get_rank():\n    case 1 | 2 as n:\n        dist.barrier()",
        "collective-by-rank",
    ),
    ("rank == 0 and dist.barrier()", "collective-by-rank"),
    ("if cfg.rank == 0:\n    dist.barrier()", "collective-by-rank"),
    (
        "r, w = dist.get_rank(), dist.get_world_size()\nif r == 0:\n    dist.barrier()",
        "collective-by-rank",
    ),
    ("def end(s: FSDP2):\n    if rank == 0:\n        s.save('run', m, o)", "save-by-rank"),
    ("rank or dist.barrier()", "collective-by-rank"),
    ("x = dist.barrier() if rank == 0 else None", "collective-by-rank"),
    (
        "async def run():\n    async with lock:\n        if rank == 0:\n            dist.barrier()",
        "collective-by-rank",
    ),
    (
        "async def run():\n    async for x in xs:\n"
        "        if rank == 0:\n            dist.barrier()",
        "collective-by-rank",
    ),
    ("rank = 0\nrank = dist.get_rank()\nif rank == 0:\n    dist.barrier()", "collective-by-rank"),
    (
        "try:\n    read()\nexcept* OSError:\n    if rank == 0:\n        dist.barrier()",
        "collective-by-rank",
    ),
]
FALSE = [
    "if dist.get_world_size() > 1:\n    dist.barrier()",
    "if dist.is_initialized():\n    dist.barrier()",
    "if rank == 0:\n    print(loss)\ndist.barrier()",
    # The others wait while the first one reads: both make one barrier.
    "if rank != 0:\n    dist.barrier()\nread()\nif rank == 0:\n    dist.barrier()",
    "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)",
    "if rank in tp_ranks:\n    dist.all_reduce(x)",
    "if rank < 4:\n    dist.all_reduce(x, group=first)",
    "if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)",
    "if accelerator.is_main_process:\n    model.save_pretrained('out')",
    "if rank == 0:\n    raise SystemExit\ndist.barrier()",
    LOOP + "if result.loss > 10:\n        break",
    LOOP
    + "flag = torch.isnan(loss)\n    dist.all_reduce(flag)\n    if flag.item():\n        break",
    LOOP + "if step == 100:\n        break",
    "for row in rows:\n    if random.random() < 0.5:\n        continue\n    print(row)",
    "if rank == 0:\n    dist.barrier()  # distft: ignore",
    "def reduce(rank):\n    if rank == 0:\n        functools.reduce(add, x)",
    # A rank that raises ends the run.
    LOOP + "if not torch.isfinite(loss):\n        raise RuntimeError('not finite')",
    # The rank of a matrix.
    "if lora_config.rank > 8:\n    dist.barrier()",
    "if config.rank > 8:\n    dist.barrier()",
    "r, w = dist.get_rank(), dist.get_world_size()\nif w > 1:\n    dist.barrier()",
    "rank = 16\nif rank > 8:\n    dist.barrier()",
    "x = dist.barrier() if rank == 0 else dist.barrier()",
    "if step and dist.barrier():\n    pass",
    "match step:\n    case 0:\n        dist.barrier()",
    "def log(strategy):\n    if rank == 0:\n        print(strategy.name)",
]


@pytest.mark.parametrize(("text", "rule"), TRUE)
def test_a_collective_that_ranks_may_make_alone_is_found(text, rule):
    found = lint_text(HEAD + text)
    assert [finding.rule for finding in found] == [rule]


@pytest.mark.parametrize("text", FALSE)
def test_what_every_rank_does_is_let_pass(text):
    assert lint_text(HEAD + text) == []


def test_a_script_of_one_process_is_not_looked_at():
    assert lint_text("if rank == 0:\n    barrier()\n    x.full_tensor()") == []


def test_the_librarys_own_code_and_examples_are_clean():
    root = Path(__file__).parents[2]
    assert lint([root / "distft", root / "examples"]) == []


def test_the_command_prints_line_and_way_out_and_exits_with_1(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HEAD + TRUE[4][0])
    done = subprocess.run(
        [sys.executable, "-m", "distft", "doctor", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"{script}:11: save-by-rank: `strategy.save`" in done.stdout
    assert "Call it on every rank" in done.stdout


def test_text_that_is_no_python_is_refused_with_its_line():
    with pytest.raises(ValueError, match="in line 2"):
        lint_text("x = 1\nif:")
