"""What a conversion that was killed leaves beside its target, and who removes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from distft.checkpoint.target import written_whole

KILLED = """
import os, signal, sys
from pathlib import Path
from distft.checkpoint.target import written_whole
with written_whole(Path(sys.argv[1]), bool, lambda _: []) as made:
    (made / "half").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(out: Path, text: str) -> None:
    with written_whole(out, bool, lambda _: []) as made:
        (made / "whole").write_text(text)


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def test_the_next_write_removes_what_a_killed_one_of_the_same_target_left(tmp_path):
    for name in ("out", "other"):
        done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / name], timeout=60)
        assert done.returncode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 2
    write(tmp_path / "out", "first")
    assert [path.name.startswith(".other.") for path in hidden(tmp_path)] == [True]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_a_folder_that_is_being_written_or_that_nobody_locked_stays(tmp_path):
    foreign = tmp_path / ".out.backup.convert"
    foreign.mkdir()
    with written_whole(tmp_path / "out", bool, lambda _: []) as made:
        (made / "whole").write_text("slow")
        write(tmp_path / "out", "fast")
        assert (made / "whole").read_text() == "slow"
    assert (tmp_path / "out" / "whole").read_text() == "slow"
    assert hidden(tmp_path) == [foreign]
