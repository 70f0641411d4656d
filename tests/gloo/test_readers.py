"""Real folders of every strategy, read without torch: each value where the run had it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distft
from distft import DDP, FSDP2, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.folder import MANIFEST
from distft.checkpoint.readers import read_map
from distft.checkpoint.readers.torch_zip import TorchZip, opened
from tests.gloo.checkpoint_jobs import ODD_SIZES, Recipe, train_and_save
from tests.gloo.test_checkpoint_errors import Payload
from tests.reading import values

ODD = Recipe(model="Lt", changes=ODD_SIZES, frozen="down_proj", extra="buffers", two_groups=True)
BF16 = replace(ODD, dtype="bfloat16")
RUNS = {
    "ddp": (DDP(), ODD),
    "fsdp2": (FSDP2(), ODD),
    "zero1": (ZeRO1(), ODD),
    "zero2": (ZeRO2(), ODD),
    "zero3": (ZeRO3(), ODD),
    "zero1-bf16": (ZeRO1(precision="bf16-mixed"), BF16),
    "zero3-bf16": (ZeRO3(precision="bf16-mixed"), BF16),
}


def save(name: str, root: Path) -> dict[str, Any]:
    """Train two steps under a strategy and save; return what the run held."""
    strategy, recipe = RUNS[name]
    return train_and_save(strategy, recipe, root / name, 2)


@dataclass(frozen=True)
class Saved:
    root: Path
    held: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory) -> Saved:
    root = tmp_path_factory.mktemp("runs")
    return Saved(root, {name: pools(3).run(save, name, root)[0] for name in RUNS})


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_the_run_bit_for_bit(saved, name):
    found = read_map(saved.root / name)
    assert found.check() == []
    held = saved.held[name]["weights"]
    own = {n: t for n, t in found.tensors.items() if n in held}
    assert own.keys() == held.keys()
    for key, tensor in own.items():
        if name.endswith("bf16") and key not in found.frozen:
            # The run's weights are the fp32 values that are saved, rounded.
            assert torch.equal(values(found.root, tensor).bfloat16(), held[key].bfloat16())
        else:
            assert torch.equal(values(found.root, tensor), held[key])
    assert values(found.root, found.tensors["big_count"]).tolist() == [16777217]
    assert values(found.root, found.tensors["switches"]).tolist() == [True, False]
    assert found.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {n for n in found.frozen if "proj" in n} == {n for n in held if "down_proj" in n}
    assert found.buffers == {"big_count", "switches"}
    assert (found.step, found.world_size) == (2, 3)


@pytest.mark.parametrize("name", [name for name in RUNS if "bf16" not in name and name != "ddp"])
def test_moments_are_those_of_ddp_by_name(saved, name):
    whole, found = read_map(saved.root / "ddp"), read_map(saved.root / name)
    assert found.optimizer.kind == "AdamW"
    assert found.optimizer.steps == whole.optimizer.steps
    assert set(found.optimizer.steps.values()) == {2.0}
    assert found.optimizer.moments.keys() == whole.optimizer.moments.keys()
    for parameter, moments in whole.optimizer.moments.items():
        for key, tensor in moments.items():
            here, there = found.optimizer.moments[parameter][key], values(whole.root, tensor)
            assert here.shape == tuple(there.shape)
            torch.testing.assert_close(values(found.root, here), there, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", RUNS)
def test_groups_have_their_names_and_settings(saved, name):
    groups = read_map(saved.root / name).optimizer.groups
    assert [group.settings["lr"] for group in groups] == [1e-3, 1e-2]
    assert {group.settings["weight_decay"] for group in groups} == {0.01}
    named = [parameter for group in groups for parameter in group.names]
    assert len(named) == len(set(named))
    assert set(named) == set(read_map(saved.root / "ddp").optimizer.steps)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_deepspeeds_own_folder_says_the_same_without_the_manifest(saved, name):
    whole = read_map(saved.root / name)
    tag = states_of(saved, name)
    (saved.root / "bare").mkdir(exist_ok=True)
    bare = saved.root / "bare" / name
    if not bare.exists():
        bare.symlink_to(tag)
    found = read_map(bare)
    assert found.format == "deepspeed"
    assert found.check() == []
    assert found.tensors.keys() == whole.tensors.keys()
    assert found.ties == whole.ties
    assert [list(group.names) for group in found.optimizer.groups] == [
        list(group.names) for group in whole.optimizer.groups
    ]


def test_a_rank_that_is_missing_or_from_another_run_is_named(saved, tmp_path):
    tag = states_of(saved, "zero3")
    files = sorted(file.name for file in tag.glob("*_optim_states.pt"))
    for file in tag.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 3 files \*_optim_states\.pt: that of rank 1"):
        read_map(tmp_path)
    (tmp_path / files[1]).write_bytes((tag / files[1]).read_bytes())
    (tmp_path / "zero_pp_rank_7_mp_rank_00_model_states.pt").symlink_to(
        tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    )
    with pytest.raises(ValueError, match=r"has 4 files \*_model_states\.pt, and 3 ranks wrote it"):
        read_map(tmp_path)


def test_several_model_parallel_ranks_are_refused(saved, tmp_path):
    tag = states_of(saved, "zero1")
    for file in tag.iterdir():
        (tmp_path / file.name).symlink_to(file)
        (tmp_path / file.name.replace("mp_rank_00", "mp_rank_01")).symlink_to(file)
    with pytest.raises(ValueError, match="split 2 ways by tensor parallelism"):
        read_map(tmp_path)


def test_a_folder_without_metadata_or_with_one_file_less_says_which(saved, tmp_path):
    source = saved.root / "fsdp2" / "dcp"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert read_map(tmp_path).format == "dcp"
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"lacks __1_0\.distcp"):
        read_map(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata is missing: searched"):
        read_map(tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    """Change one bit, of a torch file in its largest record: between records there is padding."""
    data = bytearray(file.read_bytes())
    place = len(data) // 2
    if file.suffix == ".pt":
        with opened(file) as descriptor:
            archive = TorchZip(file, file.name, descriptor)
            largest = max(archive.records, key=lambda name: archive.records[name].size)
            place = archive.place(largest)[0] + 1
    data[place] ^= 8
    file.write_bytes(data)


def states_of(saved: Saved, name: str) -> Path:
    [tag] = filter(Path.is_dir, (saved.root / name / "deepspeed").iterdir())
    return tag


@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damage_to_any_file_is_found_and_the_file_named(saved, tmp_path, name, damage):
    assert distft.verify(saved.root / name, require="proven").holds
    for file in sorted((saved.root / name).rglob("*")):
        if file.is_file():
            place = tmp_path / str(file.relative_to(saved.root)).replace("/", "-")
            shutil.copytree(saved.root / name, place)
            damaged = place / file.relative_to(saved.root / name)
            damage(damaged)
            if damage is Path.unlink and file.name == MANIFEST:
                continue
            found = distft.verify(place)
            assert found.verdict == "broken", file
            assert file.name in " ".join(found.problems)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_damage_to_a_folder_of_deepspeed_is_found_without_our_hashes(saved, tmp_path, name, damage):
    tag = states_of(saved, name)
    assert distft.verify(tag, require="proven").holds
    for file in sorted(tag.iterdir()):
        shutil.copytree(tag, tmp_path / file.stem)
        damage(tmp_path / file.stem / file.name)
        if damage is Path.unlink and name == "zero1" and "model" in file.name:
            continue
        found = distft.verify(tmp_path / file.stem)
        assert found.verdict == "broken", file
        assert file.stem.split("_mp_")[0] in found.problems[0] or "rank" in found.problems[0]


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_two_ranks_that_are_swapped_are_both_named(saved, tmp_path, kind):
    tag = shutil.copytree(states_of(saved, "zero3"), tmp_path / "tag")
    one, other = sorted(tag.glob(f"*_{kind}_states.pt"))[:2]
    one.rename(tmp_path / "kept")
    other.rename(one)
    (tmp_path / "kept").rename(other)
    found = distft.verify(tag)
    assert [one.name in text for text in found.problems] == [True, False]
    assert all("it is renamed or swapped" in text for text in found.problems)


def test_a_rank_of_another_step_is_named(saved, tmp_path):
    tag = shutil.copytree(states_of(saved, "zero3"), tmp_path / "tag")
    file = tag / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "global_steps": 9}, file)
    found = distft.verify(tag)
    assert found.verdict == "broken"
    assert "do not belong together: their steps differ (9 and 2)" in found.problems[0]


def test_a_malicious_rank_file_runs_nothing_and_is_named(saved, tmp_path):
    marker = tmp_path / "it-ran"
    for kind in ("model", "optim"):
        tag = shutil.copytree(states_of(saved, "zero3"), tmp_path / kind)
        [file] = tag.glob(f"*rank_2*{kind}_states.pt")
        torch.save({"module": Payload(marker), "optimizer_state_dict": Payload(marker)}, file)
        found = distft.verify(tag)
        assert f"{file.name} asks to load posix.mkdir" in found.problems[0]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("strategy", "model"),
    [(NDParallel(dp_shard=2, tp=2), "Q"), (NDParallel(dp_replicate=2, dp_shard=2, ep=2), "M")],
    ids=repr,
)
def test_blocks_of_a_product_of_axes_are_put_together(pools, tmp_path, strategy, model):
    held = pools(4).run(train_and_save, strategy, Recipe(model=model), tmp_path / "run", 1)[0]
    found = read_map(tmp_path / "run")
    assert found.check() == []
    assert distft.verify(tmp_path / "run", require="proven").holds
    assert found.tensors.keys() == held["weights"].keys()
    for name, weight in held["weights"].items():
        assert torch.equal(values(found.root, found.tensors[name]), weight)
    assert set(found.optimizer.steps.values()) == {1.0}
    for moments in found.optimizer.moments.values():
        assert all(values(found.root, tensor).isfinite().all() for tensor in moments.values())


def test_reading_needs_no_torch(saved):
    code = (
        "import sys; from distft.checkpoint.readers import read_map\n"
        "for path in sys.argv[1:]: assert read_map(path).check() == []\n"
        "loaded = {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    paths = [str(saved.root / name) for name in RUNS]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)


def test_the_root_of_a_run_means_its_latest(saved):
    assert distft.latest(saved.root) is not None
    assert read_map(saved.root).step == 2
