"""Commands that start ranks: launch, demo."""

from __future__ import annotations

from typing import Any


def add_launch(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    from distft.launch import add_options, run

    command = commands.add_parser(
        "launch",
        help="run a script on several ranks of this machine; torchrun is for more machines",
        epilog="example: distft launch --nproc 2 train.py --steps 100",
        allow_abbrev=False,
    )
    add_options(command)
    command.set_defaults(run=run)


def add_demo(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    from distft.demo.__main__ import add_options, run

    command = commands.add_parser(
        "demo",
        help="fine-tune one small model under six strategies and compare them, in minutes on a CPU",
        epilog="example: distft demo --strategy fsdp2 --ranks 2",
    )
    add_options(command)
    command.set_defaults(run=run)
