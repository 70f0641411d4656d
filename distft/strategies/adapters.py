"""LoRA on a model whose layers or experts are split: the factors are split as their layer is.

Of a layer split by columns, A is whole and B has this rank's rows; of one split by rows, A has this
rank's columns and B is whole. transformers' styles, put on the factor that is split, make both
sums complete: the one before a whole B forward, and the one of a whole A's gradient backward.
Experts keep their own factors, in `expert_adapters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.formulas.split_rules import SHARED_EXPERTS
from distft.mesh import Mesh
from distft.peft import PREFIX, adapter_names, attach_adapters, base_model, is_peft
from distft.process_group import base_seed
from distft.strategies._transformers import (
    EXPERT_STYLES,
    fit_forward,
    split_factor,
    split_parameter,
)
from distft.strategies.expert_adapters import require_wrapper, split_expert_factors
from distft.strategies.precision import cast_parameters
from distft.strategies.split import Split, split_layers, split_of

if TYPE_CHECKING:
    from torch import nn

# Styles of linear layers: by columns, so that B is split, and by rows, so that A is.
COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
ROWS = ("rowwise",)
# Initial values that are drawn; all others are computed of base weights.
DRAWN = (True, False, "gaussian")
# Settings of `LoraConfig` that need a whole base weight, or a bias that no style places.
NEEDS_WHOLE = (
    "use_dora",
    "use_bdlora",
    "arrow_config",
    "alora_invocation_tokens",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "lora_bias",
    "trainable_token_indices",
)


def split_with_adapters(
    caller: str, model: nn.Module, mesh: Mesh, rules: Mapping[str, str] | None, device_type: str
) -> None:
    """Split a model's layers and experts, and the adapters that are on them, in place.

    Raises:
        ValueError: As `split_layers`, or the adapters are of a kind that has not been shown to be
            right on split layers.

    Collective: every rank: process groups are made.
    """
    if not (is_peft(model) or adapter_names(model)):
        split_layers(caller, model, mesh, rules, device_type)
        return
    base = base_model(model)
    for config in getattr(model, "peft_config", {}).values():
        _check_config(f"{caller}.apply()", mesh.tp, mesh.ep, config)
    with _adapters_off(model):
        split_layers(caller, base, mesh, rules, device_type)
    split = split_of(base)
    assert split is not None
    for path, layer in _layers(model):
        _check_target(f"{caller}.apply()", split, path, layer)
    split_adapters(model, split)


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model stand where the adapters around them do, under their own names."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, LoraLayer | ModulesToSaveWrapper)
    ]
    for parent, name, child in places:
        inner: Any = child
        while isinstance(inner, LoraLayer | ModulesToSaveWrapper):
            inner = inner.base_layer if isinstance(inner, LoraLayer) else inner.original_module
        parent._modules[name] = inner
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def attach_to_split(
    caller: str, model: nn.Module, split: Split, peft_config: Any, dtype: str
) -> nn.Module:
    """Return a PEFT model around a model whose layers or experts are split.

    Values are drawn for each whole factor, as on one process, and each rank keeps its part.

    Raises:
        ValueError: A setting needs whole base weights, or a target is split in a way that has not
            been shown to be right; both are named.

    Collective: none.
    """
    call = f"{caller}.apply()"
    _check_config(call, split.dense["tp"].size(), split.expert["ep"].size(), peft_config, new=True)
    made = attach_adapters(model, peft_config, base_seed(), partial(make_whole, call, split))
    cast_parameters(made, dtype)
    split_adapters(made, split)
    return made


def split_adapters(model: nn.Module, split: Split) -> None:
    """Split the factors on split layers, which are whole, and copies of split layers, in place.

    Collective: none.
    """
    tp = split.dense["tp"]
    for path, layer in _layers(model):
        style = split.styles.get(path)
        if isinstance(layer, require_wrapper()):
            if hasattr(layer.get_param(), "placements"):
                split_expert_factors(layer)
        elif style in COLUMNS or style in ROWS:
            for factor in (layer.lora_B if style in COLUMNS else layer.lora_A).values():
                split_factor(factor, str(style), tp)
    _split_copies(model, split)


def _check_config(call: str, tp: int, ep: int, config: Any, new: bool = False) -> None:
    """Raise where adapters, which are new or have their values, need whole base weights."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        if new:
            # `attach_adapters` says it, the same under every strategy.
            return
        raise ValueError(
            f"{call} got a model with adapters of a {type(config).__name__}, and tp is {tp} and ep "
            f"is {ep}: only those of a LoraConfig have been shown to be right on split layers. "
            "Use FSDP2, or a LoraConfig."
        )
    if tp == 1 and not config.target_parameters:
        return
    wrong = [name for name in NEEDS_WHOLE if getattr(config, name, None)]
    if new and config.init_lora_weights not in DRAWN:
        wrong.append(f"init_lora_weights={config.init_lora_weights!r}")
    if wrong:
        raise ValueError(
            f"{call} got a peft_config with {', '.join(wrong)}, and no rank has whole base "
            f"weights: tp is {tp} and ep is {ep}. Leave it out, or use FSDP2, where PEFT sees "
            "each weight whole."
        )


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return PEFT's LoRA layers, each with the path that its base has without PEFT."""
    from peft.tuners.lora import LoraLayer

    return [
        (_plain(path), module)
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    ]


def _plain(path: str) -> str:
    parts = path.removeprefix(PREFIX).split(".")
    return ".".join(part for part in parts if part != "base_layer")


def make_whole(call: str, split: Split, model: Any) -> None:
    """Give factors the shapes of the whole, after a check of every target.

    PEFT makes them for this rank's part of a weight, and transformers' styles read the sizes of
    the whole from the layers.

    Raises:
        ValueError: As `attach_to_split`.

    Collective: none.
    """
    import torch

    for config in model.peft_config.values():
        _check_config(call, split.dense["tp"].size(), split.expert["ep"].size(), config, new=True)
    layers = _layers(model)
    for path, layer in layers:
        _check_target(call, split, path, layer)
    for path, layer in layers:
        style = split.styles.get(path)
        if style in COLUMNS:
            layer.out_features = layer.base_layer.out_features
            for factor in layer.lora_B.values():
                factor.out_features = layer.out_features
                factor.weight = torch.nn.Parameter(
                    factor.weight.new_zeros(layer.out_features, factor.in_features)
                )
        elif style in ROWS:
            layer.in_features = layer.base_layer.in_features
            for factor in layer.lora_A.values():
                factor.in_features = layer.in_features
                factor.weight = torch.nn.Parameter(
                    factor.weight.new_zeros(factor.out_features, layer.in_features)
                )


def _check_target(call: str, split: Split, path: str, layer: Any) -> None:
    from torch.nn import Embedding, Linear

    base, style = layer.get_base_layer(), split.styles.get(path)
    if isinstance(layer, require_wrapper()):
        weight = layer.get_param()
        right = path in split.expert_modules or not hasattr(weight, "placements")
        right = right or (style == SHARED_EXPERTS and weight.dim() == 3)
        path = f"{path}.{layer.parameter_name}"
        advice = "Spread the experts with ep, which keeps each one whole, or adapt other layers."
    else:
        # The factors of an embedding stay whole: what it returns is whole on every rank.
        right = style in (None, "replicate") or isinstance(base, Embedding)
        right = right or (isinstance(base, Linear) and style in (*COLUMNS, *ROWS))
        advice = "Leave it out of target_modules."
    if not right:
        raise ValueError(
            f"{call} cannot put an adapter on {path}, which is split over "
            f"{split.dense['tp'].size()} ranks as {style!r}: its factors have no split that has "
            f"been shown to be right. {advice}"
        )


# ---- modules_to_save ----------------------------------------------------------------------------


def _split_copies(model: nn.Module, split: Split) -> None:
    """Split the copies that ``modules_to_save`` trains as their originals are.

    A copy of a module that is split already brings along its forward pass, and with it the
    original's weights: the copy would never be used.
    """
    from peft.utils import ModulesToSaveWrapper

    for path, wrapper in model.named_modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for copied in wrapper.modules_to_save.values():
            for inner, module in copied.named_modules():
                _split_copy(module, _plain(f"{path}.{inner}" if inner else path), split)


def _split_copy(module: nn.Module, place: str, split: Split) -> None:
    tp, ep = split.dense["tp"], split.expert["ep"]
    for name, parameter in list(module._parameters.items()):
        style = split.parameters.get(f"{place}.{name}")
        if style is not None and not hasattr(parameter, "placements"):
            split_parameter(module, name, style, ep if style in EXPERT_STYLES else tp)
    style = split.styles.get(place)
    if style is not None:
        vars(module).pop("forward", None)
        fit_forward(module, style, tp, ep)
