"""Distributed checkpoints under every nest of names, saved in this process alone."""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import distft
from distft.checkpoint.readers import read_map
from distft.checkpoint.readers.unpickle import ALLOWED
from tests.reading import values


class Tied(torch.nn.Module):
    """Names like those of a tied model of transformers: all of them begin with ``model.``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 1)})


def save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.fixture
def run() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Tied()
    groups = [
        {"params": [model.model["a"].weight, model.model["b"].weight], "weight_decay": 0.1},
        {"params": [model.model["a"].bias, model.model["b"].bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model.model["b"](model.model["a"](torch.ones(4, 3))).sum().backward()
        optimizer.step()
    return model, optimizer


def states(run, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return get_state_dict(*run, options=options)


def nested(run, path):
    weights, moments = states(run, flatten=False)
    save({"model": weights, "optim": moments}, path)


def flattened(run, path):
    weights, moments = states(run, flatten=True)
    save({**weights, "optimizer": moments}, path)


def in_one_dict(run, path):
    weights, moments = states(run, flatten=True)
    save({"app": {"model": weights, "optim": moments}}, path)


def flat_with_a_prefix(run, path):
    weights, moments = states(run, flatten=True)
    flat = {f"model.{name}": tensor for name, tensor in weights.items()}
    save({**flat, **{f"optim.{name}": value for name, value in moments.items()}}, path)


def by_accelerate(run, path):
    weights, moments = states(run, flatten=False)
    save({"model": weights}, path / "pytorch_model_fsdp_0")
    save({"optimizer": moments}, path / "optimizer_0")


@pytest.mark.parametrize(
    "write", [nested, flattened, in_one_dict, flat_with_a_prefix, by_accelerate]
)
def test_names_moments_and_groups_are_found_under_every_nest(run, tmp_path, write):
    write(run, tmp_path)
    model, optimizer = run
    found = read_map(tmp_path)
    assert found.check() == []
    weights = model.state_dict()
    assert found.tensors.keys() == weights.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(values(found.root, found.tensors[name]), weights[name])
        state = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values(found.root, found.optimizer.moments[name][key]), state[key])
        assert found.optimizer.steps[name] == 3.0
    groups = {frozenset(g.names): g.settings["weight_decay"] for g in found.optimizer.groups}
    weights_only = {"model.a.weight", "model.b.weight"}
    assert groups == {frozenset(weights_only): 0.1, frozenset(weights.keys() - weights_only): 0.0}
    assert all(group.settings["lr"] == 1e-2 for group in found.optimizer.groups)
    assert found.step == 3


def test_accelerates_model_folder_alone_leads_to_its_optimizer(run, tmp_path):
    by_accelerate(run, tmp_path)
    assert read_map(tmp_path / "pytorch_model_fsdp_0").optimizer is not None


def test_weights_alone_without_a_nest_keep_their_names(run, tmp_path):
    save(dict(run[0].state_dict()), tmp_path / "plain")
    save({"model": dict(run[0].state_dict())}, tmp_path / "nested")
    for name in ("plain", "nested"):
        found = read_map(tmp_path / name)
        assert found.tensors.keys() == run[0].state_dict().keys()
        assert found.optimizer is None


def test_a_step_and_a_scheduler_beside_the_weights_are_read(run, tmp_path):
    more = {"train_state": {"step": torch.tensor(7)}, "lr_scheduler": {"last_epoch": 7}}
    save({**run[0].state_dict(), **more}, tmp_path / "step-9")
    found = read_map(tmp_path)
    assert (found.step, found.extras) == (7, {"scheduler": {"last_epoch": 7}})


def test_integer_buffers_scalars_and_empty_tensors_are_read(tmp_path):
    held = {
        "count": torch.tensor([16777217]),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "columns": torch.arange(12.0).reshape(3, 4).t(),
    }
    save(dict(held), tmp_path)
    found = read_map(tmp_path)
    assert found.check() == []
    for name, tensor in held.items():
        assert torch.equal(values(found.root, found.tensors[name]), tensor)


def test_metadata_that_would_run_code_is_refused(run, tmp_path):
    nested(run, tmp_path)
    marker = tmp_path / "it-ran"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload()))
    found = distft.verify(tmp_path)
    assert found.verdict == "broken"
    assert "asks to load posix.mkdir" in found.problems[0]
    assert not marker.exists()


def test_metadata_that_leads_out_of_the_folder_is_refused(run, tmp_path):
    nested(run, tmp_path / "x")
    data = (tmp_path / "x" / ".metadata").read_bytes()
    (tmp_path / "x" / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"/etc/hostnam"))
    assert "not 1 file inside it" in distft.verify(tmp_path / "x").problems[0]


def test_a_flipped_byte_in_an_item_is_found_by_its_crc(run, tmp_path):
    nested(run, tmp_path)
    assert distft.verify(tmp_path).verdict == "consistent"
    file = tmp_path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    tensor = read_map(tmp_path).tensors["model.a.weight"]
    [piece] = tensor.pieces()
    data[piece.offset + 5] ^= 16
    file.write_bytes(data)
    found = distft.verify(tmp_path)
    assert found.verdict == "broken"
    assert "model.a.weight is damaged at byte" in found.problems[0]


def test_a_file_that_is_cut_or_gone_is_named(run, tmp_path):
    nested(run, tmp_path)
    file = tmp_path / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "__0_0.distcp" in distft.verify(tmp_path).problems[0]
    file.unlink()
    assert "lacks __0_0.distcp" in distft.verify(tmp_path).problems[0]
    file.write_bytes(whole)
    (tmp_path / ".metadata").unlink()
    assert ".metadata is missing: searched" in distft.verify(tmp_path).problems[0]


def test_files_that_torch_writes_for_transformers_are_read(run, tmp_path):
    weights = dict(run[0].state_dict())
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights, storage_writer=writer, no_dist=True)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
    found = read_map(tmp_path)
    assert (found.format, found.check()) == ("safetensors", [])
    for name, tensor in weights.items():
        assert torch.equal(values(tmp_path, found.tensors[name]), tensor)


def test_every_name_that_metadata_may_ask_for_is_one_of_torch():
    for name in ALLOWED:
        module, _, attribute = name.rpartition(".")
        if module.startswith("torch"):
            assert hasattr(importlib.import_module(module), attribute), name
