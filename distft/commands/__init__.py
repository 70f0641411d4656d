"""The commands of ``distft`` and ``python -m distft``; each calls the library, and adds nothing."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from distft.commands.output import failed

_DESCRIPTION = "Plan, check and convert distributed fine-tuning runs of Hugging Face models."
_EPILOG = """\
`distft COMMAND --help` has an example of each.

exit codes: 0 it worked, and the answer is yes; 1 the answer is no (diff, verify, doctor, parity,
demo), or it could not be done, with the reason; 2 the arguments are wrong; 130 it was interrupted.
`launch` returns the code of the rank that failed first. With --json the output is one JSON object.
"""
# Each command's module, where `add_NAME` gives a parser to it.
_MODULES = {
    "plan": "planning",
    "topo": "planning",
    "bench-collectives": "planning",
    "consolidate": "checkpoints",
    "convert": "checkpoints",
    "reshard": "checkpoints",
    "inspect": "checkpoints",
    "verify": "checkpoints",
    "diff": "checkpoints",
    "parity": "parity",
    "doctor": "doctor",
    "launch": "runs",
    "demo": "runs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 where it worked, 1 where it says why not.

    Collective: none.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    json = "--json" in given
    try:
        options = _parser(given).parse_args(given)
        json = options.json
        code: int = options.run(options)
        # What is left in the buffer may meet a pipe that is closed.
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough, as `head` has; Python must not try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        return failed(json, error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distft",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # A command that is known needs no other one's options, and starts sooner.
    for name in given[:1] if given and given[0] in _MODULES else _MODULES:
        module = importlib.import_module(f"distft.commands.{_MODULES[name]}")
        getattr(module, f"add_{name.replace('-', '_')}")(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
