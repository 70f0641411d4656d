"""`load_model`: from a folder of safetensors to a model of which each rank reads its part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.checkpoint.matching import find_weights
from distft.checkpoint.quantize import check_config
from distft.checkpoint.weights import Weights
from distft.peft import attach_to_skeleton
from distft.process_group import base_seed, local_device, together

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Set on the model that `load_model` returns.
_MARK = "_distft_loaded_by"


def load_model(
    path: str | Path,
    strategy: Any,
    dtype: str | torch.dtype | None = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    *,
    config: Any = None,
    model_class: Any = None,
) -> nn.Module:
    """Return the model of a folder, spread over the ranks as a strategy does, for its `apply`.

    Under FSDP2 and HSDP a rank reads its own rows of each tensor and holds nothing else; under
    ZeRO-3 one tensor at a time is whole. Both need host memory for a rank's part and the largest
    tensor. DDP, ZeRO-1 and ZeRO-2 hold the whole model and read all of it. Buffers have the values
    of any build, tied weights are one parameter, and the model is in training mode.

    Families that publish experts one by one (Qwen-MoE, Mixtral and their like) are read that way
    too. Where transformers publishes another conversion, each rank reads the whole model through
    ``from_pretrained`` first, and the log says so.

    Args:
        path: Folder with ``config.json`` and safetensors, in one file or several with an index.
        strategy: The strategy that will train it; `apply` of an equal one takes the model.
        dtype: Of floating parameters, cast as they are read; default the one in which the strategy
            trains, which `apply` insists on. Buffers keep their own; fp32 stays what the model's
            class keeps so, and what is fp32 in files that are bf16 for the most part.
        peft_config: A ``peft.LoraConfig``: adapters are attached in the right order, with the
            values that `apply` gives them; `apply` gets none then.
        quantization_config: A ``BitsAndBytesConfig`` of 4 bits: linear layers are quantized one by
            one as they are read, so no rank holds the model in 16 bits; each reads all of it. Bytes
            are stored in the dtype in which the strategy computes. It needs a ``peft_config``.
        config: A transformers config to build from; default the folder's.
        model_class: The class to build, which must be the folder's; default the one that
            ``config.json`` names, from transformers.

    Raises:
        ValueError: There is no such folder, it holds another architecture, or tensors are missing,
            too many, or of other shapes; each is named. Nothing has been allocated then. Or the
            quantization is none that strategies spread, or has no adapters beside it.
        RuntimeError: There is no process group, or a package is missing.
        OutOfMemory: Memory ran out; what was predicted, what is held, and what would fit.

    Collective: every rank.
    """
    if not hasattr(strategy, "_load_weights"):
        raise ValueError(
            f"load_model() needs a strategy, and got {strategy!r}. "
            "Pass one such as FSDP2() or distft.strategy('fsdp2')."
        )
    mesh = strategy.mesh()
    strategy._check_installed()
    with strategy._explained("load_model"), together():
        wanted = _floating(strategy._weight_dtype() if dtype is None else dtype)
        if quantization_config is not None:
            computed = _floating(strategy._compute_dtype())
            quantization_config = check_config(quantization_config, peft_config, computed)
        weights = find_weights(Path(path), wanted, config, model_class, quantization_config)
        strategy._check_model(weights.model)
        strategy._check_quantized(weights.model, peft_config)
        if peft_config is not None:
            seed = base_seed()
            weights.adapt = lambda model, prepare: attach_to_skeleton(
                model, peft_config, wanted, seed, prepare
            )
    with strategy._explained("load_model", weights.model), together(), ExitStack() as stack:
        weights.advance = stack.enter_context(_progress_bar(len(weights.pieces)))
        stack.enter_context(weights.reader)
        model: nn.Module = strategy._load_weights(weights, mesh)
    model.train()
    mark_loaded(model, strategy, wanted)
    return model


def mark_loaded(model: nn.Module, strategy: Any, dtype: torch.dtype) -> None:
    """Remember on a model which strategy loaded it, and in which dtype.

    Collective: none.
    """
    setattr(model, _MARK, (strategy, str(dtype).removeprefix("torch.")))


def loaded_by(model: Any) -> tuple[Any, str] | None:
    """Return the strategy that loaded a model and the dtype of its weights, or None.

    Collective: none.
    """
    found: tuple[Any, str] | None = getattr(model, _MARK, None)
    return found


def load_whole(weights: Weights) -> nn.Module:
    """Return the model with every tensor whole on this rank's device.

    Collective: none.
    """
    import torch

    from distft.checkpoint.skeleton import replace_parameters

    weights.attach()
    device = local_device()

    def read(name: str, parameter: Tensor) -> Tensor:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        weights.fill(name, 0, whole)
        return whole

    replace_parameters(weights.model, read)
    weights.fill_buffers()
    return weights.model


def _floating(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"load_model(dtype={dtype!r}) is no floating dtype. Pass one such as 'bfloat16', or "
            "leave it out for the one in which the strategy trains."
        )
    return found


@contextmanager
def _progress_bar(num_tensors: int) -> Iterator[Callable[[], None]]:
    """Show one bar on each machine, where somebody is watching."""
    if int(os.environ.get("LOCAL_RANK", "0")) != 0 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Loading", total=num_tensors)
        yield lambda: bar.advance(task)
