"""Finding the Hugging Face model inside what `Strategy.apply` returned."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside a wrapped one; a model without a wrapper as it is.

    Parameter names of the result carry no prefix under any strategy.

    Collective: none.
    """
    from torch.nn import DataParallel
    from torch.nn.parallel import DistributedDataParallel

    # The engine is known by name, so that a run without DeepSpeed never imports it.
    while isinstance(model, DistributedDataParallel | DataParallel) or is_engine(model):
        model = cast("nn.Module", model.module)
    return model


def published_class(model: nn.Module) -> type:
    """Return the class of a model, below the one that ``fully_shard`` puts over it.

    Collective: none.
    """
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def chosen_parameters(
    model: nn.Module, names: Collection[str] | None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Return name and tensor of the parameters that are named, or of every one, each once.

    Collective: none.
    """
    for name, parameter in unwrap(model).named_parameters():
        if names is None or name in names:
            yield name, parameter


def is_engine(model: Any) -> bool:
    """Return whether an object is a DeepSpeed engine.

    Collective: none.
    """
    return any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)
