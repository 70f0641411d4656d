"""Adapters for servers: a pair of factors for each matrix that the family publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distft.checkpoint.adapters import Adapter, find_adapter
from distft.checkpoint.layouts import Layout, experts_transposed, known_layout
from distft.checkpoint.merge_plan import Change, other_than_lora, plan_merge
from distft.checkpoint.merging import FactorPair, read_whole
from distft.checkpoint.model_source import LORA, ModelSource
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor
from distft.checkpoint.target import check_target, written_whole
from distft.peft import CONFIG_FILE, PREFIX, WEIGHTS_FILE

Array = NDArray[np.float32]
# The modules of experts that are published one by one, as PEFT reads a pattern.
_EXPERTS = r"experts\.\d+\.\w+"
# Of the largest element of what is added: rounding of a product in fp32.
_TOLERANCE = 1e-5


def export_adapter(
    path: str | Path, out: str | Path, base: str | Path | None = None, config: Any = None
) -> Path:
    """Write a LoRA adapter with factors for each expert, as servers read it; return the folder.

    In training the experts of a layer are one tensor, and its factors hold all experts', gate and
    up together. Here each published matrix, such as ``experts.5.up_proj``, has its own A (r, in)
    and B (out, r), in fp32. B includes the scale, and ``lora_alpha`` is the rank everywhere: so a
    reader that knows no ``rank_pattern`` scales experts right too. What each pair adds to its
    matrix is compared with what a merge adds before the folder appears.

    Args:
        path: A checkpoint of a LoRA run in any format, or an adapter's folder.
        out: New or existing folder; files of an adapter in it are replaced.
        base: The model that the adapter goes on, where ``path`` holds none: names and shapes of
            its tensors are read, no values.
        config: The model's config where neither has one.

    Raises:
        ValueError: There is no LoRA adapter, no base, a family that publishes its experts as one
            tensor or is not known here, or an adapter that is more than ``W + scale * B A``.
        RuntimeError: A pair adds something else than the merge.

    Collective: none.
    """
    found = read_map(Path(path))
    out = Path(out).absolute()
    check_target(out, found.root)
    adapter = _lora_of(find_adapter(found), found.root, base)
    source = ModelSource.of(found, adapter, base, config, merge=False)
    layout = known_layout(source.config)
    named = None if layout is None else _split(adapter, source, layout)
    if layout is None or named is None:
        raise ValueError(
            f"export_adapter() knows {len(_families())} families, and {source.found.root} is of "
            f"{(source.config or {}).get('architectures')}. Use consolidate(adapter='only') for "
            "PEFT's layout."
        )
    tensors, ranks = named
    with written_whole(out, lambda file: file.name == WEIGHTS_FILE, _earlier) as made:
        from safetensors.numpy import save_file

        save_file(tensors, made / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(_config(adapter, ranks), indent=2, sort_keys=True) + "\n"
        (made / CONFIG_FILE).write_text(text, encoding="utf-8")
    return out


def _families() -> list[str]:
    from distft.checkpoint.layouts import PUBLISHED_AS

    return sorted(PUBLISHED_AS)


def _lora_of(adapter: Adapter | None, root: Path, base: str | Path | None) -> Adapter:
    if adapter is None or adapter.kind != LORA:
        held = "0 adapters" if adapter is None else f"1 of type {adapter.kind}"
        raise ValueError(
            f"export_adapter() splits adapters of type {LORA}, and {root} holds {held}. "
            "Pass a checkpoint of a LoRA run."
        )
    if not adapter.own_base and base is None:
        raise ValueError(
            f"{root} holds an adapter of {len(adapter.tensors)} tensors and 0 of its base, which "
            "says how its experts are published. Pass base=, the folder of that model."
        )
    other = other_than_lora(adapter, own_base=True)
    if other is not None:
        raise ValueError(
            f"export_adapter() writes W + scale * B A, and the adapter in {root} has {other}, 1 "
            "setting more. Merge it, with consolidate(adapter='merge')."
        )
    return adapter


def _split(
    adapter: Adapter, source: ModelSource, layout: Layout
) -> tuple[dict[str, Array], dict[str, int]] | None:
    """Return the tensors to write, and the ranks of modules; None where PEFT alone tells."""
    transposed = experts_transposed(source.config)
    plan = plan_merge(adapter, source.found.tensors, layout, transposed)
    if plan is None:
        return None
    tensors: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    names = {id(tensor): name for name, tensor in adapter.tensors.items()}
    pair: FactorPair | None = None
    for name, change in plan.changes.items():
        if change.a is None:
            raise ValueError(
                f"The adapter in {adapter.root} trains the bias of {name}, and servers read 2 "
                "factors of a matrix. Merge it, with consolidate(adapter='merge')."
            )
        if pair is None or pair.b_of is not change.b:
            pair = FactorPair.read(adapter.root, change)
        if change.experts == 1:
            a, b = names[id(change.a)], names[id(change.b)]
            tensors[a], tensors[b] = pair.a[0], _scaled(pair.b[:, :, 0], change)
            ranks[name.removesuffix(".weight")] = len(pair.a[0])
            continue
        for part in _parts(name, source.found.tensors[name], change, layout):
            a_part, b_part = part.factors(pair)
            part.check(pair, a_part, b_part)
            module = part.name.removesuffix(".weight")
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a_part
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b_part
            ranks[module] = len(a_part)
    for name, tensor in adapter.tensors.items():
        if ".lora_" not in name:
            tensors[name] = read_whole(adapter.root, tensor)
    return tensors, ranks


def _scaled(b: Array, change: Change) -> Array:
    return np.ascontiguousarray(b * np.float32(change.scale))


@dataclass(frozen=True)
class _Part:
    """A published matrix: some outputs of one expert."""

    name: str
    change: Change
    first_row: int
    rows: int

    def factors(self, pair: FactorPair) -> tuple[Array, Array]:
        """Return its own A (r, in), and B (out, r) with the scale."""
        expert, first = divmod(self.first_row, self.change.rows)
        b = pair.b[first : first + self.rows, :, expert]
        return np.ascontiguousarray(pair.a[expert]), _scaled(b, self.change)

    def check(self, pair: FactorPair, a: Array, b: Array) -> None:
        """Raise where the factors add something else than a merge adds."""
        expected = np.zeros((self.rows, self.change.columns), np.float32)
        pair.add(self.change, self.first_row - self.change.first_row, expected)
        error = float(np.abs(b @ a - expected).max())
        if not error <= _TOLERANCE * max(float(np.abs(expected).max()), 1e-30):
            raise RuntimeError(
                f"The factors of {self.name} add up to {error:.1e} something else than a merge. "
                "Report it with the family of the model."
            )


def _parts(name: str, held: LogicalTensor, change: Change, layout: Layout) -> Iterator[_Part]:
    """Return the published matrices of a base's tensor."""
    if len(held.shape) == 2:
        yield _Part(name, change, change.first_row, held.shape[0])
        return
    pieces = layout.pieces(name, held.shape)
    if len(pieces) == 1:
        raise ValueError(
            f"{name} holds {change.experts} experts and is published as 1 tensor, whose adapter "
            "servers read as it was trained. Use consolidate(adapter='only')."
        )
    row = 0
    for piece, shape in pieces:
        yield _Part(piece, change, row, shape[0])
        row += shape[0]


def _config(adapter: Adapter, ranks: Mapping[str, int]) -> dict[str, Any]:
    r = int(adapter.config["r"])
    experts = {rank for module, rank in ranks.items() if ".experts." in module}
    one = len(experts) == 1
    patterns = {
        module: rank
        for module, rank in ranks.items()
        if rank != r and not (one and ".experts." in module)
    }
    if one and experts != {r}:
        patterns[_EXPERTS] = next(iter(experts))
    return {
        **adapter.config,
        "inference_mode": True,
        "lora_alpha": r,
        "alpha_pattern": patterns,
        "rank_pattern": patterns,
        "use_rslora": False,
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "target_parameters": None,
    }


def _earlier(out: Path) -> list[Path]:
    return [out / name for name in (WEIGHTS_FILE, CONFIG_FILE) if (out / name).is_file()]
