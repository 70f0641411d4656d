"""Turn a checkpoint of any tool into another one, checked before and after; no ranks, no GPU.

python examples/convert.py runs/sft/checkpoint-500 model
python examples/convert.py runs/sft/checkpoint-500 on-16 --to zero3 --world-size 16
python examples/convert.py global_step500 dcp --to dcp
"""

from __future__ import annotations

import argparse

import distft

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "tp", "ep", "nd")
FORMATS = ("safetensors", "adapter", "dcp", "deepspeed")


def main() -> None:
    """Verify, convert, verify what was written, and say what the two hold differently."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="of distft, DeepSpeed, torch, Accelerate, PEFT, ...")
    parser.add_argument("out", help="new folder")
    parser.add_argument("--to", default="model", choices=("model", *STRATEGIES, *FORMATS))
    parser.add_argument("--world-size", type=int, default=8, help="ranks that will go on")
    parser.add_argument("--dtype", help="of a model's weights, such as bfloat16")
    parser.add_argument("--adapter", default="keep", choices=("keep", "merge", "only"))
    options = parser.parse_args()

    print(distft.inspect(options.checkpoint))
    print(distft.verify(options.checkpoint, require="consistent"))
    if options.to == "model":
        out = distft.consolidate(
            options.checkpoint, options.out, dtype=options.dtype, adapter=options.adapter
        )
    elif options.to in STRATEGIES:
        out = distft.reshard(
            options.checkpoint, options.out, options.to, world_size=options.world_size
        )
    else:
        out = distft.convert(options.checkpoint, options.out, options.to)
    print(distft.verify(out, require="consistent"))
    print(distft.diff(options.checkpoint, out))


if __name__ == "__main__":
    main()
