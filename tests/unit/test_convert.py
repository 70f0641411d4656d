"""Checkpoints of any format in that of another tool, read there by that tool: no ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from transformers import AutoModelForCausalLM

import distft
from distft.checkpoint.conversion import FORMATS, convert
from distft.checkpoint.readers import read_map
from distft.commands import main
from distft.testing import tiny_model
from tests.zero_folder import MOMENTS, moment, write_zero

FILE = "model.safetensors"
# torch says of one process that it is one.
ALONE = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a ZeRO-3 run of 3 ranks and 2 groups, and the model in it."""
    model = tiny_model("L")
    named = {name: p.detach() for name, p in model.named_parameters()}
    groups = [
        {name: weight for name, weight in named.items() if (weight.dim() > 1) == matrices}
        for matrices in (True, False)
    ]
    folder = tmp_path_factory.mktemp("run") / "zero"
    write_zero(folder / "global_step3", 3, 3, groups)
    (folder / "latest").write_text("global_step3")
    model.config.save_pretrained(folder)
    return folder, model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / FILE)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_goes_through_every_format_and_comes_back_the_same(run, tmp_path, world_size):
    folder, model = run
    first = convert(folder, tmp_path / "dcp", "dcp", world_size)
    second = convert(first, tmp_path / "universal", "deepspeed")
    third = convert(second, tmp_path / "zero3", "zero3", world_size)
    for made in (first, second, third):
        found = distft.diff(folder, made)
        assert found.same, str(found)
        assert found.num_equal == 3 * 21
        assert (made / "config.json").is_file()
        assert distft.verify(made).holds
    assert read_map(third).world_size == world_size
    out = convert(third, tmp_path / "model", max_ram="20MB")
    assert not any(torch.ne(w, model.state_dict()[n]).any() for n, w in weights(out).items())
    AutoModelForCausalLM.from_pretrained(out)


@ALONE
def test_torch_loads_model_and_optimizer_of_what_is_written_for_it(run, tmp_path):
    folder, source = run
    made = convert(folder, tmp_path / "dcp", "dcp", 2)
    model = tiny_model("L", seed=9)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() == 1]}], lr=1
    )
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    ours, state = get_state_dict(model, optimizer, options=options)
    # The hand-written run names lr alone of its settings.
    state = {k: v for k, v in state.items() if not k.startswith("param_groups") or k[-3:] == ".lr"}
    held = {"model": ours, "optimizer": state}
    dcp.load(held, checkpoint_id=made, no_dist=True)
    full = {**get_state_dict(model, optimizer, options=options)[1], **held["optimizer"]}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=held["model"],
        optim_state_dict=full,
        options=options,
    )
    expected = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
        for key in MOMENTS:
            assert torch.equal(optimizer.state[parameter][key], moment(expected[name], key))
        assert float(optimizer.state[parameter]["step"]) == 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.filterwarnings("ignore")
def test_deepspeeds_own_tool_reads_the_files_of_stage_3(run, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, model = run
    made = convert(folder, tmp_path / "zero3", "zero3", 2)
    found = get_fp32_state_dict_from_zero_checkpoint(str(made))
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter)


# ---- files of weights that others wrote ---------------------------------------------------------


def write_shards_of_ranks(folder: Path, model: torch.nn.Module) -> None:
    """Write what transformers leaves of two ranks: rows of each tensor, and where they begin."""
    folder.mkdir()
    for rank in range(2):
        parts, starts = {}, {}
        for name, tensor in model.state_dict().items():
            rows = -(-len(tensor) // 2)
            parts[name] = tensor[rank * rows : (rank + 1) * rows].clone()
            starts[name] = {"saved_offsets": [rank * rows, *[0] * (tensor.dim() - 1)]}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(starts), "DCP_VERSION": "1.0"}
        save_file(parts, folder / name, metadata)


@pytest.mark.parametrize("kind", ["one .bin", "one .pt", "nested .pt", "index of .bin", "shard-*"])
def test_files_of_weights_become_any_format(tmp_path, kind):
    model = tiny_model("Lt" if kind == "one .bin" else "L")
    folder = tmp_path / "in"
    state = model.state_dict()
    if kind == "shard-*":
        write_shards_of_ranks(folder, model)
    else:
        folder.mkdir()
        source = folder
        if kind == "one .bin":
            torch.save(state, folder / "pytorch_model.bin")
        elif kind == "one .pt":
            source = folder / "weights.pt"
            torch.save(state, source)
        elif kind == "nested .pt":
            source = folder / "weights.pt"
            torch.save({"model": state, "epoch": 3}, source)
        else:
            names = list(state)
            files = {
                name: f"pytorch_model-{1 + (i > 9):05d}-of-00002.bin"
                for i, name in enumerate(names)
            }
            for file in set(files.values()):
                torch.save({n: state[n].clone() for n in names if files[n] == file}, folder / file)
            index = {"metadata": {}, "weight_map": files}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    source = folder if kind not in ("one .pt", "nested .pt") else folder / "weights.pt"
    out = convert(source, tmp_path / "out")
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        made = convert(source, tmp_path / "dcp", "dcp", 3)
        held = {"model": {name: torch.empty_like(tensor) for name, tensor in state.items()}}
        dcp.load(held, checkpoint_id=made, no_dist=True)
    assert all(torch.equal(held["model"][name], tensor) for name, tensor in state.items())


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"format": "onnx"},
            r"none of the 5 formats: 'safetensors', a model .* 'zero3', the files",
        ),
        ({"format": "dcp", "dtype": "bfloat16"}, r"dtype is for safetensors and adapter"),
        ({"format": "zero3", "base": "x"}, r"base is for safetensors"),
        ({"format": "adapter", "config": "x"}, r"config is for safetensors"),
        ({"format": "safetensors", "world_size": 2}, r"'dcp' and 'zero3', are written for a"),
        ({"format": "zero3", "world_size": 0}, r"at least 1"),
        ({"format": "adapter"}, r"holds 0 adapters"),
        ({"format": "dcp", "max_ram": 1000}, r"max_ram is 1000 bytes, and \d+ are needed"),
    ],
)
def test_what_a_format_cannot_be_is_refused(run, tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        convert(run[0], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_weights_alone_are_no_run_of_deepspeed(run, tmp_path):
    model = convert(run[0], tmp_path / "model")
    for format in ("deepspeed", "zero3"):
        with pytest.raises(ValueError, match=r"no state of an optimizer"):
            convert(model, tmp_path / "out", format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_inside_the_input_or_in_use_is_refused(run, tmp_path, format):
    with pytest.raises(ValueError, match=r"lies inside the checkpoint"):
        convert(run[0], run[0] / "inside", format)
    if format in ("dcp", "deepspeed", "zero3"):
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "file").touch()
        with pytest.raises(ValueError, match=r"used holds 1 files or folders"):
            convert(run[0], tmp_path / "used", format)
    assert not (run[0] / "inside").exists()


def test_the_command_says_what_it_wrote_and_why_not(run, tmp_path, capsys):
    folder = str(run[0])
    arguments = ["convert", folder, str(tmp_path / "out"), "--to", "zero3", "--world-size", "2"]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert sum(name.endswith("_optim_states.pt") for name in said["files"]) == 2
    assert said["weight_bytes"] > 3 * 4 * 23_904
    assert main(["convert", folder, str(tmp_path / "no"), "--to", "onnx", "--json"]) == 1
    assert "5 formats" in json.loads(capsys.readouterr().out)["error"]
