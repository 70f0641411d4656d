"""Which tensors of a base a LoRA adapter changes, and by what.

Source: Hu et al. 2021, equation 3; the scale of Kalajdzievski 2023, equation 4, for ``use_rslora``;
names, patterns and which factor belongs to which expert as ``peft/tuners/lora`` 0.21.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from distft.checkpoint.adapters import Adapter
from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.layouts import Layout
from distft.checkpoint.shards import CASTABLE, LogicalTensor
from distft.checkpoint.stream import NUM_BUFFERS
from distft.peft import PREFIX

# Settings of a LoRA config that do not change what is added, or that are read here.
_PLAIN = frozenset(
    (
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
        "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias",
        "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
        "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
        "target_modules", "target_parameters", "task_type", "use_rslora",
    )
)  # fmt: skip
# Of these initial values the base changes too, when PEFT puts the adapter on.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Order in which modules of fused experts have their parameters, and so in which PEFT wraps them.
_REGISTERED = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "down_proj", "down_proj_bias")
# Tensors with a row for each token.
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_FACTOR = re.compile(r"\.(lora_(?:embedding_)?[AB])(?:\.(weight|bias))?$")

Factors = dict[str, LogicalTensor]


@dataclass(frozen=True)
class Change:
    """What is added to a tensor of the base, or to a range of its rows.

    Attributes:
        a: The factor A of shape ``(experts * r, in)``, expert by expert; None for a bias.
        b: The factor B of shape ``(out, r * experts)``, rank by rank; of a bias what is added.
        scale: What the product is multiplied by.
        experts: Number of experts, 1 for a matrix.
        rows: Rows of the base's tensor for each expert.
        transposed: Whether the base's rows are inputs.
        first_row: Row of the fused whole with which the tensor begins.
    """

    a: LogicalTensor | None
    b: LogicalTensor
    scale: float
    experts: int
    rows: int
    transposed: bool
    first_row: int = 0

    @property
    def columns(self) -> int:
        """Elements of a row."""
        if self.a is None:
            return 1
        return self.b.shape[0] if self.transposed else self.a.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of both factors in memory."""
        return 4 * (self.b.num_elements + (self.a.num_elements if self.a else 0))


@dataclass(frozen=True)
class Merge:
    """What an adapter makes of a base, by the names of the base's tensors.

    Attributes:
        root: Folder of the adapter.
        changes: Tensors to which something is added.
        replaced: Tensors whose place one of the adapter takes.
    """

    root: Path
    changes: Mapping[str, Change]
    replaced: Mapping[str, LogicalTensor]

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self.changes) | frozenset(self.replaced)

    @property
    def held_bytes(self) -> int:
        """Bytes of the largest factors, and of the rows that are summed at once."""
        largest = max((change.num_bytes for change in self.changes.values()), default=0)
        return largest + (NUM_BUFFERS + 3) * BUFFER_BYTES


def other_than_lora(adapter: Adapter, own_base: bool) -> str | None:
    """Return the first setting by which an adapter is more than ``W + scale * B A``, or None.

    Args:
        adapter: An adapter of type LoRA.
        own_base: Whether it is added to the base that it was trained on, whatever PEFT makes of a
            base when it attaches one.

    Collective: none.
    """
    for name, value in adapter.config.items():
        if name not in _PLAIN and value:
            return f"{name}={value!r}"
    start = str(adapter.config.get("init_lora_weights", True)).lower()
    if not own_base and start.startswith(_CHANGES_BASE):
        return f"init_lora_weights={start!r}"
    return None


def plan_merge(
    adapter: Adapter,
    base: Mapping[str, LogicalTensor],
    layout: Layout,
    transposed_experts: bool | None,
) -> Merge | None:
    """Return what an adapter makes of a base, or None where only PEFT knows.

    Args:
        adapter: A plain one, see `other_than_lora`.
        base: The base's tensors, named as in memory or as published.
        layout: How the family is published.
        transposed_experts: Whether the rows of fused experts are inputs; None where it is not
            known, and shapes have to say.

    Raises:
        ValueError: It is for another base, or a rank is not that of the config.

    Collective: none.
    """
    modules: dict[str, Factors] = {}
    replaced: dict[str, LogicalTensor] = {}
    for name, tensor in adapter.tensors.items():
        found = _FACTOR.search(name)
        path = name.removeprefix(PREFIX)
        if found:
            path = path[: -len(found[0])]
            modules.setdefault(path, {})[".".join(filter(None, found.groups()))] = tensor
        elif ".lora_" in name:
            return None
        else:
            replaced[path.replace(".base_layer.", ".")] = tensor
    builder = _Builder(adapter, base, layout, transposed_experts)
    changes: dict[str, Change] = {}
    for path, targets in _by_module(modules).items():
        made = builder.changes(path, targets)
        if made is None:
            return None
        changes |= made
    packed = [base[name] for name in changes if base[name].dtype not in CASTABLE]
    if packed:
        raise ValueError(
            f"{packed[0].name} of the base is {packed[0].dtype}, and an adapter is added to "
            f"{', '.join(CASTABLE)}. Pass base=, the model in 16 or 32 bits."
        )
    return Merge(adapter.root, changes, builder.replaced(replaced))


def _by_module(modules: Mapping[str, Factors]) -> dict[str, list[Factors]]:
    """Return the factors of each module, innermost wrapper first."""
    depths: dict[str, dict[int, Factors]] = {}
    for path, factors in modules.items():
        plain = path.replace(".base_layer", "")
        depths.setdefault(plain, {})[path.count(".base_layer")] = factors
    return {
        path: [found[depth] for depth in sorted(found, reverse=True)]
        for path, found in depths.items()
    }


@dataclass(frozen=True)
class _Builder:
    """Finds the base's tensor of each pair of factors."""

    adapter: Adapter
    base: Mapping[str, LogicalTensor]
    layout: Layout
    transposed_experts: bool | None

    def replaced(self, tensors: Mapping[str, LogicalTensor]) -> dict[str, LogicalTensor]:
        found = {}
        for name, tensor in tensors.items():
            held = self.base.get(name)
            wide = held is not None and held.shape[1:] == tensor.shape[1:]
            if name.endswith(VOCABULARY) and wide:
                # Also with other rows: the vocabulary was resized before the training.
                found[name] = tensor
                continue
            places = self._places(name, tensor.shape)
            if len(places) != 1:
                raise self._other_base(name, tensor.shape)
            found[places[0][0]] = tensor
        return found

    def changes(self, path: str, targets: Sequence[Factors]) -> dict[str, Change] | None:
        """Return the changes of a module's tensors, None where PEFT alone tells them apart."""
        parameters = self._parameters(path)
        if parameters:
            return self._of_parameters(path, parameters, targets)
        if len(targets) > 1:
            return None
        return self._of_layer(path, targets[0])

    def _of_layer(self, path: str, factors: Factors) -> dict[str, Change] | None:
        a, b = factors.get("lora_A.weight"), factors.get("lora_B.weight")
        looked_up = a is None
        if looked_up:
            a, b = factors.get("lora_embedding_A"), factors.get("lora_embedding_B")
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
            return None
        name = f"{path}.weight"
        scale = self._scale(path, a.shape[0])
        shapes = [(b.shape[0], a.shape[1]), (a.shape[1], b.shape[0])]
        flipped = looked_up or bool(self.adapter.config.get("fan_in_fan_out"))
        for transposed in (True,) if looked_up else (flipped, not flipped):
            places = self._places(name, shapes[transposed])
            if len(places) == 1:
                change = Change(a, b, scale, 1, shapes[transposed][0], transposed)
                return {places[0][0]: change} | self._of_bias(path, factors, scale)
        raise self._other_base(name, shapes[flipped])

    def _of_bias(self, path: str, factors: Factors, scale: float) -> dict[str, Change]:
        bias = factors.get("lora_B.bias")
        if bias is None:
            return {}
        places = self._places(f"{path}.bias", bias.shape)
        if len(places) != 1:
            raise self._other_base(f"{path}.bias", bias.shape)
        return {places[0][0]: Change(None, bias, scale, 1, bias.shape[0], False)}

    def _parameters(self, path: str) -> list[str]:
        """Return the parameters of a module that the config names, in the order of wrapping."""
        names = []
        for target in self.adapter.config.get("target_parameters") or ():
            key = f"{path}.{target.rpartition('.')[2]}"
            if (key == target or key.endswith(f".{target}")) and self._exists(key):
                names.append(key)
        known = [f"{path}.{name}" for name in _REGISTERED]
        return sorted(set(names), key=lambda key: known.index(key) if key in known else len(known))

    def _exists(self, name: str) -> bool:
        # The name of a published part does not depend on its size.
        part = self.layout.pieces(name, (1, 2, 1))[0][0]
        return name in self.base or part in self.base

    def _of_parameters(
        self, path: str, names: Sequence[str], targets: Sequence[Factors]
    ) -> dict[str, Change] | None:
        pairs = [(t.get("lora_A.weight"), t.get("lora_B.weight")) for t in targets]
        whole = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(whole) < len(pairs) or len(names) < len(whole):
            return None
        if self.transposed_experts is None and any(a.shape[1] == b.shape[0] for a, b in whole):
            return None
        fitting = [
            made
            for chosen in permutations(names, len(whole))
            if (made := self._fitted(chosen, whole)) is not None
        ]
        if not fitting:
            raise self._other_base(names[0], whole[0][0].shape)
        in_order = all(name.rpartition(".")[2] in _REGISTERED for name in names)
        # Permutations come in the order of the names, so the first is PEFT's own.
        return fitting[0] if len(fitting) == 1 or in_order else None

    def _fitted(
        self, names: Sequence[str], pairs: Sequence[tuple[LogicalTensor, LogicalTensor]]
    ) -> dict[str, Change] | None:
        found: dict[str, Change] = {}
        for name, (a, b) in zip(names, pairs, strict=True):
            rank = self._rank(name)
            experts, rest = divmod(a.shape[0], rank)
            if rest or b.shape[1] != a.shape[0]:
                return None
            made = self._of_parameter(name, a, b, experts, self._scale(name, rank))
            if made is None:
                return None
            found |= made
        return found

    def _of_parameter(
        self, name: str, a: LogicalTensor, b: LogicalTensor, experts: int, scale: float
    ) -> dict[str, Change] | None:
        sizes = (b.shape[0], a.shape[1])
        known = self.transposed_experts
        orders = (known,) if known is not None and experts > 1 else (False, True)
        for transposed in orders if experts > 1 else (False,):
            rows, columns = sizes[::-1] if transposed else sizes
            shape = (experts, rows, columns) if experts > 1 else (rows, columns)
            places = self._places(name, shape)
            if places:
                return {
                    place: Change(a, b, scale, experts, rows, bool(transposed), first)
                    for place, first in places
                }
        return None

    def _places(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, int]]:
        """Return the base's tensors that are one of a shape in memory, and their first rows."""
        whole = self.base.get(name)
        if whole is not None:
            return [(name, 0)] if whole.shape == shape else []
        places, row = [], 0
        for part, size in self.layout.pieces(name, shape):
            held = self.base.get(part)
            if held is None or held.shape != size:
                return []
            places.append((part, row))
            row += math.prod(size[:-1])
        return places

    def _rank(self, key: str) -> int:
        return int(_pattern(self.adapter.config.get("rank_pattern"), key, self.adapter.config["r"]))

    def _scale(self, key: str, rank: int) -> float:
        config = self.adapter.config
        if rank != self._rank(key):
            raise ValueError(
                f"The adapter in {self.adapter.root} has rank {rank} at {key}, and its config says "
                f"{self._rank(key)}. The two files are of different runs: copy them again."
            )
        alpha = float(_pattern(config.get("alpha_pattern"), key, config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _other_base(self, name: str, shape: tuple[int, ...]) -> ValueError:
        held = self.base.get(name)
        has = "has no such tensor" if held is None else f"has {list(held.shape)} there"
        return ValueError(
            f"The adapter in {self.adapter.root} is for another base: it changes {name} of shape "
            f"{list(shape)}, and the base {has} among its {len(self.base)} tensors. Pass base=, "
            "the model that it was trained on."
        )


def _pattern(patterns: Mapping[str, Any] | None, key: str, default: Any) -> Any:
    """Return what the first pattern that matches the end of a name says, as PEFT reads it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return value
    return default
