"""Runs the blocks of README and docs as the scripts they claim to be.

A block opened with ```python runs in a fresh process and an empty folder. One opened with
```python notest is a fragment: tests/unit/test_docs.py parses it. Those opened with ```sh run are
run one after another in one folder, with the page's ```python title="NAME" blocks in it as files.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = re.compile(
    r"^```(?:python title=\"(?P<file>[^\"]+)\"|sh run)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAUNCHERS = {
    "one rank": [sys.executable],
    "two ranks": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
}


def _blocks() -> list:
    return [
        pytest.param(code, launcher, id=f"{page.name}-{number}-{launcher}")
        for page in PAGES
        for number, code in enumerate(BLOCK.findall(page.read_text("utf-8")), start=1)
        for launcher in LAUNCHERS
        # Planning starts no ranks.
        if launcher == "one rank" or "distft.init" in code
    ]


@pytest.mark.parametrize(("code", "launcher"), _blocks())
def test_block_runs_as_a_script(code: str, launcher: str, tmp_path: Path) -> None:
    """A whole example runs alone and under torchrun."""
    script = tmp_path / "train.py"
    script.write_text(code)
    run = subprocess.run(
        [*LAUNCHERS[launcher], script], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```sh run" in page.read_text("utf-8")],
    ids=lambda page: page.name,
)
def test_page_works_as_printed(page: Path, tmp_path: Path) -> None:
    """Someone who does what the page says gets no error."""
    # `python` is the one that runs this test.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for step in STEPS.finditer(page.read_text("utf-8")):
        if step["file"]:
            (tmp_path / step["file"]).write_text(step["text"])
            continue
        run = subprocess.run(
            ["sh", "-e", "-c", step["text"]],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert run.returncode == 0, f"{step['text']}{run.stdout[-2000:]}{run.stderr[-4000:]}"
