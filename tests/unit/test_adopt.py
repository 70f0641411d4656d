"""What `adopt` says of folders that nobody can continue."""

from __future__ import annotations

import dataclasses

import pytest

import distft


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        distft.adopt(tmp_path / "nowhere")


def test_an_unknown_folder_lists_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"among its 1 files.*notes\.txt") as caught:
        distft.adopt(tmp_path)
    for name in ("distft.json", "trainer_state.json", "random_states_0.pkl", ".metadata"):
        assert name in str(caught.value)


def test_a_broken_trainer_state_is_named(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": ')
    with pytest.raises(ValueError, match=r"trainer_state\.json is not JSON"):
        distft.adopt(tmp_path)


def test_a_broken_safetensors_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file"):
        distft.adopt(tmp_path)


def test_a_pickle_in_place_of_a_torch_file_is_refused(tmp_path):
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x02}.")
    with pytest.raises(ValueError, match="does not start as a torch file"):
        distft.adopt(tmp_path)


def test_the_report_is_frozen_and_prints_as_a_page(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "some/base"}'
    )
    found = distft.adopt(tmp_path)
    page = str(found)
    assert page.splitlines()[0] == f"{tmp_path}: a LORA adapter of PEFT for some/base"
    assert "the adapter's own weights" in page
    assert "Starts here from the weights alone:" in page
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.step = 3  # type: ignore[misc]
