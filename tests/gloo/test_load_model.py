"""Loading a folder: each rank its part, the values those of from_pretrained, training the same."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import Training, differences, train_alone, train_under

SIX = [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP(dp_replicate=1)]
WORLDS = [(s, n) for n in (1, 2, 3, 4) for s in SIX] + [(HSDP(dp_replicate=2), 4)]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in WORLDS]
MODELS = ("L", "Lt", "Q", "M")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder for each tiny model; M's is in several files with an index."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        size = "60KB" if name == "M" else "5GB"
        tiny_model(name).save_pretrained(root / name, max_shard_size=size)
    assert len(list((root / "M").glob("*.safetensors"))) > 1
    return root


def whole_tensors(model):
    """Return every parameter whole and every buffer, by name; a collective."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[name] = parameter.full_tensor().detach().clone()
        elif hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach().clone()
    return found, {name: buffer.clone() for name, buffer in model.named_buffers()}


def published(folder, dtype=torch.float32, model_class=transformers.AutoModelForCausalLM):
    return model_class.from_pretrained(folder, dtype=dtype)


def assert_equal(found, expected, what):
    assert set(found) == set(expected), what
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, f"{what}: {name}"
        assert torch.equal(found[name], tensor), f"{what}: {name}"


def job_values(strategy, folders, names, dtype):
    distft.init()
    answers = {}
    for name in names:
        model = distft.load_model(folders / name, strategy, dtype)
        answers[name] = (*whole_tensors(model), model.training, type(model.config).__name__)
    return answers


@pytest.mark.parametrize(("strategy", "ranks"), WORLDS, ids=IDS)
def test_every_rank_has_the_values_of_from_pretrained(pools, folders, strategy, ranks):
    for rank, answers in enumerate(pools(ranks).run(job_values, strategy, folders, MODELS, None)):
        for name in MODELS:
            expected = published(folders / name)
            parameters, buffers, training, config = answers[name]
            assert_equal(parameters, dict(expected.named_parameters()), f"{name} on rank {rank}")
            assert_equal(buffers, dict(expected.named_buffers()), f"{name} on rank {rank}")
            assert training
            assert config == type(expected.config).__name__


@dataclass(frozen=True)
class FromFolder(Training):
    """A training that starts from a folder; alone where there is no strategy."""

    folder: Path = Path()
    strategy: distft.Strategy | None = None
    max_norm: float | None = 0.1
    changes: dict = field(default_factory=dict)

    def build(self):
        path = self.folder / self.model
        return distft.load_model(path, self.strategy) if self.strategy else published(path)


@cache
def reference(folder, name, num_micro_batches):
    return train_alone(FromFolder(name, 3, num_micro_batches, folder=folder))


def job_train(strategy, folder, names, num_micro_batches):
    return [
        train_under(strategy, FromFolder(n, 3, num_micro_batches, folder=folder, strategy=strategy))
        for n in names
    ]


@pytest.mark.parametrize(("strategy", "ranks"), WORLDS, ids=IDS)
def test_three_steps_from_a_folder_equal_one_process(pools, folders, strategy, ranks):
    batches = 2 * ranks
    answers = pools(ranks).run(job_train, strategy, folders, MODELS, batches)
    for rank, records in enumerate(answers):
        for name, found in zip(MODELS, records, strict=True):
            expected = reference(folders, name, batches)
            assert differences(found, expected) == [], f"{name} on rank {rank}"
