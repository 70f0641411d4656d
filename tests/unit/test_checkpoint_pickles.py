"""A file that asks for more than tensors is refused, and nothing in it runs."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from distft.checkpoint.pickles import load_values, refuse_code, refuse_code_in_pickle


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path) -> Path:
    """Return a folder that exists only if a payload ran."""
    return tmp_path / "it-ran"


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "file.pt"


@pytest.mark.parametrize("check", [refuse_code, load_values])
def test_tensors_and_plain_values_are_let_through(file, check):
    value = {
        "tensors": OrderedDict(a=torch.ones(2), b=torch.zeros(3, dtype=torch.bfloat16)),
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
        "shape": torch.Size([2, 3]),
        "dtype": torch.float32,
        "plain": [1, 2.5, "x", None, True, {1, 2}, (3, 4)],
    }
    torch.save(value, file)
    check(file)


@pytest.mark.parametrize("check", [refuse_code, load_values])
def test_a_name_in_a_torch_file_that_could_run_code_is_refused(file, marker, check):
    torch.save({"weights": torch.ones(2), "more": Payload(marker)}, file)
    with pytest.raises(ValueError, match=r"file\.pt asks to load posix\.mkdir, .* 58 names"):
        check(file)
    assert not marker.exists()


@pytest.mark.parametrize("check", [refuse_code, load_values])
def test_the_older_torch_format_of_many_pickles_is_refused(file, marker, check):
    # Its first pickle is a harmless number, and torch.load goes on to the others.
    torch.save(Payload(marker), file, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"\d+ bytes\) is not a whole file of a checkpoint"):
        check(file)
    assert not marker.exists()


@pytest.mark.parametrize("check", [refuse_code, load_values])
def test_a_pickle_with_a_harmless_zip_behind_it_is_refused(file, marker, check):
    # Python finds the zip at the end; torch looks at the start and would unpickle that.
    torch.save({"weights": torch.ones(2)}, file)
    harmless = file.read_bytes()
    file.write_bytes(pickle.dumps(Payload(marker)) + harmless)
    assert zipfile.is_zipfile(file)
    with pytest.raises(ValueError, match="does not start as a torch file does"):
        check(file)
    assert not marker.exists()


def test_metadata_with_a_harmless_zip_behind_it_is_refused(tmp_path, file, marker):
    torch.save({"weights": torch.ones(2)}, file)
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(pickle.dumps(Payload(marker)) + file.read_bytes())
    with pytest.raises(ValueError, match=r"\.metadata asks to load posix\.mkdir"):
        refuse_code_in_pickle(metadata)
    assert not marker.exists()


def test_a_torchscript_program_is_refused(file):
    torch.save({"weights": torch.ones(2)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"{file.stem}/constants.pkl", b"")
    with pytest.raises(ValueError, match="is a TorchScript program"):
        refuse_code(file)


@pytest.mark.parametrize("check", [refuse_code, load_values])
@pytest.mark.parametrize("keep", [0, 3, 200])
def test_a_truncated_torch_file_is_refused_with_its_size(file, check, keep):
    torch.save({"weights": torch.ones(200)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"\({keep} bytes\) is not a whole file"):
        check(file)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps([1, 2])[:-1]])
def test_a_truncated_pickle_is_refused_with_its_size(file, data):
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"\({len(data)} bytes\) is not a whole file"):
        refuse_code_in_pickle(file)
