"""Commands that start ranks: launch, demo."""

from __future__ import annotations

import argparse
from typing import Any


def add_launch(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "launch",
        help="run a script on several ranks of this machine; torchrun is for more machines",
        epilog="example: distft launch --nproc 2 train.py --steps 100",
        allow_abbrev=False,
    )
    command.add_argument("--nproc", type=int, required=True, help="number of ranks")
    command.add_argument("script", help="Python file")
    command.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    command.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from distft.launch import main

    json = ["--json"] if options.json else []
    return main(["--nproc", str(options.nproc), *json, options.script, *options.args])


def add_demo(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "demo",
        help="fine-tune one small model under six strategies and compare them, in minutes on a CPU",
        epilog="example: distft demo --strategy fsdp2 --ranks 2",
    )
    from distft.demo.__main__ import add_options

    add_options(command)
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from distft.demo.__main__ import run

    return run(options)
