"""torch's flight recorder: the last collectives of each rank, from memory or from its dumps."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

# Where torch's watchdog writes dumps, the rank's number appended; newer name first.
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# torch's functions that return what is in memory: gloo's and, where it was built with it, NCCL's.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True)
class LastCollective:
    """The last collective that a rank began in a process group.

    Attributes:
        group: Name of the group, as torch describes it.
        number: The how manieth of the group, from 1; ranks in step have the same one.
        op: Its name, such as ``"all_reduce"``.
        shape: Shape of what the rank brings.
        finished: Whether all ranks have made it.
    """

    group: str
    number: int
    op: str
    shape: tuple[int, ...]
    finished: bool

    def __str__(self) -> str:
        """Say it in a few words."""
        shape = "x".join(map(str, self.shape)) or "1"
        state = "done" if self.finished else "not done"
        return f"{self.op} {self.number} of {self.group}, {shape} elements, {state}"


def last_collectives(dump: Mapping[str, Any]) -> list[LastCollective]:
    """Return the last collective of each group in one rank's dump, the latest first.

    A record says "completed" only for NCCL; gloo's are complete where the group's counter says so.

    Collective: none.
    """
    status = dump.get("pg_status", {})
    latest: dict[str, Mapping[str, Any]] = {}
    for entry in dump.get("entries", ()):
        if not entry.get("is_p2p"):
            latest[str(entry.get("process_group"))] = entry
    found = []
    entries = sorted(latest.values(), key=lambda entry: int(entry["time_created_ns"]))
    for entry in reversed(entries):
        number = int(entry["collective_seq_id"])
        group = status.get(str(entry.get("pg_id")), status.get(entry.get("pg_id"), {}))
        completed = int(group.get("last_completed_collective", -1))
        names = entry.get("process_group") or ("", "")
        found.append(
            LastCollective(
                str(names[-1] or names[0]),
                number,
                str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
                tuple((entry.get("input_sizes") or [()])[0]),
                entry.get("state") == "completed" or number <= completed,
            )
        )
    return found


def recorded_here() -> list[LastCollective]:
    """Return the last collectives of this process; none where the recorder is off.

    ``TORCH_FR_BUFFER_SIZE=2000`` turns it on.

    Collective: none.
    """
    from torch._C import _distributed_c10d

    found: list[LastCollective] = []
    for name in _RECORDERS:
        recorder = getattr(_distributed_c10d, name, None)
        if recorder is not None:
            text = recorder(includeCollectives=True, onlyActive=False)
            found += last_collectives(json.loads(text or b"{}"))
    return found


def read_dumps(prefix: str | Path | None = None) -> dict[int, list[LastCollective]]:
    """Return the last collectives of each rank that torch's watchdog has dumped.

    Args:
        prefix: Path of the files without the rank's number; default that of torch's variables.

    Raises:
        ValueError: A file holds something else than plain values, or there is none.

    Collective: none.
    """
    if prefix is None:
        prefix = next((os.environ[name] for name in DUMP_VARIABLES if os.environ.get(name)), None)
    if prefix is None:
        raise ValueError(
            f"No path of dumps is given, and {len(DUMP_VARIABLES)} variables are not set. Pass the "
            f"path without the rank's number, or set {' or '.join(DUMP_VARIABLES)}."
        )
    start = Path(prefix)
    numbered = re.compile(rf"{re.escape(start.name)}(\d+)$")
    files = sorted(start.parent.glob(f"{start.name}*")) if start.parent.is_dir() else []
    ranks = {int(match[1]): file for file in files if (match := numbered.match(file.name))}
    if not ranks:
        raise ValueError(
            f"{prefix} has dumps of 0 ranks. torch writes them where a collective timed out, with "
            "TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1."
        )
    return {rank: last_collectives(_plain(file)) for rank, file in sorted(ranks.items())}


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, text and numbers; whatever asks for a name to call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the pickle asks for {module}.{name}")


def _plain(file: Path) -> Mapping[str, Any]:
    raw = file.read_bytes()
    try:
        found = json.loads(raw) if raw[:1] == b"{" else _PlainUnpickler(BytesIO(raw)).load()
    except Exception as error:
        raise ValueError(
            f"{file} of {len(raw)} bytes is no dump of torch's flight recorder: {error}. "
            "Pass files that torch wrote."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, and a dump is 1 dict.")
    return found


def compare(ranks: Mapping[int, list[LastCollective]]) -> str:
    """Return who is at which collective of which group, ranks at the same one together.

    >>> one = LastCollective("default_pg", 7, "all_reduce", (3,), False)
    >>> other = LastCollective("default_pg", 6, "broadcast", (), True)
    >>> print(compare({0: [one], 1: [one], 2: [other]}))
    ranks 0-1: all_reduce 7 of default_pg, 3 elements, not done
    rank 2: broadcast 6 of default_pg, 1 elements, done

    Collective: none.
    """
    by_place: dict[str, list[int]] = {}
    for rank, collectives in sorted(ranks.items()):
        for collective in collectives:
            by_place.setdefault(str(collective), []).append(rank)
    return "\n".join(f"{say_ranks(at)}: {place}" for place, at in by_place.items())


def say_ranks(ranks: list[int]) -> str:
    """Return numbers of ranks in few words.

    >>> say_ranks([0, 1, 2, 5]), say_ranks([3])
    ('ranks 0-2, 5', 'rank 3')

    Collective: none.
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
