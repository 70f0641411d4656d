"""One page on the environment of a run: versions, devices, limits, and what does not fit."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.diagnose import machine
from distft.diagnose.findings import findings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found; printed, one page without names of hosts, users or folders.

    Attributes:
        versions: By package.
        machine: What there is, in words.
        variables: Those that change how ranks talk.
        findings: What does not fit, each with the way out.
        save: Bytes and seconds of the coming save against the time-out; empty if not asked.
    """

    versions: dict[str, str]
    machine: dict[str, str]
    variables: dict[str, str]
    findings: tuple[tuple[str, str], ...]
    save: str = ""

    def __str__(self) -> str:
        """Show the page."""
        lines = ["distft doctor", ""]
        lines += [" ".join(f"{name} {number}" for name, number in self.versions.items())]
        lines += [f"{name:<14} {value}" for name, value in self.machine.items()]
        if self.variables:
            said = " ".join(f"{name}={value}" for name, value in self.variables.items())
            lines.append(f"{'variables':<14} {said}")
        if self.save:
            lines.append(f"{'save':<14} {self.save}")
        lines.append("")
        if not self.findings:
            lines.append("Nothing was found that does not fit.")
        for number, (what, way_out) in enumerate(self.findings, 1):
            lines += [f"{number}. {what}", f"   -> {way_out}"]
        return "\n".join(lines)


def doctor(
    folder: str | Path | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Return one page on this machine and its packages, ready to be pasted into a report.

    Known defects are found by trying: features of packages, devices, access between GPUs, wires,
    shared memory, limits, variables, build locks. Nothing in it names a host, a user or a folder.

    Args:
        folder: Where checkpoints go: its free room, and a file of 64 MiB is timed there.
        model: With ``folder``, what a save of this model would take, against the time-out of the
            process group.
        optimizer: Its optimizer, whose state is saved too.

    Raises:
        ValueError: ``folder`` is not there, or a model is given without one.

    Collective: none; each rank that calls looks at its own machine.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"{folder} is 0 folders. Pass one that is there.")
    if model is not None and folder is None:
        raise ValueError("doctor() got 1 model and 0 folders. Pass the folder that it goes to.")
    here = {
        "system": f"{platform.system()} {platform.machine()}, {_cores()} cores",
        "memory": _memory(),
        "backends": machine.backends(),
        "gpus": "; ".join(machine.devices()) or "none",
        "limits": _limits(),
    }
    found, save = findings(), ""
    if folder is not None:
        save, more = _save(Path(folder), model, optimizer)
        found += more
    return Diagnosis(machine.versions(), here, machine.variables(), tuple(found), save)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    held = machine.memory()
    shared = machine.shared_memory()
    parts = [
        f"{held[word] / 2**30:.0f} GiB {name}"
        for word, name in (("MemTotal", "in all"), ("MemAvailable", "available"))
        if word in held
    ]
    if shared is not None:
        parts.append(f"/dev/shm {shared[0] / 2**30:.1f} of {shared[1] / 2**30:.1f} GiB free")
    return ", ".join(parts) or "not known"


def _limits() -> str:
    said = []
    for name, value in machine.limits().items():
        in_bytes = "memory" in name
        shown = f"{value / 2**30:.3g} GiB" if in_bytes and value is not None else str(value)
        said.append(f"{name} {'unlimited' if value is None else shown}")
    return ", ".join(said)


def _save(folder: Path, model: Any, optimizer: Any) -> tuple[str, list[tuple[str, str]]]:
    """Return room and speed of a folder, and whether a save fits into both room and time."""
    import shutil

    free, rate = shutil.disk_usage(folder).free, machine.write_rate(folder)
    said = f"{free / 1e9:.1f} GB free, {rate / 1e6:.0f} MB/s"
    if model is None:
        return said, []
    from distft.measure.memory import model_state_bytes
    from distft.process_group import group_timeout, local_ranks

    held = model_state_bytes(model, optimizer)
    ranks = local_ranks()
    # What each rank of this machine writes goes through the same disk.
    num_bytes = (held.parameters + held.optimizer) * ranks
    seconds, limit = num_bytes / rate, group_timeout()
    said += f"; {ranks} ranks here write {num_bytes / 1e9:.2f} GB in about {seconds:.0f} s"
    found = []
    if num_bytes > free:
        found.append(
            (
                f"a save takes {num_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free",
                "make room, or save(..., keep=2)",
            )
        )
    if limit is not None:
        said += f"; the time-out is {limit:g} s"
        if seconds > limit / 2:
            found.append(
                (
                    f"a save takes about {seconds:.0f} s, and collectives end after {limit:g} s",
                    "distft.init(timeout=...) with more, or save(..., async_save=True)",
                )
            )
    return said, found
