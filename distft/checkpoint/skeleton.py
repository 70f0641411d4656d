"""A model without its weights, but with the buffers that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

# Storage for weights is asked for with these; buffers are computed from other functions.
_UNFILLED = frozenset({torch.empty, torch.empty_strided, torch.rand, torch.randn})


class _UnfilledOnMeta(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _UNFILLED and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters have shapes only and whose buffers have their values.

    ``torch.device("meta")`` would take the values of buffers too, such as rotary frequencies: they
    are in no checkpoint, so nothing could restore them. Here they are computed as in any build.

    Collective: none.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        with _UnfilledOnMeta():
            yield
    finally:
        handle.remove()


def build(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model with its floating parameters in a dtype, on the meta device.

    Buffers keep the dtype and the values of a normal build.

    Collective: none.
    """
    with parameters_on_meta():
        model: nn.Module = model_class(config)
    # One object for each tensor, so tied weights stay tied.
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def replace_parameters(model: nn.Module, find: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put a new tensor in the place of every parameter, one after another.

    A parameter that stands in several places is asked for once, under its first name, and the new
    one stands in all of them.

    Collective: none.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    for name, parameter in list(model.named_parameters()):
        new = find(name, parameter)
        if not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=parameter.requires_grad)
        for module, attribute in places[parameter]:
            setattr(module, attribute, new)
