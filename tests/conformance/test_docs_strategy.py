"""The strategy that the documentation writes keeps every promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_strategy_of_the_docs_checks_itself(tmp_path):
    page = (ROOT / "docs" / "write_a_strategy.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "my_strategy.py"
    script.write_text(block)
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "keeps every promise" in run.stdout
