"""How families publish tensors that transformers holds fused in memory.

A fused tensor here is the published ones laid end to end, so that a range of its rows is a few
byte ranges of the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fusion:
    """A tensor of shape (experts, rows, columns), and what one expert's part is made of.

    Attributes:
        fused: End of the tensor's name in memory.
        parts: Ends of the published names, ``*`` being the expert; their rows follow each other.
    """

    fused: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How the names and shapes of a family on disk follow from those in memory.

    Attributes:
        fusions: Tensors that are fused in memory.
        renames: Pairs of a part of a name on disk and in memory.
    """

    fusions: tuple[Fusion, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes on disk that, end to end, are this tensor of the model.

        >>> qwen = Layout((Fusion("mlp.experts.down_proj", ("mlp.experts.*.down_proj.weight",)),))
        >>> qwen.pieces("layers.0.mlp.experts.down_proj", (2, 8, 4))[1]
        ('layers.0.mlp.experts.1.down_proj.weight', (8, 4))
        >>> qwen.pieces("layers.0.mlp.shared_experts.down_proj.weight", (8, 4))
        [('layers.0.mlp.shared_experts.down_proj.weight', (8, 4))]

        Collective: none.
        """
        for fusion in self.fusions:
            if name.endswith(fusion.fused):
                head = name.removesuffix(fusion.fused)
                part = (shape[1] // len(fusion.parts), *shape[2:])
                return [
                    (self._on_disk(head + end.replace("*", str(expert))), part)
                    for expert in range(shape[0])
                    for end in fusion.parts
                ]
        return [(self._on_disk(name), shape)]

    def _on_disk(self, name: str) -> str:
        for disk, memory in self.renames:
            name = name.replace(memory, disk)
        return name

    def published(self) -> list[tuple[Any, ...]]:
        """Return this layout the way `published_by` finds it in transformers.

        Collective: none.
        """
        found: list[tuple[Any, ...]] = [
            ("WeightRenaming", (disk,), (memory,), ()) for disk, memory in self.renames
        ]
        for fusion in self.fusions:
            steps = [("MergeModulelist", 0), ("Concatenate", 1)][: min(len(fusion.parts), 2)]
            found.append(("WeightConverter", fusion.parts, (fusion.fused,), tuple(steps)))
        return found


AS_IT_IS = Layout()
QWEN_MOE = Layout(
    (
        Fusion(
            "mlp.experts.gate_up_proj",
            ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        ),
        Fusion("mlp.experts.down_proj", ("mlp.experts.*.down_proj.weight",)),
    )
)
MIXTRAL = Layout(
    (
        Fusion(".experts.gate_up_proj", (".experts.*.w1.weight", ".experts.*.w3.weight")),
        Fusion(".experts.down_proj", (".experts.*.w2.weight",)),
    ),
    ((".block_sparse_moe.", ".mlp."),),
)
KNOWN = (AS_IT_IS, QWEN_MOE, MIXTRAL)
# Layouts of classes for which transformers need not be asked; the tests ask it.
PUBLISHED_AS = {
    "Olmo2ForCausalLM": AS_IT_IS,
    "OlmoeForCausalLM": QWEN_MOE,
    "Qwen2MoeForCausalLM": QWEN_MOE,
    "GptOssForCausalLM": AS_IT_IS,
    "LlamaForCausalLM": AS_IT_IS,
    "MistralForCausalLM": AS_IT_IS,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": AS_IT_IS,
    "Qwen3ForCausalLM": AS_IT_IS,
    "Qwen3MoeForCausalLM": QWEN_MOE,
}


def known_layout(config: Mapping[str, Any] | None) -> Layout | None:
    """Return how the model of a config is published, or None where transformers has to say.

    Collective: none.
    """
    if config is None:
        return AS_IT_IS
    return PUBLISHED_AS.get((config.get("architectures") or [""])[0])


# Those whose fused experts have inputs as rows; the tests ask transformers.
_TRANSPOSED = ("GptOssForCausalLM",)


def experts_transposed(config: Mapping[str, Any] | None) -> bool | None:
    """Return whether rows of a model's fused experts are inputs, None where it is not known.

    Collective: none.
    """
    name = ((config or {}).get("architectures") or [""])[0]
    return name in _TRANSPOSED if name in PUBLISHED_AS else None


def published_by(model: Any) -> list[tuple[Any, ...]]:
    """Return the conversions that transformers publishes for a model, as plain values.

    Collective: none.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not hasattr(model, "base_model_prefix"):
        return []
    return [
        (
            type(entry).__name__,
            tuple(entry.source_patterns),
            tuple(entry.target_patterns),
            tuple(
                (type(step).__name__, getattr(step, "dim", None))
                for step in getattr(entry, "operations", ())
            ),
        )
        for entry in get_model_conversion_mapping(model, add_legacy=False)
    ]


def layout_of(model: Any) -> Layout | None:
    """Return the layout in which a model is published, or None where it is not known here.

    Only what transformers publishes word for word as it is written here counts as known.

    Collective: none.
    """
    published = published_by(model)
    return next((layout for layout in KNOWN if layout.published() == published), None)
