"""`python -m distft.launch`: ranks of one machine, one message, no rank left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distft.launch import main

pytest.importorskip("torch")
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, out = os.environ["RANK"], Path(sys.argv[1])
text = f"{os.getpid()} {os.environ['OMP_NUM_THREADS']} {sys.argv[2:]}"
(out / f"new-{rank}").write_text(text)
(out / f"new-{rank}").rename(out / f"rank-{rank}")
if sys.argv[2] == "raises" and rank == "1":
    raise ValueError("only here")
if sys.argv[2] == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] != "ends":
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Return what starts the script on two ranks; nothing of it outlives the test."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    running = []

    def of(*arguments):
        command = [sys.executable, "-m", "distft.launch", "--nproc", "2", str(script)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        environment.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            [*command, str(tmp_path), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield of
    for process in running:
        process.kill()
        process.communicate()


def ranks(folder):
    files = [folder / f"rank-{rank}" for rank in range(2)]
    return [int(file.read_text().split()[0]) for file in files if file.is_file()]


def gone(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_ranks_get_their_arguments_and_their_share_of_the_cores(start, tmp_path):
    process = start("ends", "--a", "b")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert f" {share} ['ends', '--a', 'b']" in (tmp_path / f"rank-{rank}").read_text()


def test_one_message_says_which_rank_failed_and_how(start, tmp_path):
    process = start("raises")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.count("ValueError: only here") == 1
    assert errors.rstrip().splitlines()[-1].startswith("distft.launch: rank 1 of 2 (process ")
    assert "with exit code 1; the others were ended." in errors
    assert gone(ranks(tmp_path))


def test_a_killed_rank_ends_the_run_with_the_code_of_its_signal(start):
    process = start("killed")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL
    assert "with signal SIGKILL" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=str)
def test_no_rank_outlives_the_launcher(start, tmp_path, number):
    process = start("sleeps")
    deadline = time.monotonic() + 60
    while len(ranks(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert len(ranks(tmp_path)) == 2
    assert gone(ranks(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--nproc", "0", "x.py"], "starts no rank"), (["--nproc", "2", "no.py"], "there is no file")],
)
def test_what_cannot_run_is_said_at_once(capsys, arguments, said):
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err
