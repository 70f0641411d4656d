"""Time saves in training: beside ``dcp.save``, and the stall of ``async_save`` beside a copy.

A world of ranks trains one step under FSDP2. Then four things take turns, round by round: a save,
``torch.distributed.checkpoint.save`` of the same tensors, the call of a save beside training, and a
plain copy of the rank's tensors into memory of the host that is there already. Each begins at a
barrier with nothing left to be written; a round's time is that of its slowest rank. Exit code 1: a
bound of `BOUNDS` is broken.

    python benchmarks/save.py --megabytes 1280 --rounds 7 --out result.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import machine

import distft
from distft.testing import WorkerPool

RANKS = 2
TIMEOUT = 900.0
SAVE, PEER, STALL, COPY = "save", "dcp.save", "stall of async_save", "copy to the host"
# What, beside what, and at most how many times its time.
BOUNDS = ((SAVE, PEER, 1.0), (STALL, COPY, 1.3))


def build(num_bytes: int) -> Any:
    """Return a Llama model whose weights and two moments are about so many bytes of fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, vocabulary = 1024, 8192
    block = 4 * hidden**2 + 3 * hidden * 2816
    layers = max(1, (num_bytes // 12 - 2 * vocabulary * hidden) // block)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=vocabulary,
    )
    return LlamaForCausalLM(config)


def local_tensors(model: Any, optimizer: Any) -> list[Any]:
    """Return what a rank holds of weights and moments, as flat bytes."""
    import torch

    states = [value for state in optimizer.state.values() for value in state.values()]
    found = [tensor.detach() for tensor in (*model.parameters(), *states)]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]
    return [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]


def meet_as_torchrun() -> None:
    """Begin a group with the store that torchrun gives; that of a file answers every 10 ms only."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        box = [free.getsockname()[1]]
    dist.broadcast_object_list(box)
    dist.destroy_process_group()
    address = f"tcp://127.0.0.1:{box[0]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)


def measure(num_bytes: int, rounds: int, folder: str) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes that this rank holds, and the seconds of each round."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    meet_as_torchrun()
    distft.init()
    torch.manual_seed(0)
    strategy = distft.FSDP2()
    model, optimizer = strategy.apply(build(num_bytes), partial(torch.optim.AdamW, lr=1e-4))
    rows = torch.arange(8).reshape(1, 8)
    strategy.train_step(model, optimizer, [{"input_ids": rows, "labels": rows}])
    sources = local_tensors(model, optimizer)
    room = [torch.zeros_like(source) for source in sources]

    def peer(path: Path) -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)

    def copy(path: Path) -> None:
        for target, source in zip(room, sources, strict=True):
            target.copy_(source)

    def save(path: Path, beside: bool) -> Any:
        return strategy.save(path, model, optimizer, step=1, async_save=beside)

    calls: dict[str, Callable[[Path], Any]] = {
        SAVE: partial(save, beside=False),
        PEER: peer,
        STALL: partial(save, beside=True),
        COPY: copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    # The first round makes what later ones use again.
    for number in range(rounds + 1):
        for index in range(len(calls)):
            name = list(calls)[(number + index) % len(calls)]
            path = Path(folder, f"{number}-{index}")
            os.sync()
            dist.barrier()
            started = time.perf_counter()
            made = calls[name](path)
            seconds[name].append(time.perf_counter() - started)
            if name == STALL:
                made.result()
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
    return sum(source.numel() for source in sources), {n: found[1:] for n, found in seconds.items()}


def report(num_bytes: int, slowest: dict[str, list[float]]) -> tuple[list[str], list[str]]:
    """Return the lines of a result, and the bounds that are broken."""
    lines = [
        f"# Saves in training: {num_bytes / 1e6:.0f} MB on each of {RANKS} ranks",
        "",
        *machine.describe(),
        f"- FSDP2, fp32, AdamW; {len(slowest[SAVE])} rounds in turn, the first save not counted",
        "",
        "| what | best s | median s |",
        "|---|---|---|",
    ]
    for name, found in slowest.items():
        lines.append(f"| {name} | {min(found):.3f} | {statistics.median(found):.3f} |")
    lines += ["", "| what | compared with | ratio of medians | at most |", "|---|---|---|---|"]
    broken = []
    for name, other, bound in BOUNDS:
        # Each round's own ratio: what slows the machine slows both.
        pairs = zip(slowest[name], slowest[other], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        lines.append(f"| {name} | {other} | {ratio:.2f} | {bound} |")
        if ratio > bound:
            broken.append(f"{name} took {ratio:.2f} of {other}, at most {bound}")
    return lines, broken


def slowest_of(ranks: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, round by round."""
    return {
        name: [max(found) for found in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1280, help="of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write; default the temporary folder")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    size = options.megabytes * 10**6 * RANKS
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        WorkerPool(RANKS, timeout=TIMEOUT) as pool,
    ):
        ranks = pool.run(measure, size, options.rounds, folder)
    lines, broken = report(ranks[0][0], slowest_of([seconds for _, seconds in ranks]))
    machine.publish(lines, options.out, broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
