"""Which folders are checkpoints, and which of them is the latest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

import distft
from distft.checkpoint.folder import (
    DCP,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    SavedFile,
    describe_file,
    find_checkpoint,
    is_complete,
    read_manifest,
)
from distft.checkpoint.verify import _check_manifest


def write_checkpoint(path: Path, step: int, run: str = "a run") -> Path:
    """Write a folder with one file and its manifest."""
    (path / DCP).mkdir(parents=True)
    (path / DCP / "shard").write_bytes(b"123456789")
    manifest = Manifest(
        step=step,
        strategy={"name": "fsdp2", "constructor": "FSDP2()"},
        layout=DCP,
        mesh={"dp_replicate": 2, "dp_shard": 3},
        files={"dcp/shard": describe_file(path / DCP / "shard")},
        tensors={},
        ties={},
        trainable=[],
        dtype="float32",
        optimizer="AdamW",
        optimizer_state={},
        versions={},
        extra={"note": [1, None, "x"]},
        run=run,
        folder=path.name,
    )
    (path / MANIFEST).write_text(manifest.to_json())
    return path


def change_manifest(path: Path, **changes: object) -> None:
    fields = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**fields, **changes}))


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    manifest = read_manifest(write_checkpoint(tmp_path / "saved", 4))
    assert manifest.step == 4
    assert manifest.world_size == 6
    assert manifest.extra == {"note": [1, None, "x"]}
    assert manifest.files == {"dcp/shard": SavedFile(9, xxh3_64_hexdigest(b"123456789"))}


def test_the_checksum_is_xxh3_of_64_bits_in_hexadecimal(tmp_path):
    (tmp_path / "empty").touch()
    # The published value of no bytes.
    assert describe_file(tmp_path / "empty") == SavedFile(0, "2d06800538d394c2")


def test_a_save_of_before_with_crc_32_is_read_and_verified(tmp_path):
    path = write_checkpoint(tmp_path / "saved", 4)
    # The check value of CRC-32 for these nine bytes.
    change_manifest(
        path,
        format_version=1,
        files={"dcp/shard": {"size": 9, "crc32": 0xCBF43926}},
        manifest_crc32=None,
    )
    assert read_manifest(path).files == {"dcp/shard": SavedFile(9, crc32=0xCBF43926)}
    assert _check_manifest(path).problems == []
    (path / DCP / "shard").write_bytes(b"123456788")
    assert _check_manifest(path).problems == [
        "dcp/shard has the CRC-32 bcf309b0, and distft.json says CRC-32 cbf43926"
    ]


def test_step_10_is_later_than_step_9(tmp_path):
    for step in (9, 10, 2):
        write_checkpoint(tmp_path / f"step-{step}", step)
    assert distft.latest(tmp_path) == tmp_path / "step-10"


def test_the_step_in_the_manifest_counts_and_not_the_name(tmp_path):
    write_checkpoint(tmp_path / "best", 30)
    write_checkpoint(tmp_path / "step-99", 20)
    assert distft.latest(str(tmp_path)) == tmp_path / "best"


def test_incomplete_folders_are_not_the_latest(tmp_path):
    write_checkpoint(tmp_path / "step-1", 1)
    (write_checkpoint(tmp_path / "step-2", 2) / DCP / "shard").unlink()
    (write_checkpoint(tmp_path / "step-3", 3) / DCP / "shard").write_bytes(b"1234")
    (write_checkpoint(tmp_path / "step-4", 4) / MANIFEST).unlink()
    change_manifest(write_checkpoint(tmp_path / "step-5", 5), format_version=FORMAT_VERSION + 1)
    (write_checkpoint(tmp_path / "step-6", 6) / MANIFEST).write_text('{"format_version": 1,')
    assert distft.latest(tmp_path) == tmp_path / "step-1"


def test_a_temporary_folder_is_not_the_latest_even_with_a_manifest(tmp_path):
    write_checkpoint(tmp_path / "step-1", 1)
    write_checkpoint(tmp_path / ".step-2.0123456789abcdef.tmp", 2)
    assert distft.latest(tmp_path) == tmp_path / "step-1"
    assert find_checkpoint(tmp_path) == tmp_path / "step-1"


def test_there_is_no_latest_without_a_complete_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    (tmp_path / "empty").mkdir()
    assert distft.latest(tmp_path) is None
    assert distft.latest(tmp_path / "empty") is None
    assert distft.latest(tmp_path / "never") is None
    assert distft.latest(tmp_path / "notes.txt") is None


@pytest.mark.parametrize("inner", ["", "step-1", "step-1/dcp"])
def test_root_checkpoint_and_state_folder_lead_to_the_checkpoint(tmp_path, inner):
    write_checkpoint(tmp_path / "step-1", 1)
    assert find_checkpoint(tmp_path / inner) == tmp_path / "step-1"


def test_a_path_without_checkpoints_is_named_with_what_was_searched(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"searched it for distft\.json.*the 2 folders in it"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"never: .*there is no such folder.*Pass a folder"):
        find_checkpoint(tmp_path / "never")


def test_a_root_with_half_checkpoints_only_says_what_one_of_them_lacks(tmp_path):
    (write_checkpoint(tmp_path / "step-1", 1) / DCP / "shard").unlink()
    with pytest.raises(ValueError, match=r"dcp/shard is missing, and distft\.json says 9 bytes"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"format_version": 1}'])
def test_a_truncated_manifest_is_refused(tmp_path, text):
    path = write_checkpoint(tmp_path / "saved", 1)
    (path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="is not a whole manifest"):
        read_manifest(path)
    assert not is_complete(path)


def test_a_manifest_that_is_no_text_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "saved", 1)
    (path / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a whole manifest"):
        read_manifest(path)


def test_a_later_format_asks_for_an_upgrade_whatever_its_fields(tmp_path):
    path = write_checkpoint(tmp_path / "saved", 1)
    change_manifest(path, format_version=7, files=["of another kind"], more=1)
    with pytest.raises(ValueError, match=r"has format 7, and this version reads 2\. Upgrade"):
        read_manifest(path)


def test_a_file_of_another_size_is_named_with_both_sizes(tmp_path):
    path = write_checkpoint(tmp_path / "saved", 1)
    (path / DCP / "shard").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"dcp/shard has 4 bytes, and distft\.json says 9 bytes"):
        read_manifest(path)


def test_a_changed_manifest_is_broken_and_one_of_before_is_read(tmp_path):
    path = write_checkpoint(tmp_path / "saved", 4)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"step": 4', '"step": 5'))
    with pytest.raises(ValueError, match=r"not a whole manifest: its checksum is \d+, and it says"):
        read_manifest(path)
    fields = json.loads(text)
    del fields["manifest_crc32"]
    (path / MANIFEST).write_text(json.dumps(fields))
    assert read_manifest(path).step == 4
