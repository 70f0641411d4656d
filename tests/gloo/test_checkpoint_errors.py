"""What a save, a load or a consolidation refuses: the same error on every rank, nothing left."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import distft
from distft import FSDP2, ZeRO3
from distft.checkpoint.folder import MANIFEST, describe_file, read_manifest
from distft.testing import RanksFailed, WorkerPool, tiny_model
from tests.gloo.checkpoint_jobs import (
    Call,
    Recipe,
    attempt,
    call_on_one_rank,
    consolidate_on_ranks,
    die_in_a_save,
    load_and_step,
    train_and_save,
)

L = Recipe()
STATE = {FSDP2(): "dcp", ZeRO3(): "deepspeed"}


@pytest.fixture(scope="module", autouse=True)
def _deepspeed_loaded() -> None:
    """Load DeepSpeed, which sets a variable of its own, before a test that checks for leaks."""
    import distft.testing.preload  # noqa: F401


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory) -> Callable[..., Path]:
    """Return a checkpoint of a strategy on 2 ranks, saved once and never changed."""
    root = tmp_path_factory.mktemp("saved")
    made: dict[Any, Path] = {}

    def path(strategy: Any, recipe: Recipe = L) -> Path:
        key = repr((strategy, recipe))
        if key not in made:
            made[key] = root / f"run-{len(made)}"
            pools(2).run(train_and_save, strategy, recipe, made[key], 1)
        return made[key]

    return path


def refused(
    pools: Any, strategy: Any, calls: list[Call], recipe: Recipe = L, ranks: int = 2
) -> list[str]:
    """Return the texts of calls that must all be refused alike on every rank, changing nothing."""
    first, *others = pools(ranks).run(attempt, strategy, recipe, calls)
    for call, (kind, text, changed), *elsewhere in zip(calls, first, *others, strict=True):
        assert kind in (ValueError, RuntimeError), (call, kind, text)
        assert not changed, (call, text)
        for other_kind, other_text, other_changed in elsewhere:
            assert other_kind is kind, call
            assert other_text == text
            assert not other_changed
    return [text for _, text, _ in first]


def check(texts: list[str], *patterns: str) -> None:
    for text, pattern in zip(texts, patterns, strict=True):
        assert re.search(pattern, text, re.DOTALL), (pattern, text)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


# ---- ranks that come alone ----------------------------------------------------------------------


@pytest.mark.parametrize(("call", "caller"), [("save", 0), ("save", 1), ("load", 1)])
def test_a_rank_alone_gives_up_in_time_and_all_ranks_can_save_later(
    pools, saved, tmp_path, call, caller
):
    # Case CONS-23
    path = tmp_path / "alone" if call == "save" else saved(FSDP2())
    later = tmp_path / "later"
    found = pools(2).run(call_on_one_rank, FSDP2(), L, call, caller, path, later)
    kind, text, seconds = found[caller]
    assert kind is RuntimeError
    assert re.search(
        rf"Strategy\.{call} was called on 1 of 2 ranks within 5 s\. "
        rf"Call Strategy\.{call} on every rank",
        text,
    )
    assert seconds > 4.5
    assert found[1 - caller][0] is None
    assert os.listdir(tmp_path) == ["later"]
    assert set(read_manifest(later).files) | {MANIFEST} == set(files_of(later))


# ---- folders that are no checkpoint, or half one ------------------------------------------------


def test_a_path_that_is_no_checkpoint_is_refused_with_what_was_searched(pools, tmp_path):
    published = tmp_path / "published"
    tiny_model("L").save_pretrained(published)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    paths = [tmp_path / name for name in ("never", "empty", "file", "published")]
    *texts, last = refused(pools, FSDP2(), [Call("load", path) for path in paths])
    assert f"{published} is a llama model for from_pretrained, and its optimizer is missing" in last
    for path, text in zip(paths[:3], texts, strict=True):
        assert f"No checkpoint at {path}: searched it for distft.json" in text
        assert "Pass a folder that Strategy.save returned" in text
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.* Pass "):
            distft.consolidate(path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "published"]


@pytest.mark.parametrize("harm", ["deleted", "truncated"])
@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_every_file_that_is_missing_or_short_is_named(pools, saved, tmp_path, strategy, harm):
    whole = saved(strategy)
    names = sorted(read_manifest(whole).files)
    assert len(names) >= 8
    calls = []
    for number, name in enumerate(names):
        path = tmp_path / f"half-{number}"
        shutil.copytree(whole, path)
        data = (path / name).read_bytes()
        (path / name).unlink()
        if harm == "truncated":
            (path / name).write_bytes(data[: len(data) // 2])
        calls.append(Call("load", path))
    texts = refused(pools, strategy, calls)
    for call, name, text in zip(calls, names, texts, strict=True):
        state = "is missing" if harm == "deleted" else r"has \d+ bytes"
        size = (whole / name).stat().st_size
        pattern = rf"{re.escape(name)} {state}, and distft.json says {size} bytes; searched "
        assert re.search(pattern + re.escape(str(call.path)), text), text
        with pytest.raises(ValueError, match=pattern):
            distft.consolidate(call.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_is_missing_cut_or_of_a_later_format_is_refused(pools, saved, tmp_path):
    for name in ("missing", "cut", "later"):
        shutil.copytree(saved(FSDP2()), tmp_path / name)
    (tmp_path / "missing" / MANIFEST).unlink()
    text = (tmp_path / "cut" / MANIFEST).read_text()
    (tmp_path / "cut" / MANIFEST).write_text(text[: len(text) // 2])
    fields = {**json.loads(text), "format_version": 3}
    (tmp_path / "later" / MANIFEST).write_text(json.dumps(fields))
    paths = [tmp_path / name for name in ("missing", "cut", "later")]
    patterns = (
        "No checkpoint at .*missing",
        r"cut/distft\.json is not a whole manifest: .*line \d+.*Use another checkpoint",
        r"later/distft\.json has format 3, and this version reads 2\. Upgrade distft",
    )
    check(refused(pools, FSDP2(), [Call("load", path) for path in paths]), *patterns)
    for path, pattern in zip(paths, patterns, strict=True):
        with pytest.raises(ValueError, match=pattern):
            distft.consolidate(path, tmp_path / "out")


def test_shards_with_other_bytes_of_the_same_size_are_refused_alike(pools, saved, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(saved(FSDP2()), path)
    shard = path / "dcp" / "__1_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    says = (
        r"damaged: dcp/__1_0\.distcp has the XXH3 \w+, and distft\.json says XXH3 \w+: \S+ is one"
    )
    check(refused(pools, FSDP2(), [Call("load", path)]), says)
    with pytest.raises(ValueError, match=r"damaged/?.*dcp/__1_0\.distcp"):
        distft.consolidate(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["damaged"]


# ---- checkpoints of something else --------------------------------------------------------------


@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_another_models_checkpoint_is_refused(pools, saved, strategy):
    other = saved(strategy, Recipe("M"))
    tied = saved(strategy, Recipe("Lt"))
    wide = saved(strategy, Recipe(changes={"vocab_size": 137}))
    calls = [Call("load", path) for path in (other, tied, wide)]
    check(
        refused(pools, strategy, calls),
        r"of another model \(25 tensors, this model has 21\).*are not saved.*not in the model",
        r"\(20 tensors, this model has 21\): 1 tensors .*such as lm_head\.weight.*config\.json",
        r"2 have another shape, such as model\.embed_tokens\.weight with \[137, 32\] saved and "
        r"\[131, 32\] in the model",
    )


@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_another_optimizers_state_is_refused(pools, saved, strategy):
    texts = refused(pools, strategy, [Call("load", saved(strategy))], Recipe(optimizer="SGD"))
    check(texts, r"holds the state of AdamW, and this run has SGD\. Pass AdamW to apply\(\)")


@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_another_frozen_set_is_refused_even_of_the_same_size(pools, saved, strategy):
    some = saved(strategy, Recipe(frozen="q_proj"))
    calls = [Call("load", some), Call("load", saved(strategy))]
    check(
        refused(pools, strategy, calls, Recipe(frozen="k_proj")),
        r"trained 19 parameters, and this run trains 19: \S+k_proj\.weight is one of 4 in one of "
        r"the two only\. Freeze the same ones",
        r"trained 21 parameters, and this run trains 19: .* one of 2 .*Freeze the same ones",
    )


def test_groups_that_were_saved_with_other_settings_are_not_merged(pools, saved):
    path = saved(FSDP2(), Recipe(two_groups=True))
    check(
        refused(pools, FSDP2(), [Call("load", path)]),
        r"Group 0 of this run has 21 parameters that .* saved with different settings, such as "
        r".*embed_tokens\.weight and .*layernorm\.weight\. Use the 2 groups of the saved run",
    )


def test_a_load_asks_for_nothing_that_was_not_saved(pools, saved, tmp_path):
    path = saved(FSDP2())
    rows = tmp_path / "rows"
    pools(2).run(attempt, FSDP2(), L, [Call("save", rows, {"data": True, "scheduler": True})])
    shutil.copytree(rows, tmp_path / "more")
    state = torch.load(rows / "state.pt")
    state["data"][0]["num_rows"] = 12
    replace_file(tmp_path / "more", "state.pt", lambda file: torch.save(state, file))
    calls = [
        Call("load", path, {"scheduler": True}),
        Call("load", path, {"data": True}),
        Call("load", rows, {"scheduler": object()}),
        Call("load", rows, {"data": [1, 2]}),
        Call("load", tmp_path / "more", {"data": True}),
    ]
    check(
        refused(pools, FSDP2(), calls),
        r"load\(scheduler=\.\.\.\) was asked for, and .* saved without scheduler\. Leave scheduler",
        r"load\(data=\.\.\.\) was asked for, and .* saved without data\. Leave data out",
        r"needs an object with load_state_dict\(\), and got object",
        r"needs an object with load_state_dict\(\), and got list",
        r"saved data cursor has num_rows 12, and this dataset has 10\. Resume with the dataset",
    )


# ---- saves --------------------------------------------------------------------------------------


def test_a_save_never_touches_a_folder_that_holds_something(pools, saved, tmp_path):
    complete, used = tmp_path / "complete", tmp_path / "used"
    shutil.copytree(saved(FSDP2()), complete)
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = files_of(tmp_path)
    paths = (complete, used, tmp_path / "file", tmp_path / "file" / "below")
    check(
        refused(pools, FSDP2(), [Call("save", path) for path in paths]),
        r"complete holds a complete checkpoint, and a save never writes over one\. Save to a new",
        r"used exists and is no empty folder\. Save to a new one, or remove it first",
        r"file exists and is no empty folder",
        r"below lies below .*file, which is a file\. Save below a folder",
    )
    assert files_of(tmp_path) == before


def test_an_empty_folder_is_saved_into(pools, tmp_path):
    (tmp_path / "empty").mkdir()
    assert pools(2).run(attempt, FSDP2(), L, [Call("save", tmp_path / "empty")])[0][0][0] is None
    assert distft.latest(tmp_path) == tmp_path / "empty"
    assert os.listdir(tmp_path) == ["empty"]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"extra": {"when": {1, 2}}}, r"extra=\.\.\.\) takes JSON values only: .*set"),
        ({"extra": {"a": 1 + 2j}}, r"extra=\.\.\.\) takes JSON values only: .*complex"),
        ({"extra": {1: "x"}}, r"would not come back as it is.*string keys"),
        ({"extra": {"pair": (1, 2)}}, r"would not come back as it is.*lists"),
        ({"extra": {"a": float("nan")}}, r"would not come back as it is"),
        ({"extra": [1, 2]}, r"extra=\.\.\.\) takes JSON values only"),
        (
            {"scheduler": object()},
            r"scheduler=\.\.\.\) needs an object with state_dict\(\).*object",
        ),
        ({"data": [1, 2]}, r"data=\.\.\.\) needs an object with state_dict\(\), and got list"),
        ({"step": -1}, r"step=-1\) needs the number of steps made, at least 0"),
        ({"step": True}, r"step=True\) needs the number of steps made"),
        ({"step": 1.5}, r"step=1\.5\) needs the number of steps made"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_a_save_cannot_keep_is_refused(pools, tmp_path, options, pattern):
    check(refused(pools, FSDP2(), [Call("save", tmp_path / "new", options)]), pattern)
    assert os.listdir(tmp_path) == []


class Stateful:
    """A scheduler of one's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_a_state_that_no_load_could_read_is_refused_by_the_save(pools, tmp_path, strategy):
    calls = [
        Call("save", tmp_path / "new", {"scheduler": Stateful(os.getcwd)}),
        Call("save", tmp_path / "new", {"data": Stateful(Stateful(1))}),
    ]
    check(
        refused(pools, strategy, calls),
        r"save\(scheduler=\.\.\.\) has a state .* asks to load posix\.getcwd\. Keep functions",
        r"save\(data=\.\.\.\) has a state .* asks to load .*Stateful\. Keep functions and objects",
    )
    assert os.listdir(tmp_path) == []


# ---- files that would run code ------------------------------------------------------------------


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def replace_file(path: Path, name: str, write: Callable[[Path], Any]) -> None:
    """Write another file in a checkpoint, and its size into the manifest, as an attacker would."""
    write(path / name)
    fields = json.loads((path / MANIFEST).read_text())
    fields["files"][name] = describe_file(path / name).to_fields()
    del fields["manifest_crc32"]
    (path / MANIFEST).write_text(json.dumps(fields))


def plant(path: Path, name: str, marker: Path, form: str) -> None:
    """Put a payload in the place of a file, in one of the forms that torch can read."""
    harmless = (path / name).read_bytes()
    payload = {"module": Payload(marker), "state_dict": Payload(marker)}
    if form == "older":
        options = {"_use_new_zipfile_serialization": False}
        replace_file(path, name, lambda file: torch.save(payload, file, **options))
    elif form == "before a zip":
        data = pickle.dumps(payload) + harmless
        replace_file(path, name, lambda file: file.write_bytes(data))
    elif name.endswith(".metadata"):
        replace_file(path, name, lambda file: file.write_bytes(pickle.dumps(payload)))
    else:
        replace_file(path, name, lambda file: torch.save(payload, file))


@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_a_planted_pickle_runs_nothing_and_is_named(pools, saved, tmp_path, strategy):
    whole = saved(strategy)
    marker = tmp_path / "it-ran"
    pickles = [n for n in sorted(read_manifest(whole).files) if n.endswith((".pt", ".metadata"))]
    assert sum(name.startswith(f"{STATE[strategy]}/") for name in pickles) == (
        1 if strategy == FSDP2() else 4
    )
    planted = []
    for name in pickles:
        for form in ("zip", "older", "before a zip"):
            if form == "older" and name.endswith(".metadata"):
                continue
            path = tmp_path / f"planted-{len(planted)}"
            shutil.copytree(whole, path)
            plant(path, name, marker, form)
            planted.append((path, name))
    texts = refused(pools, strategy, [Call("load", path) for path, _ in planted])
    for (path, name), text in zip(planted, texts, strict=True):
        assert text.startswith(str(path / name)), text
        assert re.search(r"asks to load posix\.mkdir|is not a whole file", text), text
        if name.startswith(f"{STATE[strategy]}/") or name == "state.pt":
            with pytest.raises(ValueError, match=re.escape(str(path / name))):
                distft.consolidate(path, tmp_path / "out")
        else:
            distft.consolidate(path, tmp_path / "out")
            shutil.rmtree(tmp_path / "out")
    assert not marker.exists()


# ---- consolidation ------------------------------------------------------------------------------


def weight_files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if "safetensors" in file.name}


@pytest.mark.parametrize("sizes", [("20KB", "1GB"), ("1GB", "20KB")], ids=str)
def test_a_used_folder_keeps_no_shard_of_the_model_before(saved, tmp_path, sizes):
    # Case CONS-19
    out = tmp_path / "out"
    old, new = saved(FSDP2()), saved(FSDP2(), Recipe(seed=5))
    distft.consolidate(old, out, max_shard_size=sizes[0])
    before = weight_files(out)
    (out / "README.md").write_text("mine")
    distft.consolidate(new, out, max_shard_size=sizes[1])
    distft.consolidate(new, tmp_path / "fresh", max_shard_size=sizes[1])
    assert files_of(out) == {**files_of(tmp_path / "fresh"), "README.md": b"mine"}
    assert weight_files(out) & before == set()
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(os.listdir(tmp_path)) == ["fresh", "out"]


@pytest.mark.parametrize("inner", ["", "hf", "dcp/hf", "../{name}/hf", "../other/../{name}/hf"])
def test_a_folder_inside_the_checkpoint_is_refused(saved, inner):
    path = saved(FSDP2())
    before = files_of(path)
    with pytest.raises(ValueError, match=r"lies inside the checkpoint .* outside it"):
        distft.consolidate(path, path / inner.format(name=path.name))
    assert files_of(path) == before


def test_a_link_into_the_checkpoint_is_refused(saved, tmp_path):
    path = saved(FSDP2())
    (tmp_path / "link").symlink_to(path)
    before = files_of(path)
    with pytest.raises(ValueError, match="lies inside the checkpoint"):
        distft.consolidate(path, tmp_path / "link" / "hf")
    assert files_of(path) == before


def test_a_file_in_the_place_of_the_output_is_refused(saved, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"out is a file\. Choose a folder"):
        distft.consolidate(saved(FSDP2()), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("dtype", ["int8", "bool", "no_dtype", torch.int64, 16], ids=str)
def test_a_dtype_that_is_not_floating_is_refused(saved, tmp_path, dtype):
    with pytest.raises(ValueError, match=r"needs a floating dtype\. Pass 'bfloat16' or 'float32'"):
        distft.consolidate(saved(FSDP2()), tmp_path / "out", dtype=dtype)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("strategy", STATE, ids=str)
def test_ranks_consolidate_together_and_fail_together(pools, saved, tmp_path, strategy):
    path, out = saved(strategy), tmp_path / "out"
    assert pools(2).run(consolidate_on_ranks, strategy, path, out, "bfloat16") == [out, out]
    alone = distft.consolidate(path, tmp_path / "alone", dtype="bfloat16")
    assert files_of(out) == files_of(alone)
    with pytest.raises(RanksFailed) as failed:
        pools(2).run(consolidate_on_ranks, strategy, path, path / "in", "bfloat16")
    assert {type(error) for error in failed.value.errors} == {ValueError}
    assert len({str(error) for error in failed.value.errors}) == 1
    assert "lies inside the checkpoint" in str(failed.value.errors[1])


# ---- death in the middle ------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint_the_latest(tmp_path, victim):
    with WorkerPool(2, timeout=300) as pool:
        pool.run(train_and_save, FSDP2(), L, tmp_path / "step-1", 1)
        before = files_of(tmp_path / "step-1")
        with pytest.raises(RanksFailed):
            pool.run(die_in_a_save, L, victim, tmp_path / "step-2")
    assert not (tmp_path / "step-2").exists()
    assert list(tmp_path.rglob(MANIFEST)) == [tmp_path / "step-1" / MANIFEST]
    assert distft.latest(tmp_path) == tmp_path / "step-1"
    assert files_of(tmp_path / "step-1") == before
    # New ranks go on from it, and their save to the same place clears what the dead ones left.
    with WorkerPool(2, timeout=300) as pool:
        found = pool.run(load_and_step, FSDP2(), L, tmp_path, 1)
        assert found[0]["counts"] == {2.0}
        pool.run(train_and_save, FSDP2(), L, tmp_path / "step-2", 2)
    assert distft.latest(tmp_path) == tmp_path / "step-2"
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
