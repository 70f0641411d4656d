"""What a rank tells of itself when ranks wait for each other, and the one report made of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distft.diagnose.flight import recorded_here, say_ranks
from distft.whereabouts import whereabouts

# Frames of a stack that are shown, from the innermost.
_FRAMES = 6
# Files in which a rank waits for others, or for a device that does.
_WAITS_IN = ("torch/distributed/", "torch/autograd/", "torch/cuda/", "deepspeed/", "distft/")


@dataclass(frozen=True)
class Scene:
    """Where a rank is.

    Attributes:
        place: The public call that it is in, or came from.
        unchanged: Seconds for which its stack has not changed.
        stack: Its innermost Python frames, as text.
        collectives: Its last collectives, where torch's flight recorder is on.
        state: ``"runs"``, ``"raised"`` or ``"left"`` (the watched block).
        error: What it raised.
    """

    place: str
    unchanged: float = 0.0
    stack: str = ""
    collectives: str = ""
    state: str = "runs"
    error: str = ""

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scene:
        """Return what `to_json` made text of."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """Say it in a line."""
        if self.state == "raised":
            return f"{self.place}, where it raised {self.error.splitlines()[-1]}"
        if self.state == "left":
            return f"left the watched block, {self.place}"
        return self.place


@dataclass(frozen=True)
class Alarm:
    """Why the ranks are asked where they are.

    Attributes:
        kind: ``"stuck"``, ``"gone"`` or ``"raised"``.
        rank: The rank that it is about.
        text: One sentence.
    """

    kind: str
    rank: int
    text: str

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Alarm:
        """Return what `to_json` made text of."""
        return cls(**json.loads(text))


def scene_here(unchanged: float) -> Scene:
    """Return where the main thread of this process is.

    Collective: none.
    """
    try:
        collectives = json.dumps([str(each) for each in recorded_here()])
    except Exception as error:  # a recorder that changed must not hide the rest
        collectives = json.dumps([f"unreadable ({type(error).__name__})"])
    return Scene(whereabouts(), round(unchanged, 1), stack_here(), collectives)


def stack_here() -> str:
    """Return the innermost frames of the main thread, as text.

    Collective: none.
    """
    frame = sys._current_frames().get(_main_thread())
    frames = traceback.extract_stack(frame) if frame is not None else []
    return "".join(traceback.format_list(frames[-_FRAMES:]))


def fingerprint() -> tuple[int, ...]:
    """Return numbers that change when the main thread goes on in its Python code.

    Collective: none.
    """
    found: list[int] = []
    frame = sys._current_frames().get(_main_thread())
    while frame is not None:
        found += [id(frame), frame.f_lasti]
        frame = frame.f_back
    return tuple(found)


def waits() -> bool:
    """Return whether the main thread is where ranks wait for each other or for a device.

    Collective: none.
    """
    frame = sys._current_frames().get(_main_thread())
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if any(part in name for part in _WAITS_IN):
            return True
        frame = frame.f_back
    return False


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def this_machine() -> str:
    """Return a word that processes which see each other's numbers share; it names nobody.

    Collective: none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        text = boot + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        text = platform.node()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def started_at(pid: int) -> str | None:
    """Return a mark of when a process of this machine began; None where it is gone.

    A number of a process is used again, and one that ended stays until its parent has asked.

    Collective: none.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return "unknown"
    return None if fields[0] in "ZX" else fields[19]


def report(alarm: Alarm, scenes: Mapping[int, Scene], num_ranks: int, limit: float) -> str:
    """Return the one message: what happened, who is where, with one stack for each place.

    Collective: none.
    """
    silent = [rank for rank in range(num_ranks) if rank not in scenes]
    places: dict[str, list[int]] = {}
    for rank, scene in sorted(scenes.items()):
        places.setdefault(str(scene), []).append(rank)
    by_size = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"distft: {alarm.text}", f"Where the {num_ranks} ranks are:"]
    if silent:
        lines.append(f"  {say_ranks(silent)}: no answer")
    for place, ranks in by_size:
        seconds = max(scenes[rank].unchanged for rank in ranks)
        still = f", unchanged for {seconds:g} s" if seconds >= 1 else ""
        lines.append(f"  {say_ranks(ranks)}: {place}{still}")
    for _, ranks in by_size:
        scene = scenes[ranks[0]]
        text = scene.error if scene.state == "raised" else scene.stack
        if text:
            what = "Error" if scene.state == "raised" else "Stack"
            lines.append(f"{what} of rank {ranks[0]}:\n{text.rstrip()}")
    lines += _recorded(scenes)
    lines.append(f"What to do: {_way_out(alarm, scenes, silent, limit)}")
    return "\n".join(lines)


def _recorded(scenes: Mapping[int, Scene]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, scene in sorted(scenes.items()):
        for text in json.loads(scene.collectives or "[]"):
            by_text.setdefault(text, []).append(rank)
    if not by_text:
        return []
    lines = [f"  {say_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    return ["Last collectives, by torch's flight recorder:", *lines]


def _way_out(alarm: Alarm, scenes: Mapping[int, Scene], silent: Sequence[int], limit: float) -> str:
    if alarm.kind == "gone":
        return (
            f"look in the log of rank {alarm.rank} and of the kernel: what ends a process without "
            "a word is most often a lack of memory (SIGKILL) or a crash in native code."
        )
    if alarm.kind == "raised":
        return (
            f"mend the error of rank {alarm.rank}; an error that ranks may meet alone belongs "
            "outside of the steps, or to be raised on every rank alike."
        )
    left = [rank for rank, scene in scenes.items() if scene.state == "left"]
    if left:
        return (
            f"{say_ranks(left)} had less to do, such as fewer batches. Give each rank the same "
            "number of steps, as strategy.batches does; train_step takes windows of any length."
        )
    if silent:
        return f"{say_ranks(list(silent))} did not run: stopped, or in native code that never ends."
    if len({scene.place for scene in scenes.values()}) > 1:
        return (
            "every rank must make the same calls in the same order: look for a condition on the "
            "rank, or on a value that ranks do not share, around the call of the few. Where one "
            "was only slow, give a higher limit."
        )
    return (
        f"all ranks are in the same call for over {limit:g} s: it is slow, or the network is. "
        "Give a higher limit, or compare the stacks."
    )


def say_error(error: BaseException) -> str:
    """Return the end of an error's traceback, as text.

    Collective: none.
    """
    lines: list[Any] = traceback.format_exception(error)
    return "".join("".join(lines).splitlines(keepends=True)[-12:]).rstrip()
