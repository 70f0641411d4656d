"""Optimizer state on a disk (ZeRO-Infinity): the same training, checkpoints that go both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD, Adagrad, AdamW, RMSprop

import distft
from distft import FSDP2, ModelSpec, Workload, ZeRO3
from distft.measure import model_state_bytes
from distft.testing import WorkerPool, tiny_batches, tiny_model
from distft.testing.checks import check_memory, check_save_and_load, check_traffic
from distft.testing.runs import LOSS_TOKENS, Training, differences, train_alone, train_under
from distft.training.loss import count_next_tokens, next_token_loss
from distft.training.optimizers import num_moments

# A rank of two has 578,000 elements: all on the disk as one, all as two; 341,000 there and the
# rest, below 1 MiB, in memory.
ALL, TWO, ONE_OF_TWO = 1_000_000_000, 280_000, 330_000

ADAMW = partial(AdamW, lr=1e-3)
LOAD = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"


@pytest.fixture(scope="module")
def ranks():
    """Return two ranks that have the op, compiled once before them where it is not yet."""
    from torch.utils.cpp_extension import get_default_build_root

    deepspeed = pytest.importorskip("deepspeed", reason="needs distft[deepspeed]")
    from distft.strategies.ops import has_op

    if not has_op(deepspeed.accelerator.get_accelerator(), "AsyncIOBuilder"):
        pytest.skip(
            "DeepSpeed's async_io op does not build: libaio and its headers are not there, as on "
            "the machines of CI; install libaio-dev to run this (compiled once, for minutes)"
        )
    built = os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root())
    env = {"TORCH_EXTENSIONS_DIR": built}
    subprocess.run([sys.executable, "-c", LOAD], env={**os.environ, **env}, check=True)
    with WorkerPool(2, timeout=600.0, env=env) as pool:
        yield pool


def on_disk(path, size=ALL, **fields):
    return ZeRO3(offload=f"nvme:{path}", sub_group_size=size, **fields)


def refused(strategy):
    """Apply a strategy where no C compiler works; return the error."""
    distft.init()
    before = os.environ.get("CC")
    os.environ["CC"] = "false"
    try:
        strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    except RuntimeError as error:
        return str(error)
    finally:
        os.environ.pop("CC") if before is None else os.environ.update(CC=before)
    return None


def test_where_the_op_does_not_build_every_rank_names_libaio_and_the_way_out(pools, tmp_path):
    for text in pools(2).run(refused, on_disk(tmp_path)):
        assert "needs DeepSpeed's async_io op" in text
        assert "libaio" in text
        assert text.endswith("or use offload='params'.")


@pytest.mark.parametrize("size", [ALL, TWO, ONE_OF_TWO])
def test_training_with_state_on_a_disk_equals_one_process(ranks, tmp_path, size):
    training = Training("W", 3, 6, max_norm=0.1)
    expected = train_alone(training)
    for rank, found in enumerate(ranks.run(train_under, on_disk(tmp_path, size), training)):
        assert differences(found, expected) == [], f"rank {rank}"


@pytest.mark.parametrize("check", [check_save_and_load, check_memory, check_traffic])
@pytest.mark.parametrize("size", [ALL, ONE_OF_TWO])
def test_a_disk_keeps_the_promises(ranks, tmp_path, size, check):
    check(on_disk(tmp_path, size), ranks, "W")


def train(strategy, steps, path=None, load=False, save=None, make=ADAMW):
    distft.init(seed=0)
    model, optimizer = strategy.apply(tiny_model("W"), make)
    if load:
        strategy.load(path, model, optimizer)
    losses, norms = [], []
    for step in steps:
        rows = tiny_batches(LOSS_TOKENS[: 2 * strategy.dp_size], seed=step)
        mine = rows[strategy.dp_rank :: strategy.dp_size]
        result = strategy.train_step(model, optimizer, mine, max_grad_norm=0.1)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if save == step:
            strategy.save(path, model, optimizer, step=step)
    return losses, norms, strategy.gather_weights(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_disk_trains_to_the_bit_as_the_host(ranks, tmp_path, precision):
    host = ranks.run(train, ZeRO3(offload="params", precision=precision), range(3))
    disk = ranks.run(train, on_disk(tmp_path, precision=precision), range(3))
    assert disk[0][:2] == host[0][:2]
    for name, weight in host[0][2].items():
        assert torch.equal(disk[0][2][name], weight), name


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (partial(AdamW, lr=1e-3, amsgrad=True), 3),
        (partial(RMSprop, lr=1e-3, centered=True, momentum=0.9), 3),
        (partial(SGD, lr=0.1), 0),
    ],
    ids=["amsgrad", "rmsprop", "sgd"],
)
def test_every_moment_of_an_optimizer_finds_room(ranks, tmp_path, make, moments):
    host = ranks.run(
        train, ZeRO3(offload="params", sub_group_size=TWO), range(3), None, False, None, make
    )
    disk = ranks.run(train, on_disk(tmp_path, TWO), range(3), None, False, None, make)
    assert disk[0][:2] == host[0][:2]
    assert num_moments(make, [{"params": ["w"]}]) == moments


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("disk", ZeRO3()),
        ("disk", FSDP2()),
        (ZeRO3(offload="params"), "disk"),
        (FSDP2(), "disk"),
    ],
    ids=str,
)
def test_a_checkpoint_goes_from_a_disk_and_to_it(ranks, tmp_path, first, then):
    first, then = (on_disk(tmp_path, TWO) if each == "disk" else each for each in (first, then))
    whole = ranks.run(train, first, range(1, 4), tmp_path / "c", False, 2)
    resumed = ranks.run(train, then, range(3, 4), tmp_path / "c", True)
    assert resumed[0][0] == pytest.approx(whole[0][0][2:], rel=1e-6)
    for name, weight in whole[0][2].items():
        torch.testing.assert_close(resumed[0][2][name], weight, rtol=0, atol=1e-5)


def test_a_checkpoint_from_a_disk_is_proven_and_consolidates(ranks, tmp_path):
    found = ranks.run(train, on_disk(tmp_path, ONE_OF_TWO), range(2), tmp_path / "c", False, 1)
    assert distft.verify(tmp_path / "c").verdict == "proven"
    distft.consolidate(tmp_path / "c", tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in found[0][2].items():
        assert torch.equal(saved[name], weight), name


def two_models(path):
    """Return what two models of one folder do, their files, and what a step moves."""
    distft.init(seed=0)
    strategy = on_disk(path, TWO)
    rows = tiny_batches(LOSS_TOKENS[:2])[strategy.dp_rank :: 2]
    pairs = [strategy.apply(tiny_model("W"), partial(AdamW, lr=1e-3)) for _ in range(2)]
    losses = [[strategy.train_step(*pair, rows).loss for pair in pairs] for _ in range(3)]
    sizes = sorted(file.stat().st_size for file in path.rglob(f"rank{strategy.dp_rank}/*.swp"))
    before = io_bytes()
    strategy.train_step(*pairs[0], rows)
    moved = [after - then for after, then in zip(io_bytes(), before, strict=True)]
    held = model_state_bytes(*pairs[0]).on_disk
    with pytest.raises(RuntimeError, match="state is on a disk"):
        pairs[0][1].state_dict()
    return losses, sizes, moved, held


def io_bytes():
    """Return the bytes that this process has read from disks, and written."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def test_files_are_a_models_own_and_a_step_moves_what_traffic_says(ranks, tmp_path):
    found = ranks.run(two_models, tmp_path)
    spec = ModelSpec.from_model(tiny_model("W"))
    strategy = on_disk(tmp_path, TWO)
    traffic = strategy.traffic(spec, Workload(seq_len=16), world_size=2)
    memory = strategy.memory(spec, Workload(seq_len=16), world_size=2)
    for losses, sizes, moved, held in found:
        assert all(a == b for a, b in losses)
        # Two models, two sub-groups, master weights and two moments.
        assert len(sizes) == 12
        assert sum(sizes) == 2 * traffic.disk_bytes_per_step
        assert moved == [traffic.disk_bytes_per_step] * 2
        assert held == memory.disk_bytes
    assert "moments, own part (disk)" in str(memory)
    assert "on the disk: " in str(memory)
    assert f"{traffic.disk_bytes_per_step:,} bytes read from its disk, and written" in str(traffic)


SCRIPT = """
import sys
from pathlib import Path
from functools import partial
import torch, distft
from distft.testing import tiny_batches, tiny_model
distft.init()
strategy = distft.ZeRO3(offload=f"nvme:{sys.argv[1]}")
pair = strategy.apply(tiny_model("W"), partial(torch.optim.AdamW, lr=1e-3))
strategy.train_step(*pair, tiny_batches([3]))
print(len(list(Path(sys.argv[1]).rglob("*.swp"))), "files")
"""


def test_files_are_gone_when_the_process_ends(ranks, tmp_path):
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, **ranks.env, "DS_ACCELERATOR": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "3 files" in made.stdout
    assert list(tmp_path.iterdir()) == []


def train_loaded(folder, path):
    distft.init(seed=0)
    strategy = on_disk(path, TWO)
    model = distft.load_model(folder, strategy)
    model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3))
    rows = tiny_batches(LOSS_TOKENS[:2])[strategy.dp_rank :: 2]
    return [strategy.train_step(model, optimizer, rows).loss for _ in range(2)]


def test_a_model_that_load_model_read_trains_on_a_disk(ranks, tmp_path):
    model = tiny_model("W")
    model.save_pretrained(tmp_path / "m")
    rows = tiny_batches(LOSS_TOKENS[:2])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum(next_token_loss(model, row) for row in rows) / sum(map(count_next_tokens, rows))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert ranks.run(train_loaded, tmp_path / "m", tmp_path)[0] == pytest.approx(expected, rel=1e-6)


def test_what_is_too_small_for_the_disk_stays_in_memory(ranks, tmp_path):
    training = Training("Lt", 3, 6, max_norm=0.1)
    expected = train_alone(training)
    for found in ranks.run(train_under, on_disk(tmp_path), training):
        assert differences(found, expected) == []
    report = on_disk(tmp_path).memory(
        ModelSpec.from_model(tiny_model("Lt")), Workload(seq_len=16), world_size=2
    )
    assert report.disk_bytes == 0


def refusals(path):
    distft.init()
    found = []
    for place, make in ((path / "gone", AdamW), (path, Adagrad)):
        try:
            on_disk(place).apply(tiny_model("L"), partial(make, lr=1e-3))
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_folder_that_is_not_there_and_adagrad_are_refused(ranks, tmp_path):
    for folder, adagrad in ranks.run(refusals, tmp_path):
        assert "gone, and there is no such folder" in folder
        assert "Adagrad makes its 1 moment when it is built" in adagrad
