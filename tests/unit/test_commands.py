"""Every command: its help, its JSON, its exit codes; none starts a rank here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

import distft.commands
from distft.commands import main
from distft.testing import tiny_model

COMMANDS = list(distft.commands._MODULES)
# What `nvidia-smi topo -m` says of two GPUs without NVLink.
TOPO = "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a published model."""
    folder = tmp_path_factory.mktemp("published") / "model"
    tiny_model("L").save_pretrained(folder)
    return folder


@pytest.fixture
def places(model, tmp_path):
    """Return what stands in the commands of the tables below."""
    (tmp_path / "topo.txt").write_text(TOPO)
    (tmp_path / "train.py").write_text("print('every rank')\n")
    (tmp_path / "hangs.py").write_text(
        "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    return {"MODEL": str(model), "HERE": str(tmp_path)}


def words(command, places):
    for name, path in places.items():
        command = command.replace(name, path)
    return shlex.split(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_whose_options_it_takes(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    example = " ".join(capsys.readouterr().out.split("example: ")[1].split())
    call = example.split(";")[0].split("distft ")[1]
    options = distft.commands._parser([command]).parse_args(shlex.split(call))
    assert options.command == command


def test_the_help_lists_every_command_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n    {command}" in said for command in COMMANDS)
    assert "exit codes: 0 " in said


@pytest.mark.parametrize(
    ("command", "code", "key"),
    [
        ("plan Qwen3-8B", 0, "best"),
        ("topo HERE/topo.txt --gpu RTX-4090", 0, "fabric"),
        ("consolidate MODEL HERE/out", 0, "files"),
        ("convert MODEL HERE/out --to dcp", 0, "files"),
        ("inspect MODEL", 0, "format"),
        ("verify MODEL", 0, "holds"),
        ("verify MODEL --require proven", 1, "holds"),
        ("diff MODEL MODEL", 0, "same"),
        ("doctor HERE/train.py", 0, "findings"),
        ("doctor HERE/hangs.py", 1, "findings"),
        # What cannot be done says why.
        ("plan no-such-model", 1, "error"),
        ("topo HERE/train.py", 1, "error"),
        ("consolidate HERE/none HERE/out", 1, "error"),
        ("convert HERE/none HERE/out", 1, "error"),
        ("reshard MODEL HERE/out --strategy fsdp2 --world-size 2", 1, "error"),
        ("inspect HERE/none", 1, "error"),
        ("verify HERE/none", 1, "error"),
        ("diff MODEL HERE/none", 1, "error"),
        ("parity HERE/none --strategies all", 1, "error"),
    ],
)
def test_with_json_the_output_is_one_object(command, code, key, places, capfd):
    assert main([*words(command, places), "--json"]) == code
    said = json.loads(capfd.readouterr().out)
    assert key in said


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_arguments_end_with_2_and_no_traceback(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--no-such-option"])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_reason_goes_to_the_errors_and_leaves_the_output_empty(places, capfd):
    assert main(words("inspect HERE/none", places)) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")


def test_an_interrupt_ends_with_130_and_no_traceback(places, capfd, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("distft.checkpoint.inspection.inspect", interrupted)
    assert main(words("inspect MODEL", places)) == 130
    assert capfd.readouterr().err == "interrupted\n"


def test_a_pipe_that_closes_early_is_no_traceback(places):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "distft", *words("inspect MODEL", places)]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")
