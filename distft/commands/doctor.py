"""The command doctor: this machine, scripts that may hang, dumps of a run that hung."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from distft.commands.output import report


def add_doctor(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "doctor",
        help="look at this machine, at scripts that may hang, or at dumps of a run that hung",
        epilog="example: distft doctor train.py; exit code 1 where something is found",
    )
    command.add_argument("scripts", nargs="*", help="scripts or folders to read; none runs")
    command.add_argument("--folder", help="where checkpoints go: its room and speed")
    command.add_argument("--flight", help="dumps of torch's flight recorder, without the rank")
    command.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.scripts:
        from distft.diagnose.lint import lint

        found = lint(options.scripts)
        print(
            json.dumps({"findings": [dataclasses.asdict(each) for each in found]})
            if options.json
            else "\n".join(map(str, found)) or "Every rank makes the collectives of these scripts."
        )
        return 1 if found else 0
    if options.flight:
        from distft.diagnose.flight import compare, read_dumps

        ranks = read_dumps(options.flight)
        fields = {r: [dataclasses.asdict(each) for each in c] for r, c in ranks.items()}
        print(json.dumps(fields) if options.json else compare(ranks))
        return 0
    from distft.diagnose.doctor import doctor

    page = doctor(options.folder)
    report(options, page)
    return 1 if page.findings else 0
