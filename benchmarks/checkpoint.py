"""Time conversions of checkpoints against every installed peer and ``cp``, as whole processes.

A ZeRO-3 folder and a distributed checkpoint of one model are made first, with two ranks' files
each. Every tool converts once and its tensors are compared with the model's, bit for bit; then all
take turns, round by round, each in a process of its own, and the medians and the peaks of resident
memory are reported. Exit code 1: a tool gave other tensors, or a bound of `BOUNDS` is broken.

    python benchmarks/checkpoint.py --gigabytes 1.2 --rounds 5 --out result.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import machine
import numpy as np

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.stream import Stream
from distft.checkpoint.writers.dcp import plan_dcp
from distft.checkpoint.writers.pickled import Stored, ordered, size_of
from distft.checkpoint.writers.torch_zip import Archives

RANKS = 2
RAM = 200_000_000
LAYERS, VOCABULARY = 12, 32_000
MOMENTS = ("exp_avg", "exp_avg_sq")
# Of a tool's median, or of `cp`'s; megabytes of resident memory.
BOUNDS = {
    "zero-3 to safetensors": (("cp weights", 1.5), ("zero_to_fp32", 0.12)),
    "dcp to safetensors": (("cp weights", 1.5), ("dcp_to_torch_save", 0.12)),
    "zero-3 to bf16": (("cp weights", 4.0),),
    "zero-3 with optimizer to universal": (("ds_to_universal", 0.1),),
}
PEAK_MB = 100
# Runs a command; prints its seconds, those of its processors, and its peak in KiB.
LAUNCHER = """
import os, sys, time
start = time.perf_counter()
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(child, 0)
print(time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(status != 0)
"""


@dataclass(frozen=True)
class Made:
    """A checkpoint in several formats, and the files it was made from."""

    root: Path
    tensors: Mapping[str, LogicalTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


@dataclass
class Tool:
    """A conversion by one command.

    Attributes:
        name: Name in the table.
        command: The command; ``OUT`` in it becomes a new folder or file.
        check: What compares the result with the model, or None.
        seconds: Seconds of each round.
        cpu: Seconds of processors of each round, which other work on the machine changes less.
        peaks: Peak of resident memory in bytes, of each round.
    """

    name: str
    command: list[str]
    check: Callable[[Path], None] | None = None
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def shapes_of(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Llama model of about so many bytes of fp32."""
    # 4 h^2 for attention and 3 * 2.75 h^2 for the MLP, in each layer.
    hidden = 64
    while (12.25 * LAYERS * hidden + 2 * VOCABULARY) * hidden * 4 < num_bytes:
        hidden += 64
    wide = hidden * 11 // 4
    layer = {
        **{f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        **{f"model.layers.{i}.{n}": shape for i in range(LAYERS) for n, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }


def make(root: Path, num_bytes: int, with_optimizer: bool) -> Made:
    """Write random weights, and the folders that two ranks would have saved."""
    chance = np.random.default_rng(0)
    tensors, offset = {}, 0
    with (root / "raw").open("wb") as file:
        for name, shape in shapes_of(num_bytes).items():
            piece = Piece("raw", offset, (0,) * len(shape), shape)
            tensors[name] = LogicalTensor(name, shape, "float32", [piece])
            for low in range(0, tensors[name].num_elements, 1 << 20):
                count = min(1 << 20, tensors[name].num_elements - low)
                file.write(chance.standard_normal(count, np.float32).tobytes())
            offset += tensors[name].num_bytes
    (root / "dcp").mkdir()
    plan_dcp({f"model.{n}": t for n, t in tensors.items()}, RANKS).write(root, root / "dcp", RAM)
    _write_zero(root, tensors, with_optimizer)
    return Made(root, tensors)


def _write_zero(root: Path, tensors: Mapping[str, LogicalTensor], with_optimizer: bool) -> None:
    """Write a ZeRO-3 folder; its flat vectors are made in files first, moments equal to weights."""
    folder = root / "zero"
    archives = Archives()
    for rank in range(RANKS):
        size = 0
        with Stream(root, BUFFER_BYTES) as stream, (root / f"flat-{rank}").open("wb") as file:
            for tensor in tensors.values():
                per_rank = -(-tensor.num_elements // RANKS)
                start = min(rank * per_rank, tensor.num_elements)
                count = min(per_rank, tensor.num_elements - start)
                for _, window in stream.windows(tensor, "float32", start, count):
                    file.write(window)
                file.write(bytes(4 * (per_rank - count)))
                size += per_rank
        flat = LogicalTensor("flat", (size,), "float32", [Piece(f"flat-{rank}", 0, (0,), (size,))])
        vector = Stored("float32", (size,), flat)
        state = {key: vector for key in MOMENTS if with_optimizer}
        settings = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        step = Stored("float32", (), np.float32(10).tobytes())
        optimizer = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "ds_version": "0.19.8",
            "fp32_flat_groups": [vector],
            "optimizer_state_dict": {
                "state": {0: {"step": step, **state}},
                "param_groups": [{**settings, "params": [0]}],
            },
        }
        name = f"global_step10/{{}}zero_pp_rank_{rank}_mp_rank_00_{{}}.pt"
        archives.add(name.format("", "optim_states"), {"optimizer_state_dict": optimizer})
        archives.add(name.format("", "model_states"), _model_state(tensors))
    folder.mkdir()
    archives.write(root, folder, RAM)
    (folder / "latest").write_text("global_step10")
    for rank in range(RANKS):
        (root / f"flat-{rank}").unlink()


def _model_state(tensors: Mapping[str, LogicalTensor]) -> dict[str, object]:
    return {
        "module": ordered(),
        "buffer_names": [],
        "param_shapes": [ordered({n: size_of(tensor.shape) for n, tensor in tensors.items()})],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "optimizer": None,
        "lr_scheduler": None,
        "ds_config": {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}},
        "ds_version": "0.19.8",
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "global_steps": 10,
        "skipped_steps": 0,
    }


def tools(made: Made, with_optimizer: bool) -> list[Tool]:
    """Return what is timed: distft, `cp`, and the peers that are installed."""
    python, root = sys.executable, made.root
    here = [python, "-m", "distft", "consolidate", "--max-ram", "100MB"]
    zero, dcp = str(root / "zero"), str(root / "dcp")

    def fp32(out: Path) -> None:
        compare(made, out)

    found = [
        Tool("cp weights", ["cp", str(root / "raw"), "OUT"]),
        Tool("zero-3 to safetensors", [*here, zero, "OUT"], fp32),
        Tool("dcp to safetensors", [*here, dcp, "OUT"], fp32),
        Tool("zero-3 to bf16", [*here, "--dtype", "bfloat16", zero, "OUT"]),
        Tool(
            "zero_to_fp32",
            [python, "-m", "deepspeed.utils.zero_to_fp32", zero, "OUT", "--safe_serialization"],
            fp32,
        ),
        Tool(
            "dcp_to_torch_save",
            [
                python,
                "-W",
                "ignore",
                "-m",
                "torch.distributed.checkpoint.format_utils",
                "dcp_to_torch",
                dcp,
                "OUT",
            ],
        ),
        Tool(
            "merge_fsdp_weights",
            [
                python,
                "-W",
                "ignore",
                "-c",
                "import sys; from accelerate.utils import merge_fsdp_weights; "
                "merge_fsdp_weights(*sys.argv[1:], safe_serialization=True)",
                dcp,
                "OUT",
            ],
            fp32,
        ),
    ]
    if with_optimizer:
        reshard = [python, "-m", "distft", "reshard", zero, "OUT", "--strategy", "zero3"]
        universal = [python, "-m", "deepspeed.checkpoint.ds_to_universal"]
        tag = f"{zero}/global_step10"
        found += [
            Tool("cp with optimizer", ["cp", "-r", zero, "OUT"]),
            Tool("zero-3 with optimizer to universal", [*reshard, "--world-size", "3"]),
            Tool("ds_to_universal", [*universal, "--input_folder", tag, "--output_folder", "OUT"]),
        ]
    return found


def compare(made: Made, out: Path) -> None:
    """Raise unless a folder of safetensors holds the model, bit for bit."""
    found = read_map(out)
    # One peer keeps what stands before the names in the distributed checkpoint.
    named = {_bare(n): n for n in found.tensors}
    names = {name: named.get(_bare(name)) for name in made.tensors}
    if None in names.values() or len(found.tensors) != len(made.tensors):
        raise RuntimeError(f"{out} holds {len(found.tensors)} of {len(made.tensors)} tensors.")
    with Stream(made.root, BUFFER_BYTES) as one, Stream(found.root, BUFFER_BYTES) as other:
        for name, tensor in made.tensors.items():
            left = one.windows(tensor, "float32")
            right = other.windows(found.tensors[names[name] or name], "float32")
            if not all(np.array_equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True)):
                raise RuntimeError(f"{name} in {out} has other values.")


def _bare(name: str) -> str:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


def run(tool: Tool, out: Path) -> None:
    """Run a command once in a process of its own, and note its time and its peak."""
    command = [str(out) if word == "OUT" else word for word in tool.command]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # A process inherits the peak of the one that starts it, so a small one does.
    launch = [sys.executable, "-I", "-S", "-c", LAUNCHER, *command]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed: {done.stderr[-500:]}")
    seconds, cpu, peak = map(float, done.stdout.split()[-3:])
    tool.seconds.append(seconds)
    tool.cpu.append(cpu)
    tool.peaks.append(int(peak) * 1024)


def remove(out: Path) -> None:
    """Remove what a tool wrote."""
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)


def measure(made: Made, timed: list[Tool], rounds: int) -> None:
    """Let every tool convert once and compare, then take turns."""
    out = made.root / "out"
    for tool in timed:
        run(tool, out)
        if tool.check is not None:
            tool.check(out)
        remove(out)
        tool.seconds.clear()
        tool.cpu.clear()
        tool.peaks.clear()
    for number in range(rounds):
        # Another one begins each time, so that none always follows the same one.
        for index in range(len(timed)):
            run(timed[(number + index) % len(timed)], out)
            remove(out)


def report(made: Made, timed: list[Tool], rounds: int) -> tuple[list[str], list[str]]:
    """Return the lines of a result, and the bounds that are broken."""
    median = {tool.name: statistics.median(tool.seconds) for tool in timed}
    lines = [
        "# Conversion of checkpoints",
        "",
        *machine.describe(),
        f"- {made.num_bytes / 1e9:.2f} GB of fp32 weights, {len(made.tensors)} tensors, {RANKS} "
        f"ranks; {rounds} rounds in turn, whole processes, warm cache",
        "",
        "| tool | best s | median s | least CPU s | peak MB |",
        "|---|---|---|---|---|",
    ]
    for tool in timed:
        peak = max(tool.peaks) / 1e6
        lines.append(
            f"| {tool.name} | {min(tool.seconds):.2f} | {median[tool.name]:.2f} | "
            f"{min(tool.cpu):.2f} | {peak:.0f} |"
        )
    broken = []
    lines += [
        "",
        "| conversion | compared with | ratio of medians | at most |",
        "|---|---|---|---|",
    ]
    for name, bounds in BOUNDS.items():
        for other, bound in bounds:
            if name in median and other in median:
                # Each round's own ratio: what slows the machine slows both.
                pairs = zip(_of(timed, name), _of(timed, other), strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                lines.append(f"| {name} | {other} | {ratio:.2f} | {bound} |")
                if ratio > bound:
                    broken.append(f"{name} took {ratio:.2f} of {other}, at most {bound}")
    for tool in timed:
        if tool.name in BOUNDS and max(tool.peaks) > PEAK_MB * 1e6:
            broken.append(f"{tool.name} held {max(tool.peaks) / 1e6:.0f} MB, at most {PEAK_MB}")
    return lines, broken


def _of(timed: list[Tool], name: str) -> list[float]:
    return next(tool.seconds for tool in timed if tool.name == name)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="weights in fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-optimizer", action="store_true", help="leave resharding out")
    parser.add_argument("--only", nargs="*", help="names of tools")
    parser.add_argument("--folder", help="where to write; default the temporary folder")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        made = make(Path(folder), int(options.gigabytes * 1e9), not options.no_optimizer)
        timed = tools(made, not options.no_optimizer)
        if options.only:
            timed = [tool for tool in timed if tool.name in options.only]
        measure(made, timed, options.rounds)
        lines, broken = report(made, timed, options.rounds)
    machine.publish(lines, options.out, broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
