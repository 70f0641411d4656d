"""Which checkpoint a run goes on from, read off the folder before any step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from distft.checkpoint.folder import MANIFEST, Manifest
from distft.trainer.resume import checkpoint_to_resume, launched

pytest.importorskip("transformers")
SAVED = Manifest(
    step=0, strategy={}, layout="dcp", mesh={}, files={}, tensors={}, ties={}, trainable=[],
    dtype="float32", optimizer="AdamW", optimizer_state={}, versions={}, extra={},
)  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return what saves checkpoints of steps, of a job, and the run's arguments."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    args = SimpleNamespace(
        output_dir=str(tmp_path), save_strategy="steps", enable_jit_checkpoint=False
    )

    def save(*steps, job=None, name="checkpoint-{}"):
        for step in steps:
            folder = tmp_path / name.format(step)
            folder.mkdir()
            extra = {} if job is None else {"launch": job}
            (folder / MANIFEST).write_text(replace(SAVED, step=step, extra=extra).to_json())

    return save, args


def test_true_is_the_latest_that_is_complete(run, tmp_path):
    save, args = run
    save(2, 4)
    (tmp_path / "checkpoint-6").mkdir()
    # Nor is one that the run did not write.
    save(8, name="on-{}")
    assert checkpoint_to_resume(True, args) == str(tmp_path / "checkpoint-4")


def test_true_without_a_checkpoint_names_the_way_out(run):
    with pytest.raises(ValueError, match=r"0 complete checkpoints.*distft\.latest"):
        checkpoint_to_resume(True, run[1])
    assert checkpoint_to_resume(None, run[1]) is None


@pytest.mark.parametrize("asked", [None, False, "checkpoint-2"])
def test_later_checkpoints_are_in_the_way_of_a_run_that_saves(run, tmp_path, asked):
    save, args = run
    save(2, 4)
    asked = str(tmp_path / asked) if asked else asked
    with pytest.raises(ValueError, match=r"has saved .*checkpoint-4, and this one begins after"):
        checkpoint_to_resume(asked, args)
    args.save_strategy = "no"
    assert checkpoint_to_resume(asked, args) == (asked or None)


def test_a_job_that_is_restarted_goes_on_and_another_one_does_not(run, tmp_path, monkeypatch):
    save, args = run
    save(2, job="4711")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4711")
    assert launched() == {"launch": "4711"}
    assert checkpoint_to_resume(None, args) == str(tmp_path / "checkpoint-2")
    # What torchrun says where nobody gave a name is no name.
    for other in ("4712", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        with pytest.raises(ValueError, match="checkpoint-2"):
            checkpoint_to_resume(None, args)
    assert launched() == {}
