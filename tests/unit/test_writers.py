"""What the writers write, others read: torch, safetensors, zipfile."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.writers.dcp import plan_dcp
from distft.checkpoint.writers.pickled import Global, Stored, ordered, size_of
from distft.checkpoint.writers.safetensors import Published, plan_files
from distft.checkpoint.writers.torch_zip import Archives

MIB = 2**20


@pytest.fixture
def source(tmp_path):
    """Return a function that stores a tensor in a file of its own and describes it."""
    folder = tmp_path / "source"
    folder.mkdir()

    def store(name: str, tensor: torch.Tensor) -> LogicalTensor:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        (folder / name).write_bytes(raw)
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        return LogicalTensor(name, shape, dtype, [Piece(name, 0, (0,) * len(shape), shape)])

    store.folder = folder
    return store


TENSORS = {
    "weight": torch.arange(35.0).reshape(7, 5),
    "half": torch.arange(12.0).bfloat16().reshape(3, 4),
    "one": torch.tensor(2.5),
    "count": torch.tensor([16_777_217]),
    "flags": torch.tensor([True, False, True]),
}


def test_safetensors_reads_every_dtype_and_each_tensor_lies_where_its_items_may(source, tmp_path):
    published = []
    for name, tensor in TENSORS.items():
        stored = source(name, tensor)
        published.append(Published(name, stored.shape, stored.dtype, stored))
    files = plan_files(published, 10**9)
    files.write(source.folder, tmp_path, 50 * MIB)
    assert list(files.sizes) == ["model.safetensors"]
    assert files.index is None
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert all(part.offset % min(8, part.tensor.item_bytes) == 0 for part in files.outputs)


@pytest.mark.parametrize(("size", "number"), [(1, 4), (100, 3), (180, 2), (1000, 1)])
def test_files_are_split_as_save_pretrained_does(source, tmp_path, size, number):
    # Case CONS-18
    published = [
        Published(f"w{at}", (elements,), "float32", source(f"w{at}", torch.ones(elements)))
        for at, elements in enumerate((30, 10, 15, 20))
    ]
    files = plan_files(published, size)
    files.write(source.folder, tmp_path, 50 * MIB)
    there = sorted(tmp_path.glob("*.safetensors"))
    assert len(there) == number
    tensors = {}
    for file in there:
        part = load_file(file)
        assert part
        tensors |= {name: file.name for name in part}
    assert len(tensors) == 4
    if number == 1:
        assert there[0].name == "model.safetensors"
        return
    assert there[-1].name == f"model-{number:05d}-of-{number:05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == tensors
    assert index["metadata"]["total_size"] == 300


def test_a_tensor_without_elements_is_refused_by_name(source):
    # Case CONS-11
    empty = Published("gone.weight", (0,), "float32", source("gone", torch.empty(0)))
    good = Published("w", (2,), "float32", source("w", torch.ones(2)))
    with pytest.raises(ValueError, match=r"1 of 2 tensors have no element, such as gone\.weight"):
        plan_files([good, empty], 10**9)
    with pytest.raises(ValueError, match="w would be written twice"):
        plan_files([good, good], 10**9)


VALUES = {
    "plain": [None, True, False, 0, 255, 256, -1, 2**40, -(2**70), 1.5, "ä", (1, 2), [], {}],
    "size": size_of((2, 3)),
    "ordered": ordered({"b": 1, "a": (2,)}),
}


def test_torch_loads_an_archive_with_nothing_but_weights_allowed(source, tmp_path):
    archives = Archives()
    state = {
        name: Stored(str(t.dtype)[6:], tuple(t.shape), source(name, t))
        for name, t in TENSORS.items()
    }
    archives.add("state.pt", {**VALUES, "dtype": Global("torch", "bfloat16"), **state})
    archives.write(source.folder, tmp_path, 50 * MIB)
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert found["plain"] == VALUES["plain"]
    assert found["size"] == torch.Size((2, 3))
    assert list(found["ordered"].items()) == [("b", 1), ("a", (2,))]
    assert found["dtype"] is torch.bfloat16
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert archive.testzip() is None


def test_a_value_that_is_no_plain_one_is_refused():
    with pytest.raises(ValueError, match="plain values and tensors, and got a complex"):
        Archives().add("state.pt", {"x": 1j})
    with pytest.raises(ValueError, match="A tensor is float8_e5m2"):
        Archives().add("state.pt", Stored("float8_e5m2", (1,), b"0"))


def test_an_archive_beyond_4_gib_has_wide_sizes_and_offsets(tmp_path):
    size = (1 << 32) + 5
    make = tmp_path / "source"
    with make.open("wb") as file:
        file.truncate(size)
        file.seek(size - 1)
        file.write(b"\x07")
    long = LogicalTensor("x", (size,), "uint8", [Piece("source", 0, (0,), (size,))])
    archives = Archives()
    archives.add("state.pt", [Stored("uint8", (size,), long), Stored("uint8", (2,), b"ab")])
    # Laid out, not written: the file would take 4 GiB.
    with (tmp_path / "state.pt").open("wb") as file:
        file.truncate(archives.sizes["state.pt"])
        for _, offset, data in archives.fixed:
            file.seek(offset)
            file.write(data)
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
        assert sizes["archive/data/0"] == size
        assert archive.getinfo("archive/data/1").header_offset > 1 << 32
        assert archive.read("archive/data/1") == b"ab"
    found = torch.load(tmp_path / "state.pt", mmap=True, weights_only=True)
    assert found[0].shape == (size,)
    assert found[1].tolist() == [97, 98]


# One process is what is wanted here.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("num_files", [1, 2, 3, 9])
def test_torchs_own_loader_reads_a_distributed_checkpoint(source, tmp_path, num_files):
    items = {name: source(name, tensor) for name, tensor in TENSORS.items()}
    items["step"] = Stored("float32", (), np.float32(3).tobytes())
    out = tmp_path / "dcp"
    out.mkdir()
    plan_dcp(items, num_files).write(source.folder, out, 50 * MIB)
    assert len(list(out.glob("*.distcp"))) == min(num_files, 7)
    expected = {**TENSORS, "step": torch.tensor(3.0)}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
