"""verify and inspect on folders that single files make up; no ranks are needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import distft
from distft.checkpoint.readers import read_map
from distft.commands import main
from distft.testing import tiny_config
from tests.reading import values


@pytest.fixture
def model(tmp_path):
    """A model in two files with an index, by hand."""
    weights = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    for number, name in enumerate(weights, 1):
        save_file({name: weights[name]}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    index = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(weights, 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


def test_safetensors_are_at_best_consistent_and_say_why(model):
    found = distft.verify(model)
    assert (found.verdict, found.problems, found.holds) == ("consistent", [], True)
    assert "have no checksum of their own" in found.notes[0]
    assert not distft.verify(model, require="proven").holds
    read = read_map(model)
    assert values(read.root, read.tensors["a"]).tolist()[2] == [8.0, 9.0, 10.0, 11.0]


def test_a_torch_file_is_proven_and_a_flipped_byte_breaks_it(tmp_path):
    file = tmp_path / "w.pt"
    torch.save({"w": torch.ones(64), "v": torch.zeros(3)}, file)
    assert distft.verify(file, require="proven").holds
    data = bytearray(file.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f") + 20] ^= 4
    file.write_bytes(data)
    found = distft.verify(file)
    assert found.verdict == "broken"
    assert found.problems == ["w.pt is damaged in its record data/0"]


def test_a_renamed_torch_file_is_named(tmp_path):
    torch.save({"w": torch.ones(64)}, tmp_path / "rank0.pt")
    (tmp_path / "rank0.pt").rename(tmp_path / "rank1.pt")
    found = distft.verify(tmp_path / "rank1.pt")
    assert found.problems == ["rank1.pt was written as rank0: it is renamed or swapped"]


def test_files_that_an_index_does_not_agree_with_are_broken(model):
    second = model / "model-00002-of-00002.safetensors"
    save_file({"c": torch.ones(5)}, second)
    assert "puts b in model-00002-of-00002.safetensors" in distft.verify(model).problems[0]
    save_file({"b": torch.ones(5), "a": torch.ones(1)}, second)
    assert "another of the 2 files holds too" in distft.verify(model).problems[0]
    second.unlink()
    assert "(1 of 2 are missing)" in distft.verify(model).problems[0]


def damage_cut(file):
    file.write_bytes(file.read_bytes()[:-3])


def damage_longer(file):
    file.write_bytes(file.read_bytes() + b"x")


def damage_overlap(file):
    file.write_bytes(file.read_bytes().replace(b"[8,20]", b"[0,12]"))


def damage_hole(file):
    file.write_bytes(file.read_bytes().replace(b"[8,20]", b"[9,21]"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_cut, "header promises"),
        (damage_longer, "its tensors end at byte"),
        (damage_overlap, "one before it ends at"),
        (damage_hole, "header promises|one before it ends at"),
    ],
)
def test_a_safetensors_file_that_is_not_filled_exactly_is_broken(tmp_path, damage, says):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, file)
    damage(file)
    found = distft.verify(tmp_path)
    assert found.verdict == "broken"
    assert any(part in found.problems[0] for part in says.split("|"))


def test_a_placeholder_without_elements_is_a_problem(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(0)}, tmp_path / "model.safetensors")
    assert distft.verify(tmp_path).problems == [
        "b has 0 elements in the shape (0,): a rank's placeholder was saved, not the weight"
    ]


def test_a_tensor_that_the_config_asks_for_and_that_is_not_there_is_named(tmp_path):
    config = tiny_config("M").to_dict()
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = {t.name: torch.zeros(t.shape) for t in distft.ModelSpec.from_config(config).tensors}
    save_file(held, tmp_path / "model.safetensors")
    assert distft.verify(tmp_path).problems == []
    short = {**held, "lm_head.weight": torch.zeros(7, 32)}
    del short["model.norm.weight"]
    short["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 32, 16)
    save_file(short, tmp_path / "model.safetensors")
    assert distft.verify(tmp_path).problems == [
        "model.norm.weight of shape (32,) is missing, and config.json asks for it",
        "lm_head.weight has the shape (7, 32), and config.json says (131, 32)",
        "experts have 17920 elements, and config.json asks for 18432",
    ]


def test_a_family_whose_files_have_other_names_than_memory_is_not_called_broken(tmp_path):
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    config = GPTNeoXConfig(**sizes, hidden_size=8, intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert distft.verify(tmp_path).problems == []


def test_rank_files_of_transformers_are_put_together(tmp_path):
    whole = torch.arange(20.0).reshape(5, 4)
    for rank, (first, last) in enumerate([(0, 3), (3, 5)], 1):
        parts = json.dumps({"w": {"saved_offsets": [first, 0]}})
        save_file(
            {"w": whole[first:last].clone()},
            tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": parts, "DCP_VERSION": "1.0", "format": "pt"},
        )
    found = read_map(tmp_path)
    assert found.check() == []
    assert torch.equal(values(tmp_path, found.tensors["w"]), whole)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    assert "that of number 1 of 2 is missing" in distft.verify(tmp_path).problems[0]


def test_an_unknown_folder_lists_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"among its 1 files .* \.metadata .* checkpoint-N"):
        distft.verify(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        distft.inspect(tmp_path / "no")
    with pytest.raises(ValueError, match="none of the 3 verdicts"):
        distft.verify(tmp_path, require="perfect")


def test_inspect_says_what_is_there(model):
    found = distft.inspect(model)
    assert (found.format, found.num_parameters, found.num_bytes) == ("safetensors", 17, 58)
    assert found.tensors == {"a": ((3, 4), "float32"), "b": ((5,), "bfloat16")}
    assert "2 of bfloat16, float32: 17 elements, 58 bytes" in str(found)
    assert "optimizer   none" in str(found)


def test_the_command_line_exits_with_1_and_the_reason(model, capsys):
    assert main(["verify", str(model)]) == 0
    assert main(["verify", str(model), "--require", "proven", "--json"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["verdict"], said["holds"]) == ("consistent", False)
    (model / "model-00001-of-00002.safetensors").unlink()
    assert main(["verify", str(model)]) == 1
    assert "has no such file" in capsys.readouterr().out
    assert main(["inspect", str(model / "no"), "--json"]) == 1
    assert "no such folder" in json.loads(capsys.readouterr().out)["error"]


def test_verify_and_inspect_load_no_torch(model):
    code = (
        "import sys, distft; distft.verify(sys.argv[1]); distft.inspect(sys.argv[1])\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model)], check=True)
