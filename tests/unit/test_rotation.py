"""Which checkpoints stay when only so many are kept."""

from __future__ import annotations

import os
import shutil

import pytest

import distft
from distft.checkpoint.rotation import rotate
from tests.unit.test_checkpoint_folder import write_checkpoint


@pytest.fixture
def root(tmp_path):
    """Five complete checkpoints, whose steps are not in the order of their names."""
    for name, step in (("e", 1), ("d", 2), ("c", 3), ("b", 4), ("a", 5)):
        write_checkpoint(tmp_path / name, step)
    return tmp_path


def test_the_ones_with_the_most_steps_stay(root):
    rotate(root / "a", 2)
    assert sorted(os.listdir(root)) == ["a", "b"]


def test_the_one_that_was_just_written_stays_whatever_its_step(root):
    rotate(root / "e", 1)
    assert os.listdir(root) == ["e"]


def test_what_is_not_complete_is_neither_counted_nor_touched(root):
    (root / "c" / "dcp" / "shard").unlink()
    (root / "mine").mkdir()
    (root / "notes.txt").write_text("x")
    being_written = write_checkpoint(root / ".f.0123456789abcdef.tmp", 9)
    rotate(root / "a", 2)
    assert sorted(os.listdir(root)) == [being_written.name, "a", "b", "c", "mine", "notes.txt"]


def test_what_the_run_did_not_write_is_neither_counted_nor_touched(root):
    write_checkpoint(root / "another", 1, run="another run")
    write_checkpoint(root / "of before", 1, run="")
    # The best one so far, put aside, and one that was renamed.
    shutil.copytree(root / "d", root / "best")
    (root / "c").rename(root / "good")
    rotate(root / "a", 1)
    assert sorted(os.listdir(root)) == ["a", "another", "best", "good", "of before"]
    rotate(root / "of before", 1)
    rotate(root / "another", 1)
    assert sorted(os.listdir(root)) == ["a", "another", "best", "good", "of before"]


def test_fewer_than_are_kept_all_stay(root):
    rotate(root / "a", 9)
    assert sorted(os.listdir(root)) == ["a", "b", "c", "d", "e"]


def test_a_death_while_one_is_deleted_leaves_no_half_checkpoint(root, monkeypatch):
    def dies(path):
        (path / "distft.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            rotate(root / "a", 4)
    [left_over] = [name for name in os.listdir(root) if name.endswith(".old")]
    assert left_over.startswith(".e.")
    assert distft.latest(root) == root / "a"
    assert sorted(set(os.listdir(root)) - {left_over}) == ["a", "b", "c", "d"]
    rotate(root / "a", 4)
    assert sorted(os.listdir(root)) == ["a", "b", "c", "d"]


def test_one_that_cannot_be_deleted_is_logged_and_not_raised(root, monkeypatch, caplog):
    def refuses(old, new):
        raise PermissionError(13, "Permission denied", str(old))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuses)
        rotate(root / "a", 4)
    assert "e is older than the 4 checkpoints to keep and cannot be deleted" in caplog.text
    assert len(os.listdir(root)) == 5
