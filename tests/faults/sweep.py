"""Every call that changes a file, made to fail in turn, in real saves and conversions.

A process that has `shim.c` loaded before libc runs it with what is swept, how many calls lie
between two cases, and the first of them. It forks a child for each case, so that the child may die,
and looks at what is left. The last line that it prints is the number of cases, unless one fails.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distft
from distft import FSDP2, ZeRO2, ZeRO3
from distft.checkpoint.readers import read_map

COUNT, KILL, FULL = 1, 2, 3
MODES = (KILL, FULL)
RANKS = 2
# Seconds that a case may take; where each rank stands is printed before they are over.
LIMIT = 120.0
NO_SPACE = os.strerror(errno.ENOSPC)


class Shim:
    """The counter of calls, which children share."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._lib.fault_count.restype = ctypes.c_long
        self._lib.fault_setup()

    def arm(self, below: Path, mode: int, number: int = 0) -> None:
        self._lib.fault_arm(str(below).encode(), mode, ctypes.c_long(number))

    def count(self) -> int:
        return int(self._lib.fault_count())


SHIM = Shim()


def first_of(stride: int) -> int:
    """Return the first call that fails, by which several sweeps share all of them."""
    return int(sys.argv[3]) % stride


def children(functions: list[Callable[[], None]], said: Path) -> list[int]:
    """Run functions in processes of their own; return exit codes, negative where one was killed.

    When one is killed, so are the others, as a launcher does. What one raised is in a file of its
    number, and its exit code is 3.
    """
    pids = []
    for number, function in enumerate(functions):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 0
        faulthandler.dump_traceback_later(LIMIT - 10)
        try:
            function()
        except BaseException as error:
            (said / str(number)).write_text(f"{type(error).__name__}: {error}")
            code = 3
        os._exit(code)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() > deadline
        if late or any(code < 0 for code in codes.values()):
            for left in set(pids) - set(codes):
                os.kill(left, signal.SIGKILL)
                codes[left] = -999 if late else -os.waitpid(left, 0)[1]
        time.sleep(0.002)
    assert -999 not in codes.values(), "a rank waited for ever"
    return [codes[pid] for pid in pids]


def files_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


# ---- saves --------------------------------------------------------------------------------------


def save(
    strategy: Any, path: Path, step: int, rank: int, store: Path, armed: Any, how: Any
) -> None:
    """Be one rank that saves, with the shim armed if it is this one's turn."""
    import torch
    import torch.distributed as dist

    from tests.gloo.checkpoint_jobs import Recipe

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    recipe = Recipe(changes={"num_hidden_layers": 1, "vocab_size": 37})
    model, optimizer = recipe.apply(strategy)
    row = torch.tensor([[1, 2, 3]])
    done = 0
    if step > 1:
        # The same run goes on, so that its rotation may delete what it wrote before.
        done = strategy.load(path.parent / "step-1", model, optimizer).step
    for _ in range(done, step):
        strategy.train_step(model, optimizer, [{"input_ids": row, "labels": row}])
    if armed is not None and armed[0] == rank:
        SHIM.arm(path.parent, *armed[1:])
    try:
        found = strategy.save(path, model, optimizer, step=step, **how)
        if how.get("async_save"):
            found.result()
    except (RuntimeError, OSError):
        SHIM.arm(path, 0)
        if armed is None or armed[1] != FULL:
            raise
        # With room again the run goes on, and the next save is whole.
        text = sys.exc_info()[1]
        if not path.exists():
            strategy.save(path, model, optimizer, step=step, keep=how.get("keep"))
        raise RuntimeError(str(text)) from None


def world(strategy: Any, path: Path, step: int, armed: Any = None, **how: Any) -> Any:
    """Save on all ranks; return their exit codes and what they said."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder)
        codes = children(
            [
                lambda rank=rank: save(strategy, path, step, rank, said / "store", armed, how)
                for rank in range(RANKS)
            ],
            said,
        )
        texts = [
            (said / str(n)).read_text() if (said / str(n)).is_file() else "" for n in range(RANKS)
        ]
    return codes, texts


def sweep_saves(strategy: Any, stride: int, **how: Any) -> int:
    """Let every call of every rank fail in a save that replaces the checkpoint before it."""
    cases = 0
    with tempfile.TemporaryDirectory() as folder:
        root, runs = Path(folder), Path(folder, "runs")
        assert world(strategy, root / "good" / "step-1", 1) == ([0, 0], ["", ""])
        assert world(strategy, root / "good" / "step-2", 2)[0] == [0, 0]
        good = {name: files_of(root / "good" / name) for name in ("step-1", "step-2")}
        for rank in range(RANKS):
            shutil.copytree(root / "good" / "step-1", runs / "step-1")
            world(strategy, runs / "step-2", 2, (rank, COUNT, 0), keep=1, **how)
            total = SHIM.count()
            assert total > 5, total
            assert os.listdir(runs) == ["step-2"]
            shutil.rmtree(runs)
            print(f"{strategy} {how}: rank {rank} changes files {total} times", flush=True)
            for number in range(first_of(stride), total, stride):
                for mode in MODES:
                    shutil.copytree(root / "good" / "step-1", runs / "step-1")
                    codes, texts = world(
                        strategy, runs / "step-2", 2, (rank, mode, number), keep=1, **how
                    )
                    cases += 1
                    case = (strategy, how, rank, number, mode, codes, texts, os.listdir(runs))
                    check_save(runs, good, mode, codes, texts, case)
                    if mode == KILL:
                        # New ranks go on, and leave nothing of the dead ones.
                        if not (runs / "step-2").exists():
                            assert world(strategy, runs / "step-2", 2, keep=1)[0] == [0, 0], case
                        assert files_of(runs / "step-2") == good["step-2"], case
                        left = set(os.listdir(runs)) - {"step-2", "step-1"}
                        assert all(name.endswith(".old") for name in left), (case, left)
                    shutil.rmtree(runs)
    return cases


def check_save(runs: Path, good: Any, mode: int, codes: Any, texts: Any, case: Any) -> None:
    """Hold what is left to the promise: the last good checkpoint is there, and nothing half."""
    last = distft.latest(runs)
    assert last is not None, case
    assert files_of(last) == good[last.name], case
    for name in ("step-1", "step-2"):
        if (runs / name).exists():
            assert files_of(runs / name) == good[name], case
    if mode == FULL and any(codes):
        assert codes == [3] * RANKS, case
        assert texts[0] == texts[1], case
        assert NO_SPACE in texts[0] or "disk" in texts[0].lower(), case
        assert (runs / "step-2").exists(), case


# ---- conversions --------------------------------------------------------------------------------


def sweep_conversion(
    name: str, convert: Callable[[Path], Any], old: Path | None, stride: int
) -> int:
    """Let every call fail in a conversion to a new folder, or into one with an earlier model."""
    cases = 0
    with tempfile.TemporaryDirectory() as folder:
        said, target = Path(folder), Path(folder, "target", "out")
        target.parent.mkdir()

        def run(mode: int, number: int) -> int:
            shutil.rmtree(target.parent)
            target.parent.mkdir()
            if old is not None:
                shutil.copytree(old, target)
            (said / "0").unlink(missing_ok=True)

            def work() -> None:
                SHIM.arm(target.parent, mode, number)
                convert(target)

            return children([work], said)[0]

        assert run(COUNT, 0) == 0, (said / "0").read_text()
        total, whole = SHIM.count(), files_of(target)
        before = None if old is None else files_of(old)
        kind = "new" if old is None else "used"
        print(f"{name} into a {kind} folder changes files {total} times", flush=True)
        for number in range(first_of(stride), total, stride):
            for mode in MODES:
                code = run(mode, number)
                cases += 1
                case = (name, old is not None, number, mode, code, os.listdir(target.parent))
                check_conversion(target, whole, before, case)
                if mode == FULL and code:
                    text = (said / "0").read_text()
                    assert NO_SPACE in text, (case, text)
                    assert set(os.listdir(target.parent)) <= {"out"}, case
                convert(target)
                assert files_of(target) == whole, case
    return cases


def check_conversion(target: Path, whole: Any, before: Any, case: Any) -> None:
    """Nothing is there, or the old model, or the new one, or what every reader refuses."""
    if not target.exists():
        return
    found = files_of(target)
    if found in (whole, before):
        return
    assert before is not None, (case, sorted(found))
    try:
        read = read_map(target)
    except ValueError:
        return
    # A reader finds a model here: it must be one of the two, its configuration with it.
    for model in (whole, before):
        names = [name for name in model if name.endswith((".safetensors", ".json", ".distcp"))]
        if all(found.get(name) == model[name] for name in names):
            return
    raise AssertionError(f"half of two models is read as one: {case}, {sorted(found)}, {read.root}")


def sweep_consolidate(source: Path, name: str, stride: int) -> int:
    """Consolidate into a new folder and over a model of another configuration."""

    def convert(out: Path) -> None:
        distft.consolidate(source, out, max_shard_size="20KB")

    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder, "old")
        distft.consolidate(source, old, dtype="bfloat16")
        config = json.loads((old / "config.json").read_text())
        (old / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
        return sweep_conversion(f"consolidate {name}", convert, None, stride) + sweep_conversion(
            f"consolidate {name}", convert, old, stride
        )


def sweep_reshard(source: Path, name: str, stride: int) -> int:
    """Reshard to both kinds of layout."""
    cases = 0
    for target in (FSDP2(), ZeRO3()):

        def convert(out: Path, target: Any = target) -> None:
            if out.exists():
                shutil.rmtree(out)
            distft.reshard(source, out, target, world_size=2)

        cases += sweep_conversion(f"reshard {name} to {target}", convert, None, stride)
    return cases


# ---- what is asked for --------------------------------------------------------------------------


def main(what: str, stride: int) -> None:
    if what == "conversions":
        import torch.distributed  # noqa: F401

        cases = 0
        with tempfile.TemporaryDirectory() as folder:
            for strategy in (FSDP2(), ZeRO3(), ZeRO2()):
                source = Path(folder, strategy.name)
                assert world(strategy, source, 1)[0] == [0, 0]
                # It changes files a twentieth as often.
                cases += sweep_consolidate(source, strategy.name, -(-stride // 20))
                cases += sweep_reshard(source, strategy.name, stride)
    else:
        import distft.testing.preload

        strategy = distft.strategy(what.removesuffix("-async"))
        cases = sweep_saves(strategy, stride, **({"async_save": True} if "async" in what else {}))
    print(cases)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
