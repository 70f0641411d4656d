"""What the ranks do in the tests of saves; module-level, so that ranks find it by name."""

from __future__ import annotations

import errno
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distft
from distft.checkpoint.capture import copies_for
from tests.gloo.checkpoint_jobs import Recipe

# Set when a held write may begin.
_GATE = threading.Event()


@dataclass
class HeldCapture:
    """A state that is not written before the gate is open, or not at all."""

    captured: Any
    error: BaseException | None

    def write(self, folder: Path) -> Any:
        assert _GATE.wait(300)
        if self.error is not None:
            raise self.error
        return self.captured.write(folder)

    def finish(self, folder: Path, chunks: Any) -> Any:
        return self.captured.finish(folder, chunks)


@functools.cache
def holding(cls: type) -> type:
    """Return a strategy class whose saves beside training wait for the gate.

    Where ``fails`` is set on it, they raise that.
    """

    def capture(self: Any, model: Any, optimizer: Any, copies: Any) -> Any:
        captured = cls._capture_state(self, model, optimizer, copies)
        return captured if copies is None else HeldCapture(captured, held.fails)

    held = type(cls.__name__, (cls,), {"_capture_state": capture, "fails": None})
    return held


def hold(strategy: Any) -> Any:
    """Return an equal strategy of such a class, the gate closed."""
    _GATE.clear()
    made = object.__new__(holding(type(strategy)))
    made.__dict__.update(strategy.__dict__)
    return made


def files_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def save_beside_training(strategy: Any, recipe: Recipe, root: Path) -> dict[str, Any]:
    """Save twice at one step, the second time beside two more steps; then load that save."""
    import torch

    strategy = hold(strategy)
    model, optimizer = recipe.apply(strategy)
    recipe.step(strategy, model, optimizer, 0)
    strategy.save(root / "waited" / "step-1", model, optimizer, step=1)
    before = strategy.gather_weights(model)
    # What is drawn must be as it was: the random state is in the save.
    pending = strategy.save(root / "beside" / "step-1", model, optimizer, step=1, async_save=True)
    losses = [recipe.step(strategy, model, optimizer, step) for step in (1, 2)]
    moved = strategy.gather_weights(model)
    there = (root / "beside" / "step-1").exists(), pending.done()
    _GATE.set()
    path = pending.result()
    strategy.load(path, model, optimizer)
    after = strategy.gather_weights(model)
    return {
        "there": there,
        "moved": all(not torch.equal(moved[name], before[name]) for name in before),
        "loaded": all(torch.equal(after[name], before[name]) for name in before),
        "losses": losses,
        "again": [recipe.step(strategy, model, optimizer, step) for step in (1, 2)],
        "path": path,
    }


def save_many_times(strategy: Any, recipe: Recipe, root: Path) -> dict[str, Any]:
    """Save beside training three times, with two kept, and say what waited and what was copied."""
    model, optimizer = recipe.apply(strategy)
    places, saves, done = [], [], []
    for step in range(3):
        recipe.step(strategy, model, optimizer, step)
        path, how = root / f"step-{step}", {"keep": 2, "async_save": True}
        saves.append(strategy.save(path, model, optimizer, step=step, **how))
        done.append([save.done() for save in saves[:-1]])
        places.append([buffer.data_ptr() for buffer in copies_for(optimizer)._buffers])
    # A load waits as well.
    state = strategy.load(root, model, optimizer)
    return {"done": done, "places": places, "step": state.step, "last": saves[-1].done()}


def fail_beside_training(strategy: Any, recipe: Recipe, root: Path) -> list[tuple[str, str]]:
    """Let the writes of one rank fail; return what every call raised."""
    import torch.distributed as dist

    strategy = hold(strategy)
    model, optimizer = recipe.apply(strategy)
    if dist.get_rank() == 1:
        type(strategy).fails = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _GATE.set()
    found = []

    def attempt(call: Any) -> None:
        try:
            call()
            found.append(("", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))

    pending = strategy.save(root / "a", model, optimizer, step=1, async_save=True)
    attempt(pending.result)
    # Told once, so the next one goes its way.
    strategy.save(root / "b", model, optimizer, step=2, async_save=True)
    type(strategy).fails = None
    attempt(lambda: strategy.save(root / "c", model, optimizer, step=3, async_save=True))
    attempt(lambda: strategy.save(root / "d", model, optimizer, step=4, async_save=True).result())
    return found


def train_and_leave(root: str) -> None:
    """Save beside training and end, with the process group gone before the file is there."""
    import time

    import torch.distributed as dist

    from distft import FSDP2

    strategy = hold(FSDP2())
    recipe = Recipe()
    model, optimizer = recipe.apply(strategy)
    strategy.save(Path(root) / "step-1", model, optimizer, step=1, async_save=True)
    dist.destroy_process_group()
    threading.Thread(target=lambda: (time.sleep(1), _GATE.set())).start()
    assert distft.latest(root) is None


def parts_of_two_tensors(odd: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Return what this rank writes of two tensors that say they are split alike."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from distft.checkpoint.dcp_write import _own_parts

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    tensors = {
        name: DTensor.from_local(
            torch.zeros(rows, 3), mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1)
        )
        for name, rows in (("one", 2), ("other", 3 if odd else 2))
    }
    return [(part.name, part.start) for part in _own_parts(tensors, rank, world)]
