"""What a save beside training writes later is what there was when it was called."""

from __future__ import annotations

import json

import torch

from distft.checkpoint.pickles import load_values
from distft.checkpoint.side_files import SideFiles, shared_or_each
from distft.testing import tiny_model


def test_what_changes_after_the_call_is_not_in_the_files(tmp_path):
    model = tiny_model("L")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule, rows = {"last_epoch": 3}, {"position": [7]}
    taken = SideFiles.of(model, optimizer, schedule, [rows])
    optimizer.param_groups[0]["lr"] = 0.25
    schedule["last_epoch"], rows["position"][0] = 4, 8
    model.config.vocab_size = 1
    taken.write(tmp_path)
    found = load_values(tmp_path / "state.pt")
    assert found["groups"][0]["lr"] == 0.5
    assert (found["scheduler"], found["data"]) == ({"last_epoch": 3}, [{"position": [7]}])
    said = json.loads((tmp_path / "config.json").read_text())
    assert (said["vocab_size"], said["architectures"]) == (131, ["LlamaForCausalLM"])


def test_states_of_the_data_are_one_where_all_ranks_share_it_and_else_one_of_each_group():
    assert shared_or_each([{"at": 1}] * 4, copies=2) == [{"at": 1}]
    assert shared_or_each([{"at": n // 2} for n in range(4)], copies=2) == [{"at": 0}, {"at": 1}]
