"""What `nvidia-smi` says of this machine."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

from distft.topology.gpus import Gpu, gpu_by_name
from distft.topology.parse import parse_table
from distft.topology.table import Table
from distft.topology.visible_devices import visible_numbers

# A driver that wakes up with eight GPUs takes some ten seconds.
_PATIENCE = 60


def detected() -> tuple[Table, Gpu | None, tuple[int, ...]]:
    """Return this machine's links, kind of GPU (None if unknown or mixed), visible GPUs."""
    table = parse_table(nvidia_smi("topo", "-m"))
    lines = nvidia_smi("--query-gpu=index,name,uuid", "--format=csv,noheader").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.count(",") == 2]
    rows = [row for row in rows if row[0].isdecimal()]
    uuids = {uuid: int(index) for index, _, uuid in rows}
    usable = visible_numbers(os.environ.get("CUDA_VISIBLE_DEVICES"), table.gpus, uuids)
    names = {name for index, name, _ in rows if int(index) in (usable or table.gpus)}
    gpu, warning = _kind(sorted(names))
    if warning:
        table = replace(table, warnings=(*table.warnings, warning))
    return table, gpu, usable


def _kind(names: list[str]) -> tuple[Gpu | None, str]:
    """Return the one kind that all GPUs are, or None and what to say."""
    if len(names) != 1:
        return None, (
            f"The GPUs are {len(names)} kinds ({', '.join(names)}), so no speed is known, and CUDA "
            "numbers them as here with CUDA_DEVICE_ORDER=PCI_BUS_ID only."
        )
    try:
        return gpu_by_name(names[0]), ""
    except ValueError:
        return None, f"The GPU {names[0]!r} is not known, and neither is any speed."


def nvidia_smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints for some arguments, or raise RuntimeError."""
    command = ("nvidia-smi", *arguments)
    way_out = (
        "Run it where the GPUs are and pass its text to Cluster.parse, or take Cluster.preset."
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except FileNotFoundError:
        raise RuntimeError(f"This machine has no nvidia-smi. {way_out}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"`{' '.join(command)}` did not answer within {_PATIENCE} s. {way_out}"
        ) from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        raise RuntimeError(
            f"`{' '.join(command)}` failed with {done.returncode}: {said}. {way_out}"
        )
    return done.stdout
