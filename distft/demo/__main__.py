"""``python -m distft.demo``: six strategies, one training; ``--help`` lists what can be chosen."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distft.demo.errors import DemoError

_EPILOG = """
Under a launcher the same command uses the launcher's ranks, NCCL on GPUs and gloo elsewhere:
  torchrun --nproc-per-node 4 -m distft.demo --strategy fsdp2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every strategy trained as one process, 1 if not, 2 for a wrong option.

    Collective: every rank of a launcher's job.
    """
    parser = argparse.ArgumentParser(
        prog="python -m distft.demo",
        description=(
            "Fine-tune one small Qwen3 on the standard library's documentation under six "
            "strategies, compare the training with one process and the costs with the formulas."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Run the demo with options that were parsed, and return the exit code of `main`.

    Collective: every rank of a launcher's job.
    """
    missing = [name for name in ("matplotlib", "rich") if not importlib.util.find_spec(name)]
    if missing:
        print(
            f"The demo draws with {' and '.join(missing)}: pip install 'distft[plot]'.",
            file=sys.stderr,
        )
        return 2
    under_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        good = _run(options, under_launcher)
    except (DemoError, ValueError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(
                json.dumps({"error": str(error)}) if options.json else f"distft.demo: {error}",
                file=sys.stdout if options.json else sys.stderr,
            )
        return 2
    if options.json and os.environ.get("RANK", "0") == "0":
        from distft.demo.results import RESULTS

        print(json.dumps(json.loads((options.out / RESULTS).read_text())))
    return 0 if good else 1


def _run(options: argparse.Namespace, under_launcher: bool) -> bool:
    from rich.console import Console

    from distft.demo.ranks import LaunchedRanks, StartedRanks, silence
    from distft.demo.run import Settings, run_demo

    silence()
    world_size = int(os.environ["WORLD_SIZE"]) if under_launcher else 0
    if under_launcher and options.ranks not in (None, world_size):
        raise DemoError(
            f"--ranks {options.ranks} is not the launcher's {world_size}. Leave --ranks out, or "
            "start without a launcher."
        )
    if options.ranks is not None and options.ranks < 1:
        raise DemoError(f"--ranks {options.ranks} starts nothing. Give at least 1.")
    settings = Settings(
        strategies=options.strategy,
        ranks=world_size or options.ranks or 2,
        steps=options.steps,
        out=options.out,
        under_launcher=under_launcher,
    )
    if under_launcher:
        import distft

        distft.init(seed=settings.seed)
        ranks = LaunchedRanks()
        return run_demo(settings, ranks, Console(quiet=options.json or not ranks.is_first))
    started = StartedRanks()
    try:
        return run_demo(settings, started, Console(quiet=options.json))
    finally:
        started.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser.

    Collective: none.
    """
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help="ddp, zero1, zero2, zero3, fsdp2 or hsdp; repeat it for several (default: all six)",
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks to start; hsdp gets twice as many (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (default: 80)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("distft-demo"),
        help="folder for pictures, numbers and models (default: ./distft-demo)",
    )


if __name__ == "__main__":
    sys.exit(main())
