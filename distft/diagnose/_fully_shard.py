"""What ``fully_shard`` keeps under private names, and nothing else here knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def reduce_dtypes(model: nn.Module) -> Iterator[torch.dtype]:
    """Yield the dtype in which the gradient of each trained, sharded parameter is reduced.

    It is decided in the first forward pass; before, there is none.

    Collective: none.
    """
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in state()._fsdp_param_groups if state else ():
            for parameter in group.fsdp_params:
                if hasattr(parameter, "reduce_dtype") and parameter.sharded_param.requires_grad:
                    yield parameter.reduce_dtype or parameter.param_dtype or parameter.orig_dtype
