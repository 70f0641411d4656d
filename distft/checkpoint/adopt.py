"""What a folder of another tool is, and how its run goes on here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distft.checkpoint import foreign
from distft.checkpoint.folder import (
    DEEPSPEED,
    MANIFEST,
    NUMBERED,
    STATE_FILE,
    find_checkpoint,
    newest_numbered,
    read_manifest,
)
from distft.checkpoint.foreign import Engine, Parts
from distft.checkpoint.pickles import load_values, names_asked

PARTS = ("weights", "optimizer", "scheduler", "random state", "data position")


@dataclass(frozen=True)
class Adoption:
    """What a folder is, what wrote it, what it holds, and how to go on from it.

    Attributes:
        path: The folder of the checkpoint.
        kind: Which tool's folder it is.
        strategy: How the model was spread over ranks, or None where the folder does not say.
        world_size: Number of ranks that wrote it, or None where the folder does not say.
        stage: ZeRO stage, or None.
        step: Optimizer steps made, or None where the folder does not say.
        dtype: Dtype of the weights, or None where they are elsewhere.
        parts: Files of each part that is there, by the part's name.
        missing: Parts that a run needs to go on exactly, and files that should be there.
        resumes: Whether its optimizer goes on here; otherwise the run starts from its weights.
        how: The commands or calls that go on from it.
        notes: What else to know.
        tag: The folder of DeepSpeed's files below ``path``, or None.
        reader: What reads its optimizer: ``"deepspeed"``, ``"dcp"``, ``"trainer"`` or ``"torch"``
            (whole tensors, numbered by Trainer's rule or in the model's order), or None.
    """

    path: Path
    kind: str
    how: str
    strategy: str | None = None
    world_size: int | None = None
    stage: int | None = None
    step: int | None = None
    dtype: str | None = None
    parts: Parts = field(default_factory=dict)
    missing: Sequence[str] = ()
    resumes: bool = False
    notes: Sequence[str] = ()
    tag: str | None = None
    reader: str | None = None

    def __str__(self) -> str:
        """Return the report as a page of text."""
        lines = [f"{self.path}: {self.kind}"]
        for name in ("strategy", "world_size", "step", "dtype"):
            value = getattr(self, name)
            shown = "not said by the folder" if value is None else value
            lines.append(f"  {name.replace('_', ' '):14}{shown}")
        for part, files in self.parts.items():
            size = sum((self.path / name).stat().st_size for name in files)
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            lines.append(f"  {part:14}{files[0]}{more} ({size:,} bytes)")
        lines += [f"  {'missing':14}{name}" for name in self.missing]
        lines += [f"  {'note':14}{note}" for note in self.notes]
        lines.append(
            "Continues here, optimizer included:"
            if self.resumes
            else "Starts here from the weights alone:"
        )
        lines += [f"  {line}" for line in self.how.splitlines()]
        return "\n".join(lines)


def adopt(path: str | Path) -> Adoption:
    """Return what a checkpoint folder is, which strategy wrote it, and the call that goes on here.

    It knows folders of distft, Trainer and TRL (plain, FSDP, DeepSpeed), Accelerate, DeepSpeed,
    torchtitan and other users of torch's distributed checkpoints, PEFT adapters, and models for
    ``from_pretrained``. Of a run's root it takes the checkpoint with the highest step. Names,
    sizes and descriptions are read; no tensor is, and nothing in the folder is run.

    Raises:
        ValueError: There is no such folder, nothing in it is known, or a file in it is broken or
            asks for more than a checkpoint needs.

    Collective: none.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"adopt({str(path)!r}): there is no such folder. Pass one that exists.")
    for recognize in (_distft, _trainer, _accelerate, _deepspeed, _dcp, _adapter, _model):
        found = recognize(folder)
        if found is not None:
            absent = [part for part in PARTS if part not in found.parts]
            return replace(found, missing=(*absent, *found.missing))
    below = newest_numbered(folder)
    if below is not None:
        return adopt(below)
    files = sorted(member.name for member in folder.iterdir())
    raise ValueError(
        f"adopt({str(path)!r}): nothing known among its {len(files)} files and folders"
        f"{' (' + ', '.join(files[:5]) + ')' if files else ''}. Looked for {MANIFEST} (distft), "
        "trainer_state.json (Trainer, TRL), random_states_0.pkl (Accelerate), *_model_states.pt or "
        "*_optim_states.pt (DeepSpeed), .metadata (torch's distributed checkpoint, torchtitan), "
        "adapter_config.json (PEFT), config.json beside weights (from_pretrained), and folders "
        "checkpoint-N, step-N, global_stepN. Pass the folder that holds one of these."
    )


def _distft(folder: Path) -> Adoption | None:
    if not (folder / MANIFEST).is_file() and not any(folder.glob(f"*/{MANIFEST}")):
        return None
    folder = find_checkpoint(folder)
    manifest = read_manifest(folder)
    state = load_values(folder / STATE_FILE)
    files = list(manifest.files)
    tensors = [name for name in files if name.startswith(f"{manifest.layout}/")]
    parts = {"weights": tensors, "optimizer": tensors}
    parts |= {"scheduler": [STATE_FILE]} if state["scheduler"] is not None else {}
    parts |= {"random state": [name for name in files if name.startswith("rng/")]}
    parts |= {"data position": [STATE_FILE]} if state["data"] not in (None, [None]) else {}
    zero = manifest.layout == DEEPSPEED
    ranks = f"{manifest.world_size} ranks" if zero else "any number of ranks"
    return Adoption(
        folder,
        "a checkpoint of distft",
        f"strategy = distft.{manifest.strategy['constructor']}  # on {ranks}\n"
        f"model, optimizer = strategy.apply(model, partial({manifest.optimizer}, ...))\n"
        f"state = strategy.load({str(folder)!r}, model, optimizer)",
        strategy=manifest.strategy["constructor"],
        world_size=manifest.world_size,
        stage=int(manifest.strategy["name"][-1]) if zero else None,
        step=manifest.step,
        dtype=manifest.dtype,
        parts=parts,
        resumes=True,
    )


def _trainer(folder: Path) -> Adoption | None:
    file = folder / "trainer_state.json"
    if not file.is_file():
        return None
    state = _read_json(file)
    arguments = folder / "training_args.bin"
    asked = names_asked(arguments) if arguments.is_file() else []
    by_trl = any(name.startswith("trl.") for name in asked)
    random_states = foreign.names(folder, "rng_state*.pth")
    engine = foreign.find_engine(folder)
    parts = {
        **foreign.whole_files(folder),
        **foreign.files_of(folder, "optimizer", "optimizer.pt", "optimizer.bin"),
        **engine.parts,
        **foreign.files_of(folder, "scheduler", "scheduler.pt"),
        **({"random state": random_states} if random_states else {}),
        # It counts rows from the start: its sampler is read up to there again.
        "data position": [file.name],
    }
    return _with_engine(
        Adoption(
            folder,
            f"a checkpoint of {'TRL' if by_trl else 'Trainer'}{engine.beside}",
            "",
            step=state.get("global_step"),
            world_size=len(random_states) or None,
            parts=parts,
        ),
        engine,
    )


def _accelerate(folder: Path) -> Adoption | None:
    random_states = foreign.names(folder, "random_states_*.pkl")
    if not random_states:
        return None
    engine = foreign.find_engine(folder)
    parts = {
        **foreign.whole_files(folder),
        **foreign.files_of(folder, "optimizer", "optimizer*.bin"),
        **engine.parts,
        **foreign.files_of(folder, "scheduler", "scheduler*.bin"),
        "random state": random_states,
        **foreign.files_of(folder, "data position", "sampler*.bin", "dl_state_dict*.bin"),
    }
    report = Adoption(
        folder,
        f"a state of Accelerate{engine.beside}",
        "",
        world_size=len(random_states),
        parts=parts,
        notes=["Accelerate keeps no config.json: take the config of that run."],
    )
    return _with_engine(report, engine)


def _deepspeed(folder: Path) -> Adoption | None:
    engine = foreign.find_engine(folder)
    if engine.stage is None:
        return None
    kind = "a checkpoint of DeepSpeed"
    return _with_engine(Adoption(engine.folder, kind, "", parts=engine.parts), engine)


def _dcp(folder: Path) -> Adoption | None:
    engine = foreign.find_engine(folder)
    if not engine.parts:
        return None
    kind = f"a distributed checkpoint of torch{engine.beside}"
    step = NUMBERED.search(folder.resolve().name)
    report = Adoption(folder, kind, "", parts=engine.parts, step=int(step[1]) if step else None)
    return _with_engine(report, engine)


def _with_engine(report: Adoption, engine: Engine) -> Adoption:
    """Return the report with what the engine's folder says, and the way on from there."""
    dtype = engine.dtype or foreign.safetensors_dtype(report.path, report.parts)
    world_size = engine.world_size or report.world_size
    spread = engine.strategy
    if spread is None and world_size is not None:
        spread = "one process" if world_size == 1 else "DDP, or another that saves whole tensors"
    missing = (*report.missing, *engine.missing, *foreign.absent_shards(report.path))
    reader = None if missing else _reader_of(report, engine)
    if reader == "deepspeed":
        how = _from_zero(report.path, engine, dtype)
    elif reader is not None:
        how = _from_run(report)
    elif "adapter" in report.parts and "weights" not in report.parts:
        how = _from_adapter(report.path)
    elif engine.merge is not None:
        how = f"{engine.merge}\n{_from_weights('OUT')}"
    else:
        how = _from_weights(str(report.path))
        if not (report.path / "config.json").is_file():
            how = (
                f"config.save_pretrained({str(report.path)!r})  # that run's, not kept here\n{how}"
            )
    notes = list(report.notes)
    if reader == "deepspeed":
        notes.append(
            "The optimizer goes on with the stage, ranks and parameter groups of that run; to "
            f"change them, start from the weights: {engine.merge}"
        )
    elif reader is not None:
        notes.append("The random state and the position in the data are not taken over.")
    elif "optimizer" in report.parts:
        notes.append(
            "The optimizer's state is there, and this version cannot take it over: to go on with "
            "it, let the run end in the tool that wrote it."
        )
    return replace(
        report,
        how=how,
        strategy=spread,
        world_size=world_size,
        stage=engine.stage,
        step=report.step if engine.step is None else engine.step,
        dtype=dtype,
        missing=missing,
        notes=notes,
        resumes=reader is not None,
        reader=reader,
        tag=engine.tag,
    )


def _adapter(folder: Path) -> Adoption | None:
    if not (folder / "adapter_config.json").is_file():
        return None
    config = _read_json(folder / "adapter_config.json")
    parts = foreign.whole_files(folder)
    return Adoption(
        folder,
        f"a {config.get('peft_type')} adapter of PEFT for {config.get('base_model_name_or_path')}",
        _from_adapter(folder),
        dtype=foreign.safetensors_dtype(folder, parts),
        parts=parts,
        missing=["the adapter's own weights"] if "adapter" not in parts else [],
    )


def _model(folder: Path) -> Adoption | None:
    parts = foreign.whole_files(folder)
    if not (folder / "config.json").is_file() or "weights" not in parts:
        return None
    below = newest_numbered(folder)
    config = _read_json(folder / "config.json")
    return Adoption(
        folder,
        f"a {config.get('model_type')} model for from_pretrained",
        _from_weights(str(folder)),
        dtype=foreign.safetensors_dtype(folder, parts),
        parts=parts,
        missing=foreign.absent_shards(folder),
        notes=[f"There are checkpoints below it, the newest {below.name}."] if below else [],
    )


def _reader_of(report: Adoption, engine: Engine) -> str | None:
    """Return what reads the optimizer of a folder, or None where nothing here does."""
    if engine.stage:
        return "deepspeed"
    if not {"weights", "adapter"} & set(report.parts) or "optimizer" not in report.parts:
        return None
    if engine.parts:
        # Of FSDP in Accelerate the two halves lie in folders of their own.
        ours = engine.strategy is None and not engine.other_names
        return "dcp" if ours else None
    if engine.strategy is not None or len(report.parts["optimizer"]) != 1:
        return None
    return "trainer" if (report.path / "trainer_state.json").is_file() else "torch"


def _from_run(report: Adoption) -> str:
    model = "model = AutoModelForCausalLM.from_config(config)  # that run's; its values are loaded"
    if "weights" not in report.parts:
        model = f"model = distft.load_adapter(base, {str(report.path)!r})"
    return (
        f"{model}\n"
        "model, optimizer = strategy.apply(model, partial(AdamW, ...))  # any strategy, any ranks\n"
        f"state = strategy.load({str(report.path)!r}, model, optimizer)  # scheduler=... too"
    )


def _from_zero(path: Path, engine: Engine, dtype: str | None) -> str:
    precision = 'precision="bf16-mixed"' if dtype == "bfloat16" else ""
    return (
        f"strategy = distft.ZeRO{engine.stage}({precision})  # on {engine.world_size} ranks\n"
        "model, optimizer = strategy.apply(model, partial(AdamW, ...))  # groups as in that run\n"
        f"state = strategy.load({str(path)!r}, model, optimizer)\n"
        "# the random state and the rows go on from `state.step` by your own code"
    )


def _from_weights(path: str) -> str:
    return (
        f"model = distft.load_model({path!r}, strategy)  # any strategy, any ranks\n"
        "model, optimizer = strategy.apply(model, partial(AdamW, lr=...))"
    )


def _from_adapter(path: Path) -> str:
    return (
        "base = AutoModelForCausalLM.from_pretrained(...)  # the one named in adapter_config.json\n"
        f"model = distft.load_adapter(base, {str(path)!r})\n"
        "model, optimizer = strategy.apply(model, partial(AdamW, lr=...))  # trains the adapter"
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}. Use a whole checkpoint.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {type(found).__name__}, not an object. Use another one.")
    return found
