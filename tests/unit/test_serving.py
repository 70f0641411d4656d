"""Adapters with factors for each expert, as servers read them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import distft
from distft.testing import tiny_model
from tests.gloo.lora_jobs import fix_values

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:The following rank_pattern keys did not match",
    "ignore:Could not find a config file",
)
PREFIX = "base_model.model."


def written(folder, family, **settings):
    """Write a base and an adapter on its experts, and what PEFT merges of both."""
    base = tiny_model(family)
    base.save_pretrained(folder / "base")
    config = distft.moe_lora(base, r=12, lora_alpha=5, **settings)
    model = fix_values(peft.get_peft_model(base, config))
    model.save_pretrained(str(folder / "adapter"))
    model.merge_and_unload().save_pretrained(folder / "merged")


def added_by(folder):
    """Return what an adapter adds to each matrix, as a reader of PEFT's layout makes it."""
    import re

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            rank, alpha = config["r"], config["lora_alpha"]
            for pattern in config["rank_pattern"]:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    rank, alpha = config["rank_pattern"][pattern], config["alpha_pattern"][pattern]
            assert len(a) == rank, module
            b = tensors[name.replace("lora_A", "lora_B")]
            found[f"{module}.weight"] = alpha / rank * b @ a
    return config, found


@pytest.mark.parametrize(("family", "parts"), [("M", 3), ("X", 3)])
def test_each_expert_gets_what_a_merge_gives_it(tmp_path, family, parts):
    written(tmp_path, family, target_modules=["q_proj"])
    out = distft.export_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    config, added = added_by(out)
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert set(added) == changed
    experts = 6 if family == "M" else 3
    assert len(changed) == 2 * (1 + parts * experts)
    for name, delta in added.items():
        torch.testing.assert_close(before[name] + delta, after[name], rtol=0, atol=1e-5, msg=name)
    # A reader without patterns scales by lora_alpha / r.
    assert config["lora_alpha"] == config["r"]
    assert config["target_parameters"] is None


def test_a_trained_router_goes_along(tmp_path):
    written(tmp_path, "M", train_router=True)
    out = distft.export_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    tensors = load_file(out / "adapter_model.safetensors")
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = f"{PREFIX}model.layers.1.mlp.gate.weight"
    assert torch.equal(tensors[name], before[name])


def test_a_family_that_publishes_its_experts_as_one_is_refused(tmp_path):
    written(tmp_path, "G")
    with pytest.raises(ValueError, match=r"published as 1 tensor.*consolidate\(adapter='only'\)"):
        distft.export_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    with pytest.raises(ValueError, match=r"0 of its base.*Pass base="):
        distft.export_adapter(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ValueError, match="holds 0 adapters"):
        distft.export_adapter(tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()
