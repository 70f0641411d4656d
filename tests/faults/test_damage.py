"""Each file of a checkpoint deleted, cut, flipped, swapped: nothing is made of it, by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import distft
from distft import DDP, FSDP2, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.folder import MANIFEST
from tests.gloo.checkpoint_jobs import Call, Recipe, attempt, train_and_save
from tests.gloo.save_jobs import files_of

RECIPE = Recipe(changes={"num_hidden_layers": 1})
LAYOUTS = [FSDP2(), ZeRO3()]
MORE = [pytest.param(s, marks=pytest.mark.slow) for s in (DDP(), ZeRO1(), ZeRO2())]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(part: float, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[int(part * (len(data) - 1))] ^= 4
    file.write_bytes(data)


def swap(name: str, file: Path) -> None:
    other = file.parent / name
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)


def harms(file: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield what may become of a file, by name."""
    yield "deleted", Path.unlink
    yield "cut", cut
    for part in (0, 0.1, 0.35, 0.5, 0.8, 1):
        yield f"flipped at {part}", partial(flip, part)
    for other in sorted(file.parent.iterdir()):
        same = other.suffix == file.suffix and other.is_file() and other.name != MANIFEST
        if same and other.name > file.name and other.read_bytes() != file.read_bytes():
            yield f"swapped with {other.name}", partial(swap, other.name)


@pytest.mark.parametrize("strategy", [*LAYOUTS, *MORE], ids=str)
def test_no_damage_yields_a_plausible_wrong_model(pools, tmp_path, strategy):
    whole, bad, out = tmp_path / "whole", tmp_path / "bad", tmp_path / "out"
    pools(2).run(train_and_save, strategy, RECIPE, whole, 1)
    distft.consolidate(whole, tmp_path / "good")
    good = files_of(tmp_path / "good")
    cases = 0
    for name in sorted(files_of(whole)):
        for harm, do in harms(whole / name):
            cases += 1
            shutil.copytree(whole, bad)
            do(bad / name)
            said = distft.verify(bad, require="proven") if (bad / MANIFEST).is_file() else None
            if said is not None:
                assert said.verdict == "broken", (name, harm)
                assert name in " ".join(said.problems), (name, harm, said)
            # What is not read may be anything; what is made must be right.
            refused = ""
            try:
                distft.consolidate(bad, out)
            except ValueError as error:
                refused = str(error)
            if refused:
                assert name in refused or MANIFEST in refused or name == MANIFEST, (harm, refused)
            else:
                assert files_of(out) == good, (name, harm)
                assert name.startswith(("rng/", "dcp/")), (name, harm)
            shutil.rmtree(out, ignore_errors=True)
            with pytest.raises(ValueError, match=r"\w"):
                distft.reshard(bad, out, DDP(), world_size=1)
            assert not out.exists(), (name, harm)
            shutil.rmtree(bad)
    print(f"{strategy}: {cases} cases")
    assert cases > 60


@pytest.mark.parametrize("strategy", LAYOUTS, ids=str)
def test_a_load_refuses_each_file_with_a_flipped_bit_before_the_first_tensor(
    pools, tmp_path, strategy
):
    whole = tmp_path / "whole"
    pools(2).run(train_and_save, strategy, RECIPE, whole, 1)
    calls, names = [], sorted(files_of(whole))
    for name in names:
        for part in (0.2, 0.6, 1):
            path = tmp_path / f"bad-{len(calls)}"
            shutil.copytree(whole, path)
            flip(part, path / name)
            calls.append(Call("load", path))
    first, second = pools(2).run(attempt, strategy, RECIPE, calls)
    assert first == second
    for number, (kind, text, changed) in enumerate(first):
        assert kind is ValueError, (names[number // 3], text)
        assert names[number // 3] in text
        assert not changed
    print(f"{strategy}: {len(calls)} cases")
