"""What conversions lost in real runs, and what they refuse before the first byte: no ranks."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import distft
from distft import DDP, FSDP2, ZeRO2, ZeRO3
from distft.checkpoint.consolidation import consolidate
from distft.checkpoint.conversion import convert
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor, OptimizerState, ParamGroup, Piece, ShardMap
from distft.checkpoint.writers.zero3 import LATEST, plan_zero3
from distft.testing import tiny_model
from tests.reading import values
from tests.zero_folder import MOMENTS, moment, write_zero

FILE = "model.safetensors"
RAM = 50_000_000


def write_run(
    folder: Path,
    model: torch.nn.Module,
    stage: int = 3,
    ranks: int = 2,
    frozen: str | None = None,
) -> Path:
    """Write a run of DeepSpeed's on a model, its config beside it."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    rest = {name: weight for name, weight in named.items() if frozen and frozen in name}
    trained = {name: weight.float() for name, weight in named.items() if name not in rest}
    write_zero(folder / "global_step3", stage, ranks, [trained], frozen=rest)
    (folder / "latest").write_text("global_step3")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_with_frozen_weights_has_one_dtype_and_the_config_says_it(tmp_path, stage):
    # Case CONS-08
    model = tiny_model("Lt").bfloat16()
    path = write_run(tmp_path / "run", model, stage, frozen="mlp")
    for asked, dtype in ((None, "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
        out = consolidate(path, tmp_path / str(asked), dtype=asked)
        found = load_file(out / FILE)
        assert {weight.dtype for weight in found.values()} == {getattr(torch, dtype)}
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        for name, weight in found.items():
            # What was bf16 is the same number in both.
            assert torch.equal(weight.bfloat16(), model.state_dict()[name]), name


@pytest.mark.parametrize("ranks", [2, 12])
def test_layer_10_follows_layer_9_and_rank_10_follows_rank_9(tmp_path, ranks):
    # Case CONS-17
    sizes = {"num_experts": 12, "num_hidden_layers": 11, "hidden_size": 16, "head_dim": 4}
    model = tiny_model("M", **sizes)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            # Its own index, its part and its place in it: a wrong order cannot look right.
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 2**13 + index)
    path = write_run(tmp_path / "run", model, ranks=ranks)
    dcp = convert(path, tmp_path / "dcp", "dcp", ranks)
    for number, source in enumerate((path, dcp, convert(dcp, tmp_path / "two", "dcp", 11))):
        out = consolidate(source, tmp_path / str(number), config=path, max_shard_size="20KB")
        loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(report.values()), report
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded.state_dict()[name], parameter), name


def test_a_ramp_stays_a_ramp_from_layout_to_layout(tmp_path):
    # Case RESH-02: every element is its place in the model, every moment the negative of it.
    model = tiny_model("L")
    with torch.no_grad():
        first = 0
        for parameter in model.parameters():
            last = first + parameter.numel()
            parameter.copy_(torch.arange(first, last, dtype=torch.float32).view(parameter.shape))
            first = last
    assert first == 23_904
    path = write_run(tmp_path / "0", model, ranks=3)
    hops = (
        (FSDP2(), 4, False),
        (ZeRO2(), 2, False),
        (ZeRO3(), 4, True),
        (ZeRO3(sub_group_size=1_000), 3, True),
        (DDP(), 1, False),
    )
    for number, (strategy, ranks, native) in enumerate(hops):
        out = tmp_path / str(number + 1)
        path = distft.reshard(path, out, strategy, ranks, native=native)
        found = read_map(path)
        for name, parameter in model.named_parameters():
            assert torch.equal(values(path, found.tensors[name]), parameter)
            for key in MOMENTS:
                held = values(path, found.optimizer.moments[name][key])
                assert torch.equal(held, moment(parameter, key)), (name, key)
        assert set(found.optimizer.steps.values()) == {3.0}


def stored(folder: Path, name: str, tensor: torch.Tensor) -> LogicalTensor:
    """Store a tensor in a file of its own and describe it."""
    (folder / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)[6:]
    return LogicalTensor(name, shape, dtype, [Piece(name, 0, (0,) * tensor.dim(), shape)])


def write_native(folder: Path, tensors: dict[str, torch.Tensor], trained: str, step: float) -> Path:
    """Write ZeRO-3's files of 3 ranks, one parameter trained and the others frozen."""
    raw = folder.parent / "raw"
    raw.mkdir()
    held = {name: stored(raw, name, tensor) for name, tensor in tensors.items()}
    state = OptimizerState(
        "AdamW",
        {trained: dict.fromkeys(MOMENTS, held[trained])},
        {trained: step},
        [ParamGroup({"lr": 0.1}, [trained])],
    )
    found = ShardMap(raw, "dcp", held, optimizer=state, frozen=frozenset(held) - {trained}, step=3)
    folder.mkdir()
    plan_zero3(found, state.groups, 3, "tag", bf16=True).write(raw, folder, RAM)
    (folder / LATEST).write_text("tag")
    return folder


def test_packed_bytes_are_the_same_at_every_stage(tmp_path):
    # Case QLORA-03, the files: read as bf16, packed nibbles are numbers that are none.
    patterns = torch.tensor([0x7FC1, 0xFFFF, 0xFF81, 0x7F80, 0x0001, 0x8000], dtype=torch.int32)
    packed = patterns.to(torch.int16).repeat(40)
    tensors = {
        "layer.weight": packed.view(torch.bfloat16).view(-1, 1),
        "layer.weight.absmax": torch.arange(15, dtype=torch.uint8),
        "layer.weight.quant_state.bitsandbytes__nf4": torch.arange(250, dtype=torch.uint8),
        "lora": torch.ones(4, 3),
    }
    path = write_native(tmp_path / "0", tensors, "lora", 3)
    path = convert(path, tmp_path / "1", "dcp", 4)
    path = convert(path, tmp_path / "2", "zero3", 2)
    path = convert(path, tmp_path / "3", "deepspeed")
    path = convert(path, tmp_path / "4", "dcp", 3)
    found = load_file(convert(path, tmp_path / "5") / FILE)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_counter_beyond_256_is_kept_where_everything_else_is_bf16(tmp_path):
    # Case RESH-09
    tensors = {"weight": torch.ones(4, 3, dtype=torch.bfloat16)}
    path = write_native(tmp_path / "0", tensors, "weight", 301)
    for number, format in enumerate(("dcp", "deepspeed", "zero3")):
        path = convert(path, tmp_path / str(number + 1), format)
        assert read_map(path).optimizer.steps == {"weight": 301.0}
    path = convert(path, tmp_path / "last", "dcp")
    assert torch.equal(values(path, read_map(path).tensors["weight"]).float(), torch.ones(4, 3))


# ---- what is refused before the first byte ------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of DeepSpeed on 2 ranks."""
    return write_run(tmp_path_factory.mktemp("run") / "zero", tiny_model("L"))


def test_a_tensor_that_the_config_asks_for_and_that_is_missing_is_named(run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    for changes, says in (
        ({"num_hidden_layers": 3}, r"in 9 places: model\.layers\.2\.\S+ of shape .* is missing"),
        ({"vocab_size": 137}, r"embed_tokens\.weight has the shape \(131, 32\), and .*\(137, 32\)"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight has the shape \(16, 32\), and .*\(8, 32\)"),
    ):
        with pytest.raises(ValueError, match=says):
            consolidate(run, tmp_path / "out", config={**config, **changes})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["M", "X", "G"])
def test_experts_are_published_and_compared_with_the_config_in_every_layout(tmp_path, name):
    # Case CONS-16
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "published")
    torch.save(model.state_dict(), tmp_path / "published" / "fused.pt")
    for source in ("published", "published/fused.pt"):
        out = consolidate(tmp_path / source, tmp_path / "out")
        found, expected = load_file(out / FILE), load_file(tmp_path / "published" / FILE)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        config = json.loads((out / "config.json").read_text())
        more = {
            key: config[key] + 1 for key in ("num_experts", "num_local_experts") if key in config
        }
        with pytest.raises(ValueError, match=r"experts have \d+ elements, and config.json asks"):
            consolidate(tmp_path / source, tmp_path / "no", config={**config, **more})
        shutil.rmtree(out)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_placeholders_of_one_rank_are_not_taken_for_weights(tmp_path, format):
    # Case CONS-11: what the state dict of a stage-3 engine's module holds on each rank.
    state = {name: torch.empty(0) for name in tiny_model("L").state_dict()}
    # One file of weights, into a folder beside it.
    torch.save({**state, "count": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"21 of 22 tensors .*have no element, such as model\.embed"
    ):
        convert(tmp_path / "pytorch_model.bin", tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


WRITERS = {
    "consolidate": consolidate,
    "safetensors": partial(convert, format="safetensors"),
    "dcp": partial(convert, format="dcp"),
    "deepspeed": partial(convert, format="deepspeed"),
    "zero3": partial(convert, format="zero3"),
    "reshard": partial(distft.reshard, strategy="fsdp2", world_size=2),
    "reshard to zero": partial(distft.reshard, strategy="zero2", world_size=2),
    "reshard natively": partial(distft.reshard, strategy="zero3", world_size=2, native=True),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_too_small_is_found_before_the_first_byte(
    run, tmp_path, monkeypatch, writer
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 50_000, 50_000))
    with pytest.raises(
        ValueError, match=r"needs \d+ bytes, and its disk has 50000 free\. Make room"
    ):
        WRITERS[writer](run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_too_little_memory_says_how_much_is_enough(run, tmp_path, writer):
    with pytest.raises(ValueError, match=r"max_ram is 900000 bytes, and (\d+) are needed") as error:
        WRITERS[writer](run, tmp_path / "out", max_ram=900_000)
    assert list(tmp_path.iterdir()) == []
    enough = int(str(error.value).split(", and ")[1].split()[0])
    try:
        WRITERS[writer](run, tmp_path / "out", max_ram=enough)
    except ValueError as still:
        # Archives in several steps: the largest of them was not the first.
        more = int(str(still).split(", and ")[1].split()[0])
        assert more > enough
        WRITERS[writer](run, tmp_path / "out", max_ram=more)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_folder_inside_the_base_is_refused(run, tmp_path):
    from peft import LoraConfig, get_peft_model

    tiny_model("L").save_pretrained(tmp_path / "base")
    model = get_peft_model(tiny_model("L"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"lies inside the base"):
        consolidate(tmp_path / "adapter", tmp_path / "base" / "in", base=tmp_path / "base")
    assert not (tmp_path / "base" / "in").exists()
