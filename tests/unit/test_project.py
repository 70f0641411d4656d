"""What pyproject.toml promises, held to what the tests run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import distft

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def versions(lines: list[str], sign: str) -> dict[str, str]:
    found = (re.fullmatch(rf"([\w.-]+){sign}([\d.]+)", line.strip()) for line in lines)
    return {match[1]: match[2] for match in found if match}


def test_the_lowest_versions_that_are_promised_are_those_of_the_tests():
    extras = PROJECT["optional-dependencies"].values()
    wanted = [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]
    lowest = versions(wanted, ">=")
    pinned = versions((ROOT / "constraints.txt").read_text("utf-8").splitlines(), "==")
    assert len(lowest) > 10
    for package, version in lowest.items():
        tested = pinned[package]
        assert tested == version or tested.startswith(f"{version}."), (package, version, tested)


def test_there_is_one_version():
    assert PROJECT["dynamic"] == ["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    assert cited is not None
    assert cited[1] == distft.__version__
