"""The command and the fixture of parity, in a repository of somebody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from distft.commands import main

PLUGIN = "distft.testing.pytest_plugin"
ROOT = Path(__file__).parents[2]
TESTS = """
from distft import DDP, EP, FSDP2
from distft.testing import tiny_model


def build_model():
    return tiny_model("L")


class Averages(DDP):
    def _backward(self, loss):
        super()._backward(loss / self.dp_size)


def test_my_model_trains_alike(distft_parity):
    certificate = distft_parity(build_model, [DDP(), FSDP2()])
    assert certificate.model == "LlamaForCausalLM"


def test_a_fault(distft_parity):
    distft_parity(build_model, [Averages()])


def test_nothing_applies(distft_parity):
    distft_parity(build_model, [EP()])
"""


def test_the_fixture_passes_and_fails_with_what_differs(tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", "-rf"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "2 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "gradient of model.embed_tokens.weight at step 0 is" in run.stdout
    assert "EP(): not applicable" in run.stdout


def test_the_command_prints_one_json_object_and_its_exit_code_is_the_verdict(tmp_path, capfd):
    page = tmp_path / "parity.md"
    given = ["parity", "tests.gloo.parity_models:dense", "--world-size", "2", "--json"]
    lora = ["--tuning", "lora", "--lora-rank", "2", "--markdown", str(page)]
    assert main([*given, *lora, "--strategies", "ddp", "fsdp2"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [result["status"] for result in found["results"]] == ["passed", "passed"]
    assert page.read_text().startswith("# Parity of LlamaForCausalLM: passed")
    assert main([*given, "--strategies", "ep"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert "has no experts" in found["results"][0]["reason"]
    assert main(["parity", "tests.gloo.parity_models:none"]) == 1
    assert "names no function" in capfd.readouterr().err


def test_pytest_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {PLUGIN: PLUGIN}
