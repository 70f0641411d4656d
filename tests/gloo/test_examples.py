"""The examples run as they stand, under the launcher that their first lines show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

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


def alone(example: str, folder: Path, *options: str) -> str:
    """Run an example in one process and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
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

    # 6 of 22 rows in 3 steps of 2; then 16 rows in 4 steps of 4.
    elsewhere = ("--checkpoints", str(run), "--strategy", "ddp", "--batch", "2")
    printed = launch("resume_elsewhere.py", tmp_path, *common, *elsewhere)
    assert "checkpoint-3: distft" in printed
    assert distft.latest(tmp_path / "runs" / "elsewhere").name == "checkpoint-7"

    for options in (
        ["merged", "--adapter", "merge"],
        ["on-3", "--to", "fsdp2"],
        ["dcp", "--to", "dcp"],
    ):
        alone("convert.py", tmp_path, str(run / "checkpoint-3"), *options)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert distft.latest(tmp_path) == tmp_path / "on-3"


def test_moe_lora_trains_and_writes_an_adapter_for_each_expert(tmp_path):
    model = tmp_path / "model"
    tiny_model("M").save_pretrained(model)
    tokenizer().save_pretrained(model)
    rows().save_to_disk(str(tmp_path / "data"))
    common = ("--model", str(model), "--dataset", str(tmp_path / "data"), "--steps", "3")
    launch("moe_lora.py", tmp_path, *common, "--rank", "12", "--train-router")
    run = tmp_path / "runs" / "moe_lora"
    tensors = load_file(run / "per-expert" / "adapter_model.safetensors")
    a = tensors["base_model.model.model.layers.1.mlp.experts.5.up_proj.lora_A.weight"]
    assert tuple(a.shape) == (2, 32)
    assert "<svg" in (run / "run.html").read_text()
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_qlora_quantizes_as_it_reads_trains_goes_on_and_publishes_an_adapter(tmp_path):
    model = tmp_path / "model"
    tiny_model("L").save_pretrained(model)
    tokenizer().save_pretrained(model)
    rows().save_to_disk(str(tmp_path / "data"))
    common = ("--model", str(model), "--dataset", str(tmp_path / "data"), "--rank", "2")
    launch("qlora.py", tmp_path, *common, "--steps", "2")
    launch("qlora.py", tmp_path, *common, "--steps", "3", "--resume")
    run = tmp_path / "runs" / "qlora"
    assert distft.latest(run) == run / "checkpoint-3"
    assert (run / "model" / "adapter_model.safetensors").is_file()
