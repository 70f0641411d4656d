"""The command line: ``python -m distft consolidate PATH OUT``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


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
    return _consolidate(parser.parse_args(arguments))


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
        print(
            json.dumps({"error": str(error)}) if options.json else f"error: {error}",
            file=sys.stdout if options.json else sys.stderr,
        )
        return 1
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir()) if file.is_file()}
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    if options.json:
        print(json.dumps({"out": str(out), "weight_bytes": weights, "files": sizes}))
    else:
        print(f"Wrote {len(sizes)} files with {weights / 1e9:.3f} GB of weights to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
