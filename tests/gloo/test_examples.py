"""The examples run as they stand, under the launcher that their first lines show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distft
from distft.testing import tiny_model
from tests.gloo.trainer_jobs import rows, tokenizer

ROOT = Path(__file__).parents[2]


def launch(example: str, folder: Path, *options: str) -> str:
    """Run an example on two ranks and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    paths = [str(ROOT / "examples" / example), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, *paths], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_sft_trains_goes_on_and_publishes_an_adapter(tmp_path):
    model = tmp_path / "model"
    tiny_model("L").save_pretrained(model)
    tokenizer().save_pretrained(model)
    rows().save_to_disk(str(tmp_path / "data"))
    common = ("--model", str(model), "--dataset", str(tmp_path / "data"), "--lora-rank", "2")
    launch("sft.py", tmp_path, *common, "--strategy", "zero3", "--steps", "2")
    launch("sft.py", tmp_path, *common, "--strategy", "fsdp2", "--steps", "3", "--resume")
    run = tmp_path / "runs" / "sft"
    assert distft.latest(run) == run / "checkpoint-3"
    assert (run / "model" / "adapter_model.safetensors").is_file()
