"""Names in a checkpoint that would lead a reader or a writer out of its folder."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import distft


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/../../evil"])
def test_a_tensor_whose_name_is_a_way_out_is_refused_before_anything_is_written(tmp_path, name):
    made = tmp_path / "deep" / "made"
    made.mkdir(parents=True)
    save_file({name: torch.ones(2)}, made / "model.safetensors")
    with pytest.raises(ValueError, match=r"lead out of its folder"):
        distft.convert(made, tmp_path / "deep" / "out", "dcp")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "deep",
        "made",
        "model.safetensors",
    ]


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"weight": "../elsewhere.safetensors"}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"elsewhere.safetensors', which would lead out"):
        distft.inspect(made)
