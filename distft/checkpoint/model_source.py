"""The model in a checkpoint, without any trace of PEFT in its names, and what is merged into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distft.checkpoint.adapters import Adapter, quantized, rooted
from distft.checkpoint.checksums import refuse_damaged_source
from distft.checkpoint.folder import MANIFEST, Manifest, read_manifest
from distft.checkpoint.layouts import Layout, experts_transposed
from distft.checkpoint.merge_plan import VOCABULARY, Merge, other_than_lora, plan_merge
from distft.checkpoint.publish import main_dtype, read_config, same_values, tied_names, untie
from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor, ShardMap
from distft.peft import base_name
from distft.quantized import packed_in, published_name

LORA = "LORA"
# PEFT's name of single rows that are trained, of which a base in training is made too.
_SINGLE_ROWS = "trainable_tokens_"


def check_adapter_choice(
    folder: Path,
    held: Adapter | None,
    choice: str,
    choices: Sequence[str],
    exclude_frozen: bool,
    base: str | Path | None,
) -> None:
    """Refuse what cannot be done with the adapter of a checkpoint, or without one.

    Raises:
        ValueError: It cannot.

    Collective: none.
    """
    if choice not in choices:
        raise ValueError(
            f"consolidate(adapter={choice!r}) is none of the {len(choices)} choices "
            f"{', '.join(choices)}."
        )
    asked = f"adapter={choice!r}" if base is None else f"base={str(base)!r}"
    if (choice != "keep" or base is not None) and held is None:
        raise ValueError(
            f"consolidate({asked}) was asked for, and {folder} holds 0 adapters. "
            "Leave it out: the run trained the model itself."
        )
    if choice == "merge" and exclude_frozen:
        raise ValueError(
            "consolidate(adapter='merge', exclude_frozen=True) contradicts itself: merging makes "
            "1 model of the frozen base and the adapter. Use adapter='only' for the adapter."
        )
    alone = choice == "only" or exclude_frozen
    if alone and base is not None:
        raise ValueError(
            f"consolidate({asked}) names a base, and the adapter alone was asked for, 1 of the 2. "
            "Leave base out, or use adapter='keep' or 'merge'."
        )
    if held is None or alone:
        return
    if not held.own_base and base is None:
        known = held.config.get("base_model_name_or_path")
        raise ValueError(
            f"{folder} holds an adapter of {len(held.tensors)} tensors and 0 of its base"
            f"{f', which was {known!r}' if known else ''}. Pass base=, the folder of that model, "
            "or use adapter='only'."
        )
    if choice == "merge" and held.kind != LORA:
        raise ValueError(
            f"consolidate(adapter='merge') adds adapters of type {LORA} into their base, and "
            f"{held.root} holds one of type {held.kind}. Use adapter='keep', and merge with PEFT."
        )


@dataclass(frozen=True)
class ModelSource:
    """The tensors of a model by the names that they have in memory, or as they were published.

    Attributes:
        found: The model's map; its names are without PEFT.
        manifest: What distft says of the folder, or None where another tool wrote it.
        config: The model's config, or None where there is none.
        merged: The adapter that is to be added, or None.
        base: The base that the caller chose, or None.
    """

    found: ShardMap
    manifest: Manifest | None
    config: dict[str, Any] | None
    merged: Adapter | None
    base: str | None

    @classmethod
    def of(
        cls,
        found: ShardMap,
        held: Adapter | None,
        base: str | Path | None,
        config: Any,
        merge: bool,
    ) -> ModelSource:
        """Return the source in a checkpoint, or in the base that goes in its place.

        Raises:
            ValueError: The base is no checkpoint, or quantized and the adapter is to be merged.

        Collective: none.
        """
        model = found if base is None else read_map(base)
        if base is not None:
            refuse_damaged_source(model.root, weights_alone=True)
        values = read_config(model.root, config)
        manifest = read_manifest(model.root) if (model.root / MANIFEST).is_file() else None
        if held is not None:
            model = _without_peft(model)
        kind = quantized(model.tensors, values) if merge else None
        if kind is not None:
            raise ValueError(
                f"consolidate(adapter='merge') adds in 16 or 32 bits, and the base in {model.root} "
                f"is quantized ({kind}). Pass base=, the folder of the model in 16 or 32 bits: "
                "which one it was trained on is yours to say."
            )
        return cls(
            model, manifest, values, held if merge else None, None if base is None else str(base)
        )

    @property
    def metadata(self) -> dict[str, str]:
        """What the files say of where they come from."""
        return {} if self.base is None else {"base_model": self.base}

    def tensors(self, exclude_frozen: bool) -> dict[str, LogicalTensor]:
        """Return the tensors to write, one of those that are tied.

        Collective: none.
        """
        chosen = untie(self.found, self.config)
        if exclude_frozen:
            frozen = self.found.frozen | self.found.buffers
            if self.manifest is not None:
                frozen = frozenset(chosen) - frozenset(self.manifest.trainable)
            chosen = {name: tensor for name, tensor in chosen.items() if name not in frozen}
        return _with_published_scales(chosen, self.config)

    def dtypes(self, asked: str | None) -> tuple[str | None, set[str], str]:
        """Return the dtype to cast to if any, the tensors left alone, and what the config says.

        Collective: none.
        """
        # Packed bytes are no numbers, and their scales are what they were made with.
        packed = set(packed_in(_with_published_scales(self.found.tensors, self.config)))
        if asked is not None:
            return asked, packed, asked
        if self.manifest is not None:
            # What stayed fp32 beside bf16 weights, by its name without PEFT.
            kept = packed | {
                base_name(name) or name
                for name, saved in self.manifest.tensors.items()
                if saved["dtype"] == "float32"
            }
            return self.manifest.dtype, kept, self.manifest.dtype
        # DeepSpeed keeps fp32 masters of what is trained and the rest in 16 bits.
        if self.found.format == "deepspeed":
            return "float32", packed, "float32"
        said = main_dtype(self.found.tensors.values())
        # What an adapter brings is fp32 whatever its base is.
        return (None if self.merged is None else said), packed, said

    def plan(self, tensors: Mapping[str, LogicalTensor], layout: Layout) -> Merge | None:
        """Return what the adapter changes, or None where only PEFT knows.

        Raises:
            ValueError: It is for another base.

        Collective: none.
        """
        assert self.merged is not None
        own = self.base is None
        if other_than_lora(self.merged, own) is not None:
            return None
        ties = tied_names(self.found, tensors, self.config)
        every = {alias: tensors[kept] for alias, kept in ties.items()} | dict(tensors)
        return plan_merge(self.merged, every, layout, experts_transposed(self.config))

    def with_merge(
        self, tensors: Mapping[str, LogicalTensor], merge: Merge
    ) -> tuple[dict[str, LogicalTensor], dict[str, Any] | None]:
        """Return the tensors to write and the config, the adapter's own tensors in their places.

        Of two that are tied both are written where the adapter changes one of them.

        Raises:
            ValueError: Tensors of the vocabulary have different numbers of rows now.

        Collective: none.
        """
        made, config = dict(tensors), self.config
        for alias, kept in tied_names(self.found, tensors, self.config).items():
            if {alias, kept} & merge.names and not _same(merge, alias, kept):
                made[alias] = replace(tensors[kept], name=alias)
                if config is not None and "tie_word_embeddings" in config:
                    config = {**config, "tie_word_embeddings": False}
        for name, tensor in merge.replaced.items():
            if name in made:
                made[name] = rooted(merge.root, tensor, name)
        rows = {name: t.shape[0] for name, t in made.items() if name.endswith(VOCABULARY)}
        if len(set(rows.values())) > 1:
            raise ValueError(
                f"The adapter in {merge.root} was trained with another vocabulary than its base "
                f"has: rows would be {rows}. Resize the base first, and pass it as base=."
            )
        if config is not None and rows and "vocab_size" in config:
            config = {**config, "vocab_size": next(iter(rows.values()))}
        return made, config


def _with_published_scales(
    tensors: Mapping[str, LogicalTensor], config: Mapping[str, Any] | None
) -> dict[str, LogicalTensor]:
    """Return tensors with the scales of packed weights under the names that transformers reads."""
    said = (config or {}).get("quantization_config")
    kind = said.get("bnb_4bit_quant_type", "nf4") if isinstance(said, Mapping) else "nf4"
    packed = packed_in(tensors)
    made = {}
    for name, tensor in tensors.items():
        ours = name in packed and not name.endswith(".weight") and ".weight." not in name
        published = published_name(name, kind) if ours else name
        if published is not None:
            made[published] = replace(tensor, name=published)
    return made


def _without_peft(found: ShardMap) -> ShardMap:
    """Return a map with the names that a model has before PEFT, and without adapters."""
    single = next((name for name in found.tensors if _SINGLE_ROWS in name), None)
    if single is not None:
        raise ValueError(
            f"{found.root} holds {single}: single rows of 1 embedding were trained, of which no "
            "base is made here. Use adapter='only', and put it on the base with PEFT."
        )
    tensors = {}
    for name, tensor in found.tensors.items():
        plain = base_name(name)
        if plain is not None:
            tensors[plain] = replace(tensor, name=plain)
    ties = {base_name(alias): base_name(kept) for alias, kept in found.ties.items()}
    known = {alias: kept for alias, kept in ties.items() if alias and kept and kept in tensors}
    return replace(found, tensors=tensors, ties=known, optimizer=None)


def _same(merge: Merge, alias: str, kept: str) -> bool:
    """Return whether an adapter has the same values for both of two tied tensors."""
    one, other = merge.replaced.get(alias), merge.replaced.get(kept)
    changed = {alias, kept} & merge.changes.keys()
    if changed or one is None or other is None:
        return False
    return same_values(merge.root, one, merge.root, other)
