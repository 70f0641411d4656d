"""`python -m distft.launch --nproc 2 script.py args...`: the ranks of one machine, for a laptop.

Thin over torch's elastic agent, which `torchrun` is too: that one has restarts, several machines
and rendezvous; this one has one message when a rank fails, and leaves no rank behind.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Given to the ranks in front of the script.
_RANK = "--as-rank"
# Lines of a failed rank's output that are shown.
_TAIL = 30
# Seconds that ranks have to end after a signal, or after one of them failed.
PATIENCE = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script on several ranks of this machine and return the exit code.

    0 where every rank ended with 0; else that of the rank that failed first, 128 + number for a
    signal, as a shell says it.

    Collective: none.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [_RANK]:
        _become(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="distft launch",
        description="Run a script on the ranks of one machine.",
        # The script's own options may begin as ours do.
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_options(parser)
    return run(parser.parse_args(arguments))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options to a parser, the script and its arguments last.

    Collective: none.
    """
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks")
    parser.add_argument("script", help="Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the script of options that were parsed, and return the exit code of `main`.

    Collective: none.
    """
    if options.nproc < 1:
        options.refuse(f"--nproc {options.nproc} starts no rank; take at least 1.")
    if not Path(options.script).is_file():
        options.refuse(f"there is no file {options.script}")
    # Threads of all ranks together are no more than there are cores.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // options.nproc)))
    with tempfile.TemporaryDirectory(prefix="distft-launch-") as folder:
        code = _run(options.nproc, [options.script, *options.args], Path(folder))
    if options.json:
        # The last line: what the ranks print themselves comes before it.
        print(json.dumps({"exit_code": code, "num_ranks": options.nproc, "script": options.script}))
    return code


def _run(num_ranks: int, command: Sequence[str], folder: Path) -> int:
    # Its start takes seconds, and what it logs says less than one message.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # The first rank's errors, and its progress bar, appear as they are; those of the others are
    # mostly the same, and kept.
    errors = dict.fromkeys(range(1, num_ranks), Std.ERR)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(str(folder), redirects={0: Std.NONE, **errors}),
        shutdown_timeout=PATIENCE,
    )
    as_rank = ["-u", "-m", "distft.launch", _RANK, *command]
    try:
        elastic_launch(config, sys.executable)(*as_rank)
    except ChildFailedError as error:
        return _explain(*error.get_first_failure(), num_ranks, folder)
    except SignalException as error:
        number = int(error.sigval)
        print(
            f"distft.launch: {signal.Signals(number).name}, sent on to {num_ranks} ranks, which "
            "have ended.",
            file=sys.stderr,
        )
        return 128 + number
    return 0


def _explain(rank: int, failure: Any, num_ranks: int, folder: Path) -> int:
    """Print the one message of a failed run, and return its exit code."""
    code = int(failure.exitcode)
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    for log in sorted(folder.rglob(f"{failure.local_rank}/stderr.log")):
        lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
        print(f"---- rank {rank}, the end of its errors", *lines, sep="\n", file=sys.stderr)
    print(
        f"distft.launch: rank {rank} of {num_ranks} (process {failure.pid}) failed first, with "
        f"{how}; the others were ended.",
        file=sys.stderr,
    )
    return code if code >= 0 else 128 - code


def _become(command: Sequence[str]) -> None:
    """Turn this process into a rank that ends when the launcher does, however that ends."""
    if sys.platform == "linux":
        launcher = os.getppid()
        # PR_SET_PDEATHSIG; it outlives exec.
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != launcher or launcher == 1:
            raise SystemExit("distft.launch: the launcher has ended.")
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    sys.exit(main())
