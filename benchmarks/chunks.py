"""Measure what consolidating a distributed checkpoint of very many small chunks holds and takes.

The checkpoint is made by torch's own classes: tensors of 1,000 rows, a chunk for each row, spread
over four files, as a mesh of very many ranks would write them. Exit code 1: a bound on the peak of
resident memory is broken.

    python benchmarks/chunks.py --chunks 10000 100000 1000000 --out result.md
"""

from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import machine
import torch
from checkpoint import LAUNCHER
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, WIDTH, FILES = 1000, 4, 4
# Megabytes, by the number of chunks; more are only reported.
BOUNDS = {10_000: 100, 100_000: 250}


def make(folder: Path, num_chunks: int) -> None:
    """Write the checkpoint."""
    written = io.BytesIO()
    torch.save(torch.ones(1, WIDTH), written)
    item, described, places = written.getvalue(), {}, {}
    ends = [0] * FILES
    for layer in range(num_chunks // ROWS):
        name = f"model.layers.{layer}.weight"
        chunks = []
        for row in range(ROWS):
            start, file = torch.Size((row, 0)), row % FILES
            chunks.append(ChunkStorageMetadata(start, torch.Size((1, WIDTH))))
            info = _StorageInfo(f"__{file}_0.distcp", ends[file], len(item))
            places[MetadataIndex(name, start, row)] = info
            ends[file] += len(item)
        properties = TensorProperties(dtype=torch.float32)
        described[name] = TensorStorageMetadata(properties, torch.Size((ROWS, WIDTH)), chunks)
    for file, end in enumerate(ends):
        (folder / f"__{file}_0.distcp").write_bytes(item * (end // len(item)))
    with (folder / ".metadata").open("wb") as metadata:
        pickle.dump(Metadata(described, {name: (name,) for name in described}, places), metadata)


def measure(num_chunks: int) -> tuple[float, float]:
    """Return the seconds of one consolidation, a process of its own, and its peak in MB."""
    with tempfile.TemporaryDirectory() as folder:
        made, out = Path(folder, "made"), str(Path(folder, "out"))
        made.mkdir()
        make(made, num_chunks)
        command = [sys.executable, "-m", "distft", "consolidate", "--max-ram", "100MB"]
        # A process inherits the peak of the one that starts it, so a small one does.
        launch = [sys.executable, "-I", "-S", "-c", LAUNCHER, *command, str(made), out]
        done = subprocess.run(launch, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{num_chunks} chunks failed: {done.stderr[-500:]}")
    seconds, _, peak = map(float, done.stdout.split()[-3:])
    return seconds, peak * 1024 / 1e6


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=list(BOUNDS))
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    lines = [
        "# Consolidating a distributed checkpoint of many chunks",
        "",
        *machine.describe(),
        f"- Tensors of {ROWS} x {WIDTH} fp32 numbers, one chunk a row, {FILES} files; metadata by "
        "torch's own classes",
        "",
        "| chunks | seconds | peak MB | at most |",
        "|---|---|---|---|",
    ]
    broken = False
    for num_chunks in options.chunks:
        seconds, peak = measure(num_chunks)
        bound = BOUNDS.get(num_chunks)
        broken |= bound is not None and peak > bound
        lines.append(f"| {num_chunks:,} | {seconds:.1f} | {peak:.0f} | {bound or 'reported'} |")
    machine.publish(lines, options.out)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
