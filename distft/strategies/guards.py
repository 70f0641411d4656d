"""What `Strategy.apply` checks of a model before it changes anything."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

from distft.checkpoint.pretrained import loaded_by
from distft.kept import is_adapter
from distft.peft import base_model
from distft.process_group import raise_together
from distft.training.wrappers import is_engine, unwrap

if TYPE_CHECKING:
    from torch import nn


# Set on the model and the optimizer that `Strategy.apply` returns.
_MARK = "_distft_applied_by"
# Set on the model: the names of the parameters that the optimizer got.
_TRAINED = "_distft_trained"
_ABSENT: Any = object()


def mark_applied(strategy: Any, model: nn.Module, optimizer: Any) -> None:
    """Remember on a model and its optimizer which strategy made them.

    Collective: none.
    """
    inner = unwrap(model)
    setattr(inner, _MARK, repr(strategy))
    setattr(optimizer, _MARK, repr(strategy))
    setattr(inner, _TRAINED, frozenset(n for n, p in inner.named_parameters() if p.requires_grad))
    base = base_model(inner)
    if hasattr(base, "resize_token_embeddings"):
        base.resize_token_embeddings = partial(_refuse_resize, repr(strategy))


def _refuse_resize(strategy: str, *sizes: Any, **more: Any) -> None:
    raise RuntimeError(
        f"The vocabulary cannot be resized after {strategy}.apply(): its {len(sizes) + len(more)} "
        "arguments would change tensors that are split and that the optimizer holds. The order is "
        "resize_token_embeddings(), then adapters, then apply()."
    )


def check_trained(strategy: Any, call: str, model: Any) -> None:
    """Raise where a model has trainable parameters that came after ``apply``.

    No optimizer holds them, and of adapters put on a sharded model no collective sums the
    gradients: every rank would train its own.

    Raises:
        RuntimeError: How many there are, and the order to follow.

    Collective: none.
    """
    inner = unwrap(model)
    trained = getattr(inner, _TRAINED, None)
    if trained is None:
        # Adapters around a wrapper: the mark is deeper than any attribute look-up goes.
        marked = (vars(module).get(_TRAINED) for module in inner.modules())
        trained = next((names for names in marked if names is not None), None)
    if trained is None:
        return
    late = [n for n, p in inner.named_parameters() if p.requires_grad and n not in trained]
    if late:
        adapters = [name for name in late if is_adapter(name)]
        what, example = ("adapter tensors", adapters[0]) if adapters else ("parameters", late[0])
        raise RuntimeError(
            f"{strategy!r}.{call}() got a model with {len(adapters or late)} trainable {what} that "
            f"came after apply(), such as {example}: the optimizer holds {len(trained)} tensors "
            "and none of these. Attach adapters first, with apply(..., peft_config=...), or "
            "set requires_grad before apply()."
        )


def check_applied(strategy: Any, call: str, model: Any, optimizer: Any = _ABSENT) -> None:
    """Raise unless a model, and an optimizer, are what ``apply`` of this strategy returned.

    Raises:
        ValueError: Which of the two it is, and what made it.
        RuntimeError: Parameters to train came after ``apply``.

    Collective: none.
    """
    check_trained(strategy, call, model)
    for what, thing in (("model", unwrap(model)), ("optimizer", optimizer)):
        if thing is _ABSENT:
            continue
        maker = getattr(thing, _MARK, None)
        if maker != repr(strategy):
            origin = f"{maker}.apply() made" if maker else "no apply() returned"
            raise ValueError(
                f"{strategy!r}.{call}() got a {type(thing).__name__} as {what} that {origin}. "
                f"Pass both that {strategy!r}.apply(model, optimizer) returns: one from "
                "elsewhere holds tensors that are not trained."
            )


def check_loaded(strategy: Any, model: Any, peft_config: Any) -> bool:
    """Return whether `distft.load_model` spread a model for an equal strategy.

    Raises:
        ValueError: Another strategy loaded it, it has a dtype in which this one does not train, it
            has been applied already, or adapters are to go on a model that is spread.

    Collective: none.
    """
    found = loaded_by(model)
    if found is None:
        return False
    maker, dtype = found
    if maker != strategy:
        raise ValueError(
            f"{strategy!r}.apply() got a model that load_model() spread for {maker!r}. "
            f"Load it with load_model(path, {strategy!r})."
        )
    if hasattr(model, _MARK):
        raise ValueError(
            f"apply() got a model that is distributed already by {getattr(model, _MARK)}. "
            "Pass the plain model, as load_model made it."
        )
    if dtype != strategy._weight_dtype():
        raise ValueError(
            f"{strategy!r} trains weights in {strategy._weight_dtype()}, and the model was loaded "
            f"in {dtype}. Load it with load_model(path, {strategy!r}), without dtype."
        )
    if peft_config is not None:
        raise ValueError(
            f"{strategy!r}.apply() got a peft_config and a model that load_model() has spread "
            "already: adapters on it would be trained by each rank alone. Pass it to load_model(), "
            "or apply() a model of from_pretrained with it."
        )
    return True


def check_shapes(strategy: Any, model: nn.Module) -> None:
    """Raise where a parameter has no dimension to split along.

    Raises:
        ValueError: Its name, and what to do.

    Collective: none.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ValueError(
            f"{strategy!r}.apply() cannot split {len(scalars)} parameters of 0 dimensions, such as "
            f"{scalars[0]}. Give it the shape (1,), or use DDP."
        )


def check_undistributed(model: Any) -> None:
    """Raise where a model cannot be spread: distributed already, empty, or without values.

    Raises:
        ValueError: What it is, and what to pass instead.

    Collective: none.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"apply() needs a torch module, and got {type(model).__name__}.")
    parameters = list(model.named_parameters())
    found = ""
    if unwrap(model) is not model:
        found = "a DeepSpeed engine" if is_engine(model) else f"nn.{type(model).__name__}"
        found = f"wrapped in {found}"
    elif isinstance(model, FSDPModule) or any(isinstance(p, DTensor) for _, p in parameters):
        sharded = sum(isinstance(p, DTensor) for _, p in parameters)
        found = f"sharded already ({sharded} of {len(parameters)} parameters are DTensors)"
    elif any(hasattr(p, "ds_id") for _, p in parameters):
        found = "partitioned by DeepSpeed already"
    elif hasattr(model, _MARK):
        found = f"distributed already by {getattr(model, _MARK)}"
    if found:
        raise ValueError(
            f"apply() got a model that is {found}. "
            "Pass the plain model, as from_pretrained made it."
        )
    empty = [name for name, p in parameters if p.is_meta]
    if empty:
        raise ValueError(
            f"{len(empty)} of {len(parameters)} parameters are on the meta device and have no "
            f"values, such as {empty[0]}. Load the weights before apply()."
        )


def check_same_model(model: nn.Module) -> None:
    """Raise on every rank where ranks hold models of different names, shapes or dtypes.

    Raises:
        ValueError: The first rank that differs from rank 0, with both parameter counts.

    Collective: every rank.
    """
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return
    text = "\n".join(
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for name, p in model.named_parameters()
    )
    mine = (hashlib.sha256(text.encode()).hexdigest(), sum(p.numel() for p in model.parameters()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    wrong = [rank for rank, other in enumerate(everyone) if other[0] != everyone[0][0]]
    error = None
    if wrong:
        error = ValueError(
            f"Rank 0 has a model of {everyone[0][1]} parameters, and rank {wrong[0]} another one "
            f"of {everyone[wrong[0]][1]}. Build the same model on every rank."
        )
    raise_together(error)


def enable_checkpointing(model: nn.Module) -> None:
    """Make a model's blocks recompute their activations in the backward pass.

    Raises:
        ValueError: The model has no such switch.

    Collective: none.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(). "
            "Use activation_checkpointing=False for it."
        )
    # The non-reentrant form keeps names, hooks and the dropout's random state.
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers lets the embedding's output have a gradient, which only the other form needs:
    # under adapters the backward pass would go on below the last of them for nothing.
    disable = getattr(model, "disable_input_require_grads", None)
    if disable is not None:
        disable()


# Which strategies have which kind of offload; tests compare it with the classes.
OFFLOADS = {
    "optimizer": "ZeRO1, ZeRO2 and ZeRO3",
    "params": "ZeRO3, FSDP2 and HSDP",
    "nvme:PATH": "ZeRO3",
}
DISK = "nvme:"


def check_offload(strategy: Any) -> None:
    """Raise where a strategy does not have the offload that it was given.

    Raises:
        ValueError: It has none or others; the text names what it has, and who has this one.
    """
    kind, has = strategy.offload, type(strategy).offloads
    shown = f"{DISK}PATH" if str(kind).startswith(DISK) and len(kind) > len(DISK) else kind
    if kind is None or shown in has:
        return
    name = type(strategy).__name__
    mine = " and ".join(repr(each) for each in has) or "no offload"
    if shown in OFFLOADS:
        way_out = f"{shown!r} is there for {OFFLOADS[shown]}."
    else:
        way_out = f"The {len(OFFLOADS)} kinds are {' and '.join(repr(each) for each in OFFLOADS)}."
    raise ValueError(
        f"{name}(offload={kind!r}): {name} has {mine}. {way_out} Or leave offload out."
    )
