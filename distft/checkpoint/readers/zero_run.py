"""What the ranks of a ZeRO run hold: weights and moments inside flat vectors, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distft.checkpoint.readers.flat import Dealt, FlatVector, Slice
from distft.checkpoint.readers.torch_zip import plain_values
from distft.checkpoint.readers.unpickle import StoredTensor
from distft.checkpoint.shards import LogicalTensor, OptimizerState, ParamGroup

# Of a group in the file: numbers of vectors, and names that param_shapes gives too.
_NOT_SETTINGS = frozenset({"params", "param_names"})
# What the model states of all ranks say alike, by what an error calls it.
_SAME_IN_ALL = {"steps": "global_steps", "ranks": "dp_world_size", "parameters": "param_shapes"}

# Of each group of vectors: the names of its parameters, and their shapes.
Trained = list[tuple[list[str], list[tuple[int, ...]]]]


@dataclass(frozen=True)
class ZeroRun:
    """The states of all ranks of a run, and the tensors inside their vectors.

    Attributes:
        folder: The tag's folder, for errors.
        models: Model states; of stages 1 and 2 the only ones.
        optimizers: Optimizer states by rank.
        stage: ZeRO stage.
    """

    folder: Path
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]
    stage: int

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        count = self.optimizers[0]["partition_count"]
        return int(max(count) if isinstance(count, list) else count)

    def check_agreement(self, models: Sequence[str], optimizers: Sequence[str]) -> None:
        """Raise where files, given by their names, are of different runs or steps.

        Raises:
            ValueError: They are; both files are named.

        Collective: none.
        """
        said = {
            what: [(name, m.get(key)) for name, m in zip(models, self.models, strict=True)]
            for what, key in _SAME_IN_ALL.items()
        }
        said |= {
            "partitions": [
                (name, o["partition_count"])
                for name, o in zip(optimizers, self.optimizers, strict=True)
            ],
        }
        for what, values in said.items():
            for name, value in values[1:]:
                if value != values[0][1]:
                    raise ValueError(
                        f"{name} and {values[0][0]} in {self.folder} do not belong together: their "
                        f"{what} differ ({_short(value)} and {_short(values[0][1])}). "
                        "Copy the folder again."
                    )

    def trained(self) -> Trained:
        """Return names and shapes of each group of vectors, in the order of their elements.

        Collective: none.
        """
        shapes = self.models[0].get("param_shapes") or []
        return [(list(group), [tuple(shape) for shape in group.values()]) for group in shapes]

    def weights(self, trained: Trained) -> dict[str, LogicalTensor]:
        """Return the trained parameters in fp32.

        Raises:
            ValueError: The vectors do not hold as many elements as their parameters.

        Collective: none.
        """
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return self._tensors(trained, [list(state[key]) for state in self.optimizers], "weights")

    def optimizer(self, root: Path, trained: Trained, kind: str) -> OptimizerState | None:
        """Return moments, steps and groups by name; ``kind`` is the optimizer's class name.

        Raises:
            ValueError: As `weights`, or the ranks have made different numbers of updates.

        Collective: none.
        """
        inner = [self._inner(state) for state in self.optimizers]
        groups, states = inner[0]["param_groups"], inner[0]["state"]
        numbers = [number for group in groups for number in group["params"]]
        names = {number: trained[index][0] for index, number in enumerate(numbers)}
        moments: dict[str, dict[str, LogicalTensor]] = {}
        steps: dict[str, float] = {}
        for key in dict.fromkeys(key for state in states.values() for key in state):
            if key == "step":
                for number in states:
                    counts = [plain_values(root, rank["state"][number][key]) for rank in inner]
                    self._check_counts(counts)
                    steps.update(dict.fromkeys(names[number], float(counts[0])))
                continue
            vectors = [[rank["state"][number][key] for number in numbers] for rank in inner]
            if not all(isinstance(part, StoredTensor) for part in vectors[0]):
                continue
            if all(part.shape == () for part in vectors[0]):
                # NAdam's mu_product: a number of a whole vector, the same on every rank.
                for number, part in zip(numbers, vectors[0], strict=True):
                    one = Slice(FlatVector.of([part]), 0, 1)
                    for name in names[number]:
                        moments.setdefault(name, {})[key] = LogicalTensor(name, (), part.dtype, one)
                continue
            for name, tensor in self._tensors(trained, vectors, key).items():
                moments.setdefault(name, {})[key] = tensor
        found = [
            ParamGroup(
                plain_values(root, {k: v for k, v in g.items() if k not in _NOT_SETTINGS}),
                [name for number in g["params"] for name in names[number]],
            )
            for g in groups
        ]
        return OptimizerState(kind, moments, steps, found)

    def _check_counts(self, counts: Sequence[float]) -> None:
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise ValueError(
                    f"{self.folder} holds an optimizer with {counts[0]:g} updates on rank 0 and "
                    f"{count:g} on rank {rank}. Its files do not belong together: copy it again."
                )

    def _inner(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        inner = state["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if not isinstance(inner, dict):
            raise ValueError(
                f"{self.folder} was saved with elastic_checkpoint, which keeps no parameter "
                "groups. Switch it off in the DeepSpeed config and save again."
            )
        return inner

    def _tensors(
        self, trained: Trained, vectors: Sequence[Sequence[StoredTensor]], what: str
    ) -> dict[str, LogicalTensor]:
        """Return the tensors inside the vectors of all ranks, one vector a group."""
        kinds = {part.dtype for rank in vectors for part in rank}
        if len(kinds) > 1 or any(part.strides for rank in vectors for part in rank):
            raise ValueError(f"{self.folder} holds {what} in {sorted(kinds)}. Use another one.")
        dtype = kinds.pop() if kinds else "float32"
        if self.stage == 3:
            return self._dealt(trained, [FlatVector.of(rank) for rank in vectors], dtype, what)
        paddings = self.optimizers[0].get("param_alignment_paddings")
        found = {}
        for index, (names, shapes) in enumerate(trained):
            vector = FlatVector.of([rank[index] for rank in vectors])
            begin = 0
            for place, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                count = math.prod(shape)
                found[name] = LogicalTensor(name, shape, dtype, Slice(vector, begin, count))
                begin += count + (paddings[index][place] if paddings is not None else 0)
            # The end is padded to twice the number of ranks, or cut off again.
            unit = 2 * self.world_size
            if -(-begin // unit) != -(-vector.num_elements // unit):
                raise self._left_over(what, begin, vector.num_elements, index)
        return found

    def _dealt(
        self, trained: Trained, vectors: Sequence[FlatVector], dtype: str, what: str
    ) -> dict[str, LogicalTensor]:
        found, begin, ranks = {}, 0, tuple(vectors)
        for names, shapes in trained:
            for name, shape in zip(names, shapes, strict=True):
                count = math.prod(shape)
                per_rank = -(-count // len(ranks))
                stored = Dealt(ranks, begin, per_rank, count)
                found[name] = LogicalTensor(name, shape, dtype, stored)
                begin += per_rank
        for rank, vector in enumerate(vectors):
            if vector.num_elements != begin:
                raise self._left_over(what, begin, vector.num_elements, rank)
        return found

    def _left_over(self, what: str, used: int, there: int, index: int) -> ValueError:
        unit = "rank" if self.stage == 3 else "group"
        return ValueError(
            f"{self.folder} holds {there} elements of {what} in {unit} {index}, and its parameters "
            f"take up {used}. Its files do not belong together: use another checkpoint."
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 40 else f"{text[:40]}..."
