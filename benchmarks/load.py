"""Measure the host memory that `distft.load_model` takes on each rank.

A model folder of the size asked for is made first. Then a world of ranks loads it under each
strategy, while a thread of each rank samples its anonymous memory (``RssAnon``), so that pages of
the files, which the kernel gives back, do not count. Exit code 1: a rank's peak is above
`BOUND` times its part of the weights, the largest tensor and what the interpreter held before.

    python benchmarks/load.py --megabytes 500 --strategy fsdp2 zero3 --out result.md
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import machine

import distft
from distft.testing import WorkerPool, tiny_model

BOUND = 1.2
RANKS = 4
INTERVAL = 0.002
TIMEOUT = 900.0
HEAD = (
    "| strategy | rank | before, MB | part, MB | largest tensor, MB | peak, MB | peak / sum "
    f"| at most {BOUND} | seconds |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Measured:
    """What one rank saw, in bytes and seconds."""

    before: int
    part: int
    largest: int
    peak: int
    seconds: float

    @property
    def ratio(self) -> float:
        """The peak as a multiple of what may be in memory."""
        return self.peak / (self.before + self.part + self.largest)


class Sampler:
    """The highest anonymous memory of this process while a block runs."""

    def __enter__(self) -> Sampler:
        """Start to sample."""
        self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Sample once more and stop."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            if self._stop.wait(INTERVAL):
                return


def anonymous_bytes() -> int:
    """Return this process's resident anonymous memory in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None, "this system does not say RssAnon in /proc/self/status"
    return int(found.group(1)) * 1024


def make_models(folder: Path, small: Path, megabytes: int) -> int:
    """Write a Qwen3 model in fp32 of at least so many MB and a tiny one; return its bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 8192}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    block = 1024 * 3072 * 3 + 1024 * 1024 * 3
    layers = max(1, -(-(megabytes * 10**6 // 4 - 2 * 8192 * 1024) // block))
    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=layers, tie_word_embeddings=False, **sizes, **heads)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="200MB")
    tiny_model("Q").save_pretrained(small)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def measure(name: str, folder: str, warm_up: str) -> Measured:
    """Load a folder on this rank and return what it took; a tiny one first, for the imports."""
    import torch.distributed as dist

    distft.init()
    strategy = distft.strategy(name)
    distft.load_model(warm_up, strategy)
    dist.barrier()
    before = anonymous_bytes()
    started = time.perf_counter()
    with Sampler() as sampler:
        model = distft.load_model(folder, strategy)
    seconds = time.perf_counter() - started
    part = largest = 0
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        local = getattr(parameter, "ds_tensor", parameter)
        local = local.to_local() if hasattr(local, "to_local") else local
        part += local.numel() * local.element_size()
        largest = max(largest, shape.numel() * local.element_size())
    return Measured(before, part, largest, sampler.peak, seconds)


def main() -> int:
    """Measure the strategies asked for, print the table, and return the exit code."""
    arguments = _parse()
    rows, worst = [], 0.0
    with tempfile.TemporaryDirectory(prefix="distft-load-") as root:
        folder, small = Path(root, "model"), Path(root, "small")
        # In a rank that ends, so that nothing of it counts here.
        with WorkerPool(1, timeout=TIMEOUT) as pool:
            num_bytes = pool.run(make_models, folder, small, arguments.megabytes)[0]
        for name in arguments.strategy:
            with WorkerPool(RANKS, timeout=TIMEOUT) as pool:
                ranks = pool.run(measure, name, str(folder), str(small))
            worst = max([worst, *(rank.ratio for rank in ranks)])
            rows += [_row(name, index, rank) for index, rank in enumerate(ranks)]
    title = f"# Host memory of load_model: {num_bytes / 1e6:.0f} MB in fp32 on {RANKS} ranks"
    machine.publish([title, "", *machine.describe(), "", HEAD, *rows], arguments.out)
    return int(worst > BOUND)


def _row(name: str, rank: int, measured: Measured) -> str:
    numbers = (measured.before, measured.part, measured.largest, measured.peak)
    megabytes = " | ".join(f"{number / 1e6:.1f}" for number in numbers)
    verdict = "yes" if measured.ratio <= BOUND else "no"
    return (
        f"| {name} | {rank} | {megabytes} | {measured.ratio:.3f} | {verdict} "
        f"| {measured.seconds:.2f} |"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500, help="at least so many MB of weights")
    parser.add_argument("--strategy", nargs="+", default=["fsdp2", "zero3"])
    parser.add_argument("--out", type=Path, help="file for the report")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
