"""The planner's benchmark: its bounds on the measured points, and rows that say too little."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
POINTS = REPO / "benchmarks" / "planner_points.json"


def summary(*arguments: str) -> dict[str, float]:
    command = [sys.executable, str(REPO / "benchmarks" / "planner.py"), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def test_predictions_are_within_their_bounds_on_the_measured_points():
    found = summary()
    assert found["median_error_pct"] <= 8
    assert found["within_20_pct_tier_a"] >= 95
    assert found["worst_under_pct"] <= 10
    assert found["false_does_not_fit_pct"] <= 15
    assert found["throughput_median_error_pct"] <= 20
    assert found["unmapped_pct"] <= 10
    assert found["scored"] >= 106


def test_a_file_of_junk_is_unmapped_and_no_crash(tmp_path):
    rows = random.Random(0).sample(json.loads(POINTS.read_text())["data_points"], 80)
    junk = [None, "junk", -1, 0, 3.5, [], {}, True, 10**12, "12"]
    chosen = random.Random(1)
    for row in rows:
        for key in list(row):
            if chosen.random() < 0.2:
                row[key] = chosen.choice(junk)
    path = tmp_path / "points.json"
    path.write_text(json.dumps({"data_points": [*rows, None, 3, {}]}))
    assert "unmapped_pct" in summary(str(path))


def test_a_wrong_unit_is_unmapped(tmp_path):
    rows = json.loads(POINTS.read_text())["data_points"][:2]
    rows[0]["measured"]["mem_unit"] = "furlong"
    rows[1]["measured"]["mem_unit"] = "MB"
    path = tmp_path / "points.json"
    path.write_text(json.dumps({"data_points": rows}))
    assert summary(str(path))["unmapped_pct"] == 100


def test_no_points_file_is_an_error(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        summary(str(tmp_path / "none.json"))
