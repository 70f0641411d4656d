"""LoRA for mixtures of experts: attention as usual, experts at a share of the rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distft.formulas._numbers import whole
from distft.training.experts import is_experts

if TYPE_CHECKING:
    from torch import nn

# A part of the name of a module that holds attention's layers.
_ATTENTION = "attn", "attention"
# What families call the module beside the experts that chooses among them.
_ROUTERS = "gate", "router"


def expert_rank(r: int, num_experts: int) -> int:
    """Return the rank of each expert's adapter, so that all of a layer's have about rank ``r``.

    ``r_e = max(1, r // E)``. Source: Schulman et al. 2025, "LoRA Without Regret", on mixtures of
    experts: as many adapter parameters for each of a layer's weights as in a dense layer.

    Raises:
        ValueError: A number is no whole one of at least 1.

    Collective: none.

    >>> [expert_rank(r, 6) for r in (1, 4, 6, 16, 64)]
    [1, 1, 1, 2, 10]
    """
    return max(1, whole("r", r, 1) // whole("num_experts", num_experts, 1))


def moe_lora(model: nn.Module, r: int = 16, *, train_router: bool = False, **settings: Any) -> Any:
    """Return a ``peft.LoraConfig`` for a mixture of experts, to be passed as ``peft_config``.

    Linear layers of attention get adapters of rank ``r`` by ``target_modules``, the matrices of
    every expert such of `expert_rank` by ``target_parameters`` and ``rank_pattern``. Shared
    experts, embeddings and the head stay as they are. ``lora_alpha`` is that of both, so an
    expert's factor is ``lora_alpha / r_e``: the step of a weight then depends little on its rank.

    Args:
        model: The model, before it is spread; on the meta device too.
        r: Rank of attention's adapters.
        train_router: Whether routers are trained whole, by ``modules_to_save``; else they stay
            frozen, and with them which experts get a token of the same hidden state.
        settings: More of ``peft.LoraConfig``; what is given replaces what is chosen here.

    Raises:
        ValueError: The model has no experts whose weights are parameters of one module, no router
            is found where it is to be trained, or dropout is set, which PEFT cannot apply to
            parameters.

    Collective: none.
    """
    from peft import LoraConfig

    experts = {path: module for path, module in model.named_modules() if is_experts(module)}
    stacked = {
        _ending(f"{path}.{name}"): int(parameter.shape[0])
        for path, module in experts.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    if not stacked:
        raise ValueError(
            f"moe_lora() found 0 modules in {type(model).__name__} that hold the weights of all "
            "experts of a layer as parameters. Pass a mixture-of-experts model of transformers, "
            "or a peft.LoraConfig of your own."
        )
    chosen = {
        "r": r,
        "target_modules": _attention_layers(model),
        "target_parameters": sorted(stacked),
        "rank_pattern": {name: expert_rank(r, number) for name, number in sorted(stacked.items())},
        "modules_to_save": _routers(model, experts) if train_router else None,
        "task_type": "CAUSAL_LM",
        **settings,
    }
    check_dropout(chosen["target_parameters"], chosen.get("lora_dropout"))
    return LoraConfig(**chosen)


def check_dropout(target_parameters: Any, dropout: float | None) -> None:
    """Raise where dropout is asked for on adapters of parameters.

    ``W + scale * B A`` is folded into the weight, so no input is there to drop elements of.

    Raises:
        ValueError: It is.

    Collective: none.
    """
    if target_parameters and dropout:
        raise ValueError(
            f"LoraConfig(lora_dropout={dropout}, target_parameters={list(target_parameters)}): "
            "adapters of parameters are folded into the weight, and dropout has 0 inputs to act "
            "on. Set lora_dropout=0, or leave target_parameters out."
        )


@contextmanager
def patterns_of_parameters(config: Any) -> Iterator[None]:
    """Silence PEFT's word that patterns match nothing where they are names of target parameters.

    It uses them all the same, and compares them with the names of modules alone when it warns.

    Collective: none.
    """
    parameters = set(getattr(config, "target_parameters", None) or ())
    with warnings.catch_warnings():
        for name in ("rank_pattern", "alpha_pattern"):
            if parameters.issuperset(getattr(config, name, None) or ()):
                warnings.filterwarnings("ignore", f"The following {name} keys did not match")
        yield


def _ending(path: str) -> str:
    """Return the end of a path that it shares with the same module of other layers.

    >>> _ending("model.layers.0.mlp.experts.down_proj")
    'mlp.experts.down_proj'
    """
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def _attention_layers(model: nn.Module) -> list[str]:
    from torch.nn import Linear

    return sorted(
        {
            path.rpartition(".")[2]
            for path, module in model.named_modules()
            if isinstance(module, Linear)
            and any(part.endswith(_ATTENTION) for part in path.split(".")[:-1])
        }
    )


def _routers(model: nn.Module, experts: dict[str, nn.Module]) -> list[str]:
    """Return the endings of the paths of the modules that choose among experts."""
    beside = {path.rpartition(".")[0] for path in experts}
    found = {
        _ending(f"{parent}.{name}")
        for parent in beside
        for name, _ in model.get_submodule(parent).named_children()
        if name in _ROUTERS
    }
    if not found:
        raise ValueError(
            f"moe_lora(train_router=True) found 0 modules named {' or '.join(_ROUTERS)} beside the "
            f"{len(experts)} modules of experts. Pass modules_to_save=[...] with their names."
        )
    return sorted(found)
