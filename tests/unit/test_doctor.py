"""The doctor's page, and torch's flight recorder."""

from __future__ import annotations

import getpass
import json
import os
import pickle
import socket
from pathlib import Path

import pytest

from distft.diagnose import findings, machine
from distft.diagnose.doctor import doctor
from distft.diagnose.flight import compare, last_collectives, read_dumps

ENTRY = {
    "collective_seq_id": 7,
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[3, 4]],
    "is_p2p": False,
    "state": "started",
    "time_created_ns": 5,
}
DUMP = {"entries": [ENTRY], "pg_status": {"0": {"last_completed_collective": "6"}}}


def test_the_page_names_versions_and_nobody(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_COMM_ID", "10.1.2.3:5000")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/home/somebody/nccl.log")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace"))
    page = str(doctor(tmp_path))
    assert "torch 2." in page
    assert "NCCL_SOCKET_IFNAME=eth0" in page
    assert "NCCL_COMM_ID=(set)" in page
    for private in (socket.gethostname(), str(Path.home()), str(tmp_path), "10.1.2.3", "somebody"):
        assert private not in page
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in page
    assert "GB free" in page
    assert len(page.splitlines()) < 60


def test_variables_and_limits_that_slow_or_stop_a_run_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(findings, "shared_memory", lambda: (2**25, 2**26))
    monkeypatch.setattr(findings, "limits", lambda: {"open files": 256})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (1, 1))
    said = " ".join(text for text, _ in findings.findings())
    assert "NCCL_P2P_DISABLE=1: GPUs talk through the host" in said
    assert "/dev/shm has 64 MiB" in said
    assert "256 files" in said
    assert "deepspeed_shm_comm has been locked" in said
    assert str(tmp_path) not in said


def test_a_save_that_takes_longer_than_the_timeout_allows_is_found(monkeypatch, tmp_path):
    import torch

    from distft.diagnose import doctor as page

    monkeypatch.setattr(machine, "write_rate", lambda folder: 1000.0)
    monkeypatch.setattr("distft.process_group.group_timeout", lambda: 60.0)
    model = torch.nn.Linear(100, 100)
    found = page.doctor(tmp_path, model)
    assert "about 40 s; the time-out is 60 s" in found.save
    assert any("collectives end after 60 s" in what for what, _ in found.findings)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 folders"):
        doctor(tmp_path / "none")


def test_dumps_of_the_flight_recorder_say_which_rank_is_behind(tmp_path):
    behind = {
        "entries": [{**ENTRY, "collective_seq_id": 6, "profiling_name": "nccl:broadcast"}],
        "pg_status": DUMP["pg_status"],
    }
    for rank, dump in enumerate((DUMP, behind, DUMP)):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump))
    (tmp_path / "trace_3").write_text(json.dumps(DUMP))
    text = compare(read_dumps(tmp_path / "trace_"))
    assert text.splitlines() == [
        "ranks 0, 2-3: all_reduce 7 of default_pg, 3x4 elements, not done",
        "rank 1: broadcast 6 of default_pg, 3x4 elements, done",
    ]


def test_a_dump_that_asks_for_code_is_refused(tmp_path):
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [os.system]}))
    with pytest.raises(ValueError, match="asks for"):
        read_dumps(tmp_path / "trace_")


def test_torchs_own_recorder_still_has_the_fields_that_are_read():
    from torch._C import _distributed_c10d

    assert last_collectives(json.loads(_distributed_c10d._dump_fr_trace_json() or b"{}")) == []
