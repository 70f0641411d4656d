"""`accelerate launch` with the files that distft writes runs distft.Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distft.interop import Recipe, write
from distft.testing import tiny_model
from tests.gloo.test_trainer import logged
from tests.gloo.trainer_jobs import train

SCRIPT = Path(__file__).parent / "launched_run.py"
CHANGES = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        # The model is read after the arguments, when Accelerate has only rank 0 read weights.
        (Recipe("fsdp2", {}, 2), ["--from-pretrained"], "FSDP2()"),
        pytest.param(Recipe("zero3", {}, 2), [], "ZeRO3()", marks=pytest.mark.slow),
    ],
    ids=["fsdp", "deepspeed"],
)
def test_a_run_under_accelerate_launch_is_the_run_of_its_strategy(
    pools, tmp_path, recipe, options, expected
):
    tiny_model("L").save_pretrained(tmp_path / "model")
    config = write(recipe, tmp_path / "accelerate.yaml")
    changes = json.dumps({**CHANGES, "activation_checkpointing": False})
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
        "--main_process_port", "0", str(SCRIPT), str(tmp_path), "--changes", changes, *options,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "log-1-of-2.json").read_text())
    assert found["strategy"] == expected
    by_name = pools(2).run(train, tmp_path / "by-name", recipe.name, "L", CHANGES)[0]
    assert logged(found["log"]) == [pytest.approx(line, rel=1e-6) for line in logged(by_name)]
