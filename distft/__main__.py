"""The command line, such as ``python -m distft consolidate PATH OUT``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 where it worked, 1 where it says why not.

    Collective: none.
    """
    parser = argparse.ArgumentParser(prog="python -m distft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A command that is known needs no other one's options, and starts sooner.
    known = _COMMANDS.get(given[0]) if given else None
    for add in [known] if known else _COMMANDS.values():
        add(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(given)
    try:
        code: int = options.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        return _failed(options, error)
    return code


def _add_consolidate(commands: Any) -> None:
    command = commands.add_parser(
        "consolidate",
        help="turn a checkpoint into safetensors that from_pretrained reads",
        epilog="example: python -m distft consolidate runs/7 model --dtype bfloat16",
    )
    command.add_argument("path", help="a checkpoint, or a run's root for its latest one")
    command.add_argument("out", help="folder to write the model to")
    command.add_argument("--dtype", help="dtype of the weights; default as trained")
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
    command.add_argument("--base", help="base of the adapter, where the checkpoint holds none")
    command.add_argument("--config", help="config.json of the model, or a folder with one")
    _add_ram_and_check(command)
    command.set_defaults(run=_consolidate)


def _add_convert(commands: Any) -> None:
    command = commands.add_parser(
        "convert",
        help="turn a checkpoint into the format of another tool",
        epilog="example: python -m distft convert runs/7 runs/7-zero3 --to zero3 --world-size 4",
    )
    command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
    command.add_argument("out", help="folder to write to")
    command.add_argument(
        "--to",
        default="safetensors",
        help="safetensors, adapter, dcp, deepspeed (universal) or zero3; default safetensors",
    )
    command.add_argument("--world-size", type=int, default=1, help="ranks, of dcp and zero3")
    command.add_argument("--dtype", help="dtype of the weights; default as trained")
    command.add_argument("--base", help="base of the adapter, where the checkpoint holds none")
    command.add_argument("--config", help="config.json of the model, or a folder with one")
    _add_ram_and_check(command)
    command.set_defaults(run=_convert)


def _add_reshard(commands: Any) -> None:
    command = commands.add_parser(
        "reshard",
        help="turn a checkpoint into one that a strategy resumes, optimizer included",
        epilog="example: python -m distft reshard runs/7 runs/7-on-4 --strategy fsdp2 "
        "--world-size 4",
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


def _add_diff(commands: Any) -> None:
    command = commands.add_parser(
        "diff",
        help="say what two checkpoints of any formats hold differently; exit code 1 if anything",
        epilog="example: python -m distft diff runs/7 model",
    )
    command.add_argument("first", help="a checkpoint")
    command.add_argument("second", help="another one")
    command.set_defaults(run=_diff)


def _add_verify(commands: Any) -> None:
    command = commands.add_parser(
        "verify",
        help="say whether a checkpoint of any format is broken, consistent or proven",
        epilog="example: python -m distft verify runs/7 --require proven",
    )
    command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
    command.add_argument(
        "--require",
        default="consistent",
        choices=("consistent", "proven"),
        help="exit with 1 below it; default consistent",
    )
    command.set_defaults(run=_verify)


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser("inspect", help="say what a checkpoint of any format holds")
    command.add_argument("path", help="a checkpoint, a run's root, or one file of weights")
    command.set_defaults(run=_inspect)


def _add_topo(commands: Any) -> None:
    command = commands.add_parser(
        "topo",
        help="say how GPUs are joined, how fast collectives are, and which GPUs to use",
        epilog="example: nvidia-smi topo -m | python -m distft topo - --gpu H100-80GB",
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument(
        "file", nargs="?", help="what `nvidia-smi topo -m` printed; - reads it from the input"
    )
    source.add_argument("--preset", help="a machine by its name, such as 8xH100-SXM")
    command.add_argument("--gpu", help="kind of GPU of FILE, such as H100-80GB")
    command.add_argument("--visible", help="GPUs of FILE that may be used, such as 4,5,6,7")
    command.add_argument("--nodes", type=int, default=1, help="number of such nodes; default 1")
    command.add_argument(
        "--internode-gbps", type=float, help="Gbit/s out of a node, all network cards together"
    )
    command.add_argument("--ranks", type=int, help="place this many; default 2, 4, ... and all")
    command.set_defaults(run=_topo)


def _add_bench_collectives(commands: Any) -> None:
    command = commands.add_parser(
        "bench-collectives",
        help="time collectives over sizes on the ranks of a launcher, as nccl-tests prints them",
        epilog="example: torchrun --nproc-per-node=8 -m distft bench-collectives --out links.json",
    )
    command.add_argument("--local", type=int, help="start this many CPU ranks here, no launcher")
    command.add_argument("--ops", nargs="+", help="collectives; default all that measure() has")
    command.add_argument("--sizes", nargs="+", type=int, help="bytes of the full buffer")
    command.add_argument("--ranks", nargs="+", type=int, help="sizes of groups; default 2, 4, ...")
    command.add_argument("--out", help="JSON to write, for Cluster.load and Cluster.with_measured")
    command.add_argument("--plot", help="picture to write")
    command.add_argument(
        "--compare-no-p2p", action="store_true", help="measure without NVLink too, and draw both"
    )
    command.set_defaults(run=_bench_collectives)


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="rank every strategy for a model on a machine: memory, time, what to change",
        epilog="example: python -m distft plan Qwen3-30B-A3B --cluster 8xH100-SXM",
    )
    command.add_argument("model", help="a model's name, or a folder with its config.json")
    command.add_argument("--cluster", default="8xH100-SXM", help="a preset; default 8xH100-SXM")
    command.add_argument("--topology", help="what `nvidia-smi topo -m` printed, with --gpu")
    command.add_argument("--gpu", help="kind of GPU of --topology, such as H100-80GB")
    command.add_argument("--nodes", type=int, default=1, help="number of such nodes; default 1")
    command.add_argument("--internode-gbps", type=float, help="Gbit/s out of a node")
    command.add_argument("--num-gpus", type=int, help="GPUs that train; default all")
    command.add_argument("--micro-batch", type=int, default=1, help="rows; default 1")
    command.add_argument("--seq-len", type=int, default=4096, help="tokens of a row; default 4096")
    command.add_argument("--grad-accum", type=int, default=1, help="micro-steps; default 1")
    command.add_argument("--tuning", default="full", help="full, lora or qlora; default full")
    command.add_argument("--lora-rank", type=int, default=16, help="rank of adapters; default 16")
    command.add_argument("--loss", default="eager", help="eager, compiled, chunked or fused")
    command.add_argument("--attention", default="flash", help="flash, sdpa or eager")
    command.add_argument("--precision", help="fp32, bf16-mixed or bf16")
    command.add_argument("--checkpointing", action="store_true", help="compute blocks again")
    command.add_argument("--compile", action="store_true", help="compile blocks")
    command.add_argument("--offload", help="optimizer or params, where a strategy can")
    command.add_argument("--html", help="also write a report with plots to this file")
    command.add_argument("--markdown", help="also write a report to this file")
    command.add_argument("--plot", help="also write the plots to this file")
    command.set_defaults(run=_plan)


def _add_parity(commands: Any) -> None:
    from distft.diagnose.command import add_parity

    add_parity(commands)


def _plan(options: argparse.Namespace) -> int:
    from distft.planner import plan
    from distft.spec import Workload
    from distft.topology import Cluster

    nodes, gbps = options.nodes, options.internode_gbps
    if options.topology:
        text = Path(options.topology).read_text(encoding="utf-8")
        cluster = Cluster.parse(text, gpu=options.gpu, nodes=nodes, internode_gbps=gbps)
    else:
        cluster = Cluster.preset(options.cluster, nodes, gbps)
    load = Workload(
        micro_batch=options.micro_batch,
        seq_len=options.seq_len,
        grad_accum=options.grad_accum,
        tuning=options.tuning,
        lora_rank=options.lora_rank,
        attention=options.attention,
        loss=options.loss,
    )
    found = plan(
        options.model,
        load,
        cluster,
        num_gpus=options.num_gpus,
        precision=options.precision,
        activation_checkpointing=options.checkpointing,
        compile=options.compile,
        offload=options.offload,
    )
    for path, text_of in ((options.html, found.to_html), (options.markdown, found.to_markdown)):
        if path:
            Path(path).write_text(text_of(), encoding="utf-8")
    if options.plot:
        found.plot(options.plot)
    print(found.to_json() if options.json else found)
    return 0


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="look at this machine, at scripts that may hang, or at dumps of a run that hung",
        epilog="example: python -m distft doctor train.py; exit code 1 where something is found",
    )
    command.add_argument("scripts", nargs="*", help="scripts or folders to read; none runs")
    command.add_argument("--folder", help="where checkpoints go: its room and speed")
    command.add_argument("--flight", help="dumps of torch's flight recorder, without the rank")
    command.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.scripts:
        from distft.diagnose.lint import lint

        found = lint(options.scripts)
        print(
            json.dumps([dataclasses.asdict(each) for each in found])
            if options.json
            else "\n".join(map(str, found)) or "Every rank makes the collectives of these scripts."
        )
        return 1 if found else 0
    if options.flight:
        from distft.diagnose.flight import compare, read_dumps

        ranks = read_dumps(options.flight)
        fields = {r: [dataclasses.asdict(each) for each in c] for r, c in ranks.items()}
        print(json.dumps(fields) if options.json else compare(ranks))
        return 0
    from distft.diagnose.doctor import doctor

    page = doctor(options.folder)
    _report(options, page)
    return 1 if page.findings else 0


def _add_ram_and_check(command: Any) -> None:
    command.add_argument("--max-ram", default="2GB", help="memory that may be added; default 2GB")
    command.add_argument("--check", action="store_true", help="verify the checkpoint first")


def _consolidate(options: argparse.Namespace) -> int:
    from distft.checkpoint.consolidation import consolidate

    with _progress() as advance:
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
    return _wrote(options, out, "weights", "*.safetensors")


def _convert(options: argparse.Namespace) -> int:
    from distft.checkpoint.conversion import convert

    with _progress() as advance:
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
    return _wrote(options, out, "state", "*.safetensors", "*.distcp", "*.pt")


def _reshard(options: argparse.Namespace) -> int:
    from distft.strategies.resharding import reshard

    with _progress() as advance:
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
    return _wrote(options, out, "state", "dcp/*", "deepspeed/*")


def _diff(options: argparse.Namespace) -> int:
    from distft.checkpoint.difference import diff

    found = diff(options.first, options.second)
    _report(options, found, same=found.same)
    return 0 if found.same else 1


def _verify(options: argparse.Namespace) -> int:
    from distft.checkpoint.verify import verify

    found = verify(options.path, options.require)
    _report(options, found, holds=found.holds)
    return 0 if found.holds else 1


def _inspect(options: argparse.Namespace) -> int:
    from distft.checkpoint.inspection import inspect

    _report(options, inspect(options.path))
    return 0


def _topo(options: argparse.Namespace) -> int:
    from distft.topology.cluster import Cluster
    from distft.topology.summary import summarize

    wires = {"nodes": options.nodes, "internode_gbps": options.internode_gbps}
    if not options.file and (options.gpu or options.visible):
        raise ValueError("--gpu and --visible describe FILE, but there is none. Leave them out.")
    if options.preset:
        cluster = Cluster.preset(options.preset, **wires)
    elif options.file:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text("utf-8")
        cluster = Cluster.parse(text, options.gpu, visible_devices=options.visible, **wires)
    else:
        cluster = Cluster.detect(**wires)
    _report(options, summarize(cluster, options.ranks))
    return 0


def _bench_collectives(options: argparse.Namespace) -> int:
    from distft.topology.microbenchmark import measured_here

    chosen = (options.ops, options.sizes, options.ranks, options.compare_no_p2p)
    if options.local:
        from distft.testing import WorkerPool

        with WorkerPool(options.local, timeout=600) as pool:
            rank, found = pool.run(measured_here, *chosen)[0]
    else:
        rank, found = measured_here(*chosen)
    if rank == 0:
        if options.out:
            found[0].save(options.out)
        if options.plot:
            found[0].plot(options.plot, *found[1:])
        if options.json and options.compare_no_p2p:
            names = ("with_p2p", "without_p2p")
            both = map(dataclasses.asdict, found)
            print(json.dumps(dict(zip(names, both, strict=True))))
        else:
            for measured in found:
                _report(options, measured)
    return 0


def _wrote(options: argparse.Namespace, out: Path, what: str, *patterns: str) -> int:
    """Say what a folder holds now, and the highest memory of this process."""
    from distft.checkpoint.memory import peak_bytes

    sizes = {
        file.relative_to(out).as_posix(): file.stat().st_size
        for file in sorted(out.rglob("*"))
        if file.is_file()
    }
    num_bytes = sum(
        size
        for name, size in sizes.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )
    peak = peak_bytes()
    if options.json:
        fields = {"out": str(out), "weight_bytes": num_bytes, "peak_bytes": peak, "files": sizes}
        print(json.dumps(fields))
    else:
        held = "" if peak is None else f", with {peak / 1e6:.0f} MB of memory at most"
        print(f"Wrote {len(sizes)} files with {num_bytes / 1e9:.3f} GB of {what} to {out}{held}")
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


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show the bytes that were written, where somebody is watching."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    import threading

    lock, done, shown = threading.Lock(), 0, 0

    def advance(num_bytes: int) -> None:
        nonlocal done, shown
        with lock:
            done += num_bytes
            # Every 64 MB is often enough for the eye.
            if done - shown >= 64_000_000:
                shown = done
                print(f"\r{done / 1e9:.2f} GB written", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print("\r" + " " * 24 + "\r", end="", file=sys.stderr, flush=True)


_COMMANDS: dict[str, Callable[[Any], None]] = {
    "consolidate": _add_consolidate,
    "convert": _add_convert,
    "reshard": _add_reshard,
    "diff": _add_diff,
    "verify": _add_verify,
    "inspect": _add_inspect,
    "topo": _add_topo,
    "bench-collectives": _add_bench_collectives,
    "plan": _add_plan,
    "parity": _add_parity,
    "doctor": _add_doctor,
}

if __name__ == "__main__":
    sys.exit(main())
