"""What real runs lost between a sharded checkpoint and the model they published."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import distft
from distft import DDP, EP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.dcp import OPTIMIZER, safe_reader
from tests.gloo.checkpoint_jobs import (
    LARGE,
    ODD_SIZES,
    PROBE,
    Recipe,
    load_and_save,
    load_and_step,
    save_own_experts,
    train_and_save,
    train_on,
)
from tests.reading import read_by_torch

SIX = [
    (DDP(), 2),
    (ZeRO1(), 2),
    (ZeRO2(), 2),
    (ZeRO3(), 2),
    (FSDP2(), 2),
    (HSDP(dp_replicate=2), 4),
]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in SIX]
HSDP_2X2 = HSDP(dp_replicate=2)


@pytest.fixture(scope="module", autouse=True)
def _deepspeed_loaded() -> None:
    """Load DeepSpeed, which sets a variable of its own, before a test that checks for leaks."""
    import distft.testing.preload  # noqa: F401


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a published model, exactly as its files hold them."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def tensor_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def load_clean(folder: Path) -> torch.nn.Module:
    """Return the model that transformers loads, which must find every name and no other."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(expected) and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


# ---- consolidation ------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=IDS)
def test_a_tied_model_comes_back_whole_and_tied(pools, tmp_path, strategy, ranks):
    # Case CONS-01
    live = pools(ranks).run(train_and_save, strategy, Recipe("Lt"), tmp_path / "saved", 2)[0]
    model = load_clean(distft.consolidate(tmp_path / "saved", tmp_path / "out"))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) == 19_712
    assert equal(dict(model.named_parameters()), live["weights"])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(PROBE)).logits
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "strategy", [ZeRO2(precision="bf16"), ZeRO3(precision="bf16")], ids=["ZeRO2", "ZeRO3"]
)
def test_a_tied_bf16_model_is_written_with_one_of_the_pair(pools, tmp_path, strategy, ranks):
    # Case CONS-02
    recipe = Recipe("Lt", dtype="bfloat16")
    pools(ranks).run(train_and_save, strategy, recipe, tmp_path / "saved", 1)
    for dtype, size in ((None, 2), ("float32", 4)):
        out = distft.consolidate(tmp_path / "saved", tmp_path / f"out-{size}", dtype=dtype)
        tensors = on_disk(out)
        assert "lm_head.weight" not in tensors
        assert "model.embed_tokens.weight" in tensors
        assert tensor_bytes(tensors) == 19_712 * size


def test_a_fresh_process_writes_a_tied_model_as_transformers_does(pools, tmp_path):
    # Case CONS-03
    live = pools(2).run(train_and_save, FSDP2(), Recipe("Lt"), tmp_path / "saved", 1)[0]
    code = "import distft, sys; distft.consolidate(*sys.argv[1:], max_shard_size='20KB')"
    command = [sys.executable, "-W", "error", "-c", code, tmp_path / "saved", tmp_path / "out"]
    subprocess.run(command, check=True, timeout=600)
    tensors = on_disk(tmp_path / "out")
    assert len(tensors) == 20
    assert "lm_head.weight" not in tensors
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 78_848
    assert set(index["weight_map"]) == set(tensors)
    assert equal(tensors, live["weights"])


@pytest.mark.parametrize("strategy", [ZeRO3(), FSDP2()], ids=str)
def test_frozen_weights_survive_resume_and_consolidation(pools, tmp_path, strategy):
    # Case CONS-06
    recipe = Recipe(frozen="mlp")
    start = recipe.build().state_dict()
    live = pools(3).run(train_and_save, strategy, recipe, tmp_path / "saved", 2)[0]
    loaded = pools(3).run(load_and_step, strategy, recipe, tmp_path / "saved", 0)[0]["loaded"]
    published = on_disk(distft.consolidate(tmp_path / "saved", tmp_path / "out"))
    frozen = [name for name in start if "mlp" in name]
    assert len(frozen) == 6
    for found in (loaded, published):
        assert list(start) == live["keys"]
        assert set(found) == set(start)
        assert all(torch.equal(found[name], start[name]) for name in frozen)
        assert equal(found, live["weights"])
    trained = set(start) - set(frozen)
    assert not any(torch.equal(loaded[name], start[name]) for name in trained)


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2()], ids=str)
def test_integer_and_boolean_buffers_keep_value_and_dtype(pools, tmp_path, strategy):
    # Case CONS-09
    recipe = Recipe(extra="buffers")
    pools(2).run(train_and_save, strategy, recipe, tmp_path / "saved", 1)
    for dtype in ("float32", "bfloat16"):
        out = distft.consolidate(tmp_path / "saved", tmp_path / dtype, dtype=dtype)
        tensors = on_disk(out)
        assert tensors["big_count"].dtype == torch.int64
        assert tensors["big_count"].tolist() == [LARGE]
        assert tensors["switches"].dtype == torch.bool
        assert tensors["switches"].tolist() == [True, False]
        assert tensors["lm_head.weight"].dtype == getattr(torch, dtype)
        assert len(tensors) == 23
    found = pools(2).run(load_and_step, strategy, recipe, tmp_path / "saved", 0)
    for rank in found:
        assert rank["buffers"]["big_count"].tolist() == [LARGE]
        assert rank["buffers"]["switches"].tolist() == [True, False]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", [ZeRO1(), ZeRO2(), ZeRO3()], ids=str)
def test_padding_of_uneven_parameters_is_cut_off_again(pools, tmp_path, strategy, ranks):
    # Case CONS-10
    recipe = Recipe(changes=ODD_SIZES)
    live = pools(ranks).run(train_and_save, strategy, recipe, tmp_path / "saved", 1)
    published = on_disk(distft.consolidate(tmp_path / "saved", tmp_path / "out"))
    sizes = {tensor.numel() for tensor in published.values()}
    assert {4_585, 1_715, 35} <= sizes
    for rank in live:
        assert equal(published, rank["weights"])


def test_parameters_with_fewer_rows_than_ranks_come_back_whole(pools, tmp_path):
    # Case CONS-12, dense
    recipe = Recipe(extra="small")
    live = pools(4).run(train_and_save, FSDP2(), recipe, tmp_path / "saved", 1)
    assert [rank["local"]["small"] for rank in live] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert [rank["local"]["scale"] for rank in live] == [(1,), (0,), (0,), (0,)]
    published = on_disk(distft.consolidate(tmp_path / "saved", tmp_path / "out"))
    assert published["small"].shape == (2, 3)
    assert published["scale"].shape == (1,)
    assert equal(published, live[0]["weights"])
    for ranks in (4, 3):
        for rank in pools(ranks).run(load_and_step, FSDP2(), recipe, tmp_path / "saved", 0):
            assert equal(rank["loaded"], live[0]["weights"])


def test_experts_that_ranks_share_unevenly_come_back_whole(pools, tmp_path):
    # Case CONS-12, 6 experts on 4 ranks
    live = pools(4).run(train_and_save, FSDP2(), Recipe("M"), tmp_path / "saved", 1)
    experts = "model.layers.0.mlp.experts.down_proj"
    assert [rank["local"][experts][0] for rank in live] == [2, 2, 2, 0]
    model = load_clean(distft.consolidate(tmp_path / "saved", tmp_path / "out"))
    assert equal(dict(model.named_parameters()), live[0]["weights"])
    for rank in pools(4).run(load_and_step, FSDP2(), Recipe("M"), tmp_path / "saved", 0):
        assert equal(rank["loaded"], live[0]["weights"])


def test_a_model_loaded_in_bf16_and_trained_in_fp32_is_written_as_asked(pools, tmp_path):
    # Case CONS-13
    recipe = Recipe(dtype="bfloat16")
    strategy = FSDP2(precision="bf16-mixed")
    live = pools(2).run(train_and_save, strategy, recipe, tmp_path / "saved", 2)[0]
    for dtype, name, size in (
        (None, "float32", 95_616),
        ("float32", "float32", 95_616),
        ("bfloat16", "bfloat16", 47_808),
        (torch.bfloat16, "bfloat16", 47_808),
    ):
        out = distft.consolidate(tmp_path / "saved", tmp_path / "out", dtype=dtype)
        tensors = on_disk(out)
        assert tensor_bytes(tensors) == size
        assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, name)}
        assert json.loads((out / "config.json").read_text())["dtype"] == name
        assert equal(tensors, {n: w.to(getattr(torch, name)) for n, w in live["weights"].items()})


def test_training_in_bf16_is_written_in_bf16_by_default(pools, tmp_path):
    # Case CONS-13, weights and moments in bf16
    strategy = FSDP2(precision="bf16")
    live = pools(2).run(train_and_save, strategy, Recipe(), tmp_path / "saved", 1)[0]
    out = distft.consolidate(tmp_path / "saved", tmp_path / "out")
    assert tensor_bytes(on_disk(out)) == 47_808
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert equal(on_disk(out), live["weights"])


def test_a_class_that_transformers_does_not_have_is_written_as_it_is(pools, tmp_path):
    # Case CONS-13, where no class of transformers names the tensors
    recipe = Recipe(extra="own class")
    live = pools(2).run(train_and_save, FSDP2(), recipe, tmp_path / "saved", 1)[0]
    out = distft.consolidate(tmp_path / "saved", tmp_path / "out", dtype="bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["OwnLlama"]
    assert config["dtype"] == "bfloat16"
    assert equal(on_disk(out), {name: w.bfloat16() for name, w in live["weights"].items()})


def test_root_checkpoint_and_state_folder_mean_the_same_checkpoint(pools, tmp_path):
    # Case CONS-24
    run = tmp_path / "run"
    pools(2).run(train_and_save, FSDP2(), Recipe(), run / "step-1", 1)
    contents = []
    for number, path in enumerate((run, run / "step-1", run / "step-1" / "dcp")):
        out = distft.consolidate(path, tmp_path / f"out-{number}")
        contents.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert "model.safetensors" in contents[0]
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "step-1" / "dcp" / ".metadata").unlink()
    for path in (broken, broken / "step-1", broken / "step-1" / "dcp"):
        with pytest.raises(ValueError, match=r"dcp/\.metadata is missing") as error:
            distft.consolidate(path, tmp_path / "never")
        assert f"searched {broken / 'step-1'}" in str(error.value)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("strategy", "ranks", "name"),
    [
        *((*world, "M") for world in SIX),
        *((strategy, 2, name) for strategy in (FSDP2(), ZeRO3()) for name in "XG"),
    ],
    ids=str,
)
def test_published_files_hold_what_save_pretrained_writes(pools, tmp_path, strategy, ranks, name):
    # Cases CONS-12 and CONS-16: the names of experts, one by one or fused as a family has them
    live = pools(ranks).run(train_and_save, strategy, Recipe(name), tmp_path / "saved", 1)[0]
    out = distft.consolidate(tmp_path / "saved", tmp_path / "out")
    alone = Recipe(name).build()
    alone.load_state_dict(live["weights"])
    alone.save_pretrained(tmp_path / "alone")
    assert equal(on_disk(out), on_disk(tmp_path / "alone"))
    assert (out / "config.json").read_text() == (tmp_path / "alone" / "config.json").read_text()
    load_clean(out)


@pytest.mark.parametrize("size", ["1KB", "20KB", "1GB"])
def test_experts_that_only_one_rank_knows_are_in_the_index_and_in_its_files(pools, tmp_path, size):
    # Case CONS-18: under EP, and as parts of another tool's run with a name for each expert
    recipe = Recipe("M")
    live = pools(2).run(train_and_save, EP(ep=2), recipe, tmp_path / "ours", 1)[0]
    recipe.build().save_pretrained(tmp_path / "alone")
    pools(2).run(save_own_experts, tmp_path / "alone", tmp_path / "theirs")
    for source, config in (("ours", None), ("theirs", tmp_path / "alone")):
        out = tmp_path / f"{source}-out"
        distft.consolidate(tmp_path / source, out, config=config, max_shard_size=size)
        tensors = on_disk(out)
        assert sum(".experts." in name for name in tensors) == 36
        files = sorted(file.name for file in out.glob("*.safetensors"))
        assert (out / "model.safetensors.index.json").is_file() == (size != "1GB")
        if size != "1GB":
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == 4 * 33_536
            assert set(index["weight_map"]) == set(tensors)
            assert sorted(set(index["weight_map"].values())) == files
            assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
            for name, file in index["weight_map"].items():
                with safe_open(out / file, "pt") as opened:
                    assert name in opened.keys()  # noqa: SIM118
        model = load_clean(out)
        expected = live["weights"] if source == "ours" else dict(recipe.build().named_parameters())
        assert equal(dict(model.named_parameters()), expected)


# ---- resharding ---------------------------------------------------------------------------------


def stored_bytes(path: Path) -> int:
    """Return the bytes of all pieces of tensors that a checkpoint's ranks wrote."""
    metadata = safe_reader(path / "dcp").read_metadata()
    return sum(
        chunk.sizes.numel() * item.properties.dtype.itemsize
        for item in metadata.state_dict_metadata.values()
        for chunk in item.chunks
    )


def moments(path: Path) -> dict[str, torch.Tensor]:
    return read_by_torch(path / "dcp", f"{OPTIMIZER}.")


def test_hsdp_saves_one_copy_and_goes_on_as_fsdp2_and_back(pools, tmp_path):
    # Case RESH-04, the way to FSDP2
    first, second = tmp_path / "hsdp", tmp_path / "fsdp2"
    recipe = Recipe()
    live = pools(4).run(train_and_save, HSDP_2X2, recipe, first, 3)[0]["weights"]
    # Weights and two moments in fp32, and 21 step counts.
    assert stored_bytes(first) == 286_848 + 21 * 4
    expected = pools(4).run(train_on, HSDP_2X2, recipe, 4)[0]
    there = pools(2).run(load_and_step, FSDP2(), recipe, first, 1)
    for rank in there:
        assert equal(rank["loaded"], live)
        assert rank["losses"][0] == pytest.approx(expected["losses"][3], rel=1e-6)
    pools(2).run(load_and_save, FSDP2(), recipe, first, second)
    assert equal(moments(second), moments(first))
    back = pools(4).run(load_and_step, HSDP_2X2, recipe, second, 1)
    for rank in back:
        assert equal(rank["loaded"], live)
        assert rank["losses"] == expected["losses"][3:]
        assert equal(rank["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [*((strategy, ranks, ranks) for strategy, ranks in SIX), (DDP(), 2, 3), (FSDP2(), 2, 3)],
    ids=[*IDS, "DDP()@2->3", "FSDP2()@2->3"],
)
def test_adam_counts_on_after_a_load(pools, tmp_path, strategy, ranks, more):
    # Case RESH-05
    recipe = Recipe(learning_rate=1e-2)
    pools(ranks).run(train_and_save, strategy, recipe, tmp_path / "saved", 1)
    expected = pools(ranks).run(train_on, strategy, recipe, 2)[0]
    for rank in pools(more).run(load_and_step, strategy, recipe, tmp_path / "saved", 1):
        assert rank["counts"] == {2.0}
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=IDS)
def test_loading_before_the_first_step_counts_as_no_step(pools, tmp_path, strategy, ranks):
    # Case RESH-05, nothing but the preparation
    recipe = Recipe(learning_rate=1e-2, weight_decay=0.1)
    start = dict(recipe.build().named_parameters())
    pools(ranks).run(train_and_save, strategy, recipe, tmp_path / "saved", 0)
    expected = pools(ranks).run(train_on, strategy, recipe, 1)[0]
    for rank in pools(ranks).run(load_and_step, strategy, recipe, tmp_path / "saved", 1):
        assert equal(rank["loaded"], start)
        assert rank["counts"] == {1.0}
        assert equal(rank["weights"], expected["weights"])
