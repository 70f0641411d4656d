"""Torch files read without torch: every tensor where torch put it, and nothing else runs."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from distft.checkpoint.readers.state_dict import read_state_dict
from distft.checkpoint.readers.torch_zip import TorchZip, opened, read_torch_file
from distft.checkpoint.readers.unpickle import ALLOWED, StandIn, StoredTensor
from distft.checkpoint.shards import ITEM_BYTES
from tests.reading import values


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_is_found_where_torch_put_it(tmp_path, name):
    data = torch.arange(48, dtype=torch.uint8)
    whole = data.view(getattr(torch, name)) if name != "bool" else data > 5
    torch.save({"w": whole, "part": whole[1:3]}, tmp_path / "w.pt")
    found = read_state_dict(tmp_path / "w.pt")
    assert found.check() == []
    for key, expected in {"w": whole, "part": whole[1:3]}.items():
        tensor = found.tensors[key]
        assert (tensor.dtype, tensor.shape) == (name, tuple(expected.shape))
        assert bytes(values(tmp_path, tensor).view(torch.uint8).numpy()) == bytes(
            expected.contiguous().view(torch.uint8).numpy()
        )


def test_views_that_are_not_contiguous_are_read_as_they_are(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    views = {"t": base.t(), "columns": base[:, 1:3], "one": base[2, 3], "rows": base[1:3]}
    views["expanded"] = base[:, :1].expand(4, 3)
    torch.save(views, tmp_path / "w.pt")
    found = read_state_dict(tmp_path / "w.pt")
    for name, view in views.items():
        assert torch.equal(values(tmp_path, found.tensors[name]), view)


def test_tied_tensors_are_kept_once_and_equal_ones_twice(tmp_path):
    tied, empty = torch.ones(3), torch.zeros(0)
    torch.save(
        {"model": {"a": tied, "b": tied, "c": tied.clone(), "d": empty, "e": empty}},
        tmp_path / "w.pt",
    )
    found = read_state_dict(tmp_path / "w.pt")
    assert found.ties == {"b": "a"}
    assert list(found.tensors) == ["a", "c", "d", "e"]


def test_a_state_dict_of_several_files_is_one(tmp_path):
    for number, name in enumerate("ab"):
        torch.save({name: torch.full((2,), float(number))}, tmp_path / f"{number}.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"a": "0.bin", "b": "1.bin"}}')
    found = read_state_dict(tmp_path)
    assert values(tmp_path, found.tensors["b"]).tolist() == [1.0, 1.0]
    assert set(found.files) == {"0.bin", "1.bin"}
    (tmp_path / "1.bin").unlink()
    with pytest.raises(ValueError, match=r"names 1\.bin, .* \(1 of 2 are missing\)"):
        read_state_dict(tmp_path)


def test_what_torch_does_not_list_becomes_an_inert_object(tmp_path):
    value = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "w": torch.nn.Parameter(torch.ones(1)),
    }
    torch.save(value, tmp_path / "x.pt")
    found = read_torch_file(tmp_path, "x.pt")
    assert isinstance(found["device"], StandIn)
    assert found["device"].args == ("cpu",)
    assert found["dtype"].asked == "torch.float32"
    assert isinstance(found["w"], StoredTensor)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_name_that_could_run_code_is_refused_and_does_not_run(tmp_path, protocol):
    marker = tmp_path / "it-ran"
    torch.save(
        {"w": torch.ones(1), "x": Payload(marker)}, tmp_path / "x.pt", pickle_protocol=protocol
    )
    with pytest.raises(
        ValueError, match=rf"x\.pt asks to load posix\.mkdir, .* {len(ALLOWED)} names"
    ):
        read_torch_file(tmp_path, "x.pt")
    assert not marker.exists()


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    # The shape (3,) in the pickle, as a tuple of one small number.
    assert data.count(b"K\x03\x85q") == 1
    (tmp_path / "x.pt").write_bytes(data.replace(b"K\x03\x85q", b"K\x05\x85q"))
    with pytest.raises(
        ValueError, match=r"shape \(5,\) needs 20 bytes of the storage 0, which has 12"
    ):
        read_torch_file(tmp_path, "x.pt")


def test_the_older_format_a_compressed_zip_and_a_program_are_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="does not start as a torch file does"):
        read_torch_file(tmp_path, "old.pt")
    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("small/data.pkl", pickle.dumps([1] * 1000))
    with pytest.raises(ValueError, match=r"data\.pkl is compressed"):
        read_torch_file(tmp_path, "small.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        archive.writestr("x/constants.pkl", b"")
    with pytest.raises(ValueError, match="TorchScript"):
        read_torch_file(tmp_path, "x.pt")


@pytest.mark.parametrize("keep", [0, 3, 30, 200, -1, -25])
def test_a_truncated_file_is_refused(tmp_path, keep):
    torch.save({"w": torch.ones(200)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()[:keep]
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ValueError, match=rf"\({len(data)} bytes\) is not a whole file"):
        read_torch_file(tmp_path, "x.pt")


def test_a_flipped_byte_is_found_by_the_record_it_is_in(tmp_path):
    torch.save({"w": torch.ones(200), "v": torch.zeros(9)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(b"\x00\x00\x80\x3f")] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with opened(tmp_path / "x.pt") as descriptor:
        found = TorchZip(tmp_path / "x.pt", "x.pt", descriptor)
        assert found.broken_records() == ["data/0"]
        assert found.has_checksums()


def test_sizes_of_64_bits_are_read(tmp_path):
    # A file of more than 4 GB in small: the same fields with the marks that send to the wide ones.
    torch.save({"w": torch.arange(5)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    end = data.rindex(b"PK\x05\x06")
    count, _, offset = struct.unpack_from("<HII", data, end + 10)
    wide, at = b"", offset
    for _ in range(count):
        head = bytearray(data[at : at + 46])
        packed, plain, names, extra, comment = struct.unpack_from("<IIHHH", head, 20)
        header = struct.unpack_from("<I", head, 42)[0]
        field = struct.pack("<HHQQQ", 1, 24, plain, packed, header)
        struct.pack_into("<IIHHH", head, 20, 0xFFFFFFFF, 0xFFFFFFFF, names, len(field), 0)
        struct.pack_into("<I", head, 42, 0xFFFFFFFF)
        wide += bytes(head) + data[at + 46 : at + 46 + names] + field
        at += 46 + names + extra + comment
    body = data[:offset] + wide
    end_64 = struct.pack(
        "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(wide), offset
    )
    locator = struct.pack("<IIQI", 0x07064B50, 0, len(body), 1)
    last = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "x.pt").write_bytes(body + end_64 + locator + last)
    assert torch.load(tmp_path / "x.pt")["w"].tolist() == [0, 1, 2, 3, 4]
    found = read_state_dict(tmp_path / "x.pt")
    assert values(tmp_path, found.tensors["w"]).tolist() == [0, 1, 2, 3, 4]
