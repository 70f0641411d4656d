"""When memory runs out the error says where, what was predicted and held, and what would fit."""

from __future__ import annotations

import os
import re
import resource
from functools import partial

import pytest
import torch
from torch.optim import AdamW

import distft
from distft import DDP, FSDP2, OutOfMemory, ZeRO1, ZeRO3
from distft.checkpoint.safetensors_reader import SINGLE, Reader
from distft.measure import model_state_bytes
from distft.testing import WorkerPool, tiny_batches, tiny_model

GIB = 2**30
CUDA_TEXT = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB"


def runs_out(model, batch):
    raise torch.OutOfMemoryError(CUDA_TEXT)


def job_step(strategy, ranks_that_fail, size=None):
    """Return the message of a step that ran out, and the state's bytes that were there."""
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    strategy.train_step(model, optimizer, tiny_batches([5, 9]))
    held = model_state_bytes(model, optimizer)
    rank = torch.distributed.get_rank()
    loss_fn = runs_out if rank in ranks_that_fail else None
    try:
        strategy.train_step(model, optimizer, tiny_batches([5, 9]), loss_fn=loss_fn)
    except torch.OutOfMemoryError as error:
        return type(error), error.phase, error.asked_bytes, str(error), held
    return None


def bytes_of(kind, text):
    """Return predicted and measured bytes of a line of the table."""
    found = re.search(rf"^{kind} +([\d,]+) +([\d,]+)$", text, re.MULTILINE)
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO3(), FSDP2()], ids=str)
def test_a_step_says_where_what_was_predicted_and_held_and_what_fits(pools, strategy):
    for rank, answer in enumerate(pools(2).run(job_step, strategy, {0, 1})):
        kind, phase, asked, text, held = answer
        assert (kind, phase, asked) == (OutOfMemory, "train_step", GIB)
        assert text.startswith(f"Rank {rank} ran out of memory in train_step (")
        assert f"under {strategy!r}: {CUDA_TEXT}" in text
        assert bytes_of("parameters", text) == [held.parameters, held.parameters]
        assert bytes_of("optimizer", text) == [held.optimizer, held.optimizer]
        assert "activation_checkpointing=True: less for activations" in text
        assert "1 row at a time" in text
        # The test raises what a GPU of 2 GiB would, and the host here has more than 1 GiB.
        assert "More is free by now than was wanted" in text
        assert "predicted to fit" not in text
        assert "start it again from the last checkpoint" in text


def job_evaluations(strategy):
    distft.init()
    model, _ = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError(CUDA_TEXT)

    calls = {
        "eval_step": lambda: strategy.eval_step(model, tiny_batches([5]), loss_fn=runs_out),
        "evaluate": lambda: strategy.evaluate(model, rows, loss_fn=runs_out),
        "generate": lambda: strategy.generate(model, input_ids=torch.ones(4, 3, dtype=torch.long)),
    }
    distft.unwrap(model).generate = fails
    answers = {}
    for call, make in calls.items():
        try:
            make()
        except torch.OutOfMemoryError as error:
            answers[call] = (error.phase, str(error))
    return answers


def test_evaluation_and_generation_are_named_and_offered_no_change_of_training(pools):
    for answers in pools(2).run(job_evaluations, FSDP2()):
        assert set(answers) == {"eval_step", "evaluate", "generate"}
        for call, (phase, text) in answers.items():
            assert phase == call
            assert f"ran out of memory in {call} (forward)" in text
            assert "activation_checkpointing=True" not in text
            assert "Still to come" not in text
        assert "2 rows at a time in place of 4" in answers["generate"][1]


def job_one_rank_saves(strategy, path):
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    cls = type(strategy)
    original, rank = cls._capture_state, torch.distributed.get_rank()

    def fails(*args):
        if rank == 1:
            torch.empty(10**15)
        return original(*args)

    cls._capture_state = fails
    try:
        strategy.save(path, model, optimizer, step=1)
    except torch.OutOfMemoryError as error:
        return error.phase, error.asked_bytes, str(error)
    finally:
        cls._capture_state = original
    return None


def test_a_save_in_which_one_rank_runs_out_says_so_on_every_rank(pools, tmp_path):
    answers = pools(2).run(job_one_rank_saves, DDP(), tmp_path / "run")
    for phase, asked, text in answers:
        assert (phase, asked) == ("save", 4 * 10**15)
        assert "ran out of memory in save (save)" in text
        assert "the host has" in text


LARGE = {"hidden_size": 1024, "intermediate_size": 4096}
# Two layers of 4 projections (two of them to 2 of 4 heads), an MLP and two norms, then the last
# norm and two embeddings; 4 bytes for each number.
LARGE_BYTES = 4 * (
    2 * (1024 * (2 * 1024 + 2 * 512) + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 2 * 131 * 1024
)


# MiB that a call may have beside what is there: less than the 61 that bf16 weights grow by as they
# become fp32, and than the 121 of all weights.
ROOM = {"apply": 48, "load_model": 90}


def job_limited(call, folder):
    """Run a call in which the weights do not fit in what this process may have."""
    distft.init()
    # The weights are in bf16 first and become fp32 one after another.
    model = tiny_model("L", **LARGE).bfloat16() if call == "apply" else tiny_model("L")
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + (ROOM[call] << 20), hard))
    try:
        if call == "apply":
            DDP().apply(model, partial(AdamW, lr=1e-3))
        else:
            distft.load_model(folder, DDP())
    except OutOfMemory as error:
        return error.phase, error.asked_bytes, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return None


@pytest.mark.parametrize("call", ["apply", "load_model"])
def test_where_the_allocator_of_the_host_really_fails_the_parts_are_counted(tmp_path, call):
    if call == "load_model":
        tiny_model("L", **LARGE).save_pretrained(tmp_path)
    # The limit is a process's, so it gets one of its own.
    with WorkerPool(1, timeout=300) as own:
        [(phase, asked, text)] = own.run(job_limited, call, tmp_path)
    assert phase == call
    assert f"you tried to allocate {asked} bytes" in text
    assert f"ran out of memory in {call} (load) under DDP()" in text
    predicted, measured = bytes_of("parameters", text)
    assert predicted == LARGE_BYTES
    assert 0 < measured < predicted
    assert f"Still to come by the prediction: {predicted - measured:,} bytes of parameters" in text
    assert 'predicted to fit: precision="bf16"' in text


def job_cut(strategy, folder, at):
    """Load a folder whose file rank 0 finds cut at the ``at``-th read."""
    distft.init()
    reads, original = [], Reader._read

    def read(self, path, offset, part):
        reads.append(offset)
        if len(reads) == at:
            os.truncate(path, offset)
        return original(self, path, offset, part)

    Reader._read = read
    try:
        distft.load_model(folder, strategy)
    except RuntimeError as error:
        return str(error)
    finally:
        Reader._read = original
    return None


def test_a_file_cut_while_zero3_reads_it_is_the_same_error_on_every_rank(pools, tmp_path):
    tiny_model("L").save_pretrained(tmp_path)
    answers = pools(2).run(job_cut, ZeRO3(), tmp_path, 5, timeout=300)
    assert f"{tmp_path / SINGLE} ended at byte" in answers[0]
    assert answers[0].removesuffix(" (on rank 0)") == answers[1].removesuffix(" (on rank 0)")
