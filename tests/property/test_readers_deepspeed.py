"""ZeRO folders of any shapes, groups, ranks and paddings are read as what was written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distft.checkpoint.readers import read_map
from tests.reading import values
from tests.zero_folder import MOMENTS, moment, write_zero

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def runs(draw):
    """Groups of parameters whose values are all different, frozen ones, and paddings."""
    count = 0

    def make(shape):
        nonlocal count
        size = torch.Size(shape).numel()
        count += size
        return torch.arange(count - size, count).float().reshape(shape)

    groups = [
        {f"g{number}.w{place}": make(shape) for place, shape in enumerate(group)}
        for number, group in enumerate(
            draw(st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3))
        )
    ]
    frozen = {
        f"frozen{n}": make(shape).bfloat16()
        for n, shape in enumerate(draw(st.lists(shapes, max_size=2)))
    }
    gaps = [[draw(st.integers(0, 3)) for _ in group] for group in groups]
    return groups, frozen, draw(st.sampled_from([None, gaps]))


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(1, 3), st.integers(1, 5))
def test_every_value_is_read_where_it_was_written(run, stage, world):
    groups, frozen, gaps = run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_zero(folder, stage, world, groups, frozen=frozen, gaps=gaps if stage < 3 else None)
        found = read_map(folder)
        assert found.check() == []
        weights = {name: weight for group in groups for name, weight in group.items()}
        assert found.tensors.keys() == weights.keys() | frozen.keys()
        assert found.frozen == frozen.keys()
        for name, weight in (weights | frozen).items():
            assert torch.equal(values(folder, found.tensors[name]), weight)
        for name, weight in weights.items():
            assert found.optimizer.steps[name] == 3.0
            for key in MOMENTS:
                stored = found.optimizer.moments[name][key]
                assert stored.shape == tuple(weight.shape)
                assert torch.equal(values(folder, stored), moment(weight, key))
        assert [list(group.names) for group in found.optimizer.groups] == [list(g) for g in groups]
        assert [g.settings for g in found.optimizer.groups] == [
            {"lr": 0.1 * (number + 1)} for number in range(len(groups))
        ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ties_buffers_and_what_the_run_says_are_read(tmp_path, stage):
    buffers = {"count": torch.tensor([16777217]), "flags": torch.tensor([True, False])}
    write_zero(
        tmp_path / "step3", stage, 2, [{"w": torch.ones(3)}], buffers=buffers, ties={"head": "w"}
    )
    (tmp_path / "latest").write_text("step3")
    found = read_map(tmp_path)
    assert found.ties == {"head": "w"}
    assert found.buffers == buffers.keys()
    assert {n: values(tmp_path, found.tensors[n]).tolist() for n in buffers} == {
        "count": [16777217],
        "flags": [True, False],
    }
    assert (found.step, found.world_size, found.optimizer.kind) == (3, 2, "AdamW")
    assert found.extras == {"scheduler": {"last_epoch": 3}}
    assert found.strategy == f"ZeRO-{stage} of DeepSpeed 0.19"


def change(file: Path, part: str, **changes: object) -> None:
    whole = torch.load(file, weights_only=False)
    inner = whole[part] if part else whole
    inner.update(changes)
    torch.save(whole, file)


def test_vectors_of_another_length_are_refused(tmp_path):
    for stage, key in ((2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")):
        folder = tmp_path / str(stage)
        write_zero(folder, stage, 2, [{"w": torch.ones(30)}])
        file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        change(file, "optimizer_state_dict", **{key: [torch.ones(7)]})
        with pytest.raises(ValueError, match=r"elements of weights in .* do not belong together"):
            read_map(folder)


def test_ranks_with_other_numbers_of_updates_are_refused(tmp_path):
    write_zero(tmp_path, 3, 2, [{"w": torch.ones(4)}])
    file = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = torch.load(file, weights_only=False)
    whole["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"] = torch.tensor(4.0)
    torch.save(whole, file)
    with pytest.raises(ValueError, match="3 updates on rank 0 and 4 on rank 1"):
        read_map(tmp_path)


def test_experts_pipelines_and_a_lost_optimizer_are_refused(tmp_path):
    for name, says in (("layer_0_expert_1_mp_rank_00", "experts"), ("layer_01", "pipeline layers")):
        folder = tmp_path / name
        write_zero(folder, 1, 1, [{"w": torch.ones(4)}])
        torch.save({}, folder / f"{name}-model_states.pt")
        with pytest.raises(ValueError, match=f"1 files of single {says}"):
            read_map(folder)
    write_zero(tmp_path / "lost", 1, 1, [{"w": torch.ones(4)}])
    (tmp_path / "lost" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="written by ZeRO-1, and 0 files"):
        read_map(tmp_path / "lost")


def test_a_run_without_zero_has_its_weights_read(tmp_path):
    weights = {"w": torch.ones(4), "head": torch.zeros(2)}
    state = {"module": weights, "global_steps": 5, "dp_world_size": 2, "ds_config": {}}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    found = read_map(tmp_path)
    assert found.tensors.keys() == weights.keys()
    assert (found.step, found.optimizer) == (5, None)
    assert "without ZeRO is not read" in found.notes[0]
