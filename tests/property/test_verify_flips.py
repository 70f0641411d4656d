"""One changed byte, wherever it is: it is found, or it changes no value; nothing else is raised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import distft
from distft.checkpoint.readers import read_map
from tests.reading import values
from tests.zero_folder import write_zero

WEIGHTS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5), "c": torch.tensor([7])}


def torch_file(folder: Path) -> Path:
    torch.save(WEIGHTS, folder / "w.pt")
    return folder / "w.pt"


def zero_folder(folder: Path) -> Path:
    write_zero(folder, 3, 2, [{name: WEIGHTS[name] for name in "ab"}])
    return folder


def distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(WEIGHTS), checkpoint_id=folder, no_dist=True)
    return folder


def safetensors(folder: Path) -> Path:
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


@pytest.fixture(params=[torch_file, zero_folder, distributed, safetensors])
def kind(request, tmp_path) -> tuple[Callable[[Path], Path], Path]:
    return request.param, request.param(tmp_path)


def read(path: Path) -> dict[str, list[float]]:
    found = read_map(path)
    return {name: values(found.root, t).tolist() for name, t in found.tensors.items()}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_changed_byte_is_found_or_changes_no_value(kind, data):
    write, path = kind
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    before = read(path)
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
    try:
        found = distft.verify(path)
        covered = write in (torch_file, zero_folder) or file.suffix == ".distcp"
        if found.verdict != "broken" and covered:
            assert read(path) == before
    finally:
        file.write_bytes(whole)
