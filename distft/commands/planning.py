"""Commands before a run: plan, topo, bench-collectives."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from distft.commands.output import report


def add_plan(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "plan",
        help="rank every strategy for a model on a machine: memory, time, what to change",
        epilog="example: distft plan Qwen3-30B-A3B --cluster 8xH100-SXM",
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


def add_topo(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
    command = commands.add_parser(
        "topo",
        help="say how GPUs are joined, how fast collectives are, and which GPUs to use",
        epilog="example: nvidia-smi topo -m | distft topo - --gpu H100-80GB",
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


def add_bench_collectives(commands: Any) -> None:
    """Add the command to a parser's commands.

    Collective: none.
    """
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
    report(options, summarize(cluster, options.ranks))
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
                report(options, measured)
    return 0
