"""Files of torch.save of other tools, compared with the CRC-32 in them before they are used."""

from __future__ import annotations

import pytest
import torch

import distft
from distft.checkpoint.readers.dcp import read_items
from distft.checkpoint.records import check_records, refuse_broken_records
from distft.commands import main


@pytest.fixture
def damaged(tmp_path):
    """A file of weights in which one bit of a number is another."""
    file = tmp_path / "w.pt"
    torch.save({"w": torch.ones(64), "v": torch.zeros(3)}, file)
    data = bytearray(file.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f") + 20] ^= 4
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_checked_conversion_writes_nothing_of_a_damaged_file(damaged, tmp_path, to):
    with pytest.raises(ValueError, match=r"w\.pt is damaged in its record data/0 \(1 in all\)"):
        distft.convert(damaged, tmp_path / "out", to, check=True)
    assert not (tmp_path / "out").exists()
    distft.convert(damaged, tmp_path / "out", to)


def test_the_command_line_checks_where_it_is_told(damaged, tmp_path, capsys):
    assert main(["convert", str(damaged), str(tmp_path / "out"), "--check"]) != 0
    assert "damaged in its record data/0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_and_parts_of_tensors_are_told_apart_and_counted(damaged, tmp_path):
    torch.save({"w": torch.ones(64)}, tmp_path / "well.pt")
    size = (tmp_path / "well.pt").stat().st_size
    found = check_records(tmp_path, ["well.pt", "w.pt"])
    assert found[0] == ([], size)
    assert found[1][0] == ["w.pt is damaged in its record data/0"]
    refuse_broken_records(tmp_path, ["well.pt"])


def test_a_flipped_bit_in_a_part_of_a_distributed_checkpoint_is_found(tmp_path):
    well = tmp_path / "w.pt"
    torch.save({"w": torch.ones(64)}, well)
    distft.convert(well, tmp_path / "dcp", "dcp")
    tensors = list(read_items(tmp_path / "dcp", tmp_path / "dcp").tensors.values())
    refuse_broken_records(tmp_path / "dcp", [], tensors)
    [file] = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(b"\x00\x00\x80\x3f") + 20] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"w is damaged at byte 0 of __0_0\.distcp"):
        refuse_broken_records(tmp_path / "dcp", [], tensors)
