"""A kill and a full disk in every call that changes a file: the last good checkpoint is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Cases apart in a quick run, of some hundred calls; all of them in a slow one.
QUICK = [("fsdp2", 13, 0), ("zero3", 29, 0), ("conversions", 400, 0)]
WHOLE = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "fsdp2-async", "zero3-async"]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The library that makes calls fail; it needs a C compiler, as DeepSpeed does."""
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", built, HERE / "shim.c", "-ldl"]
    subprocess.run(command, check=True)
    return built


@pytest.mark.parametrize(
    ("what", "stride", "first"),
    [
        *QUICK,
        *(
            pytest.param(what, 3, first, marks=pytest.mark.slow)
            for what in WHOLE
            for first in range(3)
        ),
        pytest.param("conversions", 25, 7, marks=pytest.mark.slow),
    ],
)
def test_no_death_and_no_full_disk_loses_a_checkpoint_or_leaves_half_of_one(
    shim, what, stride, first
):
    # Case CONS-22
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.faults.sweep", what, str(stride), str(first)],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cases = int(ran.stdout.split()[-1])
    print(f"{what}: {cases} cases\n{ran.stdout}")
    assert cases > 5
