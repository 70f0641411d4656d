"""Commands on checkpoints: consolidate, convert, reshard, diff, verify, inspect."""

from __future__ import annotations

import argparse
from typing import Any

from distft.commands.output import progress, report, wrote


def add_consolidate(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "consolidate",
        help="turn a checkpoint into safetensors that from_pretrained reads",
        epilog="example: distft consolidate runs/7 model --dtype bfloat16",
    )
    command.add_argument("path", help="a checkpoint, or a run's root for its latest one")
    command.add_argument("out", help="folder to write the model to")
    command.add_argument("--max-shard-size", default="5GB", help="largest file; default 5GB")
    command.add_argument(
        "--adapter",
        default="keep",
        choices=("keep", "merge", "only"),
        help="of a LoRA run: keep it beside the base, merge it, or write it only; default keep",
    )
    command.add_argument(
        "--exclude-frozen", action="store_true", help="leave out what was not trained"
    )
    _add_weights(command)
    _add_ram_and_check(command)
    command.set_defaults(run=_consolidate)


def add_convert(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "convert",
        help="turn a checkpoint into the format of another tool",
        epilog="example: distft convert runs/7 runs/7-zero3 --to zero3 --world-size 4",
    )
    command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
    command.add_argument("out", help="folder to write to")
    command.add_argument(
        "--to",
        default="safetensors",
        help="safetensors, adapter, dcp, deepspeed (universal) or zero3; default safetensors",
    )
    command.add_argument("--world-size", type=int, default=1, help="ranks, of dcp and zero3")
    _add_weights(command)
    _add_ram_and_check(command)
    command.set_defaults(run=_convert)


def add_reshard(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "reshard",
        help="turn a checkpoint into one that a strategy resumes, optimizer included",
        epilog="example: distft reshard runs/7 runs/7-on-4 --strategy fsdp2 --world-size 4",
    )
    command.add_argument("path", help="a checkpoint, or a run's root for its latest one")
    command.add_argument("out", help="new folder")
    command.add_argument("--strategy", required=True, help="name of the strategy that goes on")
    command.add_argument("--world-size", type=int, required=True, help="ranks that go on")
    command.add_argument(
        "--native", action="store_true", help="of zero3: the files that its engine writes itself"
    )
    _add_ram_and_check(command)
    command.set_defaults(run=_reshard)


def add_diff(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "diff",
        help="say what two checkpoints of any formats hold differently; exit code 1 if anything",
        epilog="example: distft diff runs/7 model",
    )
    command.add_argument("first", help="a checkpoint")
    command.add_argument("second", help="another one")
    command.set_defaults(run=_diff)


def add_verify(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "verify",
        help="say whether a checkpoint of any format is broken, consistent or proven",
        epilog="example: distft verify runs/7 --require proven",
    )
    command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
    command.add_argument(
        "--require",
        default="consistent",
        choices=("consistent", "proven"),
        help="exit with 1 below it; default consistent",
    )
    command.set_defaults(run=_verify)


def add_inspect(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "inspect",
        help="say what a checkpoint of any format holds",
        epilog="example: distft inspect runs/7 --json",
    )
    command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
    command.set_defaults(run=_inspect)


def _add_weights(command: Any) -> None:
    command.add_argument("--dtype", help="dtype of the weights; default as trained")
    command.add_argument("--base", help="base of the adapter, where the checkpoint holds none")
    command.add_argument("--config", help="config.json of the model, or a folder with one")


def _add_ram_and_check(command: Any) -> None:
    command.add_argument("--max-ram", default="2GB", help="memory that may be added; default 2GB")
    command.add_argument("--check", action="store_true", help="verify the checkpoint first")


def _consolidate(options: argparse.Namespace) -> int:
    from distft.checkpoint.consolidation import consolidate

    with progress() as advance:
        out = consolidate(
            options.path,
            options.out,
            options.dtype,
            options.max_shard_size,
            options.max_ram,
            exclude_frozen=options.exclude_frozen,
            adapter=options.adapter,
            config=options.config,
            advance=advance,
            base=options.base,
            check=options.check,
        )
    return wrote(options, out, "weights", "*.safetensors")


def _convert(options: argparse.Namespace) -> int:
    from distft.checkpoint.conversion import convert

    with progress() as advance:
        out = convert(
            options.path,
            options.out,
            options.to,
            options.world_size,
            options.dtype,
            options.max_ram,
            options.config,
            options.base,
            advance,
            options.check,
        )
    return wrote(options, out, "state", "*.safetensors", "*.distcp", "*.pt")


def _reshard(options: argparse.Namespace) -> int:
    from distft.strategies.resharding import reshard

    with progress() as advance:
        out = reshard(
            options.path,
            options.out,
            options.strategy,
            options.world_size,
            options.max_ram,
            advance,
            options.native,
            options.check,
        )
    # The tensors of either layout; beside them lie config, tokenizer and random states.
    return wrote(options, out, "state", "dcp/*", "deepspeed/*")


def _diff(options: argparse.Namespace) -> int:
    from distft.checkpoint.difference import diff

    found = diff(options.first, options.second)
    report(options, found, same=found.same)
    return 0 if found.same else 1


def _verify(options: argparse.Namespace) -> int:
    from distft.checkpoint.verify import verify

    found = verify(options.path, options.require)
    report(options, found, holds=found.holds)
    return 0 if found.holds else 1


def _inspect(options: argparse.Namespace) -> int:
    from distft.checkpoint.inspection import inspect

    report(options, inspect(options.path))
    return 0
