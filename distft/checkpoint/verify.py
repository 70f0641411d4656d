"""Whether a checkpoint can be trusted: broken, consistent in itself, or proven byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from distft.checkpoint.checksums import damage
from distft.checkpoint.config_shapes import unlike_config
from distft.checkpoint.folder import MANIFEST, find_checkpoint, read_manifest
from distft.checkpoint.readers import UnknownFormat, is_of_distft, read_map
from distft.checkpoint.readers.torch_zip import TorchZip, opened
from distft.checkpoint.records import TORCH_FILES, check_records
from distft.checkpoint.shards import ShardMap

Verdict = Literal["broken", "consistent", "proven"]

# Root of a zip that was written to an open file, whose name torch does not know.
_NO_NAME = "archive"


@dataclass(frozen=True)
class Verification:
    """What became of a check.

    Attributes:
        path: The folder or file that was checked.
        format: Its format, or "" where it could not be read.
        verdict: ``"broken"``; ``"consistent"``: whole, and all that its own metadata says agrees;
            ``"proven"``: every byte of its tensors is that which a checksum was made of.
        problems: What is wrong, each with the file or the tensor.
        notes: What could not be checked.
        required: The verdict that was asked for.
        bytes_read: Bytes whose checksums were computed.
    """

    path: Path
    format: str
    verdict: Verdict
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    required: Verdict = "consistent"
    bytes_read: int = 0

    @property
    def holds(self) -> bool:
        """Whether the verdict is the required one or better."""
        order = get_args(Verdict)
        return order.index(self.verdict) >= order.index(self.required)

    def __str__(self) -> str:
        """Return the report as text."""
        kind = f" ({self.format})" if self.format else ""
        lines = [f"{self.path}{kind}: {self.verdict}"]
        lines += [f"  problem  {problem}" for problem in self.problems]
        lines += [f"  note     {note}" for note in self.notes]
        if not self.problems and self.bytes_read:
            lines.append(f"  checksums of {self.bytes_read:,} bytes agree")
        return "\n".join(lines)


def verify(path: str | Path, require: Verdict = "consistent") -> Verification:
    """Return whether a checkpoint of any format is whole, and how far that is shown.

    Every file is read once. A checkpoint of distft has a checksum for each file. Files of
    ``torch.save`` have one for each record, and name the file that they were written as, which
    tells a renamed or swapped rank. Other formats are held to what they say of themselves: sizes,
    coverage of every tensor without gap or overlap, ranks and steps that agree between files.

    Args:
        path: As of `distft.inspect`.
        require: The verdict that `Verification.holds` asks for: ``"consistent"`` or ``"proven"``.

    Raises:
        ValueError: There is no checkpoint of a known format, or no such verdict.

    Collective: none.
    """
    if require not in get_args(Verdict):
        raise ValueError(
            f"verify(require={require!r}) is none of the {len(get_args(Verdict))} verdicts "
            f"{', '.join(get_args(Verdict))}."
        )
    path = Path(path).absolute()
    try:
        if is_of_distft(path):
            path = find_checkpoint(path)
            check = _check_manifest(path)
            if check.problems:
                return Verification(path, "distft", "broken", check.problems, required=require)
        found = read_map(path)
        problems = [*found.check(), *_empty(found), *_unlike_config(found)]
        if found.format != "distft":
            check = _check_files(found)
    except UnknownFormat:
        raise
    except ValueError as error:
        return Verification(path, "", "broken", [str(error)], required=require)
    problems += check.problems
    verdict: Verdict = "broken" if problems else "proven" if check.covered else "consistent"
    notes = [*found.notes, *check.notes]
    return Verification(
        found.root, found.format, verdict, problems, notes, require, check.bytes_read
    )


def refuse_broken(path: str | Path) -> None:
    """Raise where `verify` finds a checkpoint broken.

    Raises:
        ValueError: It is; the message has the first problem.

    Collective: none.
    """
    found = verify(path)
    if found.problems:
        raise ValueError(
            f"{found.path}: {found.problems[0]} ({len(found.problems)} in all). The checkpoint is "
            "damaged: use another one."
        )


@dataclass(frozen=True)
class _Checksums:
    """What checksums say: problems, whether they cover everything, and bytes they were made of."""

    problems: list[str]
    covered: bool
    notes: list[str]
    bytes_read: int


def _empty(found: ShardMap) -> Iterator[str]:
    """Yield the weights without elements, which are placeholders that a rank holds."""
    if found.format == "distft":
        return
    for name, tensor in found.tensors.items():
        if tensor.num_elements == 0:
            yield (
                f"{name} has 0 elements in the shape {tensor.shape}: "
                "a rank's placeholder was saved, not the weight"
            )


def _unlike_config(found: ShardMap) -> Iterator[str]:
    """Yield what a published model lacks, or has in another shape, of what its config says."""
    config = found.root / "config.json"
    if found.format != "safetensors" or not config.is_file():
        return
    try:
        said = dict(json.loads(config.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return
    shapes = {name: tensor.shape for name, tensor in found.tensors.items()}
    yield from unlike_config(shapes, said, found.format)


def _check_manifest(root: Path) -> _Checksums:
    manifest = read_manifest(root)
    found = (damage(root, manifest, name) for name in manifest.files)
    problems = [problem for problem in found if problem is not None]
    state = root / manifest.layout
    for file in sorted(state.rglob("*")):
        name = file.relative_to(root).as_posix()
        if file.is_file() and name not in manifest.files:
            problems.append(f"{name} is not one of the {len(manifest.files)} files of {MANIFEST}")
    read = sum(saved.size for saved in manifest.files.values())
    return _Checksums(problems, True, [], read)


def _check_files(found: ShardMap) -> _Checksums:
    """Check what single files say of themselves."""
    problems: list[str] = []
    archives = [name for name in found.files if name.endswith(TORCH_FILES)]
    for name in archives:
        with opened(found.root / name) as descriptor:
            root = TorchZip(found.root / name, name, descriptor).root
            if root not in (_NO_NAME, Path(name).stem):
                problems.append(f"{name} was written as {root}: it is renamed or swapped")
    checked = check_records(found.root, archives, found.all_tensors())
    problems += [text for broken, _ in checked for text in broken]
    read = sum(size for _, size in checked)
    sizes = dict(zip(archives, (size for _, size in checked), strict=False))
    without = [name for name in found.files if not sizes.get(name)]
    notes = []
    if without:
        notes.append(f"{len(without)} files have no checksum of their own, such as {without[0]}.")
    return _Checksums(problems, not without, notes, read)
