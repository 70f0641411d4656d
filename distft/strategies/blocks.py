"""torch.compile on a model's blocks, one graph for all blocks of a class.

`tests/unit/test_compile.py` fails first when what is used of torch's private names moves.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from distft.process_group import local_device, raise_together
from distft.spec import sharding_units

if TYPE_CHECKING:
    from torch import nn

# Blocks of one class share their compiled graphs. What makes another: sequence lengths (one
# length, then any: 2), training and evaluation (2), with and without gradients (2), kinds of
# attention in a model (up to 2): 16. torch's own limit of 8 would send the rest to eager.
GRAPHS_OF_A_CLASS = 16


def check_compiler() -> None:
    """Raise on every rank where one of them cannot build what torch.compile makes.

    Raises:
        RuntimeError: A rank has no C++ compiler, or no Triton for its GPU.

    Collective: every rank.
    """
    raise_together(_missing_compiler())


def _missing_compiler() -> RuntimeError | None:
    try:
        if local_device().type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                raise RuntimeError("Triton is not installed or does not know this GPU")
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except ImportError:
        # Moved: then the first step says what is missing.
        return None
    except Exception as error:
        return RuntimeError(
            f'compile="block" needs 1 working compiler on every rank, and there is none: {error}. '
            "Install g++ (Debian: apt-get install g++) or set CXX to another C++ compiler; on a "
            "GPU, Triton comes with torch. Or leave compile out."
        )
    return None


def compile_blocks(model: nn.Module) -> None:
    """Compile the ``forward`` of each block in place; one that is compiled stays as it is.

    The method and not the module: names of parameters keep no prefix, and what engines hook onto
    the module (gathering weights, recomputing activations) stays outside of the graph.

    Raises:
        ValueError: The model has no blocks.

    Collective: none.
    """
    import torch

    units = sharding_units(model)
    if not units:
        raise ValueError(
            f"{type(model).__name__} has 0 blocks to compile: no _no_split_modules and no "
            "ModuleList. Use compile=None, or name the blocks' class in model._no_split_modules."
        )
    known = inspect.signature(torch.compile).parameters
    limit: dict[str, Any] = (
        {"recompile_limit": GRAPHS_OF_A_CLASS} if "recompile_limit" in known else {}
    )
    for path in units:
        block: Any = model.get_submodule(path)
        if not is_compiled(block):
            block.forward = torch.compile(block.forward, **limit)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's ``forward`` is compiled, by `compile_blocks` or by hand.

    Collective: none.
    """
    forward = vars(module).get("forward")
    return hasattr(forward, "_torchdynamo_orig_callable") or (
        getattr(module, "_compiled_call_impl", None) is not None
    )
