"""What is trained: the tensors of a model, and the load of one optimizer step. No torch needed."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from distft.formulas._numbers import choice, whole
from distft.formulas.architectures import Decoder, expert_numbers
from distft.formulas.families import FAMILIES, ROUTED_IN_FP32
from distft.formulas.fetch import Visit
from distft.formulas.packed import packed_rows
from distft.formulas.shape import Shape
from distft.formulas.split_rules import EXPERT_RULES, TENSOR_RULES
from distft.formulas.visits import module_visits
from distft.kept import is_inside, kept_modules, kept_names
from distft.presets import preset
from distft.quantized import packed_layers, scales_of

ROOT = ""


@dataclass(frozen=True)
class TensorSpec:
    """One parameter: its name, shape and the sharding unit that gathers it.

    Args:
        name: Name in `named_parameters()`, without any wrapper's prefix.
        shape: Full shape, before any sharding.
        unit: Path of the module that is gathered as one; `""` is the rest of the model.
        trainable: Whether it gets a gradient and optimizer state.
        is_expert: Whether a token uses only its share, `experts_per_token / num_experts`.
        kept: Whether it stays fp32 where others train in bf16.
        bf16_unit: The unit in bf16, where it is another: what is kept is gathered on its own.
        scales: What scales a weight of 4 bits: `"plain"` fp32 numbers, `"nested"` ones that are
            quantized in their turn; None for a weight that is not quantized.
        packed: Whether these are the bytes of such a weight, which have one dtype in a precision.
    """

    name: str
    shape: tuple[int, ...]
    unit: str = ROOT
    trainable: bool = True
    is_expert: bool = False
    kept: bool = False
    bf16_unit: str | None = None
    scales: str | None = None
    packed: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def stored(self, precision: str) -> TensorSpec:
        """Return the tensor as a rank stores it: packed where it is quantized.

        Collective: none.
        """
        if self.scales is None:
            return self
        rows = packed_rows(self.numel, 4 if precision == "fp32" else 2)
        return replace(self, shape=(rows, 1), trainable=False, packed=True)


@dataclass(frozen=True)
class UnitSpec:
    """The tensors that a sharded strategy gathers together: a block, or the rest of the model."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class ModelSpec:
    """The parameters of a model in parameter order, each once, and what is tied to them.

    Args:
        tensors: Parameters in the order of `named_parameters()`.
        ties: Pairs (other name, name in `tensors`) of names that share one parameter.
        num_experts: Experts per layer, 0 for a dense model.
        experts_per_token: Experts that one token visits per layer.
        routes_in_fp32: Whether a token's weights for its experts are fp32 in any precision.
        rules: How the model says its tensors are split over `tp`, and its experts over `ep`.
        shape: Widths and counts that activations and time depend on; None where the model is not
            one of those known from a configuration.
    """

    tensors: tuple[TensorSpec, ...]
    ties: tuple[tuple[str, str], ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    routes_in_fp32: bool = False
    rules: tuple[Mapping[str, str], Mapping[str, str]] = field(
        default=({}, {}), repr=False, compare=False
    )
    shape: Shape | None = field(default=None, repr=False, compare=False)
    _units: tuple[UnitSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("The model has 0 parameters, so there is nothing to train. Check it.")
        units = _grouped((tensor, tensor.unit) for tensor in self.tensors)
        object.__setattr__(self, "_units", units)

    @classmethod
    def from_config(cls, config: Any) -> ModelSpec:
        """Return the spec of a language model from its configuration; no weights are built.

        Args:
            config: A transformers configuration, its dict, the path of a folder that holds
                `config.json`, or the name of a model of `distft.presets`. Architectures: those
                of `distft.formulas.families`; of others a configuration object is built on the
                meta device, with a warning that says so.

        Raises:
            ValueError: The architecture is not known (use `from_model`), a size is out of range,
                the folder has no `config.json`, or no preset has the name.

        Collective: none.

        >>> config = {"model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336}
        >>> ModelSpec.from_config({**config, "num_key_value_heads": 8}).total_params
        8030261248
        """
        values = config_values(config)
        if values.get("model_type") not in FAMILIES and hasattr(config, "to_dict"):
            return cls._from_meta_device(config)
        decoder = Decoder.from_values(values)
        before, after = decoder.root_tensors()
        tensors = [TensorSpec(name, shape) for name, shape in before]
        for layer in range(decoder.values["num_hidden_layers"]):
            unit = decoder.layer_path(layer)
            for name, shape in decoder.layer_tensors(layer):
                # What stays fp32 is gathered on its own.
                path = next((p for p in decoder.family.kept if is_inside(p, name)), None)
                own = None if path is None else f"{unit}.{path}"
                is_expert = ".experts." in name
                tensors.append(
                    TensorSpec(f"{unit}.{name}", shape, unit, True, is_expert, bool(path), own)
                )
        tensors.extend(TensorSpec(name, shape) for name, shape in after)
        tie = (decoder.family.head, decoder.family.embedding)
        total, active = _counts(tensors, decoder.num_experts, decoder.experts_per_token)
        return cls(
            tuple(tensors),
            (tie,) if decoder.tied else (),
            decoder.num_experts,
            decoder.experts_per_token,
            decoder.model_type in ROUTED_IN_FP32,
            (TENSOR_RULES, EXPERT_RULES) if decoder.model_type in SPLIT_FAMILIES else ({}, {}),
            decoder.shape(total, active),
        )

    @classmethod
    def _from_meta_device(cls, config: Any) -> ModelSpec:
        """Return the spec of a model that transformers builds without weights."""
        import torch
        import transformers

        with torch.device("meta"):
            try:
                model = transformers.AutoModelForCausalLM.from_config(config)
            except ValueError:
                model = transformers.AutoModel.from_config(config)
        warnings.warn(
            f"The tensors of {config.model_type!r} are not known from its configuration: they were "
            f"counted on a {type(model).__name__} that was built on the meta device.",
            stacklevel=3,
        )
        return cls.from_model(model)

    @classmethod
    def from_model(cls, model: Any) -> ModelSpec:
        """Return the spec of a built torch module, on any device, the meta device included.

        Units are the outermost modules whose class is named in `model._no_split_modules`, else
        the children of the `ModuleList` with the most parameters; the rest is the root unit.

        Args:
            model: A `torch.nn.Module`. Sharded parameters count with their full shape.

        Raises:
            ValueError: The model has no parameters.

        Collective: none.
        """
        units = sharding_units(model)
        bf16_units, kept = gathered_units(model), kept_names(model)
        layers = packed_layers(model)
        names: dict[int, str] = {}
        tensors, ties = [], []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in names:
                ties.append((name, names[id(parameter)]))
                continue
            names[id(parameter)] = name
            # DeepSpeed's stage 3 leaves an empty tensor and keeps the full shape beside it.
            shape = tuple(int(size) for size in getattr(parameter, "ds_shape", parameter.shape))
            path, _, own = name.rpartition(".")
            layer = layers.get(path) if own == "weight" else None
            if layer is not None:
                shape = (int(layer.out_features), int(layer.in_features))
            unit = next((unit for unit in units if name.startswith(f"{unit}.")), ROOT)
            other = next((unit for unit in bf16_units if is_inside(unit, name)), ROOT)
            tensors.append(
                TensorSpec(
                    name,
                    shape,
                    unit,
                    bool(parameter.requires_grad),
                    ".experts." in name,
                    name in kept,
                    None if other == unit else other,
                    None if layer is None else scales_of(layer),
                )
            )
        num_experts, per_token = expert_numbers(getattr(model, "config", None))
        rules = tuple(dict(getattr(model, name, None) or {}) for name in ("tp_plan", "ep_plan"))
        family = getattr(getattr(model, "config", None), "model_type", None)
        return cls(
            tuple(tensors),
            tuple(ties),
            num_experts,
            per_token,
            family in ROUTED_IN_FP32,
            (rules[0], rules[1]),
            _shape_of(model, *_counts(tensors, num_experts, per_token)),
        )

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        """Sharding units: the blocks in order, then the rest of the model."""
        return self._units

    def stored(self, precision: str) -> ModelSpec:
        """Return the model as ranks store it, quantized weights as their packed bytes.

        Collective: none.
        """
        if all(tensor.scales is None for tensor in self.tensors):
            return self
        return replace(self, tensors=tuple(tensor.stored(precision) for tensor in self.tensors))

    def units_in(self, precision: str) -> tuple[UnitSpec, ...]:
        """Return the sharding units of a precision: in bf16 what stays fp32 is a unit of its own.

        Collective: none.
        """
        if precision == "fp32" or not any(tensor.kept for tensor in self.tensors):
            return self._units
        return _grouped(
            (tensor, tensor.unit if tensor.bf16_unit is None else tensor.bf16_unit)
            for tensor in self.tensors
        )

    def module_visits(
        self, activation_checkpointing: bool = False, whole_blocks: bool = False
    ) -> tuple[Visit, ...]:
        """Return the modules in the order of work, forward and then backward.

        A visit holds the indices in `tensors` of a module's own parameters, none for a module of
        modules. Inside a decoder layer the order is that of the architectures `from_config`
        knows; other modules work in the order of registration. The backward pass is the reverse,
        outer modules still before inner ones; with activation checkpointing each block runs
        forward again in it. With ``whole_blocks`` a block is one module, as where it is compiled.

        Collective: none.
        """
        return module_visits(self.tensors, self.ties, activation_checkpointing, whole_blocks)

    @cached_property
    def total_params(self) -> int:
        """Number of parameters, a tied one counted once."""
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def trainable_params(self) -> int:
        """Number of parameters that get gradients."""
        return sum(tensor.numel for tensor in self.tensors if tensor.trainable)

    @cached_property
    def active_params(self) -> int:
        """Number of parameters that one token uses: of the experts only those it is routed to."""
        return _counts(self.tensors, self.num_experts, self.experts_per_token)[1]

    @cached_property
    def expert_params(self) -> int:
        """Number of parameters of routed experts."""
        return sum(tensor.numel for tensor in self.tensors if tensor.is_expert)

    @cached_property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding, and of the output head where it is not tied."""
        return sum(tensor.numel for tensor in self.tensors if _EMBEDDING.search(tensor.name))

    @cached_property
    def dense_params(self) -> int:
        """Number of parameters that are neither of the embedding and the head nor of experts."""
        return self.total_params - self.embedding_params - self.expert_params

    def __str__(self) -> str:
        """One line with the counts."""
        return (
            f"ModelSpec: {self.total_params:,} parameters ({self.active_params:,} active, "
            f"{self.trainable_params:,} trainable) in {len(self.tensors)} tensors, "
            f"{len(self.units)} units"
        )


_CHOICES = {
    "tuning": ("full", "lora", "qlora"),
    "optimizer": ("adamw", "adam", "sgd"),
    "attention": ("flash", "eager", "sdpa"),
    "loss": ("eager", "compiled", "chunked", "fused"),
}


@dataclass(frozen=True)
class Workload:
    """The load of one optimizer step.

    Args:
        micro_batch: Rows of one micro-step on one rank.
        seq_len: Tokens of one row.
        grad_accum: Micro-steps of one optimizer step.
        tuning: `"full"`, `"lora"` or `"qlora"`: weights of 4 bits, nf4, and adapters.
        lora_rank: Rank of the adapters on dense layers.
        lora_targets: `"all-linear"`, which leaves experts and routers to `expert_lora_rank`, or the
            names of the modules that get adapters. PEFT's own "all-linear" takes both of them too.
        expert_lora_rank: Rank of the adapters on experts; None leaves experts without.
        optimizer: `"adamw"` or `"adam"` (two moments), or `"sgd"` without momentum (none).
        attention: `"flash"`, `"sdpa"` or `"eager"`, which keeps the score matrix.
        loss: `"eager"`, `"compiled"`, `"chunked"` or `"fused"`: how much of the logits is kept.
        double_quant: Whether the scales of 4-bit weights are quantized too.

    Raises:
        ValueError: A count is no whole number of at least 1, or a name is unknown.
    """

    micro_batch: int = 1
    seq_len: int = 4096
    grad_accum: int = 1
    tuning: str = "full"
    lora_rank: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    expert_lora_rank: int | None = None
    optimizer: str = "adamw"
    attention: str = "flash"
    loss: str = "eager"
    double_quant: bool = True

    def __post_init__(self) -> None:
        for name in ("micro_batch", "seq_len", "grad_accum", "lora_rank"):
            whole(f"Workload({name}=...)", getattr(self, name), 1)
        if self.expert_lora_rank is not None:
            whole("Workload(expert_lora_rank=...)", self.expert_lora_rank, 1)
        for name, choices in _CHOICES.items():
            choice(f"Workload({name}=...)", getattr(self, name), choices)
        if not isinstance(self.lora_targets, str):
            object.__setattr__(self, "lora_targets", tuple(self.lora_targets))

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step on one rank."""
        return self.micro_batch * self.seq_len * self.grad_accum


# Names of token embeddings and output heads.
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings|lm_head)\.")
# Families whose layers the rules of `split_rules` name.
SPLIT_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def _counts(tensors: Iterable[TensorSpec], experts: int, per_token: int) -> tuple[int, int]:
    """Return all parameters and those that one token uses."""
    total = routed = 0
    for tensor in tensors:
        total += tensor.numel
        routed += tensor.numel if tensor.is_expert else 0
    return total, total - routed + (routed * per_token // experts if experts else 0)


def _shape_of(model: Any, total: int, active: int) -> Shape | None:
    """Return the widths and counts of a built model where its configuration says them."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    try:
        return Decoder.from_values({**config.to_dict(), "architectures": None}).shape(total, active)
    except ValueError:
        return None


def _grouped(members: Iterable[tuple[TensorSpec, str]]) -> tuple[UnitSpec, ...]:
    by_unit: dict[str, list[TensorSpec]] = {}
    for tensor, unit in members:
        by_unit.setdefault(unit, []).append(tensor)
    root = by_unit.pop(ROOT, None)
    units = [UnitSpec(name, tuple(tensors)) for name, tensors in by_unit.items()]
    return (*units, UnitSpec(ROOT, tuple(root))) if root else tuple(units)


def gathered_units(model: Any) -> tuple[str, ...]:
    """Return the modules that a sharded strategy gathers one at a time in bf16, inner ones first.

    The sharding units, and what stays fp32, since a unit has one dtype. Where a module keeps
    parameters of its own only, its children are units too.

    Collective: none.
    """
    found = set(sharding_units(model))
    for path, keep in kept_modules(model).items():
        found.add(path)
        if keep.names is not None:
            found |= {
                f"{path}.{name}" if path else name
                for name, child in model.get_submodule(path).named_children()
                if next(child.parameters(), None) is not None
            }
    return tuple(sorted(found - {ROOT}, key=lambda path: -path.count(".")))


def check_units(caller: str, model: Any) -> None:
    """Raise where what stays fp32 cannot be gathered on its own, in bf16.

    Raises:
        ValueError: Its module has bf16 parameters of its own too, or it is shared with another.

    Collective: none.
    """
    kept = kept_names(model)
    units = gathered_units(model) if kept else ()
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for name in sorted(kept):
        path = name.rpartition(".")[0]
        own = [
            f"{path}.{own}" if path else own
            for own, parameter in model.get_submodule(path)._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        others = [other for other in own if other not in kept]
        if others:
            raise ValueError(
                f"{caller}: {name} stays fp32 and {others[0]}, of the same module, trains in bf16; "
                f"fully_shard gathers both as 1 unit of 1 dtype. Give the {len(own)} parameters "
                "of the module one dtype, or use DDP."
            )
    for names in places.values():
        homes = {next((unit for unit in units if is_inside(unit, name)), ROOT) for name in names}
        if len(homes) > 1 and kept.issuperset(names):
            raise ValueError(
                f"{caller}: {names[0]} stays fp32 and is tied to {names[1]}, and each would be "
                f"gathered in a unit of its own: {len(homes)} for 1 tensor. Give it the dtype of "
                "the other weights, or use DDP."
            )


def sharding_units(model: Any) -> tuple[str, ...]:
    """Return the paths of the modules that a sharded strategy gathers one at a time.

    The outermost modules whose class is named in `model._no_split_modules`; where there are none,
    the children of the `ModuleList` with the most parameters; else nothing, all is one unit.

    Collective: none.
    """
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    found: list[str] = []
    lists: list[tuple[int, str, list[str]]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{unit}.") for unit in found)
        if path and type(module).__name__ in no_split and not inside:
            found.append(path)
        if "ModuleList" in (kind.__name__ for kind in type(module).__mro__):
            size = sum(math.prod(parameter.shape) for parameter in module.parameters())
            children = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
            lists.append((size, path, children))
    if not found and lists:
        # Of two lists of one size the outer one comes first, and max keeps the first.
        found = max(lists, key=lambda entry: entry[0])[2]
    return tuple(path for path in found if not _shares_parameters(model, path))


def _shares_parameters(model: Any, path: str) -> bool:
    """Whether a block has a parameter that something outside it has too: it goes to the root."""
    mine = {id(parameter) for parameter in model.get_submodule(path).parameters()}
    return any(
        id(parameter) in mine and not name.startswith(f"{path}.")
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )


def config_values(config: Any) -> Mapping[str, Any]:
    """Return the values of a configuration, a dict, a folder's config.json or a preset.

    Raises:
        ValueError: It is none of these.

    Collective: none.
    """
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, os.PathLike)):
        if isinstance(config, str) and not Path(config).exists():
            return preset(config)
        path = Path(config) / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{Path(config)} holds no config.json. "
                "Pass the folder of a saved model, a configuration or a dict."
            )
        loaded: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return loaded
    if hasattr(config, "to_dict"):
        values: Mapping[str, Any] = config.to_dict()
        return values
    raise ValueError(
        f"config is a {type(config).__name__}, but a transformers configuration, a dict or the "
        "path of a folder with config.json is needed. For a built model use ModelSpec.from_model."
    )
