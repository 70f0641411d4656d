"""Runs the Python blocks of README and docs as the scripts they claim to be.

A block opened with ```python runs in a fresh process and an empty folder. One opened with
```python notest is a fragment: it is compiled only.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python( notest)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAUNCHERS = {
    "one rank": [sys.executable],
    "two ranks": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
}


def _blocks(fragments: bool) -> list:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        pytest.param(code, id=f"{page.name}-{number}")
        for page in pages
        for number, (notest, code) in enumerate(BLOCK.findall(page.read_text()), start=1)
        if bool(notest) == fragments
    ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("code", _blocks(fragments=False))
def test_block_runs_as_a_script(code: str, launcher: str, tmp_path: Path) -> None:
    """A whole example runs alone and under torchrun."""
    script = tmp_path / "train.py"
    script.write_text(code)
    run = subprocess.run(
        [*LAUNCHERS[launcher], script], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("code", _blocks(fragments=True))
def test_fragment_is_python(code: str) -> None:
    """A fragment parses."""
    compile(code, "fragment", "exec")
