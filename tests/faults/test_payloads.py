"""A file that would run code, in each format and place that has pickles, given to each call."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distft
from distft import DDP, FSDP2, ZeRO3
from distft.checkpoint.folder import MANIFEST, describe_file
from distft.testing import tiny_model
from tests.gloo.checkpoint_jobs import Call, Recipe, attempt, train_and_save

# torch's word to one that saves without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def as_zip(payload: Any, file: Path) -> None:
    if not file.stem.startswith("."):
        torch.save({"weight": torch.ones(2), "module": payload, "state": payload}, file)
        return
    with file.open("wb") as opened:
        torch.save(payload, opened)


def as_older(payload: Any, file: Path) -> None:
    torch.save({"module": payload}, file, _use_new_zipfile_serialization=False)


def as_pickle(payload: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(payload))


def before_a_zip(payload: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(payload) + file.read_bytes())


FORMS = {
    form.__name__.replace("_", " "): form for form in (as_zip, as_older, as_pickle, before_a_zip)
}


def save_item(payload: Any, folder: Path) -> None:
    """Write a distributed checkpoint one of whose items is the payload."""
    shutil.rmtree(folder)
    model = tiny_model("L", 0)
    items = {"model": model.state_dict(), "scheduler": payload}
    dcp.save(items, checkpoint_id=folder, no_dist=True)


# ---- folders and their files --------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(pools, tmp_path_factory) -> dict[str, Path]:
    """Return a harmless checkpoint of each format."""
    root = tmp_path_factory.mktemp("harmless")
    made = {name: root / name for name in ("distft-dcp", "distft-zero", "deepspeed", "dcp")}
    pools(2).run(train_and_save, FSDP2(), Recipe(), made["distft-dcp"], 1)
    pools(2).run(train_and_save, ZeRO3(), Recipe(), made["distft-zero"], 1)
    shutil.copytree(made["distft-zero"] / "deepspeed" / "state", made["deepspeed"])
    model = tiny_model("L", 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=made["dcp"], no_dist=True)
    made["trainer"], made["bin"], made["adapter"] = root / "t", root / "b", root / "a"
    model.save_pretrained(made["trainer"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    torch.save(optimizer.state_dict(), made["trainer"] / "optimizer.pt")
    torch.save(scheduler.state_dict(), made["trainer"] / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, made["trainer"] / "rng_state.pth")
    torch.save({}, made["trainer"] / "training_args.bin")
    (made["trainer"] / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    made["bin"].mkdir()
    shutil.copy(made["trainer"] / "config.json", made["bin"])
    torch.save(model.state_dict(), made["bin"] / "pytorch_model.bin")
    made["adapter"].mkdir()
    config = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "x"}
    (made["adapter"] / "adapter_config.json").write_text(json.dumps(config))
    torch.save({"a.lora_A.weight": torch.ones(2, 2)}, made["adapter"] / "adapter_model.bin")
    return made


# Format, file, and whether calls other than the first three need to read it.
PLACES = [
    ("distft-dcp", "state.pt"),
    ("distft-dcp", "dcp/.metadata"),
    ("distft-dcp", "rng/rank-00000.pt"),
    ("distft-zero", "deepspeed/state/zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("distft-zero", "deepspeed/state/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("deepspeed", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("deepspeed", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("dcp", ".metadata"),
    ("trainer", "optimizer.pt"),
    ("trainer", "scheduler.pt"),
    ("trainer", "rng_state.pth"),
    ("trainer", "training_args.bin"),
    ("bin", "pytorch_model.bin"),
    ("adapter", "adapter_model.bin"),
]
# Where no call has to read what lies there: it is of no use here.
UNREAD = ("rng_state.pth", "training_args.bin")

CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "verify": lambda path, out: str(distft.verify(path)),
    "inspect": lambda path, out: str(distft.inspect(path)),
    "adopt": lambda path, out: str(distft.adopt(path)),
    "consolidate": distft.consolidate,
    "reshard": partial(distft.reshard, strategy=DDP(), world_size=1),
    "convert to dcp": partial(distft.convert, format="dcp"),
    "convert to safetensors": partial(distft.convert, format="safetensors"),
    "diff": lambda path, out: str(distft.diff(path, path)),
}


def plant(harmless: Path, name: str, form: str, path: Path, marker: Path) -> None:
    """Copy a folder, with a payload in the place of a file, its checksum too."""
    shutil.copytree(harmless, path)
    FORMS[form](Payload(marker), path / name)
    if (path / MANIFEST).is_file():
        fields = json.loads((path / MANIFEST).read_text())
        fields["files"][name] = describe_file(path / name).to_fields()
        del fields["manifest_crc32"]
        (path / MANIFEST).write_text(json.dumps(fields))


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_a_payload_runs_in_no_call_and_is_named(folders, tmp_path, kind, name):
    marker, out = tmp_path / "it-ran", tmp_path / "out"
    told = set()
    for form in FORMS:
        path = tmp_path / form.replace(" ", "-")
        plant(folders[kind], name, form, path, marker)
        for call, do in CALLS.items():
            try:
                said = do(path, out)
            except ValueError as error:
                said = str(error)
            assert not marker.exists(), (call, form)
            if Path(name).name in str(said) and out != said:
                told.add((form, call))
            shutil.rmtree(out, ignore_errors=True)
    if name not in UNREAD:
        assert {form for form, _ in told} == set(FORMS), told
    print(kind, name, sorted(call for form, call in told if form == "as zip"))


def load_a_model(paths: list[Path]) -> list[str]:
    """Give each folder to `load_model`; return what it raised."""
    distft.init(seed=0)
    found = []
    for path in paths:
        try:
            distft.load_model(path, FSDP2())
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_payload_runs_in_no_load_and_is_named(pools, folders, tmp_path):
    marker, calls, names = tmp_path / "it-ran", [], []
    for kind, name in PLACES:
        for form in FORMS:
            path = tmp_path / f"{len(calls)}"
            plant(folders[kind], name, form, path, marker)
            calls.append(Call("load", path))
            names.append((kind, name, form))
    for strategy in (FSDP2(), ZeRO3()):
        [found] = pools(1).run(attempt, strategy, Recipe(), calls)
        assert not marker.exists()
        for (of, name, form), (kind, text, changed) in zip(names, found, strict=True):
            # Of a run of two ranks, and without a scheduler here, these are not read.
            if name not in (*UNREAD, "scheduler.pt", "rng/rank-00000.pt"):
                assert issubclass(kind or int, ValueError), (strategy, name, form)
                # Or it is of no use here, which is said before a file is read.
                useless = of in ("bin", "adapter") or "Use distft.ZeRO3" in text
                assert useless or Path(name).name in text, (name, form, text)
                assert not changed, (strategy, name, form)
    [said] = pools(1).run(load_a_model, [call.path for call in calls])
    assert not marker.exists()
    assert len(said) == len(calls)


def test_an_item_of_a_distributed_checkpoint_that_is_a_payload_runs_nothing(folders, tmp_path):
    marker, path, out = tmp_path / "it-ran", tmp_path / "planted", tmp_path / "out"
    path.mkdir()
    save_item(Payload(marker), path)
    assert not marker.exists()
    told = []
    for call, do in CALLS.items():
        try:
            said = do(path, out)
        except ValueError as error:
            said = str(error)
        assert not marker.exists(), call
        if "posix.mkdir" in str(said):
            told.append(call)
        shutil.rmtree(out, ignore_errors=True)
    assert {"verify", "inspect", "consolidate", "reshard"} <= set(told)
