"""LoRA on a model whose layers or experts are split: the factors are split as their layer is.

Of a layer split by columns, A is whole and B has this rank's rows; of one split by rows, A has this
rank's columns and B is whole. transformers' styles, put on the factor that is split, make both
sums complete: the one before a whole B forward, and the one of a whole A's gradient backward.
Experts keep their own factors. Everything that is private to PEFT is used in this file alone, and
`tests/unit/test_peft_names.py` fails first when upstream moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.peft import PREFIX, adapter_names, attach_adapters, is_peft
from distft.process_group import base_seed
from distft.strategies._transformers import fit_forward, own_memory, split_factor
from distft.strategies.precision import cast_parameters
from distft.strategies.split import Split

if TYPE_CHECKING:
    from torch import Tensor, nn

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
# What the fold of experts takes from PEFT's wrapper of a parameter.
WRAPPER_NAMES = ("_activate_lora", "get_base_layer", "get_param")


def require_wrapper() -> Any:
    """Return PEFT's wrapper of a parameter.

    Raises:
        RuntimeError: This PEFT has none that works alike.

    Collective: none.
    """
    import peft

    try:
        from peft.tuners.lora.layer import ParamWrapper

        missing = [name for name in WRAPPER_NAMES if not hasattr(ParamWrapper, name)]
    except ImportError as error:
        missing = [str(error)]
    if missing:
        raise RuntimeError(
            f"peft {peft.__version__} has no ParamWrapper with {', '.join(missing)}, which "
            "adapters of experts need. Run pip install 'peft>=0.21'."
        )
    return ParamWrapper


def check_plain(caller: str, model: nn.Module) -> None:
    """Raise where a model has adapters before its layers are split.

    Raises:
        ValueError: How many adapter tensors there are, and the order to follow.

    Collective: none.
    """
    adapters = adapter_names(model)
    if is_peft(model) or adapters:
        raise ValueError(
            f"{caller}.apply() got a model that has {len(adapters)} adapter tensors already, and "
            "its layers are still to be split: each rank would train other adapters. Pass the "
            "plain model and peft_config=, so that adapters come after the splitting."
        )


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
    _check_config(caller, split, peft_config)
    prepare = partial(_prepare, caller, split)
    made = attach_adapters(model, peft_config, base_seed(), prepare)
    cast_parameters(made, dtype)
    for path, layer in _layers(made):
        style = split.styles.get(path)
        tp = split.dense["tp"]
        if isinstance(layer, require_wrapper()):
            if hasattr(layer.get_param(), "placements"):
                _split_expert_factors(layer, split)
        elif style in COLUMNS:
            for factor in layer.lora_B.values():
                split_factor(factor, str(style), tp)
        elif style in ROWS:
            for factor in layer.lora_A.values():
                split_factor(factor, str(style), tp)
    _refit_copies(made, split)
    return made


def _check_config(caller: str, split: Split, config: Any) -> None:
    if split.dense["tp"].size() == 1 and not getattr(config, "target_parameters", None):
        return
    init = getattr(config, "init_lora_weights", True)
    wrong = [name for name in NEEDS_WHOLE if getattr(config, name, None)]
    if init not in DRAWN:
        wrong.append(f"init_lora_weights={init!r}")
    if wrong:
        raise ValueError(
            f"{caller}.apply() got a peft_config with {', '.join(wrong)}, and no rank has whole "
            f"base weights: tp is {split.dense['tp'].size()} and ep is {split.expert['ep'].size()}."
            " Leave it out, or use FSDP2, where PEFT sees each weight whole."
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


def _prepare(caller: str, split: Split, model: nn.Module) -> None:
    """Give factors the shapes of the whole, after a check of every target.

    PEFT makes them for this rank's part of a weight, and transformers' styles read the sizes of
    the whole from the layers.
    """
    import torch

    layers = _layers(model)
    for path, layer in layers:
        _check_target(caller, split, path, layer)
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


def _check_target(caller: str, split: Split, path: str, layer: Any) -> None:
    from torch.nn import Embedding, Linear

    base, style = layer.get_base_layer(), split.styles.get(path)
    if isinstance(layer, require_wrapper()):
        right = path in split.expert_modules or not hasattr(layer.get_param(), "placements")
        path = f"{path}.{layer.parameter_name}"
        advice = "Spread the experts with ep, which keeps each one whole, or adapt other layers."
    else:
        # The factors of an embedding stay whole: what it returns is whole on every rank.
        right = style in (None, "replicate") or isinstance(base, Embedding)
        right = right or (isinstance(base, Linear) and style in (*COLUMNS, *ROWS))
        advice = "Leave it out of target_modules."
    if not right:
        raise ValueError(
            f"{caller}.apply() cannot put an adapter on {path}, which is split over "
            f"{split.dense['tp'].size()} ranks as {style!r}: its factors have no split that has "
            f"been shown to be right. {advice}"
        )


# ---- experts ------------------------------------------------------------------------------------


def _split_expert_factors(wrapper: Any, split: Split) -> None:
    """Give each rank the factors of its experts, and fold them into its part of the weight.

    Rows of A go expert by expert; columns of B go rank by rank of the adapter, each with all
    experts, so that a rank's columns are strided.
    """
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    for adapter in wrapper.lora_A:
        placements: dict[Any, Any] = {
            wrapper.lora_A[adapter]: Shard(0),
            wrapper.lora_B[adapter]: _StridedShard(1, split_factor=wrapper.r[adapter]),
        }
        for factor, placement in placements.items():
            whole = factor.weight
            part = distribute_tensor(
                whole.detach(), split.expert["ep"], [placement], src_data_rank=None
            )
            own_memory(part)
            factor.weight = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
    wrapper._activate_lora = partial(_fold_locally, wrapper)


@contextmanager
def _fold_locally(wrapper: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Let the experts' forward pass see ``W + scale * B A`` of this rank's experts, as a tensor.

    PEFT's own way parametrizes the weight, where a `DTensor` would meet plain tensors.
    """
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    whole = experts._parameters[name]
    transposed = getattr(experts, "is_transposed", False)
    folded = whole.to_local()
    for adapter in active_adapters:
        if adapter in wrapper.lora_A:
            a, b = (side[adapter].weight.to_local() for side in (wrapper.lora_A, wrapper.lora_B))
            folded = fold(folded, a, b, wrapper.scaling[adapter], transposed)
    experts._parameters[name] = folded
    try:
        yield
    finally:
        experts._parameters[name] = whole


def fold(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """Return ``W_e + scale * B_e A_e`` for each expert.

    Args:
        weight: (experts, out, in), or (experts, in, out) where ``transposed``.
        a: (experts * rank, in): each expert's rows together.
        b: (out, rank * experts): each expert in every ``experts``-th column.
        scale: The adapter's factor.
        transposed: How the family stores its experts.

    Collective: none.
    """
    import torch

    num_experts = weight.shape[0]
    a = a.reshape(num_experts, -1, a.shape[-1]).to(weight.dtype)
    b = b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1).to(weight.dtype)
    left, right = (a.transpose(1, 2), b.transpose(1, 2)) if transposed else (b, a)
    return torch.baddbmm(weight, left, right, alpha=scale)


# ---- modules_to_save ----------------------------------------------------------------------------


def _refit_copies(model: nn.Module, split: Split) -> None:
    """Fit the forward passes of the copies that ``modules_to_save`` trains.

    A copy of a module brings along the forward pass of the module it is a copy of, and with it
    that one's weights: the copy would never be used.
    """
    from peft.utils import ModulesToSaveWrapper

    for path, wrapper in model.named_modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        for copied in wrapper.modules_to_save.values():
            for inner, module in copied.named_modules():
                place = _plain(f"{path}.{inner}" if inner else path)
                style = split.styles.get(place)
                if style is None:
                    continue
                vars(module).pop("forward", None)
                fit_forward(module, style, split.dense["tp"], split.expert["ep"])
