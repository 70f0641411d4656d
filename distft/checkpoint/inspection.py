"""What a checkpoint of any format holds, without reading a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import OptimizerState


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        path: Its folder.
        format: ``"distft"``, ``"dcp"``, ``"deepspeed"``, ``"safetensors"``, ``"peft"`` or
            ``"state_dict"``.
        tensors: Shape and dtype of each parameter and buffer by name; tied ones once.
        num_parameters: Elements of all of them.
        num_bytes: Bytes of all of them.
        strategy: How the model was spread over ranks, or None where the folder does not say.
        world_size: Ranks that wrote it, or None.
        step: Optimizer steps made, or None.
        optimizer: Class name of its optimizer, "" where only its state is known, None without one.
        optimizer_bytes: Bytes of the optimizer's state tensors.
        groups: Number of parameters in each group of the optimizer.
        ties: Names that share another name's tensor.
        frozen: Names that were not trained.
        files: Bytes of each file.
        notes: What else to know.
    """

    path: Path
    format: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    num_parameters: int
    num_bytes: int
    strategy: str | None
    world_size: int | None
    step: int | None
    optimizer: str | None
    optimizer_bytes: int
    groups: Sequence[int]
    ties: Mapping[str, str]
    frozen: Sequence[str]
    files: Mapping[str, int]
    notes: Sequence[str]

    def __str__(self) -> str:
        """Return the report as text."""
        dtypes = sorted({dtype for _, dtype in self.tensors.values()})
        rows = {
            "strategy": self.strategy or "not said by the folder",
            "world size": self.world_size or "not said by the folder",
            "step": "not said by the folder" if self.step is None else self.step,
            "tensors": f"{len(self.tensors)} of {', '.join(dtypes)}: "
            f"{self.num_parameters:,} elements, {self.num_bytes:,} bytes",
            "optimizer": self._optimizer(),
            "files": f"{len(self.files)}, {sum(self.files.values()):,} bytes",
        }
        lines = [f"{self.path}: {self.format}"]
        lines += [f"  {name:12}{value}" for name, value in rows.items()]
        lines += [f"  {'tied':12}{alias} = {kept}" for alias, kept in self.ties.items()]
        lines += [f"  {'frozen':12}{len(self.frozen)} tensors"] if self.frozen else []
        lines += [f"  {'note':12}{note}" for note in self.notes]
        return "\n".join(lines)

    def _optimizer(self) -> str:
        if self.optimizer is None:
            return "none"
        sizes = ", ".join(map(str, self.groups))
        kind = self.optimizer or "of a class that the folder does not name"
        return f"{kind}, groups of {sizes} parameters, {self.optimizer_bytes:,} bytes"


def inspect(path: str | Path) -> Inspection:
    """Return what a checkpoint of any format holds; sizes and descriptions are read, no tensor.

    Args:
        path: A checkpoint's folder, the folder inside it that holds the state, a run's root, which
            means its latest checkpoint, or one file of weights.

    Raises:
        ValueError: There is no checkpoint of a known format, or it is broken.

    Collective: none.
    """
    found = read_map(path)
    state = found.optimizer
    return Inspection(
        found.root,
        found.format,
        {name: (tensor.shape, tensor.dtype) for name, tensor in found.tensors.items()},
        sum(tensor.num_elements for tensor in found.tensors.values()),
        found.num_bytes,
        found.strategy,
        found.world_size,
        found.step,
        None if state is None else state.kind,
        0 if state is None else _bytes(state),
        [] if state is None else [len(group.names) for group in state.groups],
        found.ties,
        sorted(found.frozen),
        found.files,
        found.notes,
    )


def _bytes(state: OptimizerState) -> int:
    return sum(t.num_bytes for moments in state.moments.values() for t in moments.values())
