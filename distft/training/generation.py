"""Generating text where a forward pass gathers weights, so that ranks must make equally many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distft.process_group import local_device, raise_together
from distft.training.evaluation import evaluating
from distft.training.rows import check_same_rows
from distft.training.step import control_device, to_device
from distft.training.wrappers import unwrap

if TYPE_CHECKING:
    from torch import nn


def run_generation(
    model: nn.Module, inputs: Mapping[str, Any], gathers: bool, copies: int = 1
) -> Any:
    """Return what the model's own ``generate`` returns for this rank's inputs.

    Args:
        model: What `Strategy.apply` returned.
        inputs: Keywords of ``generate``.
        gathers: Whether a forward pass is a collective, so that ranks must keep in step.
        copies: Neighbours that work on the same prompts: the size of a `tp` group.

    Raises:
        ValueError: The model cannot generate, or ``generate`` raised it on a rank.
        RuntimeError: ``generate`` raised anything else on a rank.

    Collective: every rank where ``gathers``, else none.
    """
    import torch

    inner: Any = unwrap(model)
    if not hasattr(inner, "generate"):
        raise ValueError(
            f"{type(inner).__name__} has no generate(). Pass a model made for generation, such as "
            "one of AutoModelForCausalLM."
        )
    # Keeping in step is done here: transformers' own way runs past the last position of models
    # that learn positions, and knows nothing of a rank that raised.
    keywords = {**to_device(inputs, local_device()), "synced_gpus": False}
    if not gathers:
        with evaluating(model), _without_compiling():
            return inner.generate(**keywords)
    _check_decoder(inner)
    check_same_rows([inputs], copies, "generate")
    error: BaseException | None = None
    output = keywords.get("input_ids", keywords.get("inputs"))
    with evaluating(model), _without_compiling(), torch.no_grad(), _announced(inner) as idle:
        try:
            # A rank without a prompt only helps the others.
            if output is None or len(output):
                output = inner.generate(**keywords)
        except Exception as found:
            error = found
        idle()
    raise_together(error)
    return output


def _without_compiling() -> Any:
    """Run compiled blocks as they were written: each length of a prompt would be a graph more.

    Collective: none.
    """
    import torch

    return torch.compiler.set_stance("force_eager")


def _check_decoder(inner: Any) -> None:
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"generate() of {type(inner).__name__} calls its encoder outside of the model's own "
            "forward pass, where split weights are not gathered. Use DDP, ZeRO1 or ZeRO2, or "
            "consolidate the model and generate from that."
        )


@contextmanager
def _announced(inner: Any) -> Iterator[Any]:
    """Announce every forward pass to the other ranks; yield what a rank calls when it is done.

    A rank that is done makes a forward pass of one token for each that another rank announces,
    which gathers the same weights.

    Collective: every rank: one all_reduce of 4 bytes before each forward pass.
    """
    import torch
    import torch.distributed as dist

    def any_rank(busy: bool) -> bool:
        flag = torch.tensor([int(busy)], dtype=torch.int32, device=control_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    # Before the hooks that gather weights.
    handle: Any = inner.register_forward_pre_hook(lambda *_: any_rank(True) and None, prepend=True)

    def idle() -> None:
        handle.remove()
        token = torch.zeros((1, 1), dtype=torch.long, device=local_device())
        while any_rank(False):
            inner(input_ids=token, use_cache=False)

    try:
        yield idle
    finally:
        handle.remove()
