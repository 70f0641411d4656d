"""The tensors of a model with adapters, from those of the model: what LoRA freezes and adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from distft.formulas.eager import Readers
from distft.formulas.shape import Shape
from distft.formulas.split_rules import stores_outputs_first
from distft.spec import ModelSpec, TensorSpec, Workload

_PREFIX = "base_model.model."
# Matrices that are no linear layers: PEFT leaves routers alone.
_ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
# The last linear layers of attention and of the feed-forward layer.
_OUTPUTS = ("o_proj", "attn.dense", "attention.dense", "attn.c_proj", "out_proj")
_DOWNS = ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h", "mlp.down")


def with_adapters(spec: ModelSpec, load: Workload) -> ModelSpec:
    """Return the tensors that train under a workload: the model's own, or adapters beside them.

    With `tuning="qlora"` the linear layers of blocks are quantized, adapters on them or not.

    With adapters the model's are frozen, and each targeted linear layer of a block gets A (r, in)
    and B (out, r); with `expert_lora_rank` so do the experts' matrices, r for each expert. Names
    and order are PEFT's.

    Source: Hu et al. 2021 (LoRA), section 4.1; PEFT 0.21, `target_parameters`.

    Raises:
        ValueError: No linear layer has a name that is targeted, or there are no experts.

    Collective: none.
    """
    if load.tuning == "full":
        return spec
    if load.expert_lora_rank is not None and not spec.num_experts:
        raise ValueError(
            f"Workload(expert_lora_rank={load.expert_lora_rank}), but the model has 0 experts. "
            "Leave it out."
        )
    tensors: list[TensorSpec] = []
    for path, group in groupby(spec.tensors, key=lambda tensor: tensor.name.rpartition(".")[0]):
        own = list(group)
        if load.expert_lora_rank is not None and own[0].is_expert:
            tensors += _adapted_experts(path, own, load.expert_lora_rank)
        else:
            tensors += _adapted(path, own, load)
    if not any(tensor.trainable for tensor in tensors):
        raise ValueError(
            f"Workload(lora_targets={load.lora_targets!r}) names none of the linear layers in the "
            f"model's {len(spec.tensors)} tensors. Pass names such as 'q_proj', or 'all-linear'."
        )
    ties = tuple((_PREFIX + one, _PREFIX + other) for one, other in spec.ties)
    return replace(spec, tensors=tuple(tensors), ties=ties)


def adapter_params(spec: ModelSpec, load: Workload) -> int:
    """Return the parameters of a workload's adapters.

    Raises:
        ValueError: As `with_adapters`.

    Collective: none.

    >>> adapter_params(ModelSpec.from_config("Llama-2-7B"), Workload(tuning="lora", lora_rank=8,
    ...     lora_targets=("q_proj", "v_proj")))
    4194304
    """
    found = 0
    for tensor in spec.tensors:
        rank = _rank(tensor, load)
        if rank and tensor.is_expert:
            found += rank * tensor.shape[0] * (tensor.shape[1] + tensor.shape[2])
        elif rank:
            found += rank * (tensor.shape[0] + tensor.shape[1])
    # Where there is nothing, the tensors say why.
    return found or with_adapters(spec, load).trainable_params


def shape_of(spec: ModelSpec) -> Shape:
    """Return the widths that activations depend on.

    Raises:
        ValueError: They are not known.

    Collective: none.
    """
    if spec.shape is None:
        raise ValueError(
            f"The widths of this model with {len(spec.tensors)} tensors are not known, and "
            "activations depend on them. Use ModelSpec.from_config, or a model with its config."
        )
    return spec.shape


def readers_of(spec: ModelSpec, load: Workload) -> Readers:
    """Return which linear layers of a block keep what they read under a workload.

    Raises:
        ValueError: The widths of the model are not known.

    Collective: none.
    """
    shape = shape_of(spec)
    if load.tuning == "full":
        return Readers.of_all(shape)
    layers: dict[str, int] = {}
    between = 0
    for tensor in spec.tensors:
        rank = _rank(tensor, load)
        if rank and not tensor.is_expert:
            between += rank
            name = tensor.name.removeprefix(f"{tensor.unit}.").removesuffix(".weight")
            layers[name] = rank
    inside = [name for name in layers if "mlp." in name and not name.endswith(_DOWNS)]
    outputs = [name for name in layers if name.endswith(_OUTPUTS)]
    downs = [name for name in layers if name.endswith(_DOWNS)]
    return Readers(
        len(layers) - len(inside) - len(outputs) - len(downs),
        bool(outputs),
        sum("shared_expert" not in name for name in inside),
        bool(downs),
        load.expert_lora_rank is not None,
        between / shape.layers,
        True,
    )


def _adapted_experts(path: str, tensors: Sequence[TensorSpec], rank: int) -> Iterator[TensorSpec]:
    """Yield a module of experts in PEFT's wrappers, one around another, and their factors."""
    stacked = [tensor for tensor in tensors if len(tensor.shape) == 3]
    outputs_first = stores_outputs_first([tensor.shape for tensor in stacked])
    inside = f"{_PREFIX}{path}{'.base_layer' * len(stacked)}"
    for tensor in tensors:
        yield replace(_frozen(tensor), name=f"{inside}.{tensor.name.rpartition('.')[2]}")
    for place, tensor in enumerate(stacked, 1):
        wrapper = f"{_PREFIX}{path}{'.base_layer' * (len(stacked) - place)}"
        number, *widths = tensor.shape
        out, width = widths if outputs_first else reversed(widths)
        for factor, shape in (("A", (rank * number, width)), ("B", (out, rank * number))):
            name = f"{wrapper}.lora_{factor}.default.weight"
            yield TensorSpec(name, shape, _frozen(tensor).unit, True, True)


def _frozen(tensor: TensorSpec) -> TensorSpec:
    """Return a tensor of the model under PEFT's prefix, not trained."""
    unit = _PREFIX + tensor.unit if tensor.unit else tensor.unit
    bf16_unit = _PREFIX + tensor.bf16_unit if tensor.bf16_unit else tensor.bf16_unit
    name = _PREFIX + tensor.name
    return replace(tensor, name=name, unit=unit, bf16_unit=bf16_unit, trainable=False)


def _adapted(path: str, tensors: Sequence[TensorSpec], load: Workload) -> Iterator[TensorSpec]:
    """Yield the tensors of a module, and the factors on it where it is targeted."""
    rank = max(_rank(tensor, load) for tensor in tensors)
    for tensor in tensors:
        frozen = _frozen(tensor)
        if load.tuning == "qlora" and _is_linear(tensor) and not tensor.kept:
            frozen = replace(frozen, scales="nested" if load.double_quant else "plain")
        if rank:
            own = tensor.name.rpartition(".")[2]
            frozen = replace(frozen, name=f"{_PREFIX}{path}.base_layer.{own}")
        yield frozen
    weight = next((tensor for tensor in tensors if _rank(tensor, load)), None)
    if weight is None:
        return
    out = weight.shape[0]
    for factor, shape in (("A", (rank, weight.numel // out)), ("B", (out, rank))):
        name = f"{_PREFIX}{path}.lora_{factor}.default.weight"
        yield TensorSpec(name, shape, _frozen(weight).unit)


def _rank(tensor: TensorSpec, load: Workload) -> int:
    """Return the rank of the adapter on a tensor, 0 for none."""
    if tensor.is_expert:
        return (load.expert_lora_rank or 0) if len(tensor.shape) == 3 else 0
    if not _is_linear(tensor):
        return 0
    if load.lora_targets == "all-linear":
        return load.lora_rank
    targets = (load.lora_targets,) if isinstance(load.lora_targets, str) else load.lora_targets
    layer = tensor.name.removesuffix(".weight")
    is_named = any(layer == name or layer.endswith(f".{name}") for name in targets)
    return load.lora_rank if is_named else 0


def _is_linear(tensor: TensorSpec) -> bool:
    """Return whether a tensor is the matrix of a linear layer in a block."""
    is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight") and not tensor.is_expert
    return is_matrix and bool(tensor.unit) and not tensor.name.endswith(_ROUTERS)
