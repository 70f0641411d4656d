"""The command line, such as ``python -m distft consolidate PATH OUT``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 where it worked, 1 where it says why not.

    Collective: none.
    """
    parser = argparse.ArgumentParser(prog="python -m distft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    consolidate = commands.add_parser(
        "consolidate",
        help="turn a checkpoint into safetensors that from_pretrained reads",
        epilog="example: python -m distft consolidate runs/7 model --dtype bfloat16",
    )
    consolidate.add_argument("path", help="a checkpoint, or a run's root for its latest one")
    consolidate.add_argument("out", help="folder to write the model to")
    consolidate.add_argument("--dtype", help="dtype of the weights; default as trained")
    consolidate.add_argument("--max-shard-size", default="5GB", help="largest file; default 5GB")
    consolidate.add_argument(
        "--adapter",
        default="keep",
        choices=("keep", "merge", "only"),
        help="of a LoRA run: keep it beside the base, merge it, or write it only; default keep",
    )
    consolidate.add_argument(
        "--exclude-frozen", action="store_true", help="leave out what was not trained"
    )
    consolidate.add_argument("--json", action="store_true", help="print one JSON object")
    consolidate.set_defaults(run=_consolidate)
    _add_reports(commands)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def _add_reports(commands: Any) -> None:
    """Add the commands that read a checkpoint and write nothing."""
    verify = commands.add_parser(
        "verify",
        help="say whether a checkpoint of any format is broken, consistent or proven",
        epilog="example: python -m distft verify runs/7 --require proven",
    )
    verify.add_argument(
        "--require",
        default="consistent",
        choices=("consistent", "proven"),
        help="exit with 1 below it; default consistent",
    )
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="say what a checkpoint of any format holds")
    inspect.set_defaults(run=_inspect)
    for command in (verify, inspect):
        command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
        command.add_argument("--json", action="store_true", help="print one JSON object")


def _consolidate(options: argparse.Namespace) -> int:
    from distft.checkpoint.consolidation import consolidate

    try:
        out = consolidate(
            options.path,
            options.out,
            options.dtype,
            options.max_shard_size,
            exclude_frozen=options.exclude_frozen,
            adapter=options.adapter,
        )
    except (ValueError, RuntimeError, OSError) as error:
        return _failed(options, error)
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir()) if file.is_file()}
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    if options.json:
        print(json.dumps({"out": str(out), "weight_bytes": weights, "files": sizes}))
    else:
        print(f"Wrote {len(sizes)} files with {weights / 1e9:.3f} GB of weights to {out}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from distft.checkpoint.verify import verify

    try:
        found = verify(options.path, options.require)
    except (ValueError, OSError) as error:
        return _failed(options, error)
    _report(options, found, holds=found.holds)
    return 0 if found.holds else 1


def _inspect(options: argparse.Namespace) -> int:
    from distft.checkpoint.inspection import inspect

    try:
        found = inspect(options.path)
    except (ValueError, OSError) as error:
        return _failed(options, error)
    _report(options, found)
    return 0


def _report(options: argparse.Namespace, report: Any, **more: Any) -> None:
    fields = {**dataclasses.asdict(report), **more}
    print(json.dumps(fields, default=str) if options.json else report)


def _failed(options: argparse.Namespace, error: Exception) -> int:
    print(
        json.dumps({"error": str(error)}) if options.json else f"error: {error}",
        file=sys.stdout if options.json else sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
