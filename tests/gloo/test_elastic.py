"""Jobs that torchrun restarts on fewer ranks go on by themselves; a launcher's SIGTERM saves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import distft
from distft import FSDP2
from tests.gloo.rest_jobs import rows_of_steps

SCRIPT = Path(__file__).parent / "launched_run.py"
CHANGES = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 8,
    "save_steps": 2,
}
SECONDS = 300.0
# torch 2.13 keeps one store for all rounds of a rendezvous, in which new ranks find the addresses
# of dead ones.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def listens(port):
    with socket.socket() as asking:
        return asking.connect_ex(("localhost", port)) == 0


def wait_until(true, what):
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        time.sleep(0.1)


@pytest.fixture
def agents(tmp_path):
    """Return what starts an agent of one rank; none outlives the test, nor does its rank."""
    port, running = free_port(), []

    def start(**environment):
        # An agent that is gone is missed within 5 s.
        times = (
            "last_call_timeout=15,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=5"
        )
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3",
            "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job",
            "--rdzv-endpoint", f"localhost:{port}",
            "--rdzv-conf", times, "--max-restarts", "3", str(SCRIPT), str(tmp_path / "run"),
            "--strategy", "fsdp2", "--changes", json.dumps({**CHANGES, "save_strategy": "steps"}),
            "--pause-at", "3",
        ]  # fmt: skip
        log = (tmp_path / f"agent-{len(running)}.log").open("w")
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        running.append(process)
        return process

    yield port, start
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.slow
def test_two_of_three_agents_go_on_with_the_exact_rest(pools, tmp_path, agents):
    port, start = agents
    (tmp_path / "run").mkdir()
    # The first one has the store, through which the others find each other.
    first = start()
    wait_until(lambda: listens(port), "the first agent")
    second, third = start(), start(PAUSES="600")
    wait_until((tmp_path / "run" / "waits").is_file, "step 4 on three ranks")
    rank = int((tmp_path / "run" / "waits").read_text())
    third.kill()
    os.kill(rank, signal.SIGKILL)
    assert [agent.wait(SECONDS) for agent in (first, second)] == [0, 0]
    assert not list((tmp_path / "run").glob("log-*-of-3.json"))
    found = json.loads((tmp_path / "run" / "log-1-of-2.json").read_text())["log"]

    # By hand: what three ranks saved, for two.
    by_hand = tmp_path / "by-hand" / "checkpoint-2"
    distft.reshard(tmp_path / "run" / "checkpoint-2", by_hand, FSDP2(), world_size=2)
    expected = pools(2).run(rows_of_steps, tmp_path / "other", FSDP2(), CHANGES, by_hand)[0]["log"]
    keys = ("loss", "grad_norm", "learning_rate", "num_tokens", "epoch")
    ours, theirs = (
        [{k: entry[k] for k in keys} for entry in log if "loss" in entry]
        for log in (found, expected)
    )
    assert len(ours) == 8
    assert ours[2:] == [pytest.approx(entry, rel=1e-6) for entry in theirs[2:]]
    # 12 of 22 rows by three ranks; then 4, 4 and 2, and three steps of the next epoch.
    assert [entry["epoch"] for entry in ours[3:6]] == pytest.approx([20 / 22, 1, 1 + 4 / 24])


@pytest.mark.slow
def test_a_launcher_that_is_told_to_end_has_its_ranks_save_first(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    changes = {**CHANGES, "save_strategy": "no", "enable_jit_checkpoint": True}
    command = [
        sys.executable, "-m", "distft.launch", "--nproc", "2", str(SCRIPT), str(run),
        "--strategy", "ddp", "--changes", json.dumps(changes), "--pause-at", "3",
    ]  # fmt: skip
    root = str(SCRIPT.parents[2])
    environment = {**os.environ, **ENVIRONMENT, "PAUSES": "5", "PYTHONPATH": root}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until((run / "waits").is_file, "step 4 on two ranks")
        process.terminate()
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        process.kill()
    # The step at hand was made, and nothing after it.
    assert distft.latest(run).name == "checkpoint-4"
