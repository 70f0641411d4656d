"""The command ``distft parity``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any


def add_parity(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "parity",
        help="train a small copy of a model under strategies and in one process; exit code 1 "
        "where they differ",
        epilog="example: distft parity Qwen/Qwen3-8B --strategies all",
    )
    command.add_argument(
        "model",
        help="a model's name, a folder with its config.json, or module:function that builds it",
    )
    command.add_argument(
        "--strategies", nargs="+", default=["all"], help="names, or all of them; default all"
    )
    command.add_argument("--world-size", type=int, default=4, help="ranks; default 4")
    command.add_argument("--tuning", default="full", help="full or lora; default full")
    command.add_argument("--lora-rank", type=int, default=16, help="rank of adapters; default 16")
    command.add_argument("--lora-targets", nargs="+", help="layers; default all linear ones")
    command.add_argument("--steps", type=int, default=3, help="steps before the save; default 3")
    command.add_argument("--timeout", type=float, default=120, help="seconds of a strategy")
    command.add_argument("--markdown", help="also write the certificate to this file")
    command.set_defaults(run=_parity)


def _parity(options: argparse.Namespace) -> int:
    from distft.diagnose.parity import parity
    from distft.spec import Workload
    from distft.strategies.by_name import strategy

    named = options.strategies
    targets = options.lora_targets
    certificate = parity(
        _builder(options.model),
        "all" if named == ["all"] else [strategy(name) for name in named],
        options.world_size,
        Workload(
            seq_len=16,
            tuning=options.tuning,
            lora_rank=options.lora_rank,
            lora_targets=tuple(targets) if targets else "all-linear",
        ),
        num_steps=options.steps,
        timeout=options.timeout,
    )
    if options.markdown:
        Path(options.markdown).write_text(certificate.to_markdown(), encoding="utf-8")
    print(certificate.to_json() if options.json else certificate)
    return 0 if certificate.passed else 1


def _builder(model: str) -> Any:
    """Return the function that ``module:function`` names, else the name or the folder itself."""
    module, colon, function = model.partition(":")
    if not colon or Path(model).exists():
        return model
    # As `python -m` finds modules; ranks get the same path.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{model} names no function: {error}. Write module:function, or pass a folder."
        ) from error
