"""Consolidating, resharding and comparing folders that our own writers made: no ranks, no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distft.checkpoint.consolidation import consolidate
from distft.checkpoint.difference import diff
from distft.checkpoint.readers import read_map
from distft.checkpoint.resharding import Source, reshard_checkpoint
from distft.checkpoint.safetensors_reader import list_tensors
from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.stream import Stream
from distft.checkpoint.writers.dcp import plan_dcp
from distft.checkpoint.writers.pickled import Stored
from distft.checkpoint.writers.torch_zip import Archives
from distft.commands import main
from distft.mesh import Mesh

RAM = 50_000_000
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
SHAPES = {
    "model.embed_tokens.weight": (13, 6),
    "model.layers.0.mlp.up_proj.weight": (5, 6),
    "model.norm.weight": (6,),
    "lm_head.weight": (13, 6),
}
MOE = {
    "mlp.experts.gate_up_proj": (3, 4, 2),
    "mlp.experts.down_proj": (3, 2, 2),
    "mlp.gate.weight": (3, 2),
}


def values(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return fp32 numbers, every one another."""
    chance = np.random.default_rng(0)
    return {name: chance.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_dcp(folder: Path, arrays: dict[str, np.ndarray], num_files: int = 2) -> Path:
    """Write arrays as a distributed checkpoint of torch's."""
    folder.mkdir()
    items = {name: described(folder.parent, name, array) for name, array in arrays.items()}
    plan_dcp(items, num_files).write(folder.parent, folder, RAM)
    return folder


def described(folder: Path, name: str, array: np.ndarray) -> LogicalTensor:
    """Store an array in a file of its own and describe it."""
    (folder / f"{name}.raw").write_bytes(array.tobytes())
    start = (0,) * array.ndim
    return LogicalTensor(
        name, array.shape, "float32", [Piece(f"{name}.raw", 0, start, array.shape)]
    )


def published(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor in a folder of safetensors."""
    found = {}
    for name, tensor in list_tensors(folder).items():
        size = tensor.num_elements * {"F32": 4, "BF16": 2}[tensor.dtype]
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            found[name] = (tensor.dtype, tensor.shape, file.read(size))
    return found


def as_fp32(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: ("F32", array.shape, array.tobytes()) for name, array in arrays.items()}


def test_a_folder_of_torch_becomes_the_same_tensors_in_files_of_a_size(tmp_path):
    arrays = values(SHAPES)
    source = write_dcp(tmp_path / "dcp", {f"model.{name}": a for name, a in arrays.items()})
    out = consolidate(source, tmp_path / "out", max_shard_size=400, config=LLAMA, max_ram=RAM)
    assert published(out) == as_fp32(arrays)
    assert len(list(out.glob("model-0000?-of-00003.safetensors"))) == 3
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert not diff(source, out).changed
    again = consolidate(out, tmp_path / "again", dtype="bfloat16")
    assert {dtype for dtype, *_ in published(again).values()} == {"BF16"}
    assert json.loads((again / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(file.name for file in again.iterdir()) == ["config.json", "model.safetensors"]


def test_experts_are_published_one_by_one_where_the_family_does_so(tmp_path):
    # Case CONS-16
    arrays = values({f"model.layers.0.{name}": shape for name, shape in MOE.items()})
    source = write_dcp(tmp_path / "dcp", arrays)
    config = {"architectures": ["Qwen3MoeForCausalLM"]}
    found = published(consolidate(source, tmp_path / "out", config=config))
    head = "model.layers.0.mlp"
    gate_up, down = arrays[f"{head}.experts.gate_up_proj"], arrays[f"{head}.experts.down_proj"]
    expected = {f"{head}.gate.weight": arrays[f"{head}.gate.weight"]}
    for expert in range(3):
        name = f"{head}.experts.{expert}"
        expected[f"{name}.gate_proj.weight"] = gate_up[expert, :2]
        expected[f"{name}.up_proj.weight"] = gate_up[expert, 2:]
        expected[f"{name}.down_proj.weight"] = down[expert]
    assert found == as_fp32(expected)
    fused = {"architectures": ["GptOssForCausalLM"]}
    assert published(consolidate(source, tmp_path / "fused", config=fused)) == as_fp32(arrays)


def test_of_tied_embeddings_one_is_written_and_two_different_ones_are_refused(tmp_path):
    # Case CONS-03
    arrays = values(SHAPES)
    tied = {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    config = {**LLAMA, "tie_word_embeddings": True}
    out = consolidate(write_dcp(tmp_path / "tied", tied), tmp_path / "out", config=config)
    assert set(published(out)) == set(SHAPES) - {"lm_head.weight"}
    source = write_dcp(tmp_path / "apart", arrays)
    with pytest.raises(ValueError, match=r"holds lm_head\.weight and model\.embed_tokens\.weight"):
        consolidate(source, tmp_path / "never", config=config)
    assert not (tmp_path / "never").exists()


def test_names_are_changed_as_asked_and_never_to_one_that_is_taken(tmp_path):
    source = write_dcp(tmp_path / "dcp", values(SHAPES))
    out = consolidate(source, tmp_path / "out", rename={r"^model\.": "base."})
    assert "base.norm.weight" in published(out)
    with pytest.raises(ValueError, match=r"would be written twice"):
        consolidate(source, tmp_path / "never", rename=lambda _: "one")
    assert not (tmp_path / "never").exists()


def test_too_little_memory_is_refused_with_what_would_do(tmp_path):
    source = write_dcp(tmp_path / "dcp", values(SHAPES))
    with pytest.raises(ValueError, match=r"max_ram is 1000000 bytes, and \d+ are needed"):
        consolidate(source, tmp_path / "out", max_ram="1MB")
    assert not (tmp_path / "out").exists()


def test_a_source_that_ends_early_leaves_the_folder_of_before_as_it_was(tmp_path):
    source = write_dcp(tmp_path / "dcp", values(SHAPES))
    out = consolidate(source, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    found = read_map(source)
    short = source / "__1_0.distcp"
    assert found.files[short.name] == short.stat().st_size
    os.truncate(short, short.stat().st_size // 2)
    with pytest.raises((ValueError, RuntimeError), match=r"__1_0\.distcp"):
        consolidate(source, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_fresh_process_needs_neither_torch_nor_transformers(tmp_path):
    source = write_dcp(tmp_path / "dcp", values(SHAPES))
    code = (
        "import sys, distft; distft.consolidate(*sys.argv[1:], dtype='bfloat16');"
        "print(sorted({'torch', 'transformers', 'safetensors', 'peft'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", code, source, tmp_path / "out"]
    done = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_what_is_copied_as_it_lies_needs_no_numpy_either(tmp_path):
    source = write_dcp(tmp_path / "dcp", values(SHAPES))
    code = "import sys, distft; distft.consolidate(*sys.argv[1:]); print('numpy' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code, source, tmp_path / "out"]
    done = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True)
    assert done.stdout == "False\n"


# ---- resharding ---------------------------------------------------------------------------------


class Sharded:
    """A layout, and as much of a strategy as resharding asks for."""

    name, precision = "fsdp2", "fp32"

    def __init__(self, layout: str = "dcp") -> None:
        self.layout = layout

    def __repr__(self) -> str:
        return "FSDP2()"

    def mesh(self, world_size: int | None = None) -> Mesh:
        return Mesh(dp_shard=world_size or 1)


def write_zero3(folder: Path, ranks: int) -> dict[str, np.ndarray]:
    """Write a folder as DeepSpeed's stage 3 does, two groups, three steps; return what it holds."""
    arrays = {}
    kinds = ("", "exp_avg", "exp_avg_sq")
    for number, kind in enumerate(kinds):
        for name, array in values(SHAPES).items():
            arrays[f"optimizer.{name}.{kind}" if kind else name] = array * (number + 1)
    names = list(SHAPES)
    archives = Archives()
    for rank in range(ranks):
        flat = {kind: [[], []] for kind in kinds}
        for place, name in enumerate(names):
            for kind in kinds:
                array = arrays[f"optimizer.{name}.{kind}" if kind else name].reshape(-1)
                per_rank = -(-array.size // ranks)
                part = np.zeros(per_rank, np.float32)
                mine = array[rank * per_rank : (rank + 1) * per_rank]
                part[: mine.size] = mine
                flat[kind][place // 2].append(part)
        vectors = {kind: [np.concatenate(group) for group in flat[kind]] for kind in kinds}
        stored = {
            kind: [Stored("float32", v.shape, v.tobytes()) for v in vectors[kind]] for kind in kinds
        }
        state = {
            group: {
                "step": Stored("float32", (), np.float32(3).tobytes()),
                "exp_avg": stored["exp_avg"][group],
                "exp_avg_sq": stored["exp_avg_sq"][group],
            }
            for group in (0, 1)
        }
        groups = [{"lr": 0.5 - group, "betas": (0.9, 0.99), "params": [group]} for group in (0, 1)]
        optimizer = {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": stored[""],
            "optimizer_state_dict": {"state": state, "param_groups": groups},
        }
        file = f"step/zero_pp_rank_{rank}_mp_rank_00"
        archives.add(f"{file}_optim_states.pt", {"optimizer_state_dict": optimizer})
        model = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [
                {name: SHAPES[name] for name in names[:2]},
                {name: SHAPES[name] for name in names[2:]},
            ],
            "shared_params": {},
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "dp_world_size": ranks,
            "global_steps": 3,
            "ds_config": {"optimizer": {"type": "AdamW"}},
            "ds_version": "0.19.8",
        }
        archives.add(f"{file}_model_states.pt", model)
    folder.mkdir()
    archives.write(folder, folder, RAM)
    (folder / "latest").write_text("step")
    return arrays


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a checkpoint, moments as ``optimizer.<name>.<moment>``."""
    found = read_map(folder)
    named = dict(found.tensors)
    for name, moments in found.optimizer.moments.items():
        named |= {f"optimizer.{name}.{key}": moment for key, moment in moments.items()}
    with Stream(found.root, 1 << 16) as stream:
        return {
            name: np.frombuffer(
                b"".join(bytes(window) for _, window in stream.windows(tensor, tensor.dtype)),
                np.float32,
            ).reshape(tensor.shape)
            for name, tensor in named.items()
        }


def equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return set(found) == set(expected) and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_run_of_zero_goes_on_elsewhere_with_moments_counters_and_settings(tmp_path, ranks):
    expected = write_zero3(tmp_path / "zero", ranks)
    assert equal(read(tmp_path / "zero"), expected)
    out = reshard_checkpoint(Source.read(tmp_path / "zero"), tmp_path / "out", Sharded(), 3)
    assert equal(read(out), expected)
    found = read_map(out)
    assert found.step == 3
    assert set(found.optimizer.steps.values()) == {3.0}
    assert [(g.settings["lr"], len(g.names)) for g in found.optimizer.groups] == [
        (0.5, 2),
        (-0.5, 2),
    ]
    assert found.optimizer.kind == "AdamW"
    assert len(list((out / "dcp").glob("*.distcp"))) == 3
    assert diff(tmp_path / "zero", out).same
    zero = reshard_checkpoint(Source.read(out), tmp_path / "zero-2", Sharded("deepspeed"), 2)
    assert (zero / "deepspeed" / "latest_universal").read_text() == "state"
    assert diff(out, zero).same
    assert equal(read(zero), expected)
    out = reshard_checkpoint(Source.read(zero), tmp_path / "again", Sharded(), 2)
    back = reshard_checkpoint(Source.read(out), tmp_path / "back", Sharded(), 1)
    assert diff(out, back).same
    assert equal(read(back), expected)
    weights = consolidate(back, tmp_path / "weights")
    assert published(weights) == as_fp32({n: expected[n] for n in SHAPES})


def test_what_is_not_the_same_is_named(tmp_path):
    write_zero3(tmp_path / "one", 2)
    Source.read(tmp_path / "one")
    write_zero3(tmp_path / "two", 2)
    file = tmp_path / "two" / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    piece = next(iter(read_map(tmp_path / "two").tensors["model.norm.weight"].pieces()))
    data = bytearray(file.read_bytes())
    data[piece.offset : piece.offset + 4] = np.float32(100).tobytes()
    file.write_bytes(data)
    found = diff(tmp_path / "one", tmp_path / "two")
    assert list(found.changed) == ["model.norm.weight"]
    assert 95 < found.changed["model.norm.weight"].largest < 105
    assert not found.same
    assert "1 differ: model.norm.weight differs by up to" in str(found)


def test_a_reshard_writes_over_nothing_and_rounds_nothing(tmp_path):
    write_zero3(tmp_path / "zero", 2)
    source = Source.read(tmp_path / "zero")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ValueError, match=r"used holds 1 files or folders.*Choose a new folder"):
        reshard_checkpoint(source, tmp_path / "used", Sharded(), 2)
    rounding = Sharded()
    rounding.precision = "bf16"
    with pytest.raises(ValueError, match=r"was trained in 'fp32', and FSDP2\(\) trains in 'bf16'"):
        reshard_checkpoint(source, tmp_path / "out", rounding, 2)
    with pytest.raises(ValueError, match=r"lies inside the checkpoint"):
        reshard_checkpoint(source, tmp_path / "zero" / "in", Sharded(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used", "zero"]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_command_line_says_how_much_state_it_wrote(tmp_path, capsys, strategy):
    expected = write_zero3(tmp_path / "zero", 2)
    paths = [str(tmp_path / "zero"), str(tmp_path / "out")]
    assert main(["reshard", *paths, "--strategy", strategy, "--world-size", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["weight_bytes"] > sum(array.nbytes for array in expected.values())


def test_a_checkpoint_without_an_optimizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds 4 tensors and no state of an optimizer"):
        Source.read(write_dcp(tmp_path / "dcp", values(SHAPES)))
