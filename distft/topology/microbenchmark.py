"""How long collectives take on the live group: what `distft.topology.measure` runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.formulas._numbers import choice, whole
from distft.process_group import from_rank0, group_size, init, local_device, together
from distft.topology.measurements import Measurements, Point, load_measurements

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MEASURED_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
# Seconds that the repeats of one size may take together, and how many they are.
_BUDGET = 0.3
_REPEATS = (3, 50)
_WARM_UPS = 2
_ITEM = 4
# Peer access off takes NVLink away, and the sums in the switch with it.
_WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
# A launcher's own store and ids, which processes below its ranks must not meet again.
_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_CHILD_PATIENCE = 1800


def measure(
    ops: Sequence[str] = MEASURED_OPS,
    sizes: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    *,
    p2p: bool = True,
) -> Measurements:
    """Time collectives over sizes on the ranks that run, and return the same table on every rank.

    Bandwidths are as nccl-tests prints them: `algbw` is bytes of the buffer over seconds, `busbw`
    that times `2 (N-1)/N` (all_reduce), `(N-1)/N` (all_gather, reduce_scatter, all_to_all) or 1
    (send, where each rank sends to the next at once). Of each size the slowest rank's mean counts.

    Args:
        ops: Of "all_reduce", "all_gather", "reduce_scatter", "all_to_all" and "send".
        sizes: Bytes of the full buffer, rounded down to whole elements for each rank; default
            4 KiB to 1 GiB on GPUs, to 16 MiB on a CPU, in steps of 4.
        ranks: Sizes of groups of the first ranks; default 2, 4, ... and all.
        p2p: False starts each rank once more in a process of its own without NVLink and peer
            access (NCCL reads that setting once), to show what the same GPUs do over the host.

    Raises:
        RuntimeError: There is no group of at least 2 ranks; a process of `p2p=False` failed.
        ValueError: An argument is out of range or differs between ranks; `p2p=False` without NCCL.

    Collective: every rank.
    """
    world_size = group_size("topology.measure()")
    if world_size < 2:
        raise RuntimeError(
            f"topology.measure() needs at least 2 ranks, but there is {world_size}. Start them "
            "with torchrun --nproc-per-node=2, or `python -m distft bench-collectives --local 2`."
        )
    device = _device()
    with together():
        sizes = _checked_sizes(sizes, device)
        counts = _checked_counts(ranks, world_size)
        for op in ops:
            choice("op", op, MEASURED_OPS)
        _check_p2p(p2p, device)
    with together():
        _check_same((tuple(ops), tuple(sizes), tuple(counts), p2p))
    if not p2p:
        return in_processes_of_their_own(_WITHOUT_P2P, ops, sizes, counts)
    points = [point for count in counts for point in _measure_group(ops, sizes, count, device)]
    found: Measurements = from_rank0(_described(points, world_size, device))
    return found


def measured_here(
    ops: Sequence[str] | None,
    sizes: Sequence[int] | None,
    ranks: Sequence[int] | None,
    compare: bool,
) -> tuple[int, list[Measurements]]:
    """Start the group of this process, and return its rank and what it measured.

    Args:
        ops: As in `measure`; None for its default.
        sizes: As in `measure`.
        ranks: As in `measure`.
        compare: Whether to measure with `p2p=False` too.

    Raises:
        RuntimeError: As `measure`.
        ValueError: As `measure`.

    Collective: every rank.
    """
    import torch.distributed as dist

    init()
    ways = (True, False) if compare else (True,)
    found = [measure(ops or MEASURED_OPS, sizes, ranks, p2p=p2p) for p2p in ways]
    return dist.get_rank(), found


def _device() -> torch.device:
    import torch
    import torch.distributed as dist

    on_gpu = "nccl" in dist.get_backend_config() and torch.cuda.is_available()
    return local_device() if on_gpu else torch.device("cpu")


def _checked_sizes(sizes: Sequence[int] | None, device: torch.device) -> list[int]:
    if sizes is None:
        largest = 2**30 if device.type == "cuda" else 2**24
        return [4**i for i in range(6, 16) if 4**i <= largest]
    if not sizes:
        raise ValueError("sizes is empty, but at least 1 must be measured. Pass bytes.")
    return sorted(whole("size", size, _ITEM) for size in sizes)


def _checked_counts(ranks: Sequence[int] | None, world_size: int) -> list[int]:
    if ranks is None:
        return sorted({2**i for i in range(1, world_size.bit_length())} | {world_size})
    counts = sorted({whole("ranks", count, 2) for count in ranks})
    if not counts or counts[-1] > world_size:
        raise ValueError(
            f"ranks is {list(ranks)}, but groups are of 2 to {world_size} ranks here. "
            "Pass sizes in that range, or start more ranks."
        )
    return counts


def _check_p2p(p2p: bool, device: torch.device) -> None:
    if not p2p and device.type != "cuda":
        raise ValueError(
            "p2p=False takes NVLink and peer access from NCCL, but this group measures on the "
            f"{device.type}. Leave p2p out, or run on GPUs."
        )


def _check_same(mine: object) -> None:
    first = from_rank0(mine)
    if mine != first:
        raise ValueError(
            f"measure() was called with {mine} here and {first} on rank 0. "
            "Pass the same arguments on every rank."
        )


def _described(points: list[Point], world_size: int, device: torch.device) -> Measurements:
    import torch
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"{os.cpu_count()} processor cores"
    return Measurements(
        tuple(points),
        "nccl" if on_gpu else str(dist.get_backend()),
        name,
        world_size,
        int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        p2p=os.environ.get("NCCL_P2P_DISABLE", "0") != "1",
        topology=_topology() if on_gpu else None,
    )


def _topology() -> str | None:
    from distft.topology.detect import nvidia_smi

    try:
        return nvidia_smi("topo", "-m")
    except RuntimeError:
        return None


def _measure_group(
    ops: Sequence[str], sizes: Sequence[int], count: int, device: torch.device
) -> list[Point]:
    """Return the points of the group of the first `count` ranks; no points on the others."""
    import torch.distributed as dist

    group = dist.new_group(list(range(count)))
    points = []
    if dist.get_rank() < count:
        for op in ops:
            for size in sizes:
                # As nccl-tests: a whole number of elements for each rank, at least one.
                elements = max(1, size // _ITEM // count) * count
                seconds = _time(_collective(op, elements, group, device), group, device)
                points.append(Point(op, count, elements * _ITEM, seconds))
        dist.destroy_process_group(group)
    dist.barrier()
    return points


def _collective(
    op: str, elements: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    """Return what runs one collective over a full buffer of `elements`."""
    import torch
    import torch.distributed as dist

    count, rank = dist.get_world_size(group), dist.get_rank(group)
    full = torch.zeros(elements, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if op == "all_gather":
        part = torch.zeros(elements // count, device=device)
        return lambda: dist.all_gather_into_tensor(full, part, group=group)
    if op == "reduce_scatter":
        part = torch.zeros(elements // count, device=device)
        return lambda: dist.reduce_scatter_tensor(part, full, group=group)
    other = torch.zeros_like(full)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(other, full, group=group)

    def send() -> None:
        after = dist.get_global_rank(group, (rank + 1) % count)
        before = dist.get_global_rank(group, (rank - 1) % count)
        ways = [
            dist.P2POp(dist.isend, full, after, group),
            dist.P2POp(dist.irecv, other, before, group),
        ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    return send


def _time(run: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of one call, the mean over repeats, of the slowest rank."""
    import torch
    import torch.distributed as dist

    def once(repeats: int) -> float:
        _settle(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        _settle(device)
        # The slowest rank's time, which all know afterwards.
        seconds = torch.tensor((time.perf_counter() - start) / repeats, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        return seconds.item()

    once(1)
    few, many = _REPEATS
    return once(max(few, min(many, int(_BUDGET / max(once(_WARM_UPS), 1e-9)))))


def _settle(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_processes_of_their_own(
    environment: dict[str, str], ops: Sequence[str], sizes: Sequence[int], counts: Sequence[int]
) -> Measurements:
    """Measure in a new process below each rank, with some environment variables set there.

    Raises:
        RuntimeError: A process failed; the message has the end of what it said.

    Collective: every rank.
    """
    import torch.distributed as dist

    port = from_rank0(_free_port())
    with tempfile.TemporaryDirectory(prefix="distft-measure-") as folder:
        out = Path(folder, "measured.json")
        command = [sys.executable, "-m", "distft", "bench-collectives", "--out", str(out), "--ops"]
        command += [*ops, "--sizes", *map(str, sizes), "--ranks", *map(str, counts)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
        ours = {
            "RANK": str(dist.get_rank()),
            "WORLD_SIZE": str(dist.get_world_size()),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": str(port),
        }
        with together():
            _run({**kept, **ours, **environment}, command)
        # Rank 0 of them wrote the file, below rank 0 of us.
        text = from_rank0(out.read_text("utf-8") if dist.get_rank() == 0 else None)
        out.write_text(text, "utf-8")
        return load_measurements(out)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _run(environment: dict[str, str], command: list[str]) -> None:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_CHILD_PATIENCE
    )
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[-400:]
        raise RuntimeError(
            f"Measuring in a process of its own failed with {done.returncode}: {said}. "
            "Run `python -m distft bench-collectives` with the same variables to see it all."
        )
