"""The public names do not change unseen."""

from __future__ import annotations

import difflib

from tests.public_api import FILE, lines


def test_the_public_names_and_their_parameters_are_those_on_record():
    before = FILE.read_text(encoding="utf-8").splitlines()
    changes = "\n".join(difflib.unified_diff(before, lines(), "on record", "now", lineterm="", n=0))
    assert not changes, (
        f"{changes}\nIf that is meant, run python -m tests.public_api and say it in CHANGELOG.md."
    )
